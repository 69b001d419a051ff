"""What tests of RAG on a real vLLM share: where is searched, an LLM that says words of the texts, what sessions did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import tokenizers

from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.generator import Finished, OpenAIGenerator, Prompt, Sampling
from hybridindex.rag.records import Piece
from hybridindex.rag.retriever import RetrievalSession, Retriever, SessionSource
from hybridindex.types import SearchResult
from tests.rag.world import TOPICS, query_embedder
from tests.vllm.serving import wait_for
from tests.vllm.tiny_llama import ANSWER_MARK

__all__ = ["QUESTION", "YES", "Side", "Speaker", "Watched"]

QUESTION = "what is a planet"
YES = "yes"
#: Steps that Self-RAG wants a yes of, which a model of random weights never says by itself.
_ASKED_FOR_YES = frozenset({"decide", "critique"})


class Watched:
    """A source that keeps what each session did, as it closes."""

    def __init__(self, source: SessionSource, *, landing: bool) -> None:
        """``landing``: a lookahead's lists are there when the call returns, where the source can say so."""
        self._source = source
        self._landing = landing
        self.closed: list[Mapping[str, Any]] = []

    def search(self, queries: Any, /, k: int = 10, nprobe: int | None = None, **options: Any) -> SearchResult:
        return self._source.search(queries, k, nprobe, **options)

    def session(self, **budget: Any) -> RetrievalSession:
        return _WatchedSession(self._source.session(**budget), self.closed, landing=self._landing)


class _WatchedSession:
    """Has all that the session has, ``stats`` too, whichever it is."""

    def __init__(self, session: RetrievalSession, closed: list[Mapping[str, Any]], *, landing: bool) -> None:
        self._session = session
        self._closed = closed
        self._landing = landing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def lookahead(self, drafts: Any, /, *, nprobe: int | None = None, window_ms: float | None = None) -> object:
        moved = self._session.lookahead(drafts, nprobe=nprobe, window_ms=window_ms)
        if self._landing and isinstance(moved, Future):
            moved.result(300)
        return moved

    def close(self) -> None:
        stats: Any = self._session.stats  # type: ignore[attr-defined]
        self._closed.append(stats() if callable(stats) else asdict(stats))
        self._session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where is searched: in this process, or in vLLM's."""

    name: str
    source: SessionSource
    documents: DocumentStore
    #: How the LLM is talked to beside it.
    mode: Literal["chat", "completions"]
    #: Sessions that are open.
    sessions: Callable[[], int]
    #: Lists on devices that are there for sessions alone.
    lists: Callable[[], int]

    def retriever(self, *, k: int = 3, landing: bool = False) -> tuple[Retriever, Watched]:
        watched = Watched(self.source, landing=landing)
        return Retriever(watched, query_embedder(self.documents), self.documents, k=k, lookahead_bytes=1 << 20), watched

    def wait_until_free(self) -> None:
        """No session is left, and no page of one. Moves that were on their way may take a moment."""
        assert self.sessions() == 0
        wait_for(f"pages of sessions {self.name} vLLM come free", lambda: self.lists() == 0)


class Speaker:
    """The server at ``url``, which chooses from the words of the question's topic; keeps what it was asked."""

    def __init__(self, url: str, model: Path, mode: Literal["chat", "completions"] = "completions") -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._mode = mode
        words = [*(f"Ġ{word}" for word in TOPICS["stars"].split()), ".", "Ċ"]
        self._words = self._talking(url, words)
        self._yes = self._talking(url, [f"Ġ{YES}"])
        self.asked: list[Prompt] = []

    def _talking(self, url: str, tokens: list[str]) -> OpenAIGenerator:
        allowed = [self.tokenizer.token_to_id(token) for token in tokens]
        assert None not in allowed, tokens
        extra = {"allowed_token_ids": allowed}
        return OpenAIGenerator(
            url, model="tiny", mode=self._mode, sampling=Sampling(temperature=1.0, seed=3, extra=extra)
        )

    def generate(self, prompt: Prompt, /) -> Iterator[Piece | Finished]:
        self.asked.append(prompt)
        return (self._yes if prompt.name in _ASKED_FOR_YES else self._words).generate(prompt)

    def score(self, prompt: str, continuation: str, /) -> tuple[float, ...]:
        return self._words.score(prompt, continuation)

    def seen(self, prompt: Prompt) -> str:
        """What the model is shown: in a chat what the template adds as well."""
        return prompt.text + (ANSWER_MARK if self._mode == "chat" and not prompt.append else "")

    def count(self, text: str) -> int:
        """Of the model's tokens."""
        return len(self.tokenizer.encode(text).ids)

    def close(self) -> None:
        self._words.close()
        self._yes.close()

    def __enter__(self) -> Speaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
