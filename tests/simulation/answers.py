"""Answers of a simulation against the suite's oracle. What was found right once needs no second look."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64, SearchResult
from tests.clustered import clustered
from tests.coded import best_of
from tests.oracle import TOLERANCE, candidate_distances, check_answer
from tests.simulation.virtual.scheduler import ViolationError

__all__ = ["N_QUERIES", "Answers", "CodedAnswers"]

N_QUERIES = 16


class Answers:
    """Of one index, to queries of one pool."""

    def __init__(self, index: IVFIndex, *, slack: float = 0.0) -> None:
        """``slack``: of coverages, which are not counted in bytes of lists alone."""
        self._index, self.slack = index, slack
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
        fewest, most = self._may_probe(nprobe)
        if not ((used <= most) & (used >= min(fewest, nprobe if least is None else least))).all():
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
            self._explain(
                f"query {row} with k {k} and nprobe {n}",
                self._probed(query, n),
                partial(self._check_whole, query, k, nprobe, distances, ids),
            )
            self._right.add(key)

    def check_partial(self, rows: Any, k: int, result: SearchResult) -> None:
        """Raises ViolationError: no loss of probed lists explains both the answer and its coverage."""
        self.n_checked += 1
        assert result.coverage is not None
        if not ((result.coverage >= 0) & (result.coverage <= 1)).all() or (result.coverage == 1).all():
            raise ViolationError(f"the coverage of a partial answer is {result.coverage}")
        for at, row in enumerate(np.atleast_1d(rows).tolist()):
            query = self._index.transform(self.pool[row : row + 1])
            n, coverage = int(result.nprobe_used[at]), float(result.coverage[at])
            ids, distances = result.ids[at], result.distances[at]

            asked = f"query {row} with k {k}, nprobe {n} and coverage {coverage}"
            check = partial(self._check_part, query, k, coverage, distances, ids)
            self._explain(asked, self._probed(query, n), check)

    def _check_whole(self, query: F32, k: int, nprobe: int, distances: F32, ids: I64, probes: I64) -> None:
        check_answer(*self._compared(query, probes, k, nprobe), k, distances, ids)

    def _check_part(self, query: F32, k: int, coverage: float, distances: F32, ids: I64, probes: I64) -> None:
        lost = self._lost(query[0], probes[0], k, ids, coverage)
        left = np.concatenate([np.setdiff1d(probes[0], lost), self._never_lost(probes[0])])[None]
        check_answer(self._decoded, query, left, k, distances[None], ids[None])

    def _explain(self, asked: str, probed: list[I64], check: Callable[[I64], None]) -> None:
        """Raises ViolationError: with no choice of lists does an answer pass."""
        problem: Exception | None = None
        for probes in probed:
            try:
                check(probes)
                return
            except KeyError as error:
                problem = problem or AssertionError(f"id {error} is in none of the lists")
            except AssertionError as error:
                problem = problem or error
        raise ViolationError(f"{asked} got a wrong answer: {problem}") from problem

    def _may_probe(self, nprobe: int) -> tuple[int, int]:
        """How many lists are probed at least and at most, without a deadline, where ``nprobe`` are asked for."""
        return nprobe, nprobe

    def _probed(self, query: F32, n: int) -> list[I64]:
        """Which ``n`` lists may have been probed: (1, n) each."""
        return [self._index.quantize(query, n)[0]]

    def _lost(self, query: F32, probes: I64, k: int, ids: I64, coverage: float) -> I64:
        """Which of a query's lists were not scanned: those that lack rows of the answer, and others, so that all
        together have the bytes that the coverage lacks. Raises AssertionError: there are no such."""
        found, nbytes = set(ids[ids >= 0].tolist()), self._index.list_bytes[probes].astype(np.int64)
        full = len(found) == k
        all_ids = [self._decoded.list_ids(int(each)) for each in probes]
        exact = [candidate_distances(self._decoded, query, each[None])[1] for each in probes]
        always = candidate_distances(self._decoded, query, self._never_lost(probes))
        own = {
            int(i): float(x)
            for of_list, d in zip([*all_ids, always[0]], [*exact, always[1]], strict=True)
            for i, x in zip(of_list, d, strict=True)
        }
        sign = -1.0 if self._index.metric == "ip" else 1.0
        worst = max((sign * own[i] for i in found), default=0.0) if full else np.inf
        lacking, free = [], []
        for number, (of_list, d) in enumerate(zip(all_ids, exact, strict=True)):
            has = [int(i) in found for i in of_list]
            nearer = [sign * x < worst - 2 * TOLERANCE * (1 + abs(x)) for x in d]
            if any(n and not h for n, h in zip(nearer, has, strict=True)):
                assert not any(has), f"of list {probes[number]} some rows are missing, and some are there"
                lacking.append(number)
            elif not any(has):
                free.append(number)
        # By sum: few lists have sums of their own, as all are so many rows.
        chosen: dict[int, list[int]] = {int(nbytes[lacking].sum()): lacking}
        for number in free:
            chosen = {at + int(nbytes[number]): [*lost, number] for at, lost in chosen.items()} | chosen
        total = max(1, int(nbytes.sum()))
        lost = next(
            (
                lost
                for at, lost in chosen.items()
                if np.float32(1.0 - at / total) == np.float32(coverage) or abs(1.0 - at / total - coverage) < self.slack
            ),
            None,
        )
        assert lost is not None, (
            f"it lacks {nbytes[lacking].sum()} of {nbytes.sum()} bytes, and maybe some of {nbytes[free]}"
        )
        return probes[lost]

    def _compared(self, query: F32, probes: I64, k: int, nprobe: int) -> tuple[IVFIndex, F32, I64]:
        """What an answer is the best of: an index, the transformed query (1, d), and its lists there (1, p)."""
        return self._decoded, query, np.concatenate([probes, self._never_lost(probes)], axis=1)

    def _never_lost(self, probes: I64) -> I64:
        """Lists of the oracle that are scanned beside the probed ones, whoever answers."""
        return probes[..., :0]


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
