"""How filters travel with a scan: what each leaves of the lists that a node is asked for.

The asking node knows which rows a filter leaves; the asked one applies them, and needs neither ids nor attributes. All
copies of a list have its rows in the same order. Behind the arrays of :mod:`hybridindex.router.remote.scan_codec`,
where the query string says ``f=``, the number of different filters:

    of each query (n,) int32: which filter is its
    of each filter 24 bytes: int64 rows that it leaves of the whole index, int64 lists, int64 numbers of rows or -1
    of each filter: its lists (l,) int32, ascending; then, with the rows of these lists numbered from 0 on,
        numbers (m,) uint32 of the rows that it leaves, ascending; or, after -1, a bit for each row, low bits first, in
        whole bytes

These numbers determine the length. The lists of a filter are those of the whole part that a node was asked for first;
whoever is asked for some of them in its place is told of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.host.filtered_scanner import matching_rows
from hybridindex.types import I32, I64, U8

__all__ = ["ReceivedFilters", "SentFilters", "encode_filters"]

#: total, lists, rows.
_HEAD = np.dtype([("total", "<i8"), ("lists", "<i8"), ("rows", "<i8")])
#: Says that bits follow.
_BITS = -1
#: Rows that are unpacked at a time, a multiple of 8.
_CHUNK = 1 << 18
_PAGE = 4096


class SentFilters(NamedTuple):
    """Of the queries of one part of a batch."""

    #: (m,) int32: which filter is each query's.
    of_query: I32
    #: Of each filter, the numbers before its bytes: total, lists, rows.
    heads: list[tuple[int, int, int]]
    #: What each leaves of the part's lists.
    encoded: list[bytes]

    @property
    def nbytes(self) -> int:
        """Of all filters."""
        return sum(map(len, self.encoded))

    def of(self, rows: I32 | I64) -> tuple[int, bytes]:
        """How many different filters some of the part's queries have, and the bytes for these."""
        used, of_query = np.unique(self.of_query[rows], return_inverse=True)
        numbers = used.tolist()
        heads = np.array([self.heads[number] for number in numbers], dtype=_HEAD)
        parts = [of_query.astype("<i4").tobytes(), heads.tobytes(), *(self.encoded[number] for number in numbers)]
        return len(numbers), b"".join(parts)


def encode_filters(masks: RowMasks, probes: I64) -> SentFilters:
    """Of queries (m,) and the lists (m, w) that are asked for them, -1 = skip."""
    of_query = np.zeros(len(masks), dtype=np.int32)
    heads, encoded = [], []
    for number, (queries, wanted) in enumerate(masks.groups()):
        of_query[queries] = number
        own = probes[queries]
        lists: I64 = np.unique(own[own >= 0])
        rows, n_rows = _rows_of(wanted, lists)
        numbers = n_rows <= 1 << 32 and 32 * len(rows) < n_rows
        heads.append((wanted.total, len(lists), len(rows) if numbers else _BITS))
        left = rows.astype("<u4").tobytes() if numbers else _bits(rows, n_rows)
        encoded.append(lists.astype("<i4").tobytes() + left)
    return SentFilters(of_query, heads, encoded)


def _rows_of(wanted: RowFilter, lists: I64) -> tuple[I64, int]:
    """(m,) int64 numbers of the rows that a filter leaves of some lists, ascending; and how many rows these have."""
    first = np.concatenate([[0], np.cumsum(np.diff(wanted.first)[lists])])
    counts = wanted.counts[lists]
    positions = np.empty((1, int(counts.sum())), dtype=np.int64)
    matching_rows(wanted.mask, wanted.first, lists[None], positions)
    # In the order of the lists: from the place in a list to that among all of them.
    return positions[0] - np.repeat((lists << POSITION_BITS) - first[:-1], counts), int(first[-1])


def _bits(rows: I64, n_rows: int) -> bytes:
    left = np.zeros(n_rows, dtype=np.bool_)
    left[rows] = True
    return np.packbits(left, bitorder="little").tobytes()


