"""How many candidates a search needs: the places of the true neighbours among the estimates, measured with queries.

For a query and its first p probes, the candidates are the best R rows by estimate. Recall@k of (best R by estimate,
then exact distances) is the share of the k true neighbours, of the same p probes, among them. A row as near as the k-th
neighbour counts as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hybridindex.config import MAX_CANDIDATES
from hybridindex.index.rabitq.encode import Blocks
from hybridindex.index.rabitq.estimate import estimates, prepare_queries
from hybridindex.index.rabitq.rotation import signs
from hybridindex.index.rabitq.spec import CandidateTable, CodeFormat
from hybridindex.types import F32, I64

__all__ = ["MOST_PAIRS", "CandidateMeter"]

#: Pairs of a query and a row that are kept: 8 bytes each.
MOST_PAIRS = 48 << 20
#: Neighbours that candidates are measured for.
MEASURED_K = (1, 10, 100)
#: Candidates are rounded up to the next of a row of numbers that grow by this factor.
_GROWTH = 1.25


class CandidateMeter:
    """Collects estimates and exact distances list by list. One thread.

    The probes of a query that it looks at are limited so that it keeps no more than :data:`MOST_PAIRS`; where the first
    probes are too much, so are the queries.
    """

    def __init__(self, queries: F32, probes: I64, list_sizes: I64, form: CodeFormat, own: I64 | None = None) -> None:
        """
        Args:
            queries: (n, d) float32, behind the pre-transforms.
            probes: (n, p) int64, nearest first; -1: none.
            own: (n, 2) int64, list and row that each query was made from, which does not count; None: no such row.
        """
        sizes = np.where(probes >= 0, list_sizes[probes], 0)
        ends = np.cumsum(sizes, axis=1)
        some = max(1, int(np.searchsorted(np.cumsum(ends[:, 0]), MOST_PAIRS, side="right")))
        queries, probes, sizes, ends = queries[:some], probes[:some], sizes[:some], ends[:some]
        own = None if own is None else own[:some]
        fits = ends.sum(axis=0) <= MOST_PAIRS
        #: Probes of each query that are looked at.
        self.nprobe = max(1, int(fits.sum()))
        self._queries, self._form = queries, form
        self._coded = prepare_queries(queries, signs(form.padded_dim, form.seed, form.rounds), form)
        self._ends: I64 = ends[:, : self.nprobe]
        self._own = own
        self._estimates = [np.full(end, np.inf, dtype=np.float32) for end in self._ends[:, -1].tolist()]
        self._exact = [np.full(end, np.inf, dtype=np.float32) for end in self._ends[:, -1].tolist()]
        at = np.argsort(probes[:, : self.nprobe], axis=None, kind="stable")
        found = probes[:, : self.nprobe].reshape(-1)[at]
        places = np.searchsorted(found, np.arange(len(list_sizes) + 1))
        #: Of each list: which (query, probe) pairs are its own.
        self._pairs = [at[a:b] for a, b in zip(places[:-1].tolist(), places[1:].tolist(), strict=True)]
        self._starts = self._ends - sizes[:, : self.nprobe]

    def wants(self, list_id: int) -> bool:
        """Whether some query probes the list."""
        return len(self._pairs[list_id]) > 0

    def add(
        self, list_id: int, first: int, rows: F32, blocks: Blocks, centroid: F32, squares: F32 | None = None
    ) -> None:
        """Decoded rows (n, d) of a list from ``first`` on, and what their codes say; ``squares``: (n,), what distances
        have in the place of the rows' own."""
        queries, probes = np.divmod(self._pairs[list_id], self.nprobe)
        some = self._queries[queries]
        coded = self._coded.of(queries)
        products = some @ centroid
        found = estimates(coded, blocks, products, float(centroid @ centroid), self._form)
        found[np.isnan(found)] = np.inf
        exact = -(some @ rows.T)
        if self._form.metric == "l2":
            exact = (np.einsum("nd,nd->n", rows, rows) if squares is None else squares) + 2 * exact
        starts = (self._starts[queries, probes] + first).tolist()
        for query, start, a, b in zip(queries.tolist(), starts, found, exact, strict=True):
            self._estimates[query][start : start + len(rows)] = a
            self._exact[query][start : start + len(rows)] = b
            if self._own is not None and self._own[query, 0] == list_id:
                row = int(self._own[query, 1]) - first
                if 0 <= row < len(rows):
                    self._estimates[query][start + row] = self._exact[query][start + row] = np.inf

    def table(self, recall_loss: float, progress: Callable[[int, int], None]) -> CandidateTable:
        """The fewest candidates that lose no more than ``recall_loss`` of recall on average, rounded up; at most
        :data:`~hybridindex.config.MAX_CANDIDATES`. ``progress`` is given the nprobe that is done, and the last one."""
        levels = [1 << i for i in range(self.nprobe.bit_length())]
        if levels[-1] != self.nprobe:
            levels.append(self.nprobe)
        columns = []
        for nprobe in levels:
            columns.append(self._needed(nprobe, recall_loss))
            progress(nprobe, self.nprobe)
        needed = np.array(columns).T
        for axis in (0, 1):
            needed = np.maximum.accumulate(needed, axis=axis)
        return CandidateTable(k=MEASURED_K, nprobe=tuple(levels), r=tuple(map(tuple, needed.tolist())))

    def _needed(self, nprobe: int, recall_loss: float) -> list[int]:
        """Of each k."""
        places: list[list[I64]] = [[] for _ in MEASURED_K]
        for estimated, exact, ends in zip(self._estimates, self._exact, self._ends, strict=True):
            end = int(ends[nprobe - 1])
            for mine, found in zip(places, _places(estimated[:end], exact[:end]), strict=True):
                if len(found):
                    mine.append(found)
        return [_fewest(k, mine, recall_loss) for k, mine in zip(MEASURED_K, places, strict=True)]


def _places(estimated: F32, exact: F32) -> list[I64]:
    """Of each k: the places of its true neighbours among the estimates, as many as there are."""
    there = int(np.isfinite(exact).sum())
    if there == 0:
        return [np.empty(0, dtype=np.int64) for _ in MEASURED_K]
    most = min(MEASURED_K[-1], there)
    nearest = np.sort(np.partition(exact, most - 1)[:most])
    furthest = estimated[exact <= nearest[-1]].max()
    before = np.flatnonzero(estimated <= furthest)
    ordered = exact[before[np.argsort(estimated[before], kind="stable")]]
    return [np.flatnonzero(ordered <= nearest[min(k, most) - 1])[: min(k, most)] for k in MEASURED_K]


def _fewest(k: int, places: Sequence[I64], recall_loss: float) -> int:
    if not places:
        return k
    shares = np.concatenate([np.full(len(found), 1 / len(found)) for found in places])
    flat = np.concatenate(places)
    order = np.argsort(flat, kind="stable")
    recall = np.cumsum(shares[order]) / len(places)
    enough = int(np.argmax(recall >= 1 - recall_loss - 1e-9))
    needed = max(k, int(flat[order][enough]) + 1)
    steps = max(0, math.ceil(math.log(needed / k, _GROWTH) - 1e-9))
    return min(MAX_CANDIDATES, math.ceil(k * _GROWTH**steps))
