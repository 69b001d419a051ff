"""Slow devices: who is left out, what stays right meanwhile, and how they come back."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hybridindex.errors import DeviceSlowError, InvalidInputError
from hybridindex.router import HealthPolicy, Router
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from hybridindex.tiers.shard.scanner import ShardScanner
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check

#: A stand-in is judged, and no real scan here is late.
POLICY = HealthPolicy(judge="all", slow_margin_ms=60_000, slow_parts=3)
QUERIES = clustered(12, seed=2)
WAIT_S = 300


@pytest.fixture(scope="module", params=["flat", "faiss:PQ6x6np"])
def any_index(request, tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", n=1000, nprobe=8, codec=request.param) as index:
        yield index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


class Pace:
    """Scans seem to take so long, on the clock of the thread that scans."""

    def __init__(self, monkeypatch):
        self.device_s = self.host_s = 0.0
        self._passed = threading.local()
        real = time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: real() + getattr(self._passed, "s", 0.0))
        for scanner in (NativePageScanner, ShardScanner):
            self._slow_down(monkeypatch, scanner, "scan", "device_s")
        for host in (HostNativeScanner, HostFaissScanner):
            self._slow_down(monkeypatch, host, "scan_checked", "host_s")

    def _slow_down(self, monkeypatch, scanner, method, which):
        scan = getattr(scanner, method)

        def slow(*args, **options):
            self._passed.s = getattr(self._passed, "s", 0.0) + getattr(self, which)
            return scan(*args, **options)

        monkeypatch.setattr(scanner, method, slow)


@pytest.fixture
def pace(monkeypatch):
    return Pace(monkeypatch)


def open_router(index, health=POLICY):
    """Everything is on one device."""
    return Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"], health=health)


def search(router, index, queries=QUERIES):
    """Checks the answers, and waits until the batch was judged; the part of the work that the device did."""
    judged = threading.Event()
    result = router.submit(queries, 10, 8, on_batch=lambda _report: judged.set()).result(WAIT_S)
    assert judged.wait(WAIT_S)
    check(index, queries, 10, 8, result)
    return float(result.hit_rate.mean())


def test_a_slow_device_is_left_out_and_comes_back_with_all_that_it_held(any_index, pace, by_hand, caplog):
    with open_router(any_index) as router:
        [tier] = router.devices
        pace.device_s = 3600.0
        assert [search(router, any_index) for _ in range(5)] == [1, 1, 1, 0, 0]
        stats, moved, held = router.stats(), tier.moved_bytes, router.residency.list_device.copy()
        assert (stats.device_failures, stats.device_slowdowns, stats.device_fallbacks) == (1, 1, 0)
        assert isinstance(tier.failure, DeviceSlowError)
        assert not tier.usable
        assert caplog.text.count("is slow: 3 of its scans were late: its last scan took 3.6e+06 ms") == 1
        router._served.recovery.try_failed()
        assert search(router, any_index) == 0, "still slow, and used"
        pace.device_s = 0.0
        router._served.recovery.try_failed()
        assert search(router, any_index) == 1
        assert (tier.moved_bytes, tier._health.n_probes, router.stats().device_recoveries) == (moved, 2, 1)
        np.testing.assert_array_equal(router.residency.list_device, held)
        router.check_invariants()


def test_a_hiccup_changes_nothing(index, pace):
    with open_router(index) as router:
        for device_s in [3600.0, 3600.0, 0.0, 3600.0, 0.0, 0.0, 0.0, 3600.0, 3600.0]:
            pace.device_s = device_s
            assert search(router, index) == 1
        assert router.stats().device_failures == 0


def test_a_device_that_the_host_would_not_beat_stays(index, pace):
    pace.device_s = pace.host_s = 3600.0
    with open_router(index) as router:
        assert [search(router, index) for _ in range(8)] == [1] * 8
        assert router.devices[0].usable


def test_a_device_that_is_done_before_the_host_holds_nobody_up(index, pace, monkeypatch):
    where = np.zeros(NLIST)
    where[::2] = -1
    pace.device_s, pace.host_s = 3600.0, 5000.0
    with Router(index, plan=hand_made_plan(index, where), devices=["cpu"], health=POLICY) as router:
        # The host would scan the device's part in no time; only its own takes long.
        monkeypatch.setattr(router._served.engine._host_parts._pace, "observe", lambda *_: None)
        monkeypatch.setattr(router._served.engine.health, "_time_host", lambda *_: 0.0)
        assert min(search(router, index) for _ in range(8)) > 0
        assert router.devices[0].usable


@pytest.mark.parametrize("health", [None, HealthPolicy(judge="none", slow_parts=1)])
def test_a_stand_in_is_not_judged_unless_that_is_asked_for(index, pace, health):
    pace.device_s = 3600.0
    with open_router(index, health) as router:
        assert [router.search(QUERIES, 10, 8).hit_rate.min() for _ in range(40)] == [1] * 40
        assert "hybridindex-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_slow_device_may_still_fail(index, by_hand):
    with open_router(index) as router:
        [tier] = router.devices
        tier.fail(DeviceSlowError("by hand"))
        assert search(router, index) == 0
        assert router.residency.n_resident > 0
        tier.fail(RuntimeError("fell off the bus"))
        assert search(router, index) == 1, "what comes next finds out, and drops the lists"
        assert search(router, index) == 0
        assert (router.residency.n_resident, router.stats().device_failures) == (0, 2)
        router._served.recovery.try_failed()
        assert search(router, index) == 1


def test_a_part_that_waits_while_its_device_becomes_slow_goes_to_the_host(index, monkeypatch):
    with open_router(index) as router:
        monkeypatch.setattr(router._served.engine.health, "list_device", lambda residency: residency.list_device)
        router.devices[0].fail(DeviceSlowError("by hand"))
        search(router, index)
        assert (router.stats().device_fallbacks, router.residency.n_resident > 0) == (1, True)


def test_deadlines_know_that_the_host_scans_for_a_slow_device(index):
    with open_router(index) as router:
        router._served.engine._host_parts._pace.observe(1, 3600.0)  # a host so slow that nothing fits
        assert (router.search(QUERIES, 5, 16, deadline_ms=50, min_nprobe=3).nprobe_used == 16).all()
        router.devices[0].fail(DeviceSlowError("by hand"))
        assert (router.search(QUERIES, 5, 16, deadline_ms=50, min_nprobe=3).nprobe_used == 3).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"judge": "cpu"}, "judge is 'cpu'"),
        ({"slow_factor": 0.5}, "slow_factor is 0.5; expected a number of at least 1"),
        ({"slow_margin_ms": -1}, "slow_margin_ms"),
        ({"slow_parts": 0}, "slow_parts"),
        ({"stuck_s": float("inf")}, "stuck_s"),
        ({"stuck_s": True}, "stuck_s"),
    ],
)
def test_bad_settings_are_named(options, words):
    with pytest.raises(InvalidInputError, match=words):
        HealthPolicy(**options)
