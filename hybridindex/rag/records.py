"""Records of a pipeline's run: passages, pieces of generated text, events, the answer. Data only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Answer", "Event", "Generated", "LookedAhead", "Passage", "Piece", "Retrieved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One result of a search, with its text where a document store has it."""

    id: int
    #: Inner product or squared distance, as the index has it.
    score: float
    text: str
    source: str = ""
    #: Lists that were probed to find it.
    nprobe_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of a generation, as they arrived."""

    text: str
    tokens: int
    #: Seconds since the generation was asked for.
    at_s: float
    #: Natural logarithms of the tokens' probabilities, one per token; empty where none were asked for.
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One generation: a step of a pipeline."""

    name: str
    pieces: tuple[Piece, ...]
    #: "stop", "length", or what the server said.
    finish: str
    #: Of the prompt, and generated; 0 where the server did not say.
    prompt_tokens: int
    completion_tokens: int
    #: SHA-256 of the prompt, hexadecimal, to compare with a replay's.
    prompt_sha256: str
    max_tokens: int
    #: Seconds from the start of the pipeline.
    started_s: float
    seconds: float

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> int:
        """The server's count, else the pieces', which miss tokens without text and bursts."""
        return self.completion_tokens or sum(piece.tokens for piece in self.pieces)

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first piece; the whole time where nothing came."""
        return self.pieces[0].at_s if self.pieces else self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAhead:
    """A lookahead: draft texts whose lists were requested."""

    name: str
    texts: tuple[str, ...]
    started_s: float
    #: Of embedding and the call; the lists are copied afterwards.
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved:
    """One search, of one or more query texts."""

    name: str
    texts: tuple[str, ...]
    #: Per text.
    ids: tuple[tuple[int, ...], ...]
    nprobe_used: tuple[int, ...]
    hit_rate: tuple[float, ...]
    #: None: no deadline, nprobe was not lowered.
    deadline_ms: float | None
    started_s: float
    embed_s: float
    #: Embedding, search and reading passages.
    seconds: float


Event = Generated | LookedAhead | Retrieved


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a pipeline returns."""

    pipeline: str
    question: str
    text: str
    #: Passages that the answer was generated from, best first, each once.
    passages: tuple[Passage, ...]
    #: In the order of their starts.
    events: tuple[Event, ...]
    seconds: float

    @property
    def retrieval_s(self) -> float:
        """Seconds of all searches."""
        return sum(event.seconds for event in self.events if isinstance(event, Retrieved))

    @property
    def generation_s(self) -> float:
        """Seconds of all generations."""
        return sum(event.seconds for event in self.events if isinstance(event, Generated))
