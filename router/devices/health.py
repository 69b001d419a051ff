"""Finds slow devices; the host serves their lists until a trial scan is fast again.

The time of a device's scan is compared with what the host takes. Answers do not depend on it: a slow device keeps its
lists, and batches are split as if the host had them. Beside it: :mod:`hybridindex.router.devices.watchdog` for scans
that do not end, ``device_queue`` for errors, ``recovery`` for when a trial is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybridindex.config import HealthPolicy
from hybridindex.errors import DeviceSlowError
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.split import HOST, ProbePart
from hybridindex.router.batch.stages import HOST_SCAN, device_scan
from hybridindex.router.devices.device_queue import DeviceQueue, is_slow
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.tier import Tier
from hybridindex.types import F32, I64

__all__ = ["HealthPolicy", "HealthWatch"]

_log = logging.getLogger(__name__)

#: Scans of a trial; the middle one counts.
_TRIAL_SCANS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LatePart:
    """What a slow device is tried with, and what the host took for it."""

    queries: F32
    probes: I64
    coarse_distances: F32
    k: int
    nbytes: int
    host_s: float


class HealthWatch:
    """Judge of a router's devices. Thread-safe."""

    def __init__(self, policy: HealthPolicy, device_queues: Sequence[DeviceQueue], parts: RouterParts) -> None:
        self.policy = policy
        self._host = parts.host
        self._pace, self._rerank_pace = parts.host_pace, parts.rerank_pace
        self._residency = parts.residency
        self._stats = parts.stats
        #: (nlist,) int64 code bytes.
        self._list_bytes = parts.index.list_bytes
        self._device_queues = device_queues
        self._tiers = [device_queue.tier for device_queue in device_queues]
        self._lock = threading.Lock()
        #: Per judged device: late parts more than parts in time, never below 0.
        self._late = {tier.ordinal: 0 for tier in self._tiers if self.judges(tier)}
        self._trials: dict[int, _LatePart] = {}
        #: The last answer of :meth:`list_device`, and what it was for.
        self._routed: tuple[tuple[int, ...], npt.NDArray[np.int16]] | None = None

    def judges(self, tier: Tier) -> bool:
        """Whether this device's scans are judged."""
        return self.policy.judges(stand_in=tier.info.stand_in)

    # Routing

    def list_device(self, residency: Residency) -> npt.NDArray[np.int16]:
        """(n_pieces,) int16 who scans each list, or compares with its rows: the device that holds it, or the host, also
        for a slow device."""
        slow = [tier.ordinal for tier in self._tiers if is_slow(tier)]
        if not slow:
            return residency.list_device
        key = (residency.version, *slow)
        routed = self._routed
        if routed is None or routed[0] != key:
            held = residency.list_device
            routed = self._routed = key, np.where(np.isin(held, slow), np.int16(HOST), held)
        return routed[1]

    # Judging

    def note(self, batch: Batch, times: Sequence[tuple[str, float, float, float]]) -> None:
        """Judges the devices by a batch that has ended, on the thread that ended it: the slowest device's."""
        if not self._late:
            return
        seconds = {stage: busy for stage, _, _, busy in times}
        for part in batch.parts:
            device_s = seconds.get(device_scan(part.device))
            if part.device not in self._late or device_s is None or self._tiers[part.device].failure is not None:
                continue
            try:
                self._judge(batch, part, device_s, seconds.get(HOST_SCAN, 0.0))
            except Exception:  # noqa: BLE001 - an index closed meanwhile; the batch is answered
                _log.exception("device %s could not be judged", self._tiers[part.device].label)

    def _judge(self, batch: Batch, part: ProbePart, device_s: float, beside_s: float) -> None:
        # The margin first: it is all that most scans take.
        late = device_s > beside_s + self._limit(0.0)
        late = late and device_s > beside_s + self._limit(self.expected_s(part.total_bytes))
        with self._lock:
            self._late[part.device] = max(0, self._late[part.device] + (1 if late else -1))
            if self._late[part.device] < self.policy.slow_parts:
                return
            self._late[part.device] = 0
        # The model may be wrong, or know nothing: the host shows what it takes.
        host_s = self._time_host(batch, part)
        if device_s > beside_s + self._limit(host_s):
            took = f"its last scan took {1e3 * device_s:.3g} ms, {1e3 * host_s:.3g} ms on the host"
            self.exclude(batch, part, host_s, f"{self.policy.slow_parts} of its scans were late: {took}")

    def _time_host(self, batch: Batch, part: ProbePart) -> float:
        queries = batch.queries[part.rows]
        before = self._host.adopt_thread()
        try:
            started = time.perf_counter()
            self._host.scan_checked(queries, part.probes, part.coarse_distances, batch.k)
            return time.perf_counter() - started
        finally:
            self._host.give_back_thread(before)

    def _limit(self, host_s: float) -> float:
        return self.policy.slow_factor * host_s + self.policy.slow_margin_ms / 1e3

    def expected_s(self, nbytes: int) -> float:
        """Seconds within which nearly all host scans of so many bytes end; 0 while the host has scanned nothing."""
        return _predicted(self._pace, nbytes)

    def expected_rerank_s(self, n_candidates: int) -> float:
        """Of exact comparisons on the host, in the same way."""
        return _predicted(self._rerank_pace, n_candidates)

    def exclude(self, batch: Batch, part: ProbePart, host_s: float, why: str) -> None:
        """Marks a part's device as slow, to be tried with this part, for which the host takes ``host_s``."""
        self._trials[part.device] = _LatePart(
            queries=batch.queries[part.rows],
            probes=part.probes,
            coarse_distances=part.coarse_distances,
            k=batch.k,
            nbytes=part.total_bytes,
            host_s=host_s,
        )
        self.leave_out(self._tiers[part.device], why)

    def leave_out(self, tier: Tier, why: str) -> None:
        """Marks a device as slow; without a part to try it with, it comes back when no scan is under way there."""
        self._stats.add(device_slowdowns=1)
        tier.fail(DeviceSlowError(f"device {tier.label} is slow: {why}"))

    def note_host(self, part: ProbePart, host_s: float) -> None:
        """The host took so long for a part that its device was excluded by."""
        late = self._trials.get(part.device)
        if late is not None and late.probes is part.probes:
            self._trials[part.device] = replace(late, host_s=host_s)

    # Trials

    def trial(self, tier: Tier) -> Callable[[], None] | None:
        """How ``tier`` is tried; None where it is not slow."""
        return (lambda: self._try(tier)) if is_slow(tier) else None

    def _try(self, tier: Tier) -> None:
        """Scans on a slow device what it was last late with, as far as it still holds that.

        Raises:
            DeviceSlowError: it took more than half of what makes a part late: a device comes back for good, not for the
                next part.
            whatever else the scan raises.
        """
        if self._device_queues[tier.ordinal].taken_over:
            raise DeviceSlowError(f"device {tier.label} is slow: the scan that was given up has not ended")
        late = self._trials.get(tier.ordinal)
        if late is None:
            return
        with self._residency.lease() as residency:
            here = (late.probes >= 0) & (residency.list_device[late.probes] == tier.ordinal)
            nbytes = int(self._list_bytes[late.probes[here]].sum())
            probes = np.where(here, late.probes, -1)
            seconds = []
            for _ in range(_TRIAL_SCANS if nbytes else 0):
                started = time.perf_counter()
                tier.scanner(residency).scan(late.queries, probes, late.coarse_distances, late.k)
                seconds.append(time.perf_counter() - started)
        allowed_s = self._limit(late.host_s * nbytes / max(1, late.nbytes)) / 2
        if seconds and sorted(seconds)[_TRIAL_SCANS // 2] > allowed_s:
            took = f"a trial took {1e3 * sorted(seconds)[_TRIAL_SCANS // 2]:.3g} ms"
            raise DeviceSlowError(f"device {tier.label} is slow: {took}; expected {1e3 * allowed_s:.3g} ms at most")


def _predicted(pace: PaceEstimator, size: int) -> float:
    seconds = pace.predict(np.array([size], dtype=np.int64))
    return 0.0 if seconds is None else float(seconds[0])
