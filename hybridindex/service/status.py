"""A service's state and health, as plain values."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import DeviceSlowError, FileError, StoreError
from hybridindex.service.cluster.following import Following
from hybridindex.service.cluster.member import Member
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.serving import without_paths

__all__ = ["LIMITS", "Check", "Health", "StorageWatch", "health_of", "status_of"]

#: Of one request, for clients that divide what they send.
LIMITS = ("max_body_bytes", "max_queries", "max_rows", "max_documents")

_log = logging.getLogger(__name__)

#: Free disk space below which the control store may soon fail to write.
_MIN_FREE_BYTES = 64 << 20
#: Longest wait for disks and store. Another process may hold the store's lock for longer.
_PATIENCE_S = 1.0
#: For so long a node may not know what was changed.
_UNSEEN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """While a check fails, answers stay right; they may be slower, or a change of plan may be impossible. Searches that
    need a damaged list fail."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def status_of(service: Service) -> dict[str, Any]:
    """``GET /v1/status``: without paths and keys."""
    router, index, admission = service.router, service.index, service.admission
    stats, residency, beside = router.stats(), router.residency, router.row_residency
    plan, damage = router.plan, router.damage
    refresher = None if service.refresher is None else describe(service.refresher.status())
    # A refresher knows the row of the plan that it committed.
    committed = None if refresher is None else refresher.get("plan_id")
    return {
        "index": {
            "fingerprint": index.fingerprint,
            "generation": index.ivf.generation,
            "count": index.count,
            "deleted": index.n_deleted,
            "attributes": index.attributes,
            "dim": index.dim,
            "nlist": index.nlist,
            "metric": index.metric,
            "codec": index.codec,
            "nprobe": router.nprobe,
            "host_scanner": router.host_scanner,
            "precision": router.precision,
            "bits": router.bits,
            "candidates": router.candidates,
            "rows": router.config.rows,
            "list_bytes": int(service.generations.current.planned.list_bytes.sum()),
        },
        "changes": service.rows.state(index),
        "limits": {name: getattr(service.config.limits, name) for name in LIMITS},
        "ready": service.ready,
        "draining": admission.draining,
        "uptime_s": service.clock() - service.started_s,
        "slo_ms": service.slo_ms,
        "plan_id": service.plan_id if committed is None else committed,
        "expected_hit_rate": service.expected_hit_rate,
        "planned_hit_rate": None if plan is None else plan.predicted_hit_rate,
        "residency": {
            "version": residency.version,
            "lists": residency.n_resident,
            "rows": 0 if beside is None else beside.n_resident,
        },
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
        "router": {**describe(stats), "hit_rate": stats.hit_rate, "rerank_hit_rate": stats.rerank_hit_rate},
        "queue": {
            "waiting": admission.n_waiting,
            "in_flight": admission.n_in_flight,
            "limit": service.config.limits.queue_queries,
            "refused": dict(admission.refused),
        },
        "memory": {
            "taken_bytes": service.memory.taken_bytes,
            "limit_bytes": service.memory.limit_bytes,
            "refused": dict(service.memory.refused),
        },
        "sessions": {
            "open": len(service.sessions),
            "expired": service.sessions.n_expired,
            "displaced": service.sessions.n_displaced,
        },
        "refresher": refresher,
        "damage": {
            "passes": damage.passes,
            "scrubbed_bytes": damage.nbytes,
            "found": damage.found,
            "quarantined": len(damage.quarantined),
            "mended": len(damage.mended),
        },
        "cluster": None if service.member is None else service.member.summary(),
        "note": "; ".join(n for n in (service.note, _damage_note(service)) if n) or None,
        "reload": {
            "mode": service.config.reload,
            **describe(service.generations.counts),
            "retired": [{"generation": number, "sessions": n} for number, n in service.generations.retired()],
        },
    }


def _damage_note(service: Service) -> str:
    """Which lists are damaged; empty where none are."""
    damage = service.router.damage
    return "" if damage.ok else f"generation {service.index.ivf.generation}: {damage.describe()}"


