"""What a router opens on its devices. Without room they count as failed, and open when there is some."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import DeviceBusyError, OutOfBudgetError
from hybridindex.router import HealthPolicy, Router
from hybridindex.tiers.contract.devices import resolve_device
from hybridindex.tiers.paged import device_tier as device
from hybridindex.tiers.shard import shard_tier
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check

QUERIES = clustered(12, seed=2)


@pytest.fixture(scope="module", params=["flat", "faiss:PQ6x6np"])
def index(request, tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", n=1000, nprobe=8, codec=request.param) as index:
        yield index


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Whose lists come to a device one by one."""
    with small_index(tmp_path_factory.mktemp("idx") / "flat", nprobe=8) as index:
        yield index


class Neighbour:
    """Who leaves so many bytes of the device free."""

    def __init__(self, monkeypatch):
        self.free = 1000
        for module in (device, shard_tier):
            monkeypatch.setattr(module, "available_bytes", lambda _device: self.free)


@pytest.fixture
def neighbour(monkeypatch):
    return Neighbour(monkeypatch)


def open_router(index, **options):
    return Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"], **options)


def search(router, index):
    result = router.search(QUERIES, 10, 8)
    check(index, QUERIES, 10, 8, result)
    return float(result.hit_rate.mean())


def test_a_full_device_counts_as_failed_and_is_opened_when_there_is_room(index, neighbour, monkeypatch, caplog):
    with open_router(index) as router:
        [tier] = router.devices
        router._served.recovery.close()  # it would try by itself
        for _ in range(2):
            assert search(router, index) == 0
        assert isinstance(tier.failure, OutOfBudgetError)
        assert caplog.text.count("1,000 are free") == 1
        assert (tier.usable, tier.used_bytes, tier.disabled_reason) == (False, 0, "")
        assert (router.stats().device_failures, router.stats().unplaced_lists) == (1, NLIST)
        assert tier.retry_due(1e12)
        monkeypatch.setattr(tier, "retry_due", lambda now: tier.failure is not None)
        router._served.recovery.try_failed()
        assert (search(router, index), router.stats().device_recoveries) == (0, 0)
        neighbour.free = None
        router._served.recovery.try_failed()
        assert search(router, index) == 1
        assert (router.stats().device_failures, router.stats().device_recoveries) == (1, 1)
        assert router.stats().unplaced_lists == 0
        router.check_invariants()


def test_whoever_says_so_has_it_stay_closed(index, neighbour):
    with open_router(index, health=HealthPolicy(retry_open=False)) as router:
        [tier] = router.devices
        neighbour.free = None
        assert not tier.retry_due(1e12)
        assert search(router, index) == 0
        assert (router.stats().device_failures, tier.usable) == (1, False)


def test_a_budget_that_the_device_never_has_is_no_failure_that_passes(index, neighbour, monkeypatch):
    for module in (device, shard_tier):
        monkeypatch.setattr(module, "resolve_device", smaller_device)
    with open_router(index) as router:
        [tier] = router.devices
        assert "1,000 are free" in tier.disabled_reason
        assert (tier.failure, router.stats().device_failures, search(router, index)) == (None, 0, 0)


def test_a_device_that_lets_nobody_in_is_left_out_where_lists_come_in_shards(index, monkeypatch):
    def busy(name):
        raise DeviceBusyError(f"device {name!r} lets nobody in")

    for module in (device, shard_tier):
        monkeypatch.setattr(module, "resolve_device", busy)
    with open_router(index, health=HealthPolicy(retry_open=False)) as router:
        [tier] = router.devices
        assert "lets nobody in" in (tier.disabled_reason or str(tier.failure))
        assert (tier.usable, tier.retry_due(1e12), search(router, index)) == (False, False, 0)


def smaller_device(name):
    where, info = resolve_device(name)
    return where, replace(info, total_bytes=10_000)


def test_sessions_move_lists_to_a_device_that_was_opened_late(flat, neighbour):
    with Router(flat, devices=["cpu"], device_budget_bytes=8 << 20) as router:
        [tier] = router.devices
        with router.session() as session:
            session.lookahead(QUERIES, nprobe=8).result(300)
            assert session.stats.lists_skipped > 0
        neighbour.free = None
        assert tier.recover().result(300)
        with router.session() as session:
            session.lookahead(QUERIES, nprobe=8).result(300)
            assert search(router, flat) == 1
        router.check_invariants()
