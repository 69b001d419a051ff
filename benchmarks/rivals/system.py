"""What benchmarks compare: one index over a collection, which answers a batch at a setting of its one or two dials."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hybridindex.types import F32, I64

__all__ = ["Answer", "Collection", "K", "System"]

K = 10
#: (n, d) queries -> (n, K) ids.
Answer = Callable[[F32], I64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Vectors that are compared by inner product, in the lists that all IVF systems share."""

    vectors: F32
    lists: I64
    centres: F32
    #: Folder of what takes long to build.
    cache: Path

    def kept(self, name: str, build: Callable[[Path], object]) -> Path:
        """The file (or folder) ``name`` of these vectors, built first where the cache lacks it.

        It is built under another name: a run that is stopped leaves no half file.
        """
        self.cache.mkdir(parents=True, exist_ok=True)
        path = self.cache / f"{name}-{xxhash.xxh3_64_hexdigest(self.vectors.data)}.index"
        if not path.exists():
            part = path.with_suffix(".part")
            sys.stderr.write(f"building {path.name} ...\n")
            build(part)
            part.replace(path)
        return path


def _anywhere(threads: int) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One side of a comparison."""

    name: str
    #: Names of the dials. More of either is more work and no less recall.
    dials: tuple[str, ...]
    #: Values of the first dial for a curve; the last is the most that there is.
    grid: tuple[int, ...]
    #: Values of the second dial.
    finer: tuple[int, ...] = (0,)
    #: First dial, second dial, threads -> what answers at that setting.
    at: Callable[[int, int, int], Answer]
    #: Ways of running that change time but not answers: the fastest is chosen for each batch size.
    modes: tuple[int, ...] = ()
    set_mode: Callable[[int], None] = lambda mode: None
    #: Around calls, for systems that cannot be told how many threads to use.
    held_to: Callable[[int], AbstractContextManager[object]] = _anywhere
    close: Callable[[], None] = lambda: None

    def setting(self, first: int, second: int) -> str:
        """As results name it."""
        return " ".join(f"{dial}={value}" for dial, value in zip(self.dials, (first, second), strict=False))

    @property
    def most(self) -> dict[str, int]:
        """The largest value of each dial."""
        return dict(zip(self.dials, (max(self.grid), max(self.finer)), strict=False))

    def points(self, threads: int) -> dict[str, Answer]:
        """Every setting of the curve."""
        return {
            self.setting(first, second): self.at(first, second, threads) for first in self.grid for second in self.finer
        }
