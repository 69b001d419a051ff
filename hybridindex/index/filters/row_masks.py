"""Filters of the queries of one scan: each query has its own, many have the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.types import I32, I64

__all__ = ["RowMasks"]


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """Which rows each query may be answered with. Immutable."""

    #: Different ones.
    filters: tuple[RowFilter, ...]
    #: (n,) int32: which of these is each query's.
    of_query: I32

    def __len__(self) -> int:
        return len(self.of_query)

    @classmethod
    def joined(cls, parts: Sequence[RowMasks]) -> RowMasks:
        """Those of the queries of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.filters) for part in parts[:-1])])
        of_query = [part.of_query + np.int32(n) for part, n in zip(parts, before.tolist(), strict=True)]
        return cls(tuple(each for part in parts for each in part.filters), np.concatenate(of_query))

    def take(self, rows: I64 | I32 | slice) -> RowMasks:
        """Those of some of the queries."""
        return RowMasks(self.filters, self.of_query[rows])

    def groups(self) -> Iterator[tuple[I64, RowFilter]]:
        """Queries with the same filter, (m,) int64 ascending, and that filter."""
        for number in np.unique(self.of_query).tolist():
            yield np.flatnonzero(self.of_query == number), self.filters[number]

    def runs(self, most: int) -> Iterator[slice]:
        """Queries one behind the other that have at most ``most`` different filters; all of them, in order."""
        start, seen = 0, set[int]()
        for at, number in enumerate(self.of_query.tolist()):
            if number not in seen and len(seen) == most:
                yield slice(start, at)
                start, seen = at, set()
            seen.add(number)
        if start < len(self):
            yield slice(start, len(self))
