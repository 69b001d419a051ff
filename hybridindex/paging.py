"""Page and byte arithmetic, for the partitioner, which plans device memory, and the tiers, which own it.

:mod:`hybridindex.tiers.paged.arena` decides what a page holds and who may write to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import I64

__all__ = ["DEFAULT_PAGE_BYTES", "PageGeometry", "format_bytes", "scratch_for_budget", "shard_page_bytes"]

DEFAULT_PAGE_BYTES = 65_536
_MAX_SCRATCH_BYTES = 64 << 20
#: Rows of codes that faiss-gpu interleaves.
_SHARD_ROWS = 32
#: Unit in which a device allocates memory.
_ALLOCATION_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Rows of codes in pages. A page holds whole rows, so that each page of a list can be scanned alone."""

    code_size: int
    rows_per_page: int

    @classmethod
    def for_code_size(cls, code_size: int, page_bytes: int = DEFAULT_PAGE_BYTES) -> PageGeometry:
        """Pages of at most ``page_bytes`` bytes, but of at least one row.

        Raises:
            InvalidInputError: ``code_size`` or ``page_bytes`` is below 1.
        """
        if code_size < 1:
            raise InvalidInputError(f"code_size is {code_size}; a row has at least 1 byte")
        if page_bytes < 1:
            raise InvalidInputError(f"page_bytes is {page_bytes}; a page has at least 1 byte")
        return cls(code_size=code_size, rows_per_page=max(1, page_bytes // code_size))

    @property
    def page_bytes(self) -> int:
        return self.rows_per_page * self.code_size

    def pages_for(self, sizes: I64) -> I64:
        """Pages of lists with ``sizes`` rows: (m,) int64 -> (m,) int64. An empty list takes none."""
        return -(-np.asarray(sizes, dtype=np.int64) // self.rows_per_page)


def scratch_for_budget(budget_bytes: int) -> int:
    """Bytes of a device budget that are reserved for the scan's temporary buffers."""
    return min(_MAX_SCRATCH_BYTES, budget_bytes // 8)


def shard_page_bytes(code_size: int) -> int:
    """Page bytes of a shard: whole groups of rows as faiss-gpu interleaves them, and whole allocation units, so that a
    list never takes more than its pages."""
    rows = _SHARD_ROWS * (_ALLOCATION_BYTES // math.gcd(_ALLOCATION_BYTES, _SHARD_ROWS * code_size))
    return rows * code_size


def format_bytes(nbytes: float) -> str:
    """1536 -> "1.50 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
