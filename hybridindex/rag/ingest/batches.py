"""Passages to vectors, a batch at a time: input of a build. Keeps nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.rag.documents import Document
from hybridindex.rag.retriever import Embedder
from hybridindex.types import F32, I64

__all__ = ["embedded", "mean_of"]

#: Passages embedded at a time.
_BATCH = 512
#: Passages whose mean stands for that of all.
_SAMPLE = 4096


def embedded(passages: Iterable[Document], embedder: Embedder) -> Iterator[tuple[F32, I64]]:
    """Chunks of vectors (n, d) and ids (n,), as :func:`hybridindex.build` takes them.

    Raises:
        InvalidInputError: an embedder that refuses a text, or answers something else. What else it raises.
    """
    embed: Callable[[list[str]], Any] = getattr(embedder, "embed_passages", embedder.embed)
    stream = iter(passages)
    while batch := list(itertools.islice(stream, _BATCH)):
        try:
            vectors = embed([passage.text for passage in batch])
        except InvalidInputError as error:
            raise InvalidInputError(f"passages {batch[0].id} to {batch[-1].id}: {error}") from error
        is_array = isinstance(vectors, np.ndarray)
        if not is_array or vectors.ndim != 2 or len(vectors) != len(batch) or np.iscomplexobj(vectors):
            what = (
                f"an array of shape {vectors.shape} of {vectors.dtype}" if is_array else f"a {type(vectors).__name__}"
            )
            raise InvalidInputError(
                f"the embedder gave {what} for {len(batch)} texts; expected ({len(batch)}, d) real numbers"
            )
        yield vectors.astype(np.float32, copy=False), np.array([passage.id for passage in batch], dtype=np.int64)


def mean_of(passages: Iterable[Document], count: int, embedder: Embedder) -> F32:
    """(d,) float32: the mean vector of some thousand passages, evenly spaced among ``count``.

    For :class:`hybridindex.rag.retriever.CenteredEmbedder`; any mean serves, if passages and queries lose the same.
    """
    spaced = itertools.islice(passages, 0, None, max(1, count // _SAMPLE))
    total, n = None, 0
    for vectors, _ in embedded(spaced, embedder):
        part = vectors.sum(axis=0, dtype=np.float64)
        total, n = part if total is None else total + part, n + len(vectors)
    if total is None:
        raise InvalidInputError("there are no passages; expected one or more")
    mean: F32 = (total / n).astype(np.float32)
    return mean