class ReceivedFilters:
    """The filters of the queries of one scan, as they came: sizes and lists are checked, rows are not yet."""

    def __init__(self, body: memoryview, n_filters: int, probes: I64, index: IVFIndex) -> None:
        """
        Args:
            body: what follows the arrays of the scan.
            probes: (n, w) lists of each query.

        Raises:
            InvalidInputError: another length, or what cannot be right.
        """
        n = len(probes)
        at = 4 * n + _HEAD.itemsize * n_filters
        if not 1 <= n_filters <= n or len(body) < at:
            raise InvalidInputError(f"the body has {len(body)} bytes of filters: not {n_filters} for {n} queries")
        self._index = index
        self._of_query: I32 = np.frombuffer(body, dtype="<i4", count=n).astype(np.int32)
        if self._of_query.min() < 0 or self._of_query.max() >= n_filters:
            raise InvalidInputError(f"the body names filters outside 0..{n_filters - 1}")
        self._filters: list[_Received] = []
        for total, n_lists, n_rows in np.frombuffer(body, dtype=_HEAD, count=n_filters, offset=4 * n).tolist():
            lists = _lists(body[at:], n_lists, index.nlist)
            at += 4 * n_lists
            first: I64 = np.concatenate([[0], np.cumsum(index.list_sizes[lists])]).astype(np.int64)
            all_rows = int(first[-1])
            if not 0 <= total <= index.count or not _BITS <= n_rows <= all_rows:
                raise InvalidInputError(f"a filter of the body leaves {total} rows, and {n_rows} of {all_rows} here")
            nbytes = -(-all_rows // 8) if n_rows == _BITS else 4 * n_rows
            self._filters.append(_Received(total, lists, first, n_rows == _BITS, body[at : at + nbytes]))
            at += nbytes
        if len(body) != at:
            raise InvalidInputError(f"the body has {len(body)} bytes of filters; expected {at}")
        for number, each in enumerate(self._filters):
            asked = probes[self._of_query == number]
            if not np.isin(asked[asked >= 0], each.lists).all():
                raise InvalidInputError("the body asks for lists of which its filters say nothing")

    @property
    def nbytes(self) -> int:
        """Memory that :meth:`masks` takes."""
        return sum(each.memory(self._index) for each in self._filters)

    def masks(self) -> RowMasks:
        """Masks with a bit for each row of the index, 0 for those of lists that were not asked for.

        Raises:
            InvalidInputError: lists have no such rows.
        """
        index = self._index
        first: I64 = np.concatenate([[0], np.cumsum(index.list_sizes)]).astype(np.int64)
        return RowMasks(tuple(each.filter(index, first) for each in self._filters), self._of_query)


class _Received(NamedTuple):
    """One filter."""

    #: Rows that it leaves of the whole index.
    total: int
    #: (l,) int64, ascending; and (l + 1,) where the rows of each begin.
    lists: I64
    first: I64
    is_bits: bool
    content: memoryview

    def memory(self, index: IVFIndex) -> int:
        """What is touched of its mask and counts, and one chunk of rows."""
        n_rows, n_lists = int(self.first[-1]), len(self.lists)
        mask = min(index.count // 8, n_rows // 8 + 2 * _PAGE * n_lists)
        return mask + min(8 * index.nlist, _PAGE * n_lists) + 40 * min(n_rows, _CHUNK)

    def filter(self, index: IVFIndex, first: I64) -> RowFilter:
        """``first``: (nlist + 1,) of the whole index."""
        # Pages that nothing is written to take no memory.
        mask: U8 = np.zeros(-(-int(first[-1]) // 64) * 8, dtype=np.uint8)
        counts: I64 = np.zeros(index.nlist, dtype=np.int64)
        moved = first[self.lists] - self.first[:-1]
        for rows in self._chunks():
            times = np.diff(np.searchsorted(rows, self.first))
            counts[self.lists] += times
            _set(mask, rows + np.repeat(moved, times))
        return RowFilter(
            allowed=None,
            denied=None,
            where=None,
            attributes="",
            fingerprint=index.rows.fingerprint,
            mask=mask,
            first=first,
            counts=counts,
            total=self.total,
            seen=0,
        )

    def _chunks(self) -> Iterator[I64]:
        """Numbers of rows, ascending, some at a time."""
        before, n_rows = -1, int(self.first[-1])
        step = _CHUNK // 8 if self.is_bits else 4 * _CHUNK
        for at in range(0, len(self.content), step):
            part = self.content[at : at + step]
            if self.is_bits:
                bits = np.unpackbits(np.frombuffer(part, dtype=np.uint8), bitorder="little")
                rows = np.flatnonzero(bits.view(np.bool_)) + 8 * at
            else:
                rows = np.frombuffer(part, dtype="<u4").astype(np.int64)
            if not len(rows):
                continue
            if rows[0] <= before or rows[-1] >= n_rows or (np.diff(rows) <= 0).any():
                raise InvalidInputError("a filter of the body leaves rows that its lists have not, or one twice")
            before = int(rows[-1])
            yield rows


def _lists(body: memoryview, count: int, nlist: int) -> I64:
    """The (count,) lists at the beginning."""
    if not 0 <= count <= nlist or len(body) < 4 * count:
        raise InvalidInputError(f"a filter of the body has {count} lists, which it does not name")
    lists: I64 = np.frombuffer(body, dtype="<i4", count=count).astype(np.int64)
    if count and (lists[0] < 0 or lists[-1] >= nlist or (np.diff(lists) <= 0).any()):
        raise InvalidInputError(f"the lists of a filter of the body are not ascending, or outside 0..{nlist - 1}")
    return lists


def _set(mask: U8, rows: npt.NDArray[np.int64]) -> None:
    """``rows``: ascending."""
    at, bits = rows >> 3, np.left_shift(np.uint8(1), (rows & 7).astype(np.uint8))
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    mask[at[starts]] |= np.bitwise_or.reduceat(bits, starts)
