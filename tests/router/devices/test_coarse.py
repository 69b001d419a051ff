"""Who finds the lists of a batch, and that nobody waits for a device that does not answer."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from hybridindex.index.compress import compress
from hybridindex.router import HealthPolicy, Router
from hybridindex.router.devices import coarse
from hybridindex.router.devices.coarse import CoarseQuantization
from hybridindex.tiers.paged.coarse.device_centroids import DeviceCentroids
from tests.clustered import clustered, hand_made_plan, small_index
from tests.router.slow_copies import until
from tests.router.test_router import check

QUERIES = clustered(12, seed=2)
LISTS = 400
WAIT_S = 60.0


@pytest.fixture(scope="module", params=["flat", "pq6", "rabitq"])
def index(request, tmp_path_factory):
    """With lists enough that a few of them are candidates; distances of pq and codes begin with those of centroids."""
    codec = "flat" if request.param == "rabitq" else request.param
    path = tmp_path_factory.mktemp("idx") / "i"
    with small_index(path, n=4000, nlist=LISTS, nprobe=8, codec=codec) as index:
        if request.param == "rabitq":
            compress(index)
        yield index


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "flat", n=4000, nlist=LISTS, nprobe=8) as index:
        yield index


@pytest.fixture(autouse=True)
def patient():
    """A device is waited for on a busy machine, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coarse, "_LEAST_WAIT_S", WAIT_S)
        patch.setattr(coarse, "_UNKNOWN_WAIT_S", WAIT_S)
        yield patch


def hurry(patch):
    patch.setattr(coarse, "_LEAST_WAIT_S", 0.02)
    patch.setattr(coarse, "_UNKNOWN_WAIT_S", 0.02)


def open_router(index, choice="device", **options):
    return Router(index, devices=["cpu"], device_budget_bytes=8 << 20, coarse_quantization=choice, **options)


def counts(router):
    stats = router.stats()
    return stats.device_quantized, stats.device_quantized_again


@pytest.mark.parametrize("n", [1, 12])
def test_answers_are_those_of_the_host(index, n):
    with open_router(index) as router, open_router(index, "host") as host:
        found, right = (each.search(QUERIES[:n], 10, 8) for each in (router, host))
        np.testing.assert_array_equal(found.ids, right.ids)
        np.testing.assert_array_equal(found.distances, right.distances)
        assert counts(router) == (n, 0)
        assert counts(host) == (0, 0)


def test_the_stand_in_finds_none_unless_it_is_asked_to(flat):
    with open_router(flat, "auto") as router:
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert router.devices[0].centroids is None
        assert counts(router) == (0, 0)


def test_more_lists_than_a_device_chooses_from_are_the_hosts(flat):
    with open_router(flat) as router:
        check(flat, QUERIES, 10, 200, router.search(QUERIES, 10, 200))
        assert counts(router) == (0, 0)


def test_queries_that_are_not_settled_are_searched_among_all_lists(flat, monkeypatch):
    search = DeviceCentroids.search

    def half_known(self, queries, m):
        candidates, farthest = search(self, queries, m)
        farthest[::2] = -np.inf
        return candidates, farthest

    monkeypatch.setattr(DeviceCentroids, "search", half_known)
    with open_router(flat) as router:
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert counts(router) == (6, 6)


def test_a_device_that_does_not_answer_is_left_until_it_has(flat, monkeypatch, patient):
    hurry(patient)
    search, goes_on = DeviceCentroids.search, threading.Event()

    def hangs(self, queries, m):
        goes_on.wait(WAIT_S)
        return search(self, queries, m)

    monkeypatch.setattr(DeviceCentroids, "search", hangs)
    with open_router(flat) as router:
        for _ in range(3):
            check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        # The first was given up, the others were not even asked for.
        assert counts(router) == (0, 12)
        goes_on.set()
        until(lambda: router._served.engine._coarse._left.done())
        patient.setattr(coarse, "_LEAST_WAIT_S", WAIT_S)
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert counts(router) == (12, 12)


def test_a_router_closes_beside_a_search_that_does_not_end(flat, monkeypatch, patient):
    hurry(patient)
    goes_on = threading.Event()
    monkeypatch.setattr(DeviceCentroids, "search", lambda *_: goes_on.wait(WAIT_S))
    router = open_router(flat, health=HealthPolicy(stuck_s=0.2))
    try:
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        router.close()
        [thread] = [each for each in threading.enumerate() if each.name == "hybridindex-coarse"]
        assert thread.daemon
    finally:
        goes_on.set()
        until(lambda: all(each.name != "hybridindex-coarse" for each in threading.enumerate()))


