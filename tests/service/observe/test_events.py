"""Events: those of devices are recorded once, and the route answers with this index's newest."""

from __future__ import annotations

import pytest

from hybridindex.config import HealthPolicy
from hybridindex.service.observe.events import DEVICE_FAILED, DEVICE_RECOVERED, DeviceWatch
from tests.service.conftest import ask


def kinds(service):
    """Without that of the plan that was applied before."""
    events = ask(service, "GET", "/v1/events").json()["events"]
    return [event["kind"] for event in events if event["kind"] != "plan_current"]


def test_a_device_that_fails_and_comes_back_is_recorded_once_each(service):
    watch = DeviceWatch(service)
    watch.look()
    assert kinds(service) == []
    service.router._served.recovery.close()  # it would bring the device back by itself
    [tier] = service.router.devices
    tier.fail(RuntimeError("it broke"))
    watch.look()
    watch.look()
    assert kinds(service) == [DEVICE_FAILED]
    assert tier.recover().result(300)
    watch.look()
    assert kinds(service) == [DEVICE_FAILED, DEVICE_RECOVERED]
    # Both between two looks.
    tier.fail(RuntimeError("again"))
    assert tier.recover().result(300)
    watch.look()
    watch.look()
    assert kinds(service) == [DEVICE_FAILED, DEVICE_RECOVERED] * 2
    assert watch.store_errors == 0


def test_a_device_that_was_full_at_the_start_is_recorded_and_tried_again_unless_told_otherwise(
    make_service, monkeypatch
):
    with monkeypatch.context() as full:
        full.setattr("hybridindex.tiers.paged.device_tier.available_bytes", lambda _device: 1000)
        service, closed = make_service(), make_service(router={"health": HealthPolicy(retry_open=False)})
    assert [s.router.devices[0].retry_due(1e12) for s in (service, closed)] == [True, False]
    DeviceWatch(service).look()
    assert kinds(service) == [DEVICE_FAILED]


def test_a_busy_device_that_proves_too_small_has_not_come_back(service, monkeypatch):
    watch = DeviceWatch(service)
    [tier] = service.router.devices
    tier.fail(RuntimeError("busy"))
    watch.look()
    monkeypatch.setattr(tier, "disabled_reason", "the budget is above its memory")
    tier._health.retire()
    watch.look()
    assert kinds(service) == [DEVICE_FAILED]
    assert ask(service, "GET", "/healthz").json()["checks"][-2]["detail"] == "the budget is above its memory"


def test_a_store_that_is_gone_costs_the_event_and_nothing_else(service):
    watch = DeviceWatch(service)
    service.router.devices[0].fail(RuntimeError("it broke"))
    service.store.close()
    watch.look()
    assert watch.store_errors >= 1


def test_events_are_the_newest_of_this_index_oldest_first(service):
    own = service.index.fingerprint
    ids = [service.store.record_event("x", {"index": own, "n": n}) for n in range(5)]
    service.store.record_event("x", {"index": "another", "n": 9})
    service.store.record_event("y", {"index_fingerprint": "another"})
    ids.append(service.store.record_event("y", {"index_fingerprint": own, "n": 5}))

    def found(since=ids[0] - 1, **params):
        params = {"since": since, **params}
        return [event["payload"]["n"] for event in ask(service, "GET", "/v1/events", params=params).json()["events"]]

    assert found() == [0, 1, 2, 3, 4, 5]
    assert found(limit=2) == [4, 5]
    assert found(since=ids[2]) == [3, 4, 5]
    assert found(since=ids[-1]) == []
    assert found(since=1 << 40) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit", 0), ("limit", 201), ("limit", 1.5), ("limit", "x"), ("since", -1), ("since", "nan"), ("since", 1e400)],
)
def test_wrong_bounds_are_problems(service, field, value):
    answer = ask(service, "GET", "/v1/events", params={field: value})
    assert (answer.status_code, answer.json()["field"]) == (400, field)
