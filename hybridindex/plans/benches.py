"""Loads that ``bench`` ran, kept in the control store for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridindex.store.control import ControlStore
from hybridindex.store.records import BENCH, StoredEvent

__all__ = ["keep_bench", "latest_benches"]


def keep_bench(
    store: ControlStore,
    fingerprint: str,
    plan_id: int | None,
    *,
    devices: Sequence[str],
    resident_bytes: int,
    slo_ms: float | None,
    load: Sequence[Mapping[str, Any]],
) -> int:
    """Stores the rows of one ``bench``; returns the event's id. ``plan_id``: what was placed; None: the host alone."""
    served = {"plan_id": plan_id, "devices": list(devices), "resident_bytes": resident_bytes, "slo_ms": slo_ms}
    return store.record_event(BENCH, {"index_fingerprint": fingerprint, **served, "load": list(load)})


def latest_benches(store: ControlStore, fingerprint: str, plan_id: int) -> list[StoredEvent]:
    """The newest of the host alone, and the newest with this plan's lists, as far as there are any."""
    events = store.list_events(kind=BENCH, index_fingerprint=fingerprint)
    newest = (next((e for e in events if e.payload["plan_id"] == wanted), None) for wanted in (None, plan_id))
    return [event for event in newest if event is not None]
