"""Searches by codes with devices, held against the host's to the bit: for the tests of placements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.router import Router
from hybridindex.types import F32, SearchResult
from tests.clustered import NLIST, clustered
from tests.stuck import WAIT_S

__all__ = ["BUDGET", "QUERIES", "asked", "differences", "opened", "search_beside_swaps"]

QUERIES = clustered(60, seed=5)
BUDGET = 4 << 20


def opened(index: IVFIndex, n_devices: int, **options: Any) -> Router:
    options = {"precision": "codes", "scrub_bytes_per_s": 0, "device_budget_bytes": BUDGET, **options}
    return Router(index, devices=["cpu"] * n_devices, **options)


def differences(answer: SearchResult, right: SearchResult) -> int:
    """Queries whose ids or distances are not the same, to the bit."""
    same = (answer.ids == right.ids) & (answer.distances.view(np.int32) == right.distances.view(np.int32))
    return int((~same.all(axis=1)).sum())


def asked(rng: np.random.Generator) -> tuple[F32, int, int]:
    """Queries of a search, k and nprobe."""
    rows = rng.permutation(len(QUERIES))[: rng.integers(1, len(QUERIES) + 1)]
    return QUERIES[rows], int(rng.choice([1, 3, 10, 40])), int(rng.choice([1, 5, 16, NLIST]))


def search_beside_swaps(
    index: IVFIndex, n_devices: int, seed: int, placed: Callable[[IVFIndex, int, int], Any]
) -> None:
    """Searches of a router and of a session while plans follow each other: ``placed(index, n_devices, seed)``."""
    rng = np.random.default_rng(seed)
    requests = [asked(rng) for _ in range(8)]
    stop = threading.Event()

    def swap(router: Router) -> None:
        for number in range(50):
            router.apply_plan(placed(index, n_devices, seed + number))
            if stop.is_set():
                return

    with (
        Router(index, precision="codes", scrub_bytes_per_s=0) as alone,
        opened(index, n_devices, lookahead_bytes=1 << 18, wait_for_lists=True) as router,
        router.session() as session,
    ):
        swapping = threading.Thread(target=swap, args=(router,))
        swapping.start()
        try:
            waiting = []
            for queries, k, nprobe in requests:
                session.lookahead(queries[:4], nprobe=nprobe)
                waiting.append(router.submit(queries, k, nprobe))
                waiting.append(session.submit(queries, k, nprobe))
            for (queries, k, nprobe), *found in zip(requests, waiting[::2], waiting[1::2], strict=True):
                right = alone.search(queries, k, nprobe)
                assert [differences(future.result(WAIT_S), right) for future in found] == [0, 0]
        finally:
            stop.set()
            swapping.join()
        router.check_invariants()
