"""A small world for pipelines: a corpus of real words, its embeddings, an index, a document store, recorded answers.

Embeddings are made by the demo's embedder with a toy vocabulary. What an LLM says is a recorded trace, replayed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from hybridindex.index import build
from hybridindex.index.ivf import IVFIndex
from hybridindex.rag.documents import Document, DocumentStore, write_documents
from hybridindex.rag.embed import StaticEmbedder, center
from hybridindex.rag.records import Generated, Piece
from hybridindex.rag.retriever import CenteredEmbedder
from hybridindex.rag.trace import ReplayGenerator
from hybridindex.router import Router
from hybridindex.router.session import Session
from hybridindex.types import F32, SearchResult

DIM = 16
NLIST = 16
TOPICS = {
    "trees": "oak beech birch pine forest leaf root bark acorn timber",
    "seas": "wave tide reef salt harbour gull current coral island storm",
    "stars": "comet planet orbit galaxy nova moon eclipse lens dust light",
    "bread": "flour yeast oven crust dough rye wheat loaf sour bake",
}
WORDS = sorted({word for words in TOPICS.values() for word in words.split()} | set(TOPICS) | {"a", "is", "what", "of"})
PER_TOPIC = 60


def embedder() -> StaticEmbedder:
    """Words of one topic lie near each other."""
    rng = np.random.default_rng(5)
    middles = {topic: 3 * rng.standard_normal(DIM) for topic in TOPICS}
    table = rng.standard_normal((len(WORDS) + 1, DIM)).astype(np.float32)
    for topic, words in TOPICS.items():
        for word in (topic, *words.split()):
            table[WORDS.index(word) + 1] += middles[topic]
    vocabulary = {"[UNK]": 0, **{word: number for number, word in enumerate(WORDS, 1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return StaticEmbedder(table, tokenizer)


def texts(per_topic: int = PER_TOPIC) -> list[str]:
    """Passages of 12 words; those of a topic follow one another, as one document."""
    rng = np.random.default_rng(6)
    return [
        " ".join(rng.choice(words.split(), size=12).tolist()) for words in TOPICS.values() for _ in range(per_topic)
    ]


def ids(per_topic: int = PER_TOPIC) -> list[int]:
    """Not row numbers, so that nobody takes one for the other."""
    return [3 * row + 7 for row in range(per_topic * len(TOPICS))]


def build_world(
    folder: Path, *, per_topic: int = PER_TOPIC, nlist: int = NLIST, nprobe: int = 4, name: str = "toy"
) -> tuple[IVFIndex, Path, F32]:
    """An index over centred vectors, its document store, and the mean. ``name``: the store's embedder."""
    vectors = embedder().embed(texts(per_topic))
    mean: F32 = vectors.mean(axis=0)
    numbers = np.array(ids(per_topic))
    index = build(center(vectors, mean), folder / "index", ids=numbers, nlist=nlist, metric="ip", nprobe=nprobe)
    path = folder / "documents.sqlite"
    write_documents(
        path, documents(per_topic), index_fingerprint=index.fingerprint, embedder=name, dim=DIM, mean=mean,
        token_starts=embedder().token_starts,
    )  # fmt: skip
    return index, path, mean


def documents(per_topic: int = PER_TOPIC) -> Iterable[Document]:
    numbers = ids(per_topic)
    for row, (number, text) in enumerate(zip(numbers, texts(per_topic), strict=True)):
        ends = (row + 1) % per_topic == 0
        source = list(TOPICS)[row // per_topic]
        yield Document(id=number, text=text, source=source, successor=None if ends else numbers[row + 1])


def query_embedder(store: DocumentStore) -> CenteredEmbedder:
    assert store.info.mean is not None
    return CenteredEmbedder(embedder(), store.info.mean)


def spoken(name: str, text: str, *, finish: str = "stop", probability: float = 0.9, prompt: str = "") -> Generated:
    """A recorded generation, word by word, a word in 10 ms."""
    words = text.split(" ")
    pieces = tuple(
        Piece(
            text=word if number == 0 else f" {word}",
            tokens=1,
            at_s=0.05 + 0.01 * number,
            logprobs=(math.log(0.1 if word.startswith("?") else probability),),
        )
        for number, word in enumerate(words)
    )
    return Generated(
        name=name,
        pieces=pieces,
        finish=finish,
        prompt_tokens=len(prompt.split()),
        completion_tokens=0,
        prompt_sha256=hashlib.sha256(prompt.encode()).hexdigest(),
        max_tokens=64,
        started_s=0.0,
        seconds=0.06 + 0.01 * len(words),
    )


def replay(*said: Generated) -> ReplayGenerator:
    """Without waiting."""
    return ReplayGenerator(said, speed=math.inf)


def names(events: Sequence[object]) -> list[str]:
    """ "kind name" of each event, in short."""
    return [f"{type(event).__name__} {event.name}" for event in events]  # type: ignore[attr-defined]


class LandingSource:
    """A router whose lookahead has landed when the call returns: what a test sees does not depend on threads."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.sessions: list[LandingSession] = []

    def session(self, *, lookahead_bytes: int | None = None, window_ms: float | None = None) -> LandingSession:
        opened = self._router.session(lookahead_bytes=lookahead_bytes, window_ms=window_ms)
        self.sessions.append(LandingSession(opened))
        return self.sessions[-1]

    def search(self, queries: Any, /, k: int = 10, nprobe: int | None = None, **options: Any) -> SearchResult:
        return self._router.search(queries, k, nprobe, **options)


class LandingSession:
    def __init__(self, session: Session) -> None:
        self.within = session
        #: Of each lookahead.
        self.windows: list[float | None] = []

    def lookahead(self, drafts: Any, /, *, nprobe: int | None = None, window_ms: float | None = None) -> None:
        self.windows.append(window_ms)
        self.within.lookahead(drafts, nprobe=nprobe, window_ms=window_ms).result(300)

    def search(self, queries: Any, /, k: int = 10, nprobe: int | None = None, **options: Any) -> SearchResult:
        return self.within.search(queries, k, nprobe, **options)

    def close(self) -> None:
        self.within.close()
