"""What is counted and told of batches: their work, their stages, and who listens."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from hybridindex.router.batch.request import Request
from hybridindex.router.batch.split import HOST, ProbeSplit
from hybridindex.router.batch.stages import BatchClock, BatchReport, StageTime
from hybridindex.router.batch.stats import StatsCounter

__all__ = ["BatchReports"]

_log = logging.getLogger(__name__)


class BatchReports:
    """Of one router. Any thread."""

    def __init__(self, stats: StatsCounter, listeners: Sequence[Callable[[BatchReport], None]]) -> None:
        """``listeners``: the owner may change what it holds."""
        self._stats = stats
        self.listeners = listeners
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Of a batch, whether or not anybody hears of it."""
        return next(self._numbers)

    def count(self, requests: Sequence[Request], split: ProbeSplit, n_devices: int, *, any_again: bool) -> None:
        """Counts what a batch was asked, and where it is scanned here.

        ``any_again``: some of ``requests`` may have been counted before.
        """
        host = device = 0
        for part in split.parts:
            if part.device == HOST:
                host += part.total_bytes
            elif part.device < n_devices:
                device += part.total_bytes
        n = len(split.n_parts)
        n_requests, n_queries = len(requests), n
        if any_again:
            n_requests -= sum(request.again for request in requests)
            n_queries -= sum(len(request.queries) for request in requests if request.again)
        self._stats.add(
            requests=n_requests,
            queries=n_queries,
            batches=1,
            largest_batch=n,
            host_work_bytes=host,
            device_work_bytes=device,
        )

    def tell(
        self,
        requests: Sequence[Request],
        clock: BatchClock,
        times: Sequence[tuple[str, float, float, float]],
        *,
        n_queries: int,
        nprobe: int,
        candidates: int,
        again: Sequence[Request] = (),
    ) -> None:
        """Sums the stages of a batch, and tells who listens. Never raises: a listener must not stop the engine.

        Args:
            times: the clock's, which it gives once.
            again: those of ``requests`` that another batch answers, and tells.
        """
        queue_s = tuple([clock.started_s - r.submitted_s for r in requests])
        self._stats.add_stages(queue_s, times)
        own = [r.on_batch for r in requests if r.on_batch is not None and r not in again]
        told = [*self.listeners, *own]
        number = self.next_number()
        if not told:
            return
        report = BatchReport(
            number=number,
            n_requests=len(requests),
            n_queries=n_queries,
            k=max(r.params.k for r in requests),
            nprobe=nprobe,
            candidates=candidates,
            started_s=clock.started_s,
            queue_s=queue_s,
            stages=tuple(StageTime(stage=s, started_s=a, ended_s=b, busy_s=busy) for s, a, b, busy in times),
        )
        self._tell(report, told)

    def tell_of_one(
        self, k: int, nprobe: int, n_queries: int, stages: Sequence[tuple[str, float, float]], candidates: int = 0
    ) -> None:
        """As :meth:`tell`, of a call that was answered at once and is counted; ``stages``: name, start and end."""
        number = self.next_number()
        if not self.listeners:
            return
        report = BatchReport(
            number=number,
            n_requests=1,
            n_queries=n_queries,
            k=k,
            nprobe=nprobe,
            candidates=candidates,
            started_s=stages[0][1],
            queue_s=(0.0,),
            stages=tuple(StageTime(stage=s, started_s=a, ended_s=b, busy_s=b - a) for s, a, b in stages),
        )
        self._tell(report, self.listeners)

    def _tell(self, report: BatchReport, told: Sequence[Callable[[BatchReport], None]]) -> None:
        for tell in told:
            try:
                tell(report)
            except BaseException:  # noqa: BLE001 - even SystemExit: one listener must not cost the others their answers
                self._stats.add(listener_errors=1)
                _log.exception("a listener of batches raised")
