"""Answers of a simulation against the suite's oracle. What was found right once needs no second look."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64, SearchResult
from tests.clustered import clustered
from tests.coded import best_of
from tests.oracle import check_answer
from tests.simulation.virtual.scheduler import ViolationError

__all__ = ["N_QUERIES", "Answers", "CodedAnswers"]

N_QUERIES = 16


class Answers:
    """Of one index, to queries of one pool."""

    def __init__(self, index: IVFIndex) -> None:
        self._index = index
        self.pool = clustered(N_QUERIES, index.dim, seed=3)
        self._decoded = cast(
            "IVFIndex",
            SimpleNamespace(
                metric=index.metric,
                list_ids=cache(index.list_ids),
                decode_list=cache(index.decode_list),
            ),
        )
        self._right: set[tuple[Any, ...]] = set()
        self.n_checked = 0

    def check(self, rows: Any, k: int, nprobe: int, result: SearchResult, *, least: int | None = None) -> None:
        """Raises ViolationError: ``result`` is not the answer to ``pool[rows]`` over the lists that it says were
        probed; ``least``: fewest of them, where a deadline was given."""
        self.n_checked += 1
        used = result.nprobe_used
        if not ((used <= nprobe) & (used >= (nprobe if least is None else least))).all():
            raise ViolationError(f"{used} lists were probed where {nprobe} were asked for")
        if not ((result.hit_rate >= 0) & (result.hit_rate <= 1 + 1e-6)).all():
            raise ViolationError(f"the hit rate is {result.hit_rate}")
        for at, row in enumerate(np.atleast_1d(rows).tolist()):
            n = int(used[at])
            ids, distances = result.ids[at : at + 1], result.distances[at : at + 1]
            key = row, k, nprobe, n, ids.tobytes(), distances.tobytes()
            if key in self._right:
                continue
            query = self._index.transform(self.pool[row : row + 1])
            probes, _ = self._index.quantize(query, n)
            try:
                check_answer(*self._compared(query, probes, k, nprobe), k, distances, ids)
            except AssertionError as error:
                raise ViolationError(f"query {row} with k {k} and nprobe {n} got a wrong answer: {error}") from error
            self._right.add(key)

    def _compared(self, query: F32, probes: I64, k: int, nprobe: int) -> tuple[IVFIndex, F32, I64]:
        """What an answer is the best of: an index, the transformed query (1, d), and its lists there (1, p)."""
        return self._decoded, query, probes


class CodedAnswers(Answers):
    """Of searches by codes: of the rows with the best estimates."""

    def __init__(self, index: IVFIndex) -> None:
        super().__init__(index)
        codes = index.load_codes()
        assert codes is not None
        self._spec = codes.spec
        self._scanner = HostRabitqScanner(index.by_codes(), codes, threads=1)
        lists = range(index.nlist)
        self._rows = np.concatenate([index.decode_list(i) for i in lists])
        self._rows[np.concatenate([index.list_ids(i) for i in lists])] = self._rows.copy()
        self._candidates = cache(self._candidates_of)

    def _compared(self, query: F32, probes: I64, k: int, nprobe: int) -> tuple[IVFIndex, F32, I64]:
        found = self._candidates(query.tobytes(), probes.tobytes(), self._spec.candidates_for(k, nprobe))
        one_list = SimpleNamespace(
            metric=self._index.metric, list_ids=lambda _list: found, decode_list=lambda _list: self._rows[found]
        )
        return cast("IVFIndex", one_list), query, np.zeros((1, 1), np.int64)

    def _candidates_of(self, query: bytes, probes: bytes, n: int) -> I64:
        one, lists = np.frombuffer(query, np.float32)[None], np.frombuffer(probes, np.int64)[None]
        products = self._scanner.centre_products(one, lists)
        ids, _ = best_of(self._index, one[0], lists[0], products[0], n, n)
        return ids
