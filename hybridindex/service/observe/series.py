"""The last hour of one service in samples, in bounded memory, for the page and ``GET /v1/series``.

Latencies are counted in buckets 5 % wide: a percentile is off by 2.5 % at most, and samples can be merged. Nothing is
kept on disk.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from hybridindex.router.devices.usage import ArenaUse
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.searches import Observation

__all__ = ["Sample", "Series"]

#: Single seconds kept, seconds merged into one older sample, and older samples kept: about an hour.
_SECONDS, _MERGED, _COARSE = 600, 10, 360
_BUCKET = math.log(1.05)
_SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was answered in ``span_s`` seconds, and the state at their end. None where nothing was answered."""

    #: The end, in seconds since 1970.
    at_s: float
    span_s: float
    requests: int
    queries: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    #: Requests answered while an SLO was in force, and those that met it.
    judged: int
    met: int
    slo_ms: float | None
    #: Mean over queries, by bytes; and what is predicted of the plan's lists that are on devices.
    hit_rate: float | None
    expected_hit_rate: float | None
    #: Queries that wait.
    waiting: int
    devices: tuple[ArenaUse, ...]


@dataclass(slots=True)
class _Counts:
    """Sums over one span."""

    began_s: float
    requests: int = 0
    queries: int = 0
    judged: int = 0
    met: int = 0
    hit_rate_sum: float = 0.0
    #: Bucket -> requests.
    latencies: Counter[int] = field(default_factory=Counter)

    def add(self, other: _Counts) -> None:
        for name in ("requests", "queries", "judged", "met", "hit_rate_sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latencies.update(other.latencies)

    def percentile_ms(self, percent: float) -> float | None:
        """The middle of its bucket."""
        left = math.ceil(self.requests * percent / 100)
        for bucket in sorted(self.latencies):
            left -= self.latencies[bucket]
            if left <= 0:
                return _SHORTEST_S * math.exp((bucket + 0.5) * _BUCKET) * 1e3
        return None


class Series:
    """The samples. ``observe`` on the event loop, ``sample`` on one thread at a time, ``read`` on any."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        """Starts to observe searches. ``clock``: seconds since 1970."""
        self._service = service
        self._clock = clock
        self._lock = threading.Lock()
        self._fine: deque[Sample] = deque(maxlen=_SECONDS)
        self._coarse: deque[Sample] = deque(maxlen=_COARSE)
        self._now = _Counts(clock())
        self._merged = _Counts(self._now.began_s)
        self._n_merged = 0
        service.on_search.append(self.observe)

    def observe(self, seen: Observation) -> None:
        """Counts one answered search."""
        n = len(seen.queries)
        slo_ms = self._service.slo_ms
        bucket = int(math.log(max(seen.latency_s, _SHORTEST_S) / _SHORTEST_S) / _BUCKET)
        with self._lock:
            now = self._now
            now.requests += 1
            now.queries += n
            now.hit_rate_sum += seen.hit_rate_sum
            now.latencies[bucket] += 1
            if slo_ms is not None:
                now.judged += 1
                now.met += seen.latency_s * 1e3 <= slo_ms

    def sample(self) -> Sample:
        """Ends the current span and keeps its sample. May wait for a lock of the devices."""
        devices = self._service.router.arena_use()
        at_s = self._clock()
        with self._lock:
            ended, self._now = self._now, _Counts(at_s)
            sample = self._close(ended, at_s, devices)
            self._fine.append(sample)
            self._merged.add(ended)
            self._n_merged += 1
            if self._n_merged == _MERGED:
                self._coarse.append(self._close(self._merged, at_s, devices))
                self._merged, self._n_merged = _Counts(at_s), 0
        return sample

    def _close(self, counts: _Counts, at_s: float, devices: tuple[ArenaUse, ...]) -> Sample:
        return Sample(
            at_s=at_s,
            span_s=at_s - counts.began_s,
            requests=counts.requests,
            queries=counts.queries,
            p50_ms=counts.percentile_ms(50),
            p90_ms=counts.percentile_ms(90),
            p99_ms=counts.percentile_ms(99),
            judged=counts.judged,
            met=counts.met,
            slo_ms=self._service.slo_ms,
            hit_rate=counts.hit_rate_sum / counts.queries if counts.queries else None,
            expected_hit_rate=self._service.expected_hit_rate,
            waiting=self._service.admission.n_waiting,
            devices=devices,
        )

    def samples(self, since_s: float = 0.0) -> list[Sample]:
        """Samples that ended after ``since_s``, oldest first; merged ones are older than all single seconds."""
        with self._lock:
            fine, coarse = list(self._fine), list(self._coarse)
        began_s = fine[0].at_s - fine[0].span_s if fine else math.inf
        older = [s for s in coarse if s.at_s <= began_s]
        return [s for s in (*older, *fine) if s.at_s > since_s]

    def read(self, since_s: float = 0.0) -> dict[str, Any]:
        """``GET /v1/series``: the samples as columns of equal length, and the current state, as plain values."""
        samples = self.samples(since_s)
        service = self._service
        names = [f.name for f in fields(Sample) if f.name != "devices"]
        parts = [f.name for f in fields(ArenaUse) if f.name != "name"]
        tiers, plan = service.router.devices, service.router.plan
        followed = None if service.refresher is None else describe(service.refresher.status())
        committed = None if followed is None else followed.get("plan_id")
        return {
            "now_s": self._clock(),
            # On the clock of drift windows.
            "clock_s": service.clock(),
            "samples": {name: [getattr(s, name) for s in samples] for name in names},
            "devices": [
                {
                    "name": tier.label,
                    "disabled_reason": tier.disabled_reason or None,
                    "failures": tier.n_failures,
                    **{part: [_use(s, i, part) for s in samples] for part in parts},
                }
                for i, tier in enumerate(tiers)
            ],
            "plan_id": service.plan_id if committed is None else committed,
            "planned_hit_rate": None if plan is None else plan.predicted_hit_rate,
            "generation": service.index.ivf.generation,
            "changes": service.rows.state(service.index),
            "precision": service.router.precision,
            "bits": service.router.bits,
            "candidates": service.router.candidates,
            "cluster": None if service.member is None else service.member.summary(),
            "note": service.generations.current.note or None,
            "ready": service.ready,
            "draining": service.admission.draining,
            "refresher": followed,
        }


def _use(sample: Sample, device: int, part: str) -> Any:
    """A field of :class:`ArenaUse`; nothing where another generation served, with fewer devices."""
    if device < len(sample.devices):
        return getattr(sample.devices[device], part)
    return False if part == "usable" else 0
