"""An open-loop load on a router, with what the simulator says of it: when each request came, began and was answered.

Times count from the moment in which a request was handed over, not from when it was due: a late sender is no part of
the server. How late it was is told beside them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hybridindex.router import Router
from hybridindex.router.batch.stages import COARSE, HOST_SCAN, MERGE, RERANK, SPLIT, BatchReport
from hybridindex.studies.simulator.engine_fit import Served
from hybridindex.types import F32, F64, SearchResult

__all__ = ["Recorded", "serve_recorded"]

#: Longest wait for the reports of batches whose answers are there.
_REPORT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One load."""

    served: Served
    #: (n,) float64 seconds between due and handed over.
    late_s: F64
    hit_rate: float


def serve_recorded(router: Router, queries: F32, due: F64, *, first_query: int = 0) -> Recorded:
    """Hands over query ``first_query`` + i modulo their number at ``due`` (n,) ascending seconds, one per request.

    Raises what a search raised.
    """
    n = len(due)
    came, done, hits = np.zeros(n), np.zeros(n), np.zeros(n)
    answered = threading.Semaphore(0)
    reports: list[BatchReport] = []
    reported = threading.Condition()
    failed: list[BaseException] = []

    def note(report: BatchReport) -> None:
        with reported:
            reports.append(report)
            reported.notify()

    def note_answer(number: int, future: Future[SearchResult]) -> None:
        done[number] = time.perf_counter()
        error = future.exception()
        if error is None:
            hits[number] = future.result().hit_rate[0]
        else:
            failed.append(error)
        answered.release()

    router.on_batch.append(note)
    try:
        start = time.perf_counter()
        for number, at in enumerate(due.tolist()):
            wait = at - (time.perf_counter() - start)
            if wait > 0:
                time.sleep(wait)
            came[number] = time.perf_counter()
            future = router.submit(queries[(first_query + number) % len(queries)])
            future.add_done_callback(lambda told, number=number: note_answer(number, told))  # type: ignore[misc]
        for _ in range(n):
            answered.acquire()
        if failed:
            raise failed[0]
        with reported:
            assert reported.wait_for(lambda: sum(one.n_requests for one in reports) >= n, _REPORT_TIMEOUT_S)
    finally:
        router.on_batch.remove(note)
    # A batch is reported when it ends, which may be after a later one.
    reports.sort(key=lambda one: one.started_s)
    sizes = np.array([one.n_requests for one in reports], dtype=np.int64)
    started = np.array([one.started_s for one in reports])
    split, engine, devices = (np.array(column) for column in zip(*map(_parts, reports), strict=True))
    # Merging and answering are the engine's too; where devices take part, they may do it.
    answered_s = np.maximum.reduceat(done, np.cumsum(sizes) - sizes) - started
    served = Served(
        arrivals=came - start,
        started_s=np.repeat(started, sizes) - start,
        done_s=done - start,
        batches=sizes,
        split_s=split,
        engine_s=np.where(devices > 0, engine, np.maximum(engine, answered_s)),
        device_s=devices,
        first_query=first_query,
    )
    return Recorded(served=served, late_s=came - start - due, hit_rate=float(hits.mean()))


def _parts(report: BatchReport) -> tuple[float, float, float]:
    """Seconds of a batch up to the end of its split and of its host part, and of its slowest device scan."""
    ended = {stage.stage: stage.ended_s - report.started_s for stage in report.stages}
    devices = [stage.busy_s for stage in report.stages if stage.stage not in (COARSE, SPLIT, HOST_SCAN, MERGE, RERANK)]
    return ended[SPLIT], ended.get(HOST_SCAN, ended[SPLIT]), max(devices, default=0.0)
