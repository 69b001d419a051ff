"""The oracle of the soak: for every query of a pool and every nprobe, the exact answer, computed beforehand in float64.

An answer that equals it, ids place by place and distances within the tolerance of ``tests/oracle.py``, is right; any
other is judged by that file itself, which knows ties. So every answer of a long run can be checked while it runs.
"""

from __future__ import annotations

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import F32, F64, I64, SearchResult
from tests.oracle import TOLERANCE, check_answer

__all__ = ["PoolOracle"]


class PoolOracle:
    """Knows the ``most_k`` best of each pool query in its first 1..``most_nprobe`` lists. Not thread-safe."""

    def __init__(self, index: IVFIndex, pool: F32, *, most_nprobe: int, most_k: int) -> None:
        """``pool``: (n, dim) float32, as clients send it."""
        self._index = index
        self._transformed = index.transform(pool)
        self._probes: I64 = index.quantize(self._transformed, most_nprobe)[0]
        self.most_nprobe, self.most_k = most_nprobe, most_k
        #: (n, most_nprobe, most_k): at [row, p - 1] the answer of row with nprobe p; -1 and inf where there is none.
        self._ids: I64 = np.empty((len(pool), most_nprobe, most_k), dtype=np.int64)
        self._distances: F64 = np.empty(self._ids.shape)
        self._fill(*self._best_of_lists())
        #: Answers that differed from the expected one and were judged by the oracle of the tests.
        self.n_close_calls = 0

    def _best_of_lists(self) -> tuple[I64, F64]:
        """(nlist, n, most_k): the best of every list for every query."""
        n, k, nlist = len(self._transformed), self.most_k, self._index.nlist
        x = self._transformed.astype(np.float64)
        ids, distances = np.full((nlist, n, k), -1, np.int64), np.full((nlist, n, k), np.inf)
        for number in range(nlist):
            rows = self._index.decode_list(number).astype(np.float64)
            if not len(rows):
                continue
            if self._index.metric == "ip":
                all_distances = -(x @ rows.T)
            else:
                all_distances = (x**2).sum(axis=1)[:, None] - 2 * (x @ rows.T) + (rows**2).sum(axis=1)
            order = np.argsort(all_distances, axis=1, kind="stable")[:, :k]
            ids[number, :, : order.shape[1]] = self._index.list_ids(number)[order]
            distances[number, :, : order.shape[1]] = np.take_along_axis(all_distances, order, axis=1)
        return ids, distances

    def _fill(self, ids: I64, distances: F64) -> None:
        every = np.arange(len(self._transformed))
        k = self.most_k
        best_ids, best = np.full((len(every), k), -1, np.int64), np.full((len(every), k), np.inf)
        for place in range(self.most_nprobe):
            lists = self._probes[:, place]
            best_ids = np.concatenate([best_ids, ids[lists, every]], axis=1)
            best = np.concatenate([best, distances[lists, every]], axis=1)
            order = np.argsort(best, axis=1, kind="stable")[:, :k]
            best_ids, best = np.take_along_axis(best_ids, order, axis=1), np.take_along_axis(best, order, axis=1)
            self._ids[:, place], self._distances[:, place] = best_ids, best
        if self._index.metric == "ip":
            self._distances *= -1

    def problem(self, rows: I64, k: int, least: int, most: int, result: SearchResult) -> str | None:
        """What is wrong with the answer to the pool's ``rows`` with between ``least`` and ``most`` probes, or None."""
        used = result.nprobe_used
        if result.ids.shape != (len(rows), k) or len(used) != len(rows):
            return f"shape {result.ids.shape} for {len(rows)} queries and k {k}"
        if (used < least).any() or (used > most).any():
            return f"nprobe_used {used.tolist()}; asked for {least}..{most}"
        if not ((result.hit_rate >= 0) & (result.hit_rate <= 1)).all():
            return f"hit_rate {result.hit_rate.tolist()}"
        ids, distances = self._ids[rows, used - 1, :k], self._distances[rows, used - 1, :k]
        with np.errstate(invalid="ignore"):  # inf - inf, where a place is empty: then the other oracle decides
            near = np.abs(result.distances - distances) <= TOLERANCE * (1 + np.abs(distances))
        if np.array_equal(ids, result.ids) and near.all():
            return None
        self.n_close_calls += 1
        probes = np.where(np.arange(self.most_nprobe) < used[:, None], self._probes[rows], -1)
        found = np.ascontiguousarray(result.distances, dtype=np.float32)
        try:
            check_answer(self._index, self._transformed[rows], probes, k, found, result.ids)
        except (AssertionError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return None
