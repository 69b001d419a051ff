"""Which requests stay in a batch whose lists were ranked, and how many of these each of them probes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.deadline import nprobe_for_deadline
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.request import Request
from hybridindex.router.lookahead.wait_for_loads import WaitForLoads
from hybridindex.types import I64

__all__ = ["StayingRequests"]


class StayingRequests:
    """For whoever has the engine's turn."""

    def __init__(self, parts: RouterParts, wait_for_loads: WaitForLoads, submit: Callable[[Request], None]) -> None:
        """``submit``: queues a request that has waited."""
        self._integrity, self._stats, self._pace = parts.index.integrity, parts.stats, parts.host_pace
        self._wait_for_loads, self._submit = wait_for_loads, submit
        #: (nlist + 1,) int64 bytes per list; the last entry, where probe -1 lands, is 0.
        self._work_of_probe: I64 = np.append(parts.index.list_bytes, 0)

    def refuse_damaged(
        self,
        batch: Batch,
        requests: list[Request],
        probes: I64,
        damaged: npt.NDArray[np.bool_],
        left: npt.NDArray[np.bool_],
    ) -> None:
        """Fails those that probe a list in quarantine, and takes them out of ``requests`` and ``left``, the batch's
        rows."""
        for number, request in enumerate(batch.requests):
            rows = batch.rows_of(number)
            own = probes[rows, : request.nprobe]
            found = np.unique(own[(own >= 0) & damaged[own]])
            if len(found):
                requests.remove(request)
                left[rows] = False
                request.reply.fail(self._integrity.error(found.tolist()))

    def leave_out_waiting(
        self,
        batch: Batch,
        requests: list[Request],
        probes: I64,
        list_device: npt.NDArray[np.int16],
        left: npt.NDArray[np.bool_],
    ) -> None:
        """Takes those out of ``requests`` and ``left``, the batch's rows, that wait for lists on their way."""
        # A search that waits is scanned after what stays in the batch.
        staying_bytes = 0
        # First those that stay in any case.
        for may_wait, number in sorted((request.may_wait, number) for number, request in enumerate(batch.requests)):
            request, rows = batch.requests[number], batch.rows_of(number)
            if not left[rows].all():
                continue
            own = probes[rows, : request.nprobe]
            request.may_wait = False
            if may_wait and self._wait_for_loads.takes(request, own, list_device, staying_bytes, self._submit):
                # At once: a failure from here on must not reach it.
                requests.remove(request)
                left[rows] = False
            else:
                staying_bytes += int(self._miss_bytes(own, list_device).sum())

    def limit_probes(
        self,
        batch: Batch,
        probes: I64,
        list_device: npt.NDArray[np.int16],
        not_here: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Cuts each request's probes to its own nprobe, in place; deadlines may lower it further. ``not_here``: lists
        that others scan meanwhile."""
        for number, request in enumerate(batch.requests):
            probes[batch.rows_of(number), request.nprobe :] = -1
        # A floor as high as what was asked for leaves nothing to lower.
        lowerable = [r.deadline_s is not None and r.params.min_nprobe < r.nprobe for r in batch.requests]
        if not any(lowerable):
            return
        miss_bytes = self._miss_bytes(probes, list_device)
        if not_here is not None:
            miss_bytes[(probes >= 0) & not_here[probes]] = 0
        total = int(miss_bytes.sum())
        now = time.monotonic()
        for number, request in enumerate(batch.requests):
            if request.deadline_s is None or not lowerable[number]:
                continue
            rows = batch.rows_of(number)
            own = miss_bytes[rows]
            nprobe = nprobe_for_deadline(
                own,
                total - int(own.sum()),
                request.deadline_s - now,
                self._pace,
                request.params.min_nprobe,
                request.nprobe,
            )
            if nprobe < request.nprobe:
                self._stats.add(nprobe_lowered=1)
                total -= int(own[:, nprobe:].sum())
                probes[rows, nprobe:] = -1

    def _miss_bytes(self, probes: I64, list_device: npt.NDArray[np.int16]) -> I64:
        """Bytes that the host scans for each of (n, p) probes; 0 where a device does, or there is none."""
        on_host = (probes >= 0) & (list_device[probes] < 0)
        return np.where(on_host, self._work_of_probe[probes], 0)
