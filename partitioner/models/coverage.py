"""Coverage: what share of the scan work the hottest lists serve, measured on held-back probes.

Gives per-query hit work at any prefix of the hot order, and the prefix's bytes in pages. Does not model distributions
(:mod:`hybridindex.partitioner.models.hitrate`) or time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hybridindex.errors import ProfileError
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry
from hybridindex.partitioner.models.order_stats import avoid_probability
from hybridindex.partitioner.models.rows import RowCurve, build_row_curve
from hybridindex.types import F64, I64, Profile

__all__ = [
    "CoverageCurve",
    "QueryWork",
    "build_coverage_curve",
    "code_size_of",
    "count_grid",
    "group_rows_of",
    "variance_at_half",
]

#: Fewer held-back queries say nothing about batch minima.
MIN_HELD_QUERIES = 8
#: Held-back queries in use: a random sample of more gives the same figures. ``n_held_total`` counts all.
MAX_HELD_QUERIES = 4096
_TOUCH_CACHE = 64
#: Of RaBitQ codes.
_BLOCK_ROWS = 16
#: And of four-bit product quantizers.
_FAST_SCAN_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryWork:
    """How much of each held-back query's scan falls on one resident set. Arrays (n,) float64 of whole numbers."""

    #: Code bytes of all probed lists.
    work: F64
    #: Number of probed lists.
    probes: F64
    #: Code bytes of probed resident lists.
    hit_work: F64
    hit_probes: F64
    #: Pages of the resident lists, and of resident rows.
    pages: int
    #: Number of resident lists; ``None`` when the set is no prefix of the hot order.
    prefix: int | None
    #: (nlist,) bool in hot order; ``None`` when the set is a prefix.
    resident: npt.NDArray[np.bool_] | None = None
    #: Candidates whose rows are resident; ``None``: none are. And the number of lists whose rows are; ``None`` when
    #: these are no prefix of the order of rows.
    row_hits: F64 | None = None
    row_prefix: int | None = 0
    #: Pages of rows that the host reads from disk; ``None``: all rows are in memory.
    row_faults: F64 | None = None

    @property
    def hit_rate(self) -> F64:
        """(n,) float64 in [0, 1], by bytes. A query without work misses everything."""
        return self.hit_work / np.maximum(self.work, 1.0)

    @property
    def miss_work(self) -> F64:
        return self.work - self.hit_work

    @property
    def miss_probes(self) -> F64:
        return self.probes - self.hit_probes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoverageCurve:
    """Hit rates against the number of resident lists, in hot order. Immutable but for caches.

    Held-back queries are in a seeded random order, so that neighbours form a random batch.
    """

    nlist: int
    geometry: PageGeometry
    #: (nlist,) int64 list ids, hottest first (most accesses; ties by id).
    order: I64
    #: (nlist,) int64 position of each list in ``order``.
    rank: I64
    #: (nlist,) int64 code bytes, pages and accesses in hot order.
    bytes_by_rank: I64
    pages_by_rank: I64
    accesses_by_rank: F64
    #: (nlist + 1,) int64 sums over the first 0..nlist lists in hot order.
    prefix_bytes: I64
    prefix_pages: I64
    #: (g,) int64 numbers of lists, from 0 to nlist, where the curve is tabulated.
    grid: I64
    #: (g, n) float64: bytes and probes of each held-back query that hit at each grid point.
    hit_work: F64
    hit_probes: F64
    #: (g,) float64: mean and variance of the hit rate by bytes, across held-back queries.
    mean: F64
    variance: F64
    #: Variance of the hit rate where its mean is one half (VectorLiteRAG IV-A2); 0 when the mean never reaches it.
    sigma2_max: float
    #: Effective number of equally heavy probes of a query: (sum w)^2 / sum w^2, averaged over queries.
    effective_probes: float
    #: (nlist,) int64 number of held-back queries that probe each list, in hot order.
    queries_by_rank: I64
    #: Held-back queries in use, and in the profile.
    n_held: int
    n_held_total: int
    #: Of candidates, where searches scan codes; ``None``: they were not counted.
    rows: RowCurve | None = None
    probe_query: npt.NDArray[np.int32]
    probe_rank: npt.NDArray[np.int32]
    probe_work: F64
    probe_cell: npt.NDArray[np.int16]
    cell_cache: dict[int, tuple[I64, I64, F64]] = field(default_factory=dict, repr=False)
    touch_cache: dict[int, F64] = field(default_factory=dict, repr=False)

    def at(self, count: int, rows: int = 0) -> QueryWork:
        """Per-query work with the first ``count`` lists resident, and ``rows`` of the order of rows; exact."""
        g = int(np.searchsorted(self.grid, count, side="right")) - 1
        hit_work, hit_probes = self.hit_work[g], self.hit_probes[g]
        if count > self.grid[g]:
            if g not in self.cell_cache:
                inside = np.flatnonzero(self.probe_cell == g)
                self.cell_cache[g] = (
                    self.probe_query[inside].astype(np.int64),
                    self.probe_rank[inside].astype(np.int64),
                    self.probe_work[inside],
                )
            query, rank, work = self.cell_cache[g]
            hit = rank < count
            hit_work = hit_work + np.bincount(query[hit], weights=work[hit], minlength=self.n_held)
            hit_probes = hit_probes + np.bincount(query[hit], minlength=self.n_held)
        return QueryWork(
            work=self.hit_work[-1],
            probes=self.hit_probes[-1],
            hit_work=hit_work,
            hit_probes=hit_probes,
            pages=int(self.prefix_pages[count] + (self.rows.prefix_pages[rows] if self.rows is not None else 0)),
            prefix=count,
            row_hits=self.rows.at(rows) if self.rows is not None and rows else None,
            row_prefix=rows,
            row_faults=self.rows.faults(self.rows.order[:rows], rows) if self.rows is not None else None,
        )

    def of_lists(self, lists: I64, rows: I64 | None = None) -> QueryWork:
        """Per-query work with the list ids (m,) resident, and the rows of the list ids ``rows``."""
        if self.rows is not None and rows is not None and rows.size:
            row_hits, row_prefix = self.rows.of_lists(rows)
            faults = self.rows.faults(rows, row_prefix)
            work = self.of_lists(lists)
            pages = work.pages + int(self.rows.list_pages[rows].sum())
            return replace(work, pages=pages, row_hits=row_hits, row_prefix=row_prefix, row_faults=faults)
        resident = np.zeros(self.nlist, dtype=np.bool_)
        resident[self.rank[lists]] = True
        count = int(resident.sum())
        if resident[:count].all():
            return self.at(count)
        hit = resident[self.probe_rank]
        query = self.probe_query[hit]
        return QueryWork(
            work=self.hit_work[-1],
            probes=self.hit_probes[-1],
            hit_work=np.bincount(query, weights=self.probe_work[hit], minlength=self.n_held).astype(np.float64),
            hit_probes=np.bincount(query, minlength=self.n_held).astype(np.float64),
            pages=int(self.pages_by_rank[resident].sum()),
            prefix=None,
            resident=resident,
            row_faults=self.at(0).row_faults,
        )

    def union_bytes(self, work: QueryWork, batch: int) -> tuple[float, float]:
        """Expected code bytes of the distinct (resident, missed) lists that a random batch of ``batch`` probes."""
        cumulative = self.touch_cache.get(batch)
        if cumulative is None:
            touched = 1.0 - avoid_probability(self.n_held, batch)[self.queries_by_rank]
            cumulative = np.concatenate(([0.0], np.cumsum(self.bytes_by_rank * touched)))
            if len(self.touch_cache) >= _TOUCH_CACHE:
                self.touch_cache.clear()
            self.touch_cache[batch] = cumulative
        total = float(cumulative[-1])
        if work.prefix is not None:
            resident = float(cumulative[work.prefix])
        else:
            assert work.resident is not None
            resident = float(np.diff(cumulative)[work.resident].sum())
        return resident, max(total - resident, 0.0)

    def loads(self, work: QueryWork) -> tuple[F64, I64]:
        """(m,) float64 bytes that the queries read of each resident list, hottest first, and (m,) int64 its pages."""
        lists = slice(work.prefix) if work.prefix is not None else work.resident
        return self.accesses_by_rank[lists] * self.bytes_by_rank[lists], self.pages_by_rank[lists]

    def without_caches(self) -> CoverageCurve:
        """The same with nothing kept of what was computed."""
        rows = self.rows
        if rows is not None and rows.cache is not None:
            rows = replace(rows, cache=replace(rows.cache, _known={}))
        return replace(self, cell_cache={}, touch_cache={}, rows=rows)

    def pages_of(self, pieces: I64) -> I64:
        """Pages of each of the pieces (m,): what is scanned of list l is piece l, the rows beside its code are piece
        nlist + l."""
        lists = pieces % self.nlist
        beside = np.zeros_like(lists) if self.rows is None else self.rows.list_pages[lists]
        return np.where(pieces < self.nlist, self.pages_by_rank[self.rank[lists]], beside)

    def device_bytes(self, count: int) -> int:
        """Bytes of the pages that hold the first ``count`` lists; no scratch."""
        return int(self.prefix_pages[count]) * self.geometry.page_bytes

    def useful_count(self) -> int:
        """Smallest prefix beyond which no list was ever accessed, in either half."""
        wanted = np.flatnonzero((self.accesses_by_rank > 0) | (self.queries_by_rank > 0))
        return int(wanted[-1]) + 1 if wanted.size else 0


