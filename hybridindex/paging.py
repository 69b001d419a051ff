"""Page and byte arithmetic, for the partitioner, which plans device memory, and the tiers, which own it.

:mod:`hybridindex.tiers.paged.arena` decides what a page holds and who may write to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import I64

__all__ = [
    "CODE_PAGE_BYTES",
    "DEFAULT_PAGE_BYTES",
    "PageGeometry",
    "centroid_share",
    "format_bytes",
    "least_with_centroids",
    "scratch_for_budget",
    "shard_page_bytes",
    "usual_page_bytes",
]

DEFAULT_PAGE_BYTES = 65_536
#: Of codes, which are short: in a large page, half of which a list leaves empty on average, they would save little.
CODE_PAGE_BYTES = 4096
#: Part of the pages of all lists that rows fill, at least, where pages do not become smaller than this; and most rows
#: that a kernel takes at a time.
_LEAST_USEFUL, _LEAST_PAGE_BYTES, _KERNEL_ROWS = 0.85, 8192, 64
#: Most pages of the list in which an average row lies: each is an entry in tables, and work of its own for a kernel.
_MOST_PAGES = 256
_MAX_SCRATCH_BYTES = 64 << 20
#: Where lists are codes: their scans write few bytes for each that they read, but candidates of a query take room, too.
_LEAST_SCRATCH_OF_CODES, _SCRATCH_PER_CODE_BYTE = 4 << 20, 1 / 4
#: A budget of so many times their bytes has room for centroids.
_CENTROIDS_ARE_WORTH = 16
#: Rows of codes that faiss-gpu interleaves.
_SHARD_ROWS = 32
#: Unit in which a device allocates memory.
_ALLOCATION_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Rows of codes in pages. A page holds whole rows, so that each page of a list can be scanned alone."""

    code_size: int
    rows_per_page: int
    #: Rows that no page parts: ``rows_per_page`` is a multiple of it.
    group_rows: int = 1

    @classmethod
    def for_code_size(
        cls, code_size: int, page_bytes: int = DEFAULT_PAGE_BYTES, *, group_rows: int = 1
    ) -> PageGeometry:
        """Pages of at most ``page_bytes`` bytes, but of at least one group of rows.

        Raises:
            InvalidInputError: ``code_size`` or ``page_bytes`` is below 1.
        """
        if code_size < 1:
            raise InvalidInputError(f"code_size is {code_size}; a row has at least 1 byte")
        if page_bytes < 1:
            raise InvalidInputError(f"page_bytes is {page_bytes}; a page has at least 1 byte")
        groups = max(1, page_bytes // (code_size * group_rows))
        return cls(code_size=code_size, rows_per_page=groups * group_rows, group_rows=group_rows)

    @property
    def page_bytes(self) -> int:
        return self.rows_per_page * self.code_size

    def pages_for(self, sizes: I64) -> I64:
        """Pages of lists with ``sizes`` rows: (m,) int64 -> (m,) int64. An empty list takes none."""
        return -(-np.asarray(sizes, dtype=np.int64) // self.rows_per_page)

    def pages_of_bytes(self, nbytes: I64) -> I64:
        """Pages that ``nbytes`` (m,) int64 take, one byte behind the other: (m,) int64."""
        return -(-np.asarray(nbytes, dtype=np.int64) // self.page_bytes)


def usual_page_bytes(codec: str, row_bytes: int, sizes: I64) -> int:
    """Most bytes of a page, as it fits lists that hold rows, or short codes: RaBitQ's ("rabitq1") and those of product
    quantizers ("pq48").

    Pages of rows have a power of two of them, which kernels take together: about as many as
    :data:`DEFAULT_PAGE_BYTES` hold, or fewer where those would leave much of the lists' last pages empty. Rows that lie
    in very long lists keep large pages, whatever short lists there are beside them.

    Args:
        row_bytes: of one row.
        sizes: (nlist,) rows of each list.
    """
    if codec.startswith(("rabitq", "pq")):
        return CODE_PAGE_BYTES
    rows = 1 << (max(1, DEFAULT_PAGE_BYTES // row_bytes).bit_length() - 1)
    if _KERNEL_ROWS * row_bytes <= 2 * DEFAULT_PAGE_BYTES:
        rows = max(rows, _KERNEL_ROWS)
    sizes = np.asarray(sizes, dtype=np.int64)
    count = int(sizes.sum())
    while rows // 2 * row_bytes >= _LEAST_PAGE_BYTES:
        if count >= _LEAST_USEFUL * rows * int(_pages_of(sizes, rows).sum()):
            break
        if float(sizes @ _pages_of(sizes, rows // 2)) > _MOST_PAGES * count:
            break
        rows //= 2
    return rows * row_bytes


def _pages_of(sizes: I64, rows: int) -> I64:
    pages: I64 = -(-sizes // rows)
    return pages


def scratch_for_budget(budget_bytes: int, code_bytes: int = 0) -> int:
    """Bytes of a device budget that are reserved for the scan's temporary buffers. ``code_bytes``: of all lists, where
    devices hold codes; 0: they hold rows."""
    most = _MAX_SCRATCH_BYTES
    if code_bytes:
        most = min(most, max(_LEAST_SCRATCH_OF_CODES, int(code_bytes * _SCRATCH_PER_CODE_BYTE)))
    return min(most, budget_bytes // 8)


def centroid_share(budget_bytes: int, centroid_bytes: int) -> int:
    """Bytes of a device budget that are reserved for the index's centroids, which take ``centroid_bytes``: none of a
    small one."""
    return centroid_bytes if least_with_centroids(centroid_bytes) <= budget_bytes else 0


def least_with_centroids(centroid_bytes: int) -> int:
    """The smallest device budget that has room for centroids of ``centroid_bytes``."""
    return centroid_bytes * _CENTROIDS_ARE_WORTH


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
