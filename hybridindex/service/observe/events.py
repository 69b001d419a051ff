"""Events of one service in its control store: reads all kinds, and records failures and recoveries of devices.

Other events (plans applied, stages of a refresh) are recorded where they happen.
"""

from __future__ import annotations

import logging
from typing import Any

from hybridindex.errors import StoreError
from hybridindex.plans.precision import views_of
from hybridindex.router.router import Router
from hybridindex.service.core import Service

__all__ = ["DEVICE_FAILED", "DEVICE_RECOVERED", "MAX_EVENTS", "DeviceWatch", "read_events"]

_log = logging.getLogger(__name__)

DEVICE_FAILED = "device_failed"
DEVICE_RECOVERED = "device_recovered"
#: Most events of one answer.
MAX_EVENTS = 200
#: PostgreSQL's largest id.
_LAST_ID = 2**31 - 1


class DeviceWatch:
    """Records each failure and recovery of a device once. ``look`` on one thread at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._router: Router | None = None
        self._seen: list[tuple[int, bool]] = []
        #: Events that the store did not take.
        self.store_errors = 0

    def look(self) -> None:
        """Records what changed since the last look."""
        router = self._service.router
        if router is not self._router:
            # Failures before the first look count, too.
            self._router, self._seen = router, [(0, False) for _ in router.devices]
        for number, tier in enumerate(router.devices):
            # A device that is disabled, as it never had room, has not recovered.
            out = tier.failure is not None or bool(tier.disabled_reason)
            before, now = self._seen[number], (tier.n_failures, out)
            self._seen[number] = now
            if now[0] > before[0]:
                self._record(DEVICE_FAILED, tier.label, now[0])
            if (before[1] or now[0] > before[0]) and not now[1]:
                self._record(DEVICE_RECOVERED, tier.label, now[0])

    def _record(self, kind: str, device: str, failures: int) -> None:
        service = self._service
        try:
            service.store.record_event(
                kind, {"index": service.index.fingerprint, "device": device, "failures": failures}
            )
        except StoreError as error:
            self.store_errors += 1
            _log.warning("%s of device %s could not be recorded: %s", kind, device, error)


def read_events(service: Service, *, since: int, limit: int) -> dict[str, Any]:
    """For ``GET /v1/events``: the newest events of this index with an id above ``since``, oldest first.

    Raises:
        StoreError: the store cannot be read.
    """
    found = service.store.list_events(
        index_fingerprint=tuple(view.fingerprint for view in views_of(service.index.ivf)),
        after_id=min(since, _LAST_ID),
        limit=limit,
    )
    return {"events": [{"id": e.id, "at": e.at, "kind": e.kind, "payload": dict(e.payload)} for e in found[::-1]]}
