"""A router on the stand-in device whose plan follows its load, under a clock that only the requests move."""

from __future__ import annotations

import numpy as np

from hybridindex.refresh.drift import DriftPolicy
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.refresh.update_cycle import UpdatePolicy
from tests.moving_load import moving_queries
from tests.oracle import check_answer

NPROBE, NLIST = 4, 48
BUDGET = 8 << 20
CONFIG = RefreshConfig(
    drift=DriftPolicy(window_requests=100, window_s=1e6, min_queries=20, cool_down_s=100.0),
    update=UpdatePolicy(verify_windows=2, back_off_s=50.0, max_back_off_s=500.0),
    slo_ms=50.0,
    reservoir_queries=512,
    retention_s=1e6,
    min_queries=64,
    bandwidth_share=1.0,
    planning="here",
)
LATE_S, FAST_S = 0.2, 0.01


class World:
    """One router, its refresher and a clock that only the requests move."""

    def __init__(self, index, plan, store, config, **options):
        self.index, self.now = index, 0.0
        self.router = index.router(plan, ["cpu"], threads=1, **options)
        self.store = store
        self.refresher = Refresher(index, self.router, store, config, clock=self.clock)

    def clock(self):
        """No two readings are the same."""
        self.now += 1e-6
        return self.now

    def serve(self, windows=1, *, seed, moved=False, latency_s=FAST_S):
        """Real searches, one query each; a step after each window."""
        queries = moving_queries(100 * windows, seed=seed, moved=moved)
        for number, query in enumerate(queries):
            result = self.router.search(query, 5)
            self.now += 0.01
            self.refresher.observe(query, latency_s, result.hit_rate)
            if number % 100 == 99:
                self.refresher.step()
        self.refresher.check_invariants()

    def events(self, kind=None):
        found = self.store.list_events(kind=kind, limit=1000)
        return [event.payload for event in reversed(found)]

    def answers_are_right(self):
        queries = moving_queries(20, seed=99, moved=True)
        result = self.router.search(queries, 5)
        ivf = self.index.ivf
        probes, _ = ivf.quantize(ivf.transform(queries), NPROBE)
        check_answer(ivf, queries, probes, 5, result.distances, result.ids)


def fresh_hit_rate(index, plan, queries):
    """Mean hit rate by bytes of ``queries`` if the lists of ``plan`` were resident."""
    probes, _ = index.ivf.quantize(index.ivf.transform(queries), NPROBE)
    work = index.list_bytes[probes]
    return float((np.where(plan.list_device[probes] >= 0, work, 0).sum(axis=1) / work.sum(axis=1)).mean())
