"""Back-off of a failed device."""

from __future__ import annotations

import weakref

from hybridindex.errors import DeviceSlowError
from hybridindex.tiers.contract.device_health import DeviceHealth, TierHealth

LOST = RuntimeError("lost")


def due_after(health, now):
    """Seconds from ``now`` after which a retry is due, by asking at quarter seconds."""
    return next(quarter / 4 for quarter in range(1000) if health.retry_due(now + quarter / 4))


def test_retries_wait_1_2_4_to_60_seconds():
    health = DeviceHealth()
    assert not health.retry_due(1e9)
    now = 100.0
    health.fail(LOST, now)
    waits = []
    for _ in range(8):
        waits.append(due_after(health, now))
        now += waits[-1]
        assert health.begin_probe()
        assert not health.retry_due(now + 1e9), "two trials at once"
        assert not health.begin_probe()
        health.end_probe(works=False, now_s=now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (health.n_failures, health.n_probes) == (1, 8)


def test_one_failure_is_one_however_often_it_is_seen():
    health = DeviceHealth()
    assert health.fail(LOST, 0.0)
    assert not health.fail(RuntimeError("again"), 0.5)
    assert health.failure is LOST
    assert health.n_failures == 1
    assert health.retry_due(1.0), "a failure seen again puts nothing off"


def test_a_device_that_fails_soon_after_its_recovery_goes_on_backing_off():
    health = DeviceHealth()
    health.fail(LOST, 0.0)
    health.begin_probe()
    health.end_probe(works=True, now_s=1.0)
    assert health.failure is None
    health.fail(LOST, 2.0)
    assert due_after(health, 2.0) == 2
    health.begin_probe()
    health.end_probe(works=True, now_s=4.0)
    health.fail(LOST, 4.0 + 60.25)
    assert due_after(health, 64.25) == 1
    assert health.n_failures == 3


def test_a_slow_device_may_fail_and_a_failed_one_is_not_just_slow():
    health = DeviceHealth()
    slow = DeviceSlowError("late")
    assert health.fail(slow, 0.0)
    assert health.slow
    assert not health.fail(slow, 0.5)
    assert health.fail(LOST, 0.6)
    assert (health.slow, health.failure, health.n_failures) == (False, LOST, 2)
    assert not health.fail(slow, 0.7)
    assert due_after(health, 0.6) == 2


def test_a_working_device_is_not_tried():
    assert not DeviceHealth().begin_probe()


def test_a_failure_that_is_kept_keeps_nothing_of_what_failed():
    """A frame of a scan holds its batch, the sessions of its requests, and memory of the device."""

    class Batch:
        pass

    def scan(batch):
        try:
            raise ValueError(len([batch]))
        except ValueError as error:
            raise RuntimeError("lost") from error

    health, batch = TierHealth(lambda: "cpu", lambda: 0.0), Batch()
    kept = weakref.ref(batch)
    try:
        scan(batch)
    except RuntimeError as error:
        health.note(error)
    del batch
    assert kept() is None
    assert repr(health.failure) == "RuntimeError('lost')"
    assert isinstance(health.failure.__cause__, ValueError)
