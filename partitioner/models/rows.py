"""Rows beside codes: which share of the candidates finds its row on a device, by the lists whose rows devices hold.

A search by codes compares its candidates exactly. Candidates in lists whose rows lie on a device are compared there.
Has its own order of lists: a list with few accesses can have many candidates. Does not say what the comparisons take
(:mod:`hybridindex.partitioner.models.latency`) or which pieces come first (:mod:`hybridindex.partitioner.forms`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.models.row_cache import RowCache, build_row_cache
from hybridindex.types import F64, I64, Profile

__all__ = ["RowCurve", "build_row_curve", "row_bytes_of", "rows_on_devices"]

_GRID_POINTS = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCurve:
    """Candidates on devices against the number of lists whose rows are there. Immutable.

    Held-back queries are in the order of the :class:`hybridindex.partitioner.models.coverage.CoverageCurve` beside it.
    """

    #: Bytes of a row; and (nlist,) int64 bytes and pages of the rows of each list.
    row_bytes: int
    list_bytes: I64
    list_pages: I64
    #: (m,) int64 lists that have candidates, most candidates per row first (ties by id); and (nlist,) int64 position of
    #: each list in it, m where it has none.
    order: I64
    rank: I64
    #: (m,) float64 in this order: candidates of the queries that chose it.
    candidates_by_rank: F64
    #: (m + 1,) int64 sums of pages over the first 0..m lists.
    prefix_pages: I64
    #: (n,) float64 candidates of each held-back query.
    every: F64
    #: (g,) int64 numbers of lists where ``hits`` (g, n) float64, the candidates in them, is tabulated.
    grid: I64
    hits: F64
    #: Pairs of a query and a list with candidates, by ascending rank.
    probe_query: npt.NDArray[np.int32]
    probe_rank: npt.NDArray[np.int32]
    probe_candidates: F64
    #: Lists of the pairs.
    probe_list: npt.NDArray[np.int32]
    #: Whether devices can hold rows: not those of faiss's own codes.
    on_devices: bool
    #: Of rows that are on disk; ``None``: all are in memory.
    cache: RowCache | None = None

    @property
    def n_lists(self) -> int:
        """Lists whose rows are worth a place."""
        return self.order.size

    def at(self, count: int) -> F64:
        """(n,) float64 candidates of each query in the first ``count`` lists."""
        g = int(np.searchsorted(self.grid, count, side="right")) - 1
        first, last = np.searchsorted(self.probe_rank, (self.grid[g], count))
        table: F64 = self.hits[g]
        return table + self._sum(slice(int(first), int(last)))

    def of_lists(self, lists: I64) -> tuple[F64, int | None]:
        """The same for the list ids (m,), and how many they are where they are a prefix of the order; None: no
        prefix. Lists without candidates do not count."""
        here = np.zeros(self.n_lists + 1, dtype=np.bool_)
        here[self.rank[lists]] = True
        here[-1] = False
        count = int(here.sum())
        if here[:count].all():
            return self.at(count), count
        return self._sum(here[self.probe_rank]), None

    def faults(self, lists: I64, count: int | None) -> F64 | None:
        """(n,) float64 pages that each query reads from disk where devices hold the rows of the list ids (m,), the
        first ``count`` of the order; None: no prefix of it. None where all rows are in memory."""
        return None if self.cache is None else self.cache.faults(lists, count)

    def with_cache(self, profile: Profile, nbytes: int | None) -> RowCurve:
        """The same with so much memory for rows; None: all are in memory."""
        if nbytes is None:
            return replace(self, cache=None)
        cache = build_row_cache(
            profile,
            self.row_bytes,
            nbytes,
            self.probe_query,
            self.probe_list,
            self.probe_candidates,
            self.every.size,
        )
        return replace(self, cache=cache)

    def in_pages(self, page_bytes: int) -> RowCurve:
        """The same in pages of another size."""
        pages = -(-self.list_bytes // page_bytes)
        return replace(self, list_pages=pages, prefix_pages=np.concatenate(([0], np.cumsum(pages[self.order]))))

    def _sum(self, some: slice | npt.NDArray[np.bool_]) -> F64:
        sums = np.bincount(self.probe_query[some], weights=self.probe_candidates[some], minlength=self.every.size)
        return np.asarray(sums, dtype=np.float64)


def row_bytes_of(profile: Profile) -> int:
    """Bytes of the row beside a code; 0 where the profile does not say."""
    nbytes = int(profile.notes.get("codes", {}).get("row_bytes", 0))
    return round(nbytes / max(1, int(profile.list_sizes.sum())))


def rows_on_devices(profile: Profile) -> bool:
    """Whether devices can hold the row beside a code. Profiles that do not say have row bytes only where they can."""
    return bool(profile.notes.get("codes", {}).get("rows_on_devices", True))


def build_row_curve(profile: Profile, queries: I64, page_bytes: int) -> RowCurve | None:
    """Tabulate the candidates of the held-back ``queries`` (n,) int64, numbers in the profile, by prefix of the order
    of rows. None where candidates were not counted, or there are none."""
    access, row_bytes = profile.access, row_bytes_of(profile)
    counts = access.list_candidates
    if counts is None or access.held_candidates is None or not row_bytes or not (counts > 0).any():
        return None
    nlist = profile.nlist
    each = counts / np.maximum(profile.list_sizes, 1)
    order = np.argsort(-each, kind="stable")[: int((each > 0).sum())]
    rank = np.full(nlist, order.size, dtype=np.int64)
    rank[order] = np.arange(order.size)
    probes, candidates = access.held_probes[queries], access.held_candidates[queries].astype(np.float64)
    query, place = np.nonzero((candidates > 0) & (probes >= 0))
    lists, here = probes[query, place], candidates[query, place]
    ranks = rank[lists]
    by_rank = np.argsort(ranks, kind="stable")
    query, lists, ranks, here = query[by_rank], lists[by_rank], ranks[by_rank], here[by_rank]
    n, half = len(queries), _GRID_POINTS // 2
    points = np.concatenate((np.linspace(0, order.size, half), np.geomspace(1, order.size, half)))
    grid = np.unique(np.round(points)).astype(np.int64)
    cell = np.searchsorted(grid, ranks, side="right") - 1
    sums = np.bincount(cell * n + query, weights=here, minlength=grid.size * n).reshape(grid.size, n)
    # Candidates in lists beyond the order are in the last cell.
    hits = np.zeros((grid.size, n))
    np.cumsum(sums[:-1], axis=0, out=hits[1:])
    nbytes = profile.list_sizes * row_bytes
    pages = -(-nbytes // page_bytes)
    return RowCurve(
        row_bytes=row_bytes,
        list_bytes=nbytes,
        list_pages=pages,
        order=order,
        rank=rank,
        candidates_by_rank=counts[order],
        prefix_pages=np.concatenate(([0], np.cumsum(pages[order]))),
        every=sums.sum(axis=0),
        grid=grid,
        hits=hits,
        probe_query=query.astype(np.int32),
        probe_rank=ranks.astype(np.int32),
        probe_candidates=here,
        probe_list=lists.astype(np.int32),
        on_devices=rows_on_devices(profile),
    )
