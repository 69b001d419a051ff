"""Tables of a tile in host memory that a device copies from, with what kernels read besides, and room for its answer.

The extension makes the tables, or numpy where it is missing; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.paged.tables.scan_tables import ALIGNED, GROUP, Cutting, NumpyTables, Selection, Tile
from hybridindex.types import I64

if TYPE_CHECKING:
    import torch

__all__ = ["Cut", "StagedTables", "cut_for"]

#: Words of a new block.
_WORDS = 1 << 14


class Cut(NamedTuple):
    """How the pairs of a batch are cut into tiles."""

    selection: Selection
    #: Pages of the longest stretch.
    pages: int
    #: See :attr:`hybridindex.tiers.paged.tables.scan_tables.Cutting.costs`.
    costs: tuple[float, int, int, int, int]


def cut_for(k: int, room: int, query_bytes: int, pair_bytes: int, rows_per_page: int, list_sizes: I64) -> Cut:
    """See :class:`hybridindex.tiers.paged.tables.scan_tables.Cutting`.

    Raises:
        OutOfBudgetError: the scratch is too small for one query at this k.
    """
    try:
        # Any list fits: nobody has to look for the longest one.
        return _cut(k, room, query_bytes, pair_bytes, rows_per_page, rows_per_page)
    except OutOfBudgetError:
        return _cut(k, room, query_bytes, pair_bytes, rows_per_page, int(list_sizes.max()))


@lru_cache(maxsize=1024)
def _cut(k: int, room: int, query_bytes: int, pair_bytes: int, rows_per_page: int, longest_list: int) -> Cut:
    cutting = Cutting(
        selection=Selection.of(k),
        room=room,
        query_bytes=query_bytes,
        pair_bytes=pair_bytes,
        rows_per_page=rows_per_page,
        longest_list=longest_list,
    )
    return Cut(cutting.selection, cutting.longest_stretch(k), cutting.costs)


class StagedTables:
    """What one scan has on the host. Its next tile is written when nothing reads the last one any more.

    Args:
        page_locked: memory that a GPU copies from by itself.
    """

    def __init__(self, rows_per_page: int, *, page_locked: bool) -> None:
        made = NumpyTables if native is None else native.ScanTables
        #: Takes the probes, and knows what members, stretches and pairs of the last tile are.
        self.tables: Any = made(rows_per_page, GROUP)
        self._page_locked = page_locked
        self._place(_WORDS)
        self._keys = self._new(2048, np.int64)
        #: Of the last scan: its answer, as torch and as numpy see it.
        self._answer: tuple[torch.Tensor, I64] = self._keys, self._keys.numpy()
        #: Behind the copy of the last answer, on a GPU.
        self.done: Any = None

    def _new(self, n: int, dtype: npt.DTypeLike) -> torch.Tensor:
        import torch

        kind = torch.int32 if dtype == np.int32 else torch.int64
        return torch.empty(n, dtype=kind, pin_memory=self._page_locked)

    def _place(self, words: int) -> None:
        self.block = self._new(words, np.int32)
        self._ints: npt.NDArray[np.int32] = self.block.numpy()
        self._floats = self._ints.view(np.float32)

    def write(self, start: int, end: int, residency: Residency, heavy_from: int, selection: Selection) -> Tile:
        """Writes the tables of a tile."""
        pages = residency.list_log, residency.page_log
        while True:
            made = self.tables.write(start, end, *pages, heavy_from, selection.chunk, selection.kept, self._ints)
            tile = Tile._make(made)
            if tile.used <= len(self._ints):
                return tile
            self._place(1 << (tile.used - 1).bit_length())

    def put(self, used: int, operands: Mapping[str, npt.NDArray[Any]], at: dict[str, int]) -> int:
        """Writes arrays of int32 or float32 behind ``used`` words, and says in ``at`` where each begins; how many words
        are used now."""
        for name, values in operands.items():
            at[name], end = used, used + values.size
            if end > len(self._ints):
                old = self._ints
                self._place(1 << (end - 1).bit_length())
                self._ints[:used] = old[:used]
            if values.size:
                (self._floats if values.dtype == np.float32 else self._ints)[used:end] = values.reshape(-1)
            used = -(-end // ALIGNED) * ALIGNED
        return used

    def keys(self, count: int) -> tuple[torch.Tensor, I64]:
        """Room for an answer of (count,) int64, as torch and as numpy see it."""
        if len(self._answer[1]) != count:
            if len(self._keys) < count:
                self._keys = self._new(1 << (count - 1).bit_length(), np.int64)
            answer = self._keys[:count]
            self._answer = answer, answer.numpy()
        return self._answer