class StorageWatch:
    """Looks at disks and store on a thread of its own; whoever asks waits for a second at most. On the event loop."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._service = service
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "hybridindex-health")
        #: The look that is under way or was the last, and when it began.
        self._look: asyncio.Future[list[Check]] | None = None
        self._began_s = 0.0

    async def read(self) -> list[Check]:
        """What a look finds that was under way or begins now; where it takes longer, that it does."""
        if self._look is None or self._look.done():
            self._began_s = self._clock()
            self._look = asyncio.get_running_loop().run_in_executor(self._thread, _look_at_storage, self._service)
        look = self._look
        await asyncio.wait({look}, timeout=max(0.0, self._began_s + _PATIENCE_S - self._clock()))
        if look.done():
            return look.result()
        words = (
            f"no answer for {self._clock() - self._began_s:.1f} s: another process may hold its lock; searches go on"
        )
        return [Check(name="control store", ok=False, detail=words)]

    def close(self) -> None:
        """Lets the thread end when its look does."""
        self._thread.shutdown(wait=False)


def _look_at_storage(service: Service) -> list[Check]:
    """Writes one page to the store. Blocks."""
    return [*_disks(service), _store(service)]


def health_of(service: Service, storage: list[Check], key_problem: str | None = None, *, keys: bool = False) -> Health:
    """Checks devices now. Never blocks.

    Args:
        storage: what :class:`StorageWatch` says.
        key_problem: what is wrong with the key file.
        keys: whether there is a key file.
    """
    stats = service.router.stats()
    checks = [*storage]
    if keys:
        checks.append(Check(name="keys", ok=key_problem is None, detail=key_problem or "the key file was read"))
    damage = service.router.damage
    checks.append(Check(name="lists", ok=damage.ok, detail=damage.describe()))
    if service.member is not None:
        checks.append(_cluster(service.member))
        if service.member.following is not None:
            checks.append(_following(service.member.following))
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


def _following(following: Following) -> Check:
    """Whether searches see what was changed lately."""
    if following.age_s < _UNSEEN_S:
        return Check(name="changes", ok=True, detail=f"searches see change {following.number}, the last one")
    why = f": {following.problem}" if following.problem else "; the file system of the index gives no answer"
    words = f"for {following.age_s:.0f} s searches do not see what was changed after change {following.number}{why}"
    return Check(name="changes", ok=False, detail=words)


def _cluster(member: Member) -> Check:
    """Whether every list is on a node that answers."""
    if member.remote.map is None:
        return Check(name="cluster", ok=False, detail="this node has no map yet: it knows no other node")
    lists, part = member.unreachable()
    words = f"{lists} lists, {part:.2%} of the bytes, are on no node that answers: searches that need them fail"
    return Check(name="cluster", ok=not lists, detail=words if lists else "every list is on a node that answers")


def _disks(service: Service) -> list[Check]:
    """The file systems of the index and, where it lies elsewhere, of the control store."""
    checks = [_disk("disk", service.index.path)]
    file = service.store.file
    if file is not None and file.parent != service.index.path.resolve():
        checks.append(_disk("disk of the control store", file.parent))
    return checks


def _disk(name: str, path: Path) -> Check:
    try:
        free = filesystem.free_bytes(path)
    except FileError as error:
        return Check(name=name, ok=False, detail=f"the directory cannot be read ({error.strerror})")
    ok = free >= _MIN_FREE_BYTES
    warning = "" if ok else "; searches go on, but a plan or profile may not be stored: make room"
    return Check(name=name, ok=ok, detail=f"{free >> 20} MiB free{warning}")


def _store(service: Service) -> Check:
    try:
        service.store.list_events(limit=1)
    except StoreError as error:
        _log.error("health: %s", error)
        words = f"it cannot be read, searches go on: {without_paths(service.store, error)}"
        return Check(name="control store", ok=False, detail=words)
    try:
        service.store.check_writable()
    except StoreError as error:
        _log.error("health: %s", error)
        words = without_paths(service.store, error)
        words = f"it cannot be written: searches go on, the plan cannot be changed: {words}"
        return Check(name="control store", ok=False, detail=words)
    if (now := service.generations.current).pending:
        return Check(name="control store", ok=False, detail=f"the host serves: {now.note}")
    return Check(name="control store", ok=True, detail="it was read and written")