@pytest.mark.parametrize("where", ["search", "warm_up"])
def test_an_error_is_told_once_and_the_device_left_alone(flat, monkeypatch, caplog, where):
    caplog.set_level(logging.WARNING)

    def lost(*_args):
        raise RuntimeError("CUDA error: device lost")

    with open_router(flat) as router:
        monkeypatch.setattr(DeviceCentroids, "search", lost)
        monkeypatch.setattr(DeviceCentroids, where, lost)
        for _ in range(3):
            check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert counts(router) == (0, 12)
        assert caplog.text.count("found no lists") == 1
        monkeypatch.undo()
        later = time.monotonic() + coarse._LEFT_ALONE_S
        monkeypatch.setattr(time, "monotonic", lambda: later)
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert counts(router) == (12, 12)


def test_what_the_caller_does_with_torch_changes_nothing(flat):
    import torch

    with open_router(flat) as router, torch.autocast("cpu", dtype=torch.bfloat16):
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert counts(router) == (12, 0)


def test_a_failed_device_is_not_asked(flat):
    with open_router(flat) as router:
        router.devices[0].fail(RuntimeError("lost"))
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))
        assert counts(router) == (0, 0)


class Timed:
    """A host and a device that take as long as is said, by a clock of their own."""

    def __init__(self, monkeypatch, router):
        self.now = 0.0
        self.host_s = self.device_s = 0.01
        self.asked: list[str] = []
        parts: Any = router._served.parts
        monkeypatch.setattr(coarse.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(coarse.time, "monotonic", lambda: self.now)
        quantize, search = type(parts.host).quantize, DeviceCentroids.search

        def by_host(*args):
            self.now += self.host_s
            self.asked.append("host")
            return quantize(*args)

        def by_device(*args):
            self.now += self.device_s
            self.asked.append("device")
            return search(*args)

        monkeypatch.setattr(type(parts.host), "quantize", by_host)
        monkeypatch.setattr(DeviceCentroids, "search", by_device)
        monkeypatch.setattr(DeviceCentroids, "warm_up", lambda _self: None)
        self.quantization = CoarseQuantization(parts, "auto")

    def ask(self, n):
        self.asked.clear()
        for _ in range(n):
            self.quantization.quantize(QUERIES, 8)
        return {side: self.asked.count(side) for side in ("host", "device")}


def test_whoever_is_faster_is_asked_and_the_other_one_now_and_then(flat, monkeypatch):
    with open_router(flat) as router:
        timed = Timed(monkeypatch, router)
        timed.device_s = 0.0025
        assert timed.ask(8) == {"host": 4, "device": 4}
        assert timed.ask(63) == {"host": 0, "device": 63}
        assert timed.ask(1) == {"host": 1, "device": 0}
        # Not before a second has passed.
        assert timed.ask(350) == {"host": 0, "device": 350}
        assert timed.ask(60)["host"] == 1
        # It is busy with something else from now on.
        timed.device_s = 0.08
        assert timed.ask(100)["host"] >= 90
        # And is not any more.
        timed.device_s = 0.0025
        timed.ask(1000)
        assert timed.ask(100)["device"] >= 99
        assert timed.quantization.close(WAIT_S) == set()


def test_one_slow_batch_says_little(flat, monkeypatch):
    with open_router(flat) as router:
        timed = Timed(monkeypatch, router)
        timed.device_s = 0.0025
        timed.ask(20)
        timed.device_s = 1.0
        assert timed.ask(1) == {"host": 0, "device": 1}
        timed.device_s = 0.0025
        assert timed.ask(40)["device"] >= 39
        timed.quantization.close(WAIT_S)


def test_plans_say_whether_there_is_room(flat, caplog):
    from hybridindex.config import RouterConfig
    from hybridindex.router.devices.opening import TierOpening
    from hybridindex.router.lookahead.windows import Windows
    from hybridindex.tiers.serving import tier_of

    wanted = tier_of(flat, "cuda").centroid_bytes

    def share(budget, choice="auto", plan=None):
        config = RouterConfig(devices=["cuda:0"], device_budget_bytes=budget, coarse_quantization=choice)
        return TierOpening(flat, plan, config, Windows(None, None, pinned=False))._centroid_bytes(0)

    caplog.set_level(logging.INFO)
    assert share(16 * wanted) == wanted
    assert share(16 * wanted, "host") is None
    assert not caplog.text
    assert share(16 * wanted - 1) is None
    assert "too small for centroids" in caplog.text
    # A plan of before: its scratch is for scans.
    old = hand_made_plan(flat, np.zeros(LISTS), budget=16 * wanted)
    assert share(16 * wanted, plan=old) is None
    assert "make the plan anew" in caplog.text
