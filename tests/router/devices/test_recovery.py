"""Failed devices are tried when their time has come, and given their lists back."""

from __future__ import annotations

import threading

import pytest

from hybridindex.paging import scratch_for_budget
from hybridindex.router.devices.recovery import Recovery
from hybridindex.tiers.paged.device_tier import DeviceTier
from tests.clustered import small_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i") as index:
        yield index


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(index, clock):
    budget = 1 << 20
    made = DeviceTier(
        index, "cpu", 0, budget_bytes=budget, wanted_bytes=budget - scratch_for_budget(budget), clock=clock
    )
    yield made
    made.close()


def nothing():
    pass


def untried(_tier):
    """No device is slow."""


def never(_tier):
    raise AssertionError("restored without need")


def test_a_device_is_tried_when_due_and_restored_once(tier, clock):
    restored = []
    recovery = Recovery([tier], restored.append, nothing, untried, clock=clock, interval_s=3600)
    tier.fail(RuntimeError("gone"))
    recovery.try_failed()
    assert (restored, tier.n_probes) == ([], 0)
    clock.now = 1.0
    recovery.try_failed()
    recovery.try_failed()
    assert (restored, tier.n_probes, tier.usable) == ([tier], 1, True)
    recovery.close()


def test_a_device_that_does_not_come_back_is_tried_ever_less_often(tier, clock, monkeypatch):
    recovery = Recovery([tier], never, nothing, untried, clock=clock, interval_s=3600)
    tier.fail(RuntimeError("gone"))

    def broken(pages, codes):
        raise RuntimeError("still gone")

    monkeypatch.setattr(tier.arena, "write", broken)
    for second in range(1, 32):
        clock.now = float(second)
        recovery.try_failed()
    # After 1, 2, 4, 8 and 16 s more each time.
    assert tier.n_probes == 5
    assert not tier.usable
    recovery.close()


def test_an_error_while_lists_come_back_does_not_end_the_trials(tier, clock, caplog):
    def broken(_tier):
        raise RuntimeError("no lists")

    recovery = Recovery([tier], broken, nothing, untried, clock=clock, interval_s=3600)
    tier.fail(RuntimeError("gone"))
    clock.now = 1.0
    recovery.try_failed()
    assert "could not be tried" in caplog.text
    assert tier.usable
    recovery.close()


def test_the_thread_tries_by_itself_and_ends_with_close(tier, clock):
    restored = threading.Event()
    tier.fail(RuntimeError("gone"))
    clock.now = 1.0
    recovery = Recovery([tier], lambda _tier: restored.set(), nothing, untried, clock=clock, interval_s=0.001)
    assert restored.wait(300)
    recovery.close()
    recovery.close()


def test_a_trial_that_does_not_end_keeps_no_other_device_waiting(index, tier, clock, monkeypatch):
    go_on, restored = threading.Event(), []
    budget = 1 << 20
    other = DeviceTier(index, "cpu", 1, budget_bytes=budget, wanted_bytes=budget // 2, clock=clock)
    recovery = Recovery(
        [tier, other], restored.append, nothing, untried, clock=clock, interval_s=3600, trial_wait_s=0.01
    )
    try:
        monkeypatch.setattr(
            tier.arena, "write", lambda pages, codes, write=tier.arena.write: (go_on.wait(300), write(pages, codes))
        )
        for device in (tier, other):
            device.fail(RuntimeError("gone"))
        clock.now = 1.0
        recovery.try_failed()
        while other.failure is not None:
            threading.Event().wait(0.001)
        recovery.try_failed()
        assert (restored, tier.n_probes) == ([other], 1)
        go_on.set()
        while tier.failure is not None:
            threading.Event().wait(0.001)
        recovery.try_failed()
        assert (restored, tier.n_probes) == ([other, tier], 1)
    finally:
        go_on.set()
        recovery.close()
        other.close()


def test_missing_lists_are_looked_for_whatever_went_wrong_before(tier, clock, caplog):
    calls, twice = [], threading.Event()

    def complete():
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        raise RuntimeError("no lists")

    recovery = Recovery([tier], never, complete, untried, clock=clock, interval_s=0.001)
    assert twice.wait(300)
    recovery.close()
    assert "missing lists could not be brought" in caplog.text
