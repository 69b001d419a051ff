"""Scans that do not end: the host answers, pages stay until the end, and the device comes back afterwards."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest

from hybridindex.router import HealthPolicy
from hybridindex.router.devices.watchdog import Watchdog
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from tests.clustered import NLIST, hand_made_plan, small_index
from tests.router.devices.test_health import QUERIES, WAIT_S, open_router, search
from tests.router.test_router import check
from tests.stuck import Stuck, on_watchdog


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


@pytest.fixture
def stuck(monkeypatch):
    """The device's scans end when this event is set."""
    scan, go_on = NativePageScanner.scan, threading.Event()

    def held(*args, **options):
        assert go_on.wait(WAIT_S)
        return scan(*args, **options)

    monkeypatch.setattr(NativePageScanner, "scan", held)
    yield go_on
    go_on.set()


def test_a_scan_that_does_not_end_keeps_nobody_waiting(index, stuck, by_hand, monkeypatch, caplog):
    with closing(open_router(index, HealthPolicy(judge="all", stuck_s=0.2))) as router:
        [tier], [device_queue] = router.devices, router._served.engine._device_queues
        try:
            futures = []
            for n_stuck in (1, 2, 2):  # the third waits for its turn: two batches are under way
                futures.append(router.submit(QUERIES[len(futures) :], 10, 8))
                while len(device_queue.waiting()) < n_stuck and tier.usable:
                    threading.Event().wait(0.001)
            for i, future in enumerate(futures):
                check(index, QUERIES[i:], 10, 8, future.result(WAIT_S))
            assert [search(router, index) for _ in range(4)] == [0] * 4
            assert caplog.text.count("a scan has not ended after") == 1
            assert (router.stats().device_slowdowns, tier.usable) == (1, False)
            used = tier.used_bytes
            dropped = router._served.residency.publish({}, drops=router.residency.resident_lists().tolist())
            assert tier.used_bytes == used, "a page left under a scan"
            router._served.recovery.try_failed()
            assert not tier.usable, "the scan has not ended"
            monkeypatch.setattr(router._served.engine._watchdog, "_is_stuck", lambda task: False)
            monkeypatch.setattr(router._served.engine.health, "list_device", lambda _: np.zeros(NLIST, np.int16))
            check(index, QUERIES, 10, 8, router.submit(QUERIES, 10, 8).result(WAIT_S))
            monkeypatch.undo()
        finally:
            stuck.set()
        assert router._served.residency.wait_reclaimed(dropped.version, WAIT_S)
        assert tier.used_bytes == 0
        while device_queue.taken_over:
            threading.Event().wait(0.001)
        assert [r.levelname for r in caplog.records].count("ERROR") == 1, "an answer that came late was used"
        assert device_queue._pace.line() is None, "what was given up was taken for a scan's time"
        router._served.recovery.try_failed()
        router.apply_plan(hand_made_plan(index, np.zeros(NLIST)))
        assert search(router, index) == 1
        assert device_queue._pace.line() is not None
        router.check_invariants()


def test_a_batch_ends_after_the_host_even_if_its_device_ends_before(index, stuck):
    """And what turned out to be damaged meanwhile is searched again."""
    ended = []
    with closing(open_router(index, HealthPolicy(judge="all", stuck_s=0.2))) as router:
        router.on_batch.append(lambda report: ended.append(report.number))
        with Stuck(router._served.host, "scan_checked", on_watchdog) as on_host:
            waiting = router.submit(QUERIES, 10, 8)
            assert on_host.begun.wait(WAIT_S)
            stuck.set()
            assert router._served.engine._device_queues[0].close(WAIT_S), "the device's scan has not ended"
            assert (router._served.residency.n_leases, ended) == (1, [])
            index.integrity.marks[0] += 1
        check(index, QUERIES, 10, 8, waiting.result(WAIT_S))
    assert ended == [1, 2]


def test_a_look_that_fails_is_not_the_watchdogs_last(index, stuck, monkeypatch, caplog):
    looks = []
    look = Watchdog._look

    def broken(self, lane):
        looks.append(lane)
        if len(looks) == 1:
            raise RuntimeError("the lane is in two minds")
        look(self, lane)

    monkeypatch.setattr(Watchdog, "_look", broken)
    with closing(open_router(index, HealthPolicy(judge="all", stuck_s=0.2))) as router:
        try:
            check(index, QUERIES, 10, 8, router.submit(QUERIES, 10, 8).result(WAIT_S))
        finally:
            stuck.set()
    assert "could not be watched" in caplog.text
    assert looks[1:]


def test_an_answer_that_was_taken_over_may_close_nothing_that_waits_for_it(index, stuck):
    """A callback on the watchdog's thread is told so, instead of waiting for itself."""
    with closing(open_router(index, HealthPolicy(judge="all", stuck_s=0.2))) as router:
        refused = []

        def close(_future):
            try:
                router.close()
            except Exception as error:  # noqa: BLE001 - shown below
                refused.append((threading.current_thread().name, str(error)))

        router.submit(QUERIES, 10, 8).add_done_callback(close)
        while not refused:
            threading.Event().wait(0.001)
        stuck.set()
    assert refused[0][0] == "hybridindex-watchdog"
    assert "own thread" in refused[0][1]
