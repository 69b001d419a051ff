"""A service's state and health, as plain values."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex.errors import DeviceSlowError, StoreError
from hybridindex.service.core import Service
from hybridindex.service.describe import describe

__all__ = ["Check", "Health", "health_of", "status_of"]

_log = logging.getLogger(__name__)

#: Free disk space below which the control store may soon fail to write.
_MIN_FREE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """While a check fails, answers stay right; they may be slower, or a change of plan may be impossible."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def status_of(service: Service) -> dict[str, Any]:
    """``GET /v1/status``: without paths and keys."""
    router, index, admission = service.router, service.index, service.admission
    stats, residency = router.stats(), router.residency
    plan = router.plan
    refresher = None if service.refresher is None else describe(service.refresher.status())
    # A refresher knows the row of the plan that it committed.
    committed = None if refresher is None else refresher.get("plan_id")
    return {
        "index": {
            "fingerprint": index.fingerprint,
            "generation": index.ivf.generation,
            "count": index.count,
            "dim": index.dim,
            "nlist": index.nlist,
            "metric": index.metric,
            "codec": index.codec,
            "nprobe": router.nprobe,
            "host_scanner": router.host_scanner,
        },
        "ready": service.ready,
        "draining": admission.draining,
        "uptime_s": service.clock() - service.started_s,
        "slo_ms": service.slo_ms,
        "plan_id": service.plan_id if committed is None else committed,
        "expected_hit_rate": service.expected_hit_rate,
        "planned_hit_rate": None if plan is None else plan.predicted_hit_rate,
        "residency": {"version": residency.version, "lists": residency.n_resident},
        "devices": [
            {
                "name": tier.label,
                "usable": tier.usable,
                "disabled_reason": tier.disabled_reason or None,
                "failed": tier.failure is not None,
                "failures": tier.n_failures,
                "resident_bytes": tier.used_bytes,
                "moved_bytes": tier.moved_bytes,
            }
            for tier in router.devices
        ],
        "router": {**describe(stats), "hit_rate": stats.hit_rate},
        "queue": {
            "waiting": admission.n_waiting,
            "in_flight": admission.n_in_flight,
            "limit": service.config.limits.queue_queries,
            "refused": dict(admission.refused),
        },
        "sessions": {"open": len(service.sessions), "expired": service.sessions.n_expired},
        "refresher": refresher,
        "note": service.generations.current.note or None,
        "reload": {
            "mode": service.config.reload,
            **describe(service.generations.counts),
            "retired": [{"generation": number, "sessions": n} for number, n in service.generations.retired()],
        },
    }


def health_of(service: Service, key_problem: str | None = None, *, keys: bool = False) -> Health:
    """Checks disk, store and devices now; writes one page to the store. Blocks.

    Args:
        key_problem: what is wrong with the key file.
        keys: whether there is a key file.
    """
    stats = service.router.stats()
    checks = [*_disks(service), _store(service)]
    if keys:
        checks.append(Check(name="keys", ok=key_problem is None, detail=key_problem or "the key file was read"))
    for tier in service.router.devices:
        failed = tier.failure is not None
        last = ", the last by being slow" if isinstance(tier.failure, DeviceSlowError) else ""
        detail = f"failed {tier.n_failures} time(s){last}" if failed else tier.disabled_reason or "works"
        checks.append(Check(name=f"device {tier.label}", ok=not failed, detail=detail))
    checks.append(
        Check(
            name="fallbacks",
            ok=stats.unplaced_lists == 0,
            detail=f"{stats.device_fallbacks} parts fell back to the host, {stats.unplaced_lists} lists are unplaced",
        )
    )
    return Health(checks=tuple(checks))


def _disks(service: Service) -> list[Check]:
    """The file systems of the index and, where it lies elsewhere, of the control store."""
    checks = [_disk("disk", service.index.path)]
    file = service.store.file
    if file is not None and file.parent != service.index.path.resolve():
        checks.append(_disk("disk of the control store", file.parent))
    return checks


def _disk(name: str, path: Path) -> Check:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check(name=name, ok=False, detail=f"the directory cannot be read ({error.strerror})")
    ok = free >= _MIN_FREE_BYTES
    warning = "" if ok else "; searches go on, but a plan or profile may not be stored: make room"
    return Check(name=name, ok=ok, detail=f"{free >> 20} MiB free{warning}")


def _store(service: Service) -> Check:
    try:
        service.store.list_events(limit=1)
    except StoreError as error:
        _log.error("health: %s", error)
        return Check(name="control store", ok=False, detail="it cannot be read; see the log")
    try:
        service.store.check_writable()
    except StoreError as error:
        _log.error("health: %s", error)
        words = "it cannot be written: searches go on, the plan cannot be changed; see the log"
        return Check(name="control store", ok=False, detail=words)
    return Check(name="control store", ok=True, detail="it was read and written")