def count_grid(nlist: int, points: int = 200) -> I64:
    """About ``points`` increasing counts from 0 to ``nlist``: half on a linear grid, half on a logarithmic one."""
    half = max(points // 2, 2)
    linear = np.linspace(0, nlist, half)
    logarithmic = np.geomspace(1, max(nlist, 1), half)
    return np.unique(np.concatenate(([0.0], np.round(linear), np.round(logarithmic), [float(nlist)]))).astype(np.int64)


def code_size_of(profile: Profile) -> int:
    """Bytes of one code: total list_bytes / total rows, padding of codes in blocks included; 1 when all lists are
    empty."""
    group = group_rows_of(profile)
    rows = int((-(-profile.list_sizes // group)).sum()) * group
    return max(1, round(int(profile.list_bytes.sum()) / rows)) if rows > 0 else 1


def group_rows_of(profile: Profile) -> int:
    """Rows whose codes lie together in a block, which no page parts."""
    if profile.codec.startswith("pqfs"):
        return _FAST_SCAN_ROWS
    return _BLOCK_ROWS if profile.bits is not None else 1


def build_coverage_curve(
    profile: Profile, *, page_bytes: int = DEFAULT_PAGE_BYTES, points: int = 200, seed: int = 0
) -> CoverageCurve:
    """Tabulate hits on held-back probes by prefix of the hot order.

    Raises:
        ProfileError: fewer than 8 held-back queries, arrays that do not fit ``nlist``, or accesses that are no numbers
            >= 0.
    """
    nlist = profile.nlist
    access = profile.access
    for name, size in (
        ("list_bytes", profile.list_bytes.size),
        ("list_sizes", profile.list_sizes.size),
        ("access.list_accesses", access.list_accesses.size),
    ):
        if size != nlist or nlist < 1:
            raise ProfileError(f"profile.{name} has {size} entries; nlist is {nlist}")
    wrong = np.flatnonzero(~(np.isfinite(access.list_accesses) & (access.list_accesses >= 0)))
    if wrong.size:
        raise ProfileError(
            f"profile.access.list_accesses of list {wrong[0]} is {access.list_accesses[wrong[0]]}; numbers of accesses "
            "are finite and >= 0. Profile again"
        )
    held_total = int(access.held_probes.shape[0])
    if held_total < MIN_HELD_QUERIES:
        raise ProfileError(
            f"profile.access.held_probes has {held_total} queries; at least {MIN_HELD_QUERIES} are needed to estimate "
            "hit rates. Profile with more queries"
        )
    shuffle = np.random.default_rng(seed).permutation(held_total)[:MAX_HELD_QUERIES]
    probes = access.held_probes[shuffle]

    order = np.argsort(-access.list_accesses, kind="stable").astype(np.int64)
    rank = np.empty(nlist, dtype=np.int64)
    rank[order] = np.arange(nlist)
    geometry = PageGeometry.for_code_size(code_size_of(profile), page_bytes, group_rows=group_rows_of(profile))
    bytes_by_rank = profile.list_bytes[order].astype(np.int64)
    pages_by_rank = geometry.pages_for(profile.list_sizes[order])

    # A query whose lists are all empty has no hit rate. It would lower every mean.
    if probes.size and int(probes.max()) >= nlist:
        raise ProfileError(f"profile.access.held_probes names list {int(probes.max())}; nlist is {nlist}")
    idle = ~((profile.list_bytes[probes] > 0) & (probes >= 0)).any(axis=1)
    if idle.any() and not idle.all():
        shuffle, probes = shuffle[~idle], probes[~idle]
    n, width = probes.shape

    grid = count_grid(nlist, points)
    cell_of_rank = (np.searchsorted(grid, np.arange(nlist), side="right") - 1).astype(np.int16)
    query = np.repeat(np.arange(n, dtype=np.int32), width)
    flat = probes.ravel()
    if (flat < 0).any():
        query, flat = query[flat >= 0], flat[flat >= 0]
    probe_rank = rank.astype(np.int32)[flat]
    probe_work = bytes_by_rank.astype(np.float64)[probe_rank]
    cell = cell_of_rank[probe_rank]
    slot = cell.astype(np.int64) * n + query
    shape = (grid.size, n)

    def cumulate(weights: F64 | None) -> F64:
        table = np.zeros(shape)
        counts = np.bincount(slot, weights=weights, minlength=(grid.size - 1) * n)
        np.cumsum(counts.reshape(grid.size - 1, n), axis=0, out=table[1:])
        return table

    hit_work = cumulate(probe_work)
    hit_probes = cumulate(None)
    work = np.maximum(hit_work[-1], 1.0)
    rates = hit_work / work
    mean = np.maximum.accumulate(rates.mean(axis=1))
    variance = rates.var(axis=1)
    squares = np.bincount(query, weights=probe_work**2, minlength=n)
    effective = hit_work[-1] ** 2 / np.maximum(squares, 1.0)
    return CoverageCurve(
        nlist=nlist,
        geometry=geometry,
        order=order,
        rank=rank,
        bytes_by_rank=bytes_by_rank,
        pages_by_rank=pages_by_rank,
        accesses_by_rank=access.list_accesses[order].astype(np.float64),
        prefix_bytes=np.concatenate(([0], np.cumsum(bytes_by_rank))),
        prefix_pages=np.concatenate(([0], np.cumsum(pages_by_rank))),
        grid=grid,
        hit_work=hit_work,
        hit_probes=hit_probes,
        mean=mean,
        variance=variance,
        sigma2_max=variance_at_half(mean, variance),
        effective_probes=float(effective.mean()),
        queries_by_rank=np.minimum(np.bincount(probe_rank, minlength=nlist), n).astype(np.int64),
        n_held=n,
        n_held_total=held_total,
        rows=build_row_curve(profile, shuffle, geometry.page_bytes),
        probe_query=query,
        probe_rank=probe_rank,
        probe_work=probe_work,
        probe_cell=cell,
    )


def variance_at_half(mean: F64, variance: F64) -> float:
    """``variance`` (g,) where ``mean`` (g,) crosses one half, interpolated; 0 when it does not cross."""
    above = np.flatnonzero(mean >= 0.5)
    if above.size == 0 or above[0] == 0:
        return 0.0
    hi = int(above[0])
    lo = hi - 1
    share = (0.5 - mean[lo]) / (mean[hi] - mean[lo])
    return float(variance[lo] + share * (variance[hi] - variance[lo]))
