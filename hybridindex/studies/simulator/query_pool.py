"""The queries of the requests: a profile's held-back queries, and the work of each on every tier.

Request i asks query i modulo their number. Queries are in the curve's random order, so neighbours form a random batch:
the work of every batch is a sum over a window. The split is the router's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.coverage import CoverageCurve
from hybridindex.partitioner.models.order_stats import avoid_probability
from hybridindex.partitioner.models.rows import row_bytes_of
from hybridindex.router.batch.split import HOST, split_probes
from hybridindex.types import F64, I64, Profile

__all__ = ["QueryPool", "TierWork", "move_hot_set", "pool_of", "query_pool", "scale_lists"]

I16 = npt.NDArray[np.int16]


#: Multiply-adds that take as long as reading a byte, as in the native host scan's order of lists.
_MULTIPLIES_PER_BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierWork:
    """Work of the queries on one tier for one residency: (n,) float64 each."""

    work: F64
    probes: F64
    #: (nlist,) bool: this tier's lists.
    lists: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryPool:
    """Queries by the lists that they probe."""

    #: (n, width) int64, nearest first as far as the profile knows, -1 = none.
    probes: I64
    #: (nlist,) int64 code bytes.
    list_bytes: I64
    #: (nlist,) int64 number of queries that probe each list.
    queries_of_list: I64
    #: Cost that each request adds to the scan of a list, over the cost of reading the list.
    request_cost: float = 0.0
    #: Every probe as (m,) int64 queries and lists, and how many queries earlier (cyclic) the list was probed before.
    _visits: tuple[I64, I64, I64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        query, column = np.nonzero(self.probes >= 0)
        probed = self.probes[query, column]
        order = np.lexsort((query, probed))
        query, probed = query[order], probed[order]
        before = np.roll(query, 1)
        first = np.flatnonzero(np.diff(probed, prepend=-1))
        # Before the first probe of a list comes its last one, one round earlier.
        before[first] = query[np.append(first[1:], len(query)) - 1] - len(self) if len(query) else 0
        object.__setattr__(self, "_visits", (query, probed, query - before))

    def __len__(self) -> int:
        return len(self.probes)

    def tiers(self, list_device: I16, n_devices: int) -> tuple[list[TierWork], F64]:
        """Work of the host, then of each device; and (n,) hit rates by bytes."""
        split = split_probes(
            self.probes, np.zeros(self.probes.shape, np.float32), list_device, self.list_bytes, n_devices
        )
        padded = np.append(self.list_bytes, 0).astype(np.float64)
        found = []
        for device in range(HOST, n_devices):
            work, probes = np.zeros(len(self)), np.zeros(len(self))
            for part in split.parts:
                if part.device == device:
                    work[part.rows] = padded[part.probes].sum(axis=1)
                    probes[part.rows] = (part.probes >= 0).sum(axis=1)
            found.append(TierWork(work=work, probes=probes, lists=list_device == device))
        return found, split.hit_rate.astype(np.float64)

    def window_union(self, lists: npt.NDArray[np.bool_], batch: int) -> F64:
        """(n,) bytes of the distinct ``lists`` (nlist,) bool that the ``batch`` queries from each query on probe."""
        n, (query, probed, gap) = len(self), self._visits
        mine = lists[probed]
        query, nbytes = query[mine], self.list_bytes[probed[mine]].astype(np.float64)
        # A probe is the first of its list in every window that does not contain the probe before it.
        begin = query - np.minimum(gap[mine], batch) + 1
        change = np.bincount(begin % n, weights=nbytes, minlength=n + 1)
        change -= np.bincount(query + 1, weights=nbytes, minlength=n + 1)
        change[0] += nbytes[begin < 0].sum()
        return np.asarray(np.cumsum(change[:n]), dtype=np.float64)

    def union_bytes(self, lists: npt.NDArray[np.bool_], batch: int) -> float:
        """Expected bytes of the distinct ``lists`` (nlist,) bool that a random batch probes."""
        touched = 1.0 - avoid_probability(len(self), batch)[self.queries_of_list]
        return float((self.list_bytes * touched)[lists].sum())


def query_pool(curve: CoverageCurve, dim: int) -> QueryPool:
    """The held-back queries of a coverage curve, in its order; ``dim`` of the vectors."""
    counts = np.bincount(curve.probe_query, minlength=curve.n_held)
    probes = np.full((curve.n_held, int(counts.max())), -1, dtype=np.int64)
    column = np.arange(curve.probe_query.size) - np.repeat(np.cumsum(counts) - counts, counts)
    probes[curve.probe_query, column] = curve.order[curve.probe_rank]
    list_bytes = np.empty_like(curve.bytes_by_rank)
    list_bytes[curve.order] = curve.bytes_by_rank
    queries_of_list = np.empty_like(curve.queries_by_rank)
    queries_of_list[curve.order] = curve.queries_by_rank
    cost = _request_cost(dim, curve.geometry.code_size)
    return QueryPool(probes=probes, list_bytes=list_bytes, queries_of_list=queries_of_list, request_cost=cost)


def pool_of(probes: I64, list_bytes: I64, *, dim: int, code_size: int) -> QueryPool:
    """Queries by their ``probes`` (n, nprobe) int64, -1 = none, of lists of ``list_bytes`` (nlist,) int64."""
    counts = np.bincount(probes[probes >= 0], minlength=len(list_bytes))
    cost = _request_cost(dim, code_size)
    return QueryPool(probes=probes, list_bytes=list_bytes, queries_of_list=counts, request_cost=cost)


def _request_cost(dim: int, code_size: int) -> float:
    return dim / (_MULTIPLIES_PER_BYTE * code_size)


def scale_lists(profile: Profile, factor: float) -> Profile:
    """The profile of an index whose lists are ``factor`` times as long; timings stay as measured."""
    if not 0 < factor < 1e6:
        raise InvalidInputError(f"index_scale is {factor}; give a number > 0 and < 1e6")
    if factor == 1:
        return profile
    sizes = np.round(profile.list_sizes * factor).astype(np.int64)
    code, notes = int(profile.list_bytes.sum()) / max(int(profile.list_sizes.sum()), 1), profile.notes
    if codes := notes.get("codes"):  # rows beside them
        notes = {**notes, "codes": {**codes, "row_bytes": row_bytes_of(profile) * int(sizes.sum())}}
    return replace(profile, list_sizes=sizes, list_bytes=(sizes * round(code)).astype(np.int64), notes=notes)


def move_hot_set(profile: Profile, shift: float) -> Profile:
    """The profile after drift: every access moves to the list ``shift`` of the hot order further down (cyclic). The
    skew stays; the hot lists change."""
    if not 0 <= shift <= 1:
        raise InvalidInputError(f"shift is {shift}; give a part of the hot order in [0, 1]")
    order = np.argsort(-profile.access.list_accesses, kind="stable")
    target = np.empty(profile.nlist + 1, dtype=np.int32)
    target[order] = np.roll(order, -round(shift * profile.nlist))
    target[-1] = -1  # where probe -1 lands
    accesses = np.empty_like(profile.access.list_accesses)
    accesses[target[:-1]] = profile.access.list_accesses
    access = replace(
        profile.access,
        fit_probes=target[profile.access.fit_probes],
        held_probes=target[profile.access.held_probes],
        list_accesses=accesses,
    )
    return replace(profile, access=access)
