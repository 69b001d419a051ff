"""What :func:`hybridindex.demo.load.load_dataset` returns: paths, counts and lazy readers. Makes and checks nothing.

Everything here is immutable and may be read from several threads; arrays come as read-only memory maps. Vectors are
raw unit vectors; ``center`` them (passages and queries alike, by the passages' mean) before building an index unless
the raw space is what you want to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridindex import filesystem
from hybridindex.rag.embed import center
from hybridindex.types import F32

__all__ = ["Dataset", "QuerySet", "SourceCount"]


def _map(path: Path) -> F32:
    with filesystem.performing("map", path):
        array: F32 = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCount:
    """How many passages of a dataset come from a source, and under which licence."""

    name: str
    passages: int
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySet:
    """Queries of one collection in their order."""

    count: int
    texts_path: Path
    vectors_path: Path

    def texts(self) -> list[str]:
        return filesystem.read_text(self.texts_path).split("\n")[:-1]

    def vectors(self) -> F32:
        """(count, 256) float32, raw unit vectors."""
        return _map(self.vectors_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Passages, their vectors, a log of real queries, and what to say about them. Passage ids are row numbers."""

    name: str
    count: int
    passages_path: Path  # UTF-8, one passage per line
    vectors_path: Path  # (count, 256) float32 .npy, raw unit vectors
    mean: F32  # (256,) mean of the raw vectors
    log: QuerySet  # a log with repeats: the workload
    sources: tuple[SourceCount, ...]  # in the order of the passages
    notes: tuple[str, ...]  # to be shown to the user: what is missing, whose terms apply

    @property
    def dim(self) -> int:
        return int(self.mean.shape[0])

    @property
    def log_queries(self) -> F32:
        """(m, 256) float32, raw: the vectors of :attr:`log`."""
        return self.log.vectors()

    def vectors(self) -> F32:
        """(count, 256) float32, raw unit vectors, memory-mapped."""
        return _map(self.vectors_path)

    def centered(self, vectors: F32) -> F32:
        """``vectors`` (n, 256) in the centred space of this dataset: queries, or a slice of the passages."""
        return center(vectors, self.mean)

    def iter_centered(self, rows: int = 65_536) -> Iterator[F32]:
        """The passages' centred vectors in blocks of ``rows``, in bounded memory: input for a streaming build."""
        vectors = self.vectors()
        for start in range(0, self.count, rows):
            yield center(vectors[start : start + rows], self.mean)

    def passages(self) -> Iterator[str]:
        """All passages in order of id."""
        with filesystem.open_text(self.passages_path, newline="\n") as file:
            for line in file:
                yield line[:-1]
