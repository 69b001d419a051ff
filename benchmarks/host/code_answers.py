"""Searches by codes at random placements, and while placements change under load, against the host alone.

Random metric, bits, codec of the rows, number of devices, placement of codes and of rows, k, nprobe and batch. An
answer is one query's; it differs where a bit of an id or of a distance does. The host's own answers are held against
numpy for some of the queries: the best candidates by the reference of the estimates, and their distances in float64.
Target: 0.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.common.measure import arguments, show, write
from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.plan import Plan
from hybridindex.router import Router
from hybridindex.types import F32, Metric, SearchResult
from tests.clustered import clustered, hand_made_plan, small_index
from tests.coded import TABLE, best_of, with_codes

__all__ = ["count_differences"]

METRICS: tuple[Metric, ...] = ("ip", "l2")
BITS = (1, 2, 4)
ROWS = ("flat", "fp16", "bf16", "sq8")
#: Answers of one index, in each of both ways.
_OF_ONE = 2500
_CLIENTS = 3
_BUDGET = 8 << 20
#: One query of so many is held against numpy.
_CHECKED = 50


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)


def count_differences(answers: int, seed: int = 0) -> dict[str, Any]:
    """Counts over at least so many answers, half of them while placements change."""
    rng = np.random.default_rng(seed)
    counts = {
        "indexes": 0, "placements": 0, "swaps": 0, "answers": 0, "of_these_while_swapping": 0, "differences": 0,
        "against_numpy": 0, "differences_from_numpy": 0, "fallbacks": 0, "compared_on_devices": 0,
    }  # fmt: skip
    kinds = [(metric, bits) for metric in METRICS for bits in BITS]
    with tempfile.TemporaryDirectory() as folder:
        while counts["answers"] < answers:
            metric, bits = kinds[counts["indexes"] % len(kinds)]
            made = small_index(
                Path(folder) / str(counts["indexes"]),
                metric=metric,
                codec=str(rng.choice(ROWS)),
                n=int(rng.integers(1500, 6000)),
                dim=int(rng.choice([17, 32, 96])),
                nlist=int(rng.choice([7, 32, 100])),
            )
            with with_codes(made, bits=bits) as index, _opened(index) as host:
                counts["indexes"] += 1
                trial = _Trial(index, host, rng, counts)
                trial.random_placements()
                trial.swaps_under_load()
    return counts


def _opened(index: IVFIndex, n_devices: int = 0, plan: Plan | None = None) -> Router:
    return Router(
        index,
        plan=plan,
        devices=["cpu"] * n_devices,
        precision="codes",
        scrub_bytes_per_s=0,
        device_budget_bytes=_BUDGET if n_devices else None,
    )


class _Trial:
    """One index, and the host that scans all of it."""

    def __init__(self, index: IVFIndex, host: Router, rng: np.random.Generator, counts: dict[str, Any]) -> None:
        self._index, self._host, self._rng, self._counts = index, host, rng, counts

    def random_placements(self) -> None:
        """Each placement answers a few searches."""
        n_devices, done = int(self._rng.integers(1, 4)), 0
        with _opened(self._index, n_devices, self._placement(n_devices)) as router:
            while done < _OF_ONE:
                router.apply_plan(self._placement(n_devices))
                self._counts["placements"] += 1
                for _ in range(4):
                    queries, k, nprobe = self._asked(self._rng)
                    done += self._compare(router.search(queries, k, nprobe), queries, k, nprobe)
            router.check_invariants()
            self._count(router)

    def swaps_under_load(self) -> None:
        """Clients search, with sessions that look ahead, while one plan follows the other."""
        n_devices, stop = int(self._rng.integers(1, 4)), threading.Event()
        plans = [self._placement(n_devices) for _ in range(4)]
        with _opened(self._index, n_devices, plans[0]) as router:

            def swap() -> int:
                done = 0
                while not stop.is_set():
                    done += 1
                    router.apply_plan(plans[done % len(plans)])
                return done

            def search(seed: int) -> list[tuple[SearchResult, F32, int, int]]:
                rng, found, done = np.random.default_rng(seed), [], 0
                while done < _OF_ONE / _CLIENTS:
                    queries, k, nprobe = self._asked(rng)
                    with router.session() as session:
                        session.lookahead(queries[:4], nprobe=nprobe)
                        found.append((session.search(queries, k, nprobe), queries, k, nprobe))
                    done += len(queries)
                return found

            with ThreadPoolExecutor(_CLIENTS + 1) as pool:
                swapping = pool.submit(swap)
                try:
                    found = list(pool.map(search, self._rng.integers(1 << 30, size=_CLIENTS).tolist()))
                finally:
                    stop.set()
                self._counts["swaps"] += swapping.result()
            router.check_invariants()
            self._count(router)
        for one in (one for of_client in found for one in of_client):
            self._counts["of_these_while_swapping"] += self._compare(*one)

    def _count(self, router: Router) -> None:
        stats = router.stats()
        self._counts["fallbacks"] += stats.device_fallbacks
        self._counts["compared_on_devices"] += stats.device_candidates

    def _placement(self, n_devices: int) -> Plan:
        """Codes of a random part of the lists on random devices, rows of another part too."""
        plan = hand_made_plan(
            self._index.by_codes(),
            self._drawn(n_devices),
            row_device=self._drawn(n_devices),
            n_devices=n_devices,
            budget=_BUDGET,
        )
        # Small pages: lists take several.
        cast("Any", plan.request).page_bytes = 2048
        return plan

    def _drawn(self, n_devices: int) -> np.ndarray:
        nlist, share = self._index.nlist, self._rng.choice([0, 0.1, 0.5, 0.9, 1])
        drawn = np.where(self._rng.random(nlist) < share, self._rng.integers(n_devices, size=nlist), -1)
        return drawn.astype(np.int16)

    def _asked(self, rng: np.random.Generator) -> tuple[F32, int, int]:
        queries = clustered(int(rng.integers(1, 65)), self._index.dim, seed=int(rng.integers(1 << 30)))
        return queries, int(rng.choice([1, 3, 10, 40])), int(rng.integers(1, self._index.nlist + 1))

    def _compare(self, answer: SearchResult, queries: F32, k: int, nprobe: int) -> int:
        """Counts the answers of one search, and returns how many there are."""
        right = self._host.search(queries, k, nprobe)
        same = (answer.ids == right.ids) & (answer.distances.view(np.int32) == right.distances.view(np.int32))
        before = self._counts["answers"]
        self._counts["answers"] += len(queries)
        self._counts["differences"] += int((~same.all(axis=1)).sum())
        if before // _CHECKED != self._counts["answers"] // _CHECKED:
            self._counts["against_numpy"] += 1
            self._counts["differences_from_numpy"] += not self._as_numpy(right, queries, k, nprobe)
        return len(queries)

    def _as_numpy(self, answer: SearchResult, queries: F32, k: int, nprobe: int) -> bool:
        """Whether the first query's answer is that of the reference."""
        index = self._index
        transformed = index.transform(queries[:1])
        probes, _ = index.quantize(transformed, nprobe)
        products = self._host._served.host.centre_products(transformed, probes)[0]  # type: ignore[attr-defined]
        candidates = TABLE.candidates_for(k, nprobe)
        ids, exact = best_of(index, transformed[0], probes[0], products, candidates, k)
        near = np.allclose(answer.distances[0, : len(ids)], exact, rtol=1e-5, atol=1e-4)
        return near and set(answer.ids[0, : len(ids)].tolist()) == set(ids.tolist())


def main() -> None:
    args = arguments(__doc__, _options)
    counts = count_differences(args.answers, args.seed)
    show("searches by codes", tuple(counts), [tuple(counts.values())])
    write(args.json, "code_answers", counts)
    raise SystemExit(1 if counts["differences"] or counts["differences_from_numpy"] else 0)


if __name__ == "__main__":
    main()
