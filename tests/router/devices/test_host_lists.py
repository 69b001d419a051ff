"""Lists in page-locked host memory: the hottest that the plan in force leaves on the host, whoever copies meanwhile."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.config import RouterConfig
from hybridindex.errors import InvalidInputError
from hybridindex.paging import PageGeometry
from hybridindex.router import Router
from hybridindex.router.devices import host_lists, placement
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.paged import device_tier as device
from hybridindex.tiers.paged.copier import Copier
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check
from tests.tiers.late_stream import LateStream

QUERIES = clustered(12, seed=2)
#: Room for 16 of 32 lists where each has a page of 64 KiB, as hand-made plans say; and for fewer than 32 lists where
#: no plan says of which size pages are.
LIMIT, LIMIT_WITHOUT_A_PLAN = 1 << 20, 1 << 17


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Whose lists come to a device one by one."""
    with small_index(tmp_path_factory.mktemp("idx") / "flat", nprobe=8) as index:
        yield index


@pytest.fixture
def full(monkeypatch):
    """Devices have no room before ``full.clear()``."""
    full = threading.Event()
    full.set()
    monkeypatch.setattr(device, "available_bytes", lambda _device: 1000 if full.is_set() else None)
    return full


@pytest.fixture
def streams(monkeypatch):
    """Copies go through streams and staging buffers, as on a GPU."""
    monkeypatch.setattr(device, "open_copier", lambda arena, staging_bytes: Copier(arena, LateStream()))


def plan_with_accesses(index, accesses, resident, n_devices=1):
    """The lists ``resident`` are on the first device."""
    where = np.full(NLIST, -1)
    where[resident] = 0
    plan = hand_made_plan(index, where, n_devices=n_devices)
    plan.analysis = SimpleNamespace(profile=SimpleNamespace(access=SimpleNamespace(list_accesses=accesses)))
    return plan


def hot_order(seed):
    """Accesses, and the lists by them."""
    accesses = np.random.default_rng(seed).permutation(NLIST).astype(float)
    return accesses, np.argsort(-accesses)


def pinned_in(router):
    """List -> where it lies."""
    memory = router.devices[0]._path.pinned
    return {i: found for i in range(NLIST) if (found := memory.find(i)) is not None}


def first_that_fit(router, index, lists):
    """Of ``lists``, in their order, in pages as the devices have them."""
    geometry = router.devices[0].geometry
    room, found = router.config.pin_host_lists // geometry.page_bytes, set()
    for list_id in lists:
        n_pages = int(geometry.pages_for(index.list_sizes[list_id]))
        if 0 < n_pages <= room:
            room -= n_pages
            found.add(list_id)
    assert 0 < len(found) < len(lists)
    return found


def expected(router, index, plan):
    """The hottest lists that the plan leaves on the host."""
    hottest = np.argsort(-plan.analysis.profile.access.list_accesses)
    return first_that_fit(router, index, [i for i in hottest.tolist() if plan.list_device[i] < 0])


def check_pinned(router, index, plan):
    router.check_invariants()
    found = pinned_in(router)
    assert set(found) == expected(router, index, plan)
    for list_id, there in found.items():
        codes = index.list_codes(list_id).reshape(-1)
        n_pages = int(router.devices[0].geometry.pages_for(index.list_sizes[list_id]))
        parts = [p.block[p.slot : p.slot + n].numpy().reshape(-1) for n, p in there.cut(0, n_pages)]
        assert np.array_equal(np.concatenate(parts)[: len(codes)], codes)


def test_another_plan_chooses_anew_and_what_is_still_right_stays(flat):
    plans = []
    for seed in (3, 4, 5):
        accesses, hottest = hot_order(seed)
        plans.append(plan_with_accesses(flat, accesses, hottest[:4]))
    with Router(flat, plan=plans[0], devices=["cpu"], pin_host_lists=LIMIT) as router:
        taken = router.stats().pinned_host_bytes
        for plan in (*plans[1:], plans[0]):
            before = {i: found.runs for i, found in pinned_in(router).items()}
            router.apply_plan(plan)
            check_pinned(router, flat, plan)
            assert set(router.page_locked_lists.tolist()) == pinned_in(router).keys()
            after = {i: found.runs for i, found in pinned_in(router).items()}
            stayed = before.keys() & after.keys()
            assert 0 < len(stayed) < len(after)
            assert all(before[i] is after[i] for i in stayed)
            assert router.stats().pinned_host_bytes == taken <= LIMIT
            check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))


def test_a_plan_that_comes_after_the_opening_chooses(flat):
    accesses, hottest = hot_order(3)
    plan = plan_with_accesses(flat, accesses, hottest[:2])
    with Router(flat, devices=["cpu"], device_budget_bytes=8 << 20, pin_host_lists=LIMIT_WITHOUT_A_PLAN) as router:
        assert pinned_in(router).keys() == first_that_fit(router, flat, range(NLIST))
        router.apply_plan(plan)
        check_pinned(router, flat, plan)


def test_a_plan_that_comes_before_any_device_is_ready_chooses_when_one_is(flat, full, monkeypatch):
    accesses, hottest = hot_order(3)
    plan = plan_with_accesses(flat, accesses, hottest[:2])
    with Router(flat, devices=["cpu"], device_budget_bytes=8 << 20, pin_host_lists=LIMIT_WITHOUT_A_PLAN) as router:
        [tier] = router.devices
        router._served.recovery.close()
        router.apply_plan(plan)
        assert router.stats().pinned_host_bytes == 0
        full.clear()
        monkeypatch.setattr(tier, "retry_due", lambda now: tier.failure is not None)
        router._served.recovery.try_failed()
        check_pinned(router, flat, plan)


def test_lists_that_are_being_copied_make_way_at_a_later_look(flat):
    plans = [plan_with_accesses(flat, hot_order(seed)[0], []) for seed in (3, 4)]
    with Router(flat, plan=plans[0], devices=["cpu"], pin_host_lists=LIMIT) as router:
        router._served.recovery.close()
        read = pinned_in(router)
        router.apply_plan(plans[1])
        stayed = read.keys() & expected(router, flat, plans[1])
        assert set(pinned_in(router)) == stayed
        for list_id, there in read.items():
            codes = flat.list_codes(list_id).reshape(-1)
            [(_, part)] = there.cut(0, 1)
            assert np.array_equal(part.block[part.slot].numpy()[: len(codes)], codes), "it was overwritten"
        del there, part
        router._served.placement.complete()
        assert set(pinned_in(router)) == stayed
        read.clear()
        router._served.placement.complete()
        check_pinned(router, flat, plans[1])


def test_lists_are_exchanged_while_sessions_fetch_them(flat, streams):
    """Four plans in turn, three sessions at a time; every answer and every byte is right, and no page is lost."""
    plans = [plan_with_accesses(flat, hot_order(seed)[0], hot_order(seed)[1][:3], n_devices=2) for seed in range(4)]
    options = {"devices": ["cpu", "cpu"], "device_budget_bytes": 8 << 20, "cache_fraction": 0.0}
    going_on, errors, n_moved = threading.Event(), [], []
    with Router(flat, plan=plans[0], pin_host_lists=LIMIT, **options) as router:

        def fetch(seed):
            try:
                while going_on.is_set():
                    queries = clustered(4, seed=seed)
                    with router.session() as session:
                        session.lookahead(queries, nprobe=8).result(300)
                        check(flat, queries, 10, 8, session.search(queries, 10, 8))
                        n_moved.append(session.stats.lists_moved)
            except BaseException as error:
                errors.append(error)
                raise

        going_on.set()
        fetchers = [threading.Thread(target=fetch, args=(seed,)) for seed in range(3)]
        for thread in fetchers:
            thread.start()
        for number in range(12):
            router.apply_plan(plans[number % 4])
            assert router.stats().pinned_host_bytes <= LIMIT
            router.check_invariants()
        going_on.clear()
        for thread in fetchers:
            thread.join()
        assert errors == []
        assert sum(n_moved) > 0
        for tier in router.devices:
            tier.load([], router._served.residency).result(300)
        router._served.placement.complete()
        check_pinned(router, flat, plans[3])


def test_the_host_scan_never_reads_the_copy(flat, monkeypatch):
    accesses, _ = hot_order(3)
    with Router(flat, plan=plan_with_accesses(flat, accesses, []), devices=["cpu"], pin_host_lists=LIMIT) as router:
        assert isinstance(router._served.host, HostNativeScanner)
        for found in pinned_in(router).values():
            [(_, part)] = found.cut(0, 1)
            part.block[:] = 0
        check(flat, QUERIES, 10, 8, router.search(QUERIES, 10, 8))


def test_a_list_that_cannot_be_read_costs_no_plan(flat, monkeypatch, caplog):
    plans = [plan_with_accesses(flat, hot_order(seed)[0], []) for seed in (3, 4)]
    with Router(flat, plan=plans[0], devices=["cpu"], pin_host_lists=LIMIT) as router:

        def unreadable(_list_id):
            raise OSError("the file cannot be read")

        with monkeypatch.context() as patch:
            patch.setattr(flat, "list_codes", unreadable)
            router.apply_plan(plans[1])
        assert router.plan is plans[1]
        assert "the file cannot be read" in caplog.text
        router.check_invariants()
        router.apply_plan(plans[0])
        check_pinned(router, flat, plans[0])


def test_copying_takes_its_share_of_the_time_and_ends_with_the_router(flat, monkeypatch):
    plans = [plan_with_accesses(flat, hot_order(seed)[0], []) for seed in (3, 4)]
    ticks, rests = iter(range(10_000)), []
    with Router(flat, plan=plans[0], devices=["cpu"], pin_host_lists=LIMIT) as router:
        lists = router._served.opening.host_lists
        n_before, n_missing = len(pinned_in(router)), len(expected(router, flat, plans[1]) - pinned_in(router).keys())

        class Stop(threading.Event):
            def wait(self, timeout=None):
                rests.append(timeout)
                if len(rests) == 3:
                    router.settle()
                    assert self.is_set(), "a rest would go on"
                return self.is_set()

        lists._stop = Stop()
        monkeypatch.setattr(host_lists, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
        router.apply_plan(plans[1], bandwidth_share=0.25)
        # Each copy takes a second on this clock.
        assert rests == [3.0] * 3
        assert n_missing > 4
        assert len(pinned_in(router)) == n_before - n_missing + 4
        router.check_invariants()


@pytest.mark.parametrize("why", ["a change of plan waits", "the router closes"])
def test_nothing_more_is_copied_for_who_gives_way(flat, why):
    plans = [plan_with_accesses(flat, hot_order(seed)[0], []) for seed in (3, 4)]
    with Router(flat, plan=plans[0], devices=["cpu"], pin_host_lists=LIMIT) as router:
        before, lists = set(pinned_in(router)), router._served.opening.host_lists
        assert expected(router, flat, plans[1]) - before
        if why == "the router closes":
            lists.stop()
        lists.choose(plans[1], router.devices, lambda: why != "the router closes", None)
        assert pinned_in(router).keys() <= before


def test_sessions_fetch_pinned_lists_without_staging_to_every_device(flat, streams):
    options = {"devices": ["cpu", "cpu"], "device_budget_bytes": 8 << 20}
    with Router(flat, pin_host_lists=8 << 20, **options) as router:
        held = router.stats().pinned_host_bytes
        assert held > 0
        for tier in router.devices:
            assert tier.load([tier.ordinal], router._served.residency).result(300).loaded == (tier.ordinal,)
        with router.session() as session:
            session.lookahead(QUERIES, nprobe=8).result(300)
            assert session.stats.bytes_moved > 0
            assert (router.search(QUERIES, 10, 8).hit_rate == 1).all()
        assert [use.host_bytes for use in router.arena_use()] == [0, 0], "staging was used"
        assert router.stats().pinned_host_bytes == held
    with Router(flat, **options) as router, router.session() as session:
        session.lookahead(QUERIES, nprobe=8).result(300)
        assert sum(use.host_bytes for use in router.arena_use()) > 0


def test_lists_are_pinned_when_a_device_without_room_has_been_opened(flat, full, monkeypatch):
    with Router(flat, devices=["cpu"], device_budget_bytes=8 << 20, pin_host_lists=8 << 20) as router:
        [tier] = router.devices
        assert router.stats().pinned_host_bytes == 0
        full.clear()
        monkeypatch.setattr(tier, "retry_due", lambda now: tier.failure is not None)
        router._served.recovery.try_failed()
        assert router.stats().pinned_host_bytes > 0


def test_a_gpu_has_a_share_of_the_memory_and_the_stand_in_none(flat, monkeypatch):
    monkeypatch.setattr(host_lists, "available_bytes", lambda: 8 * LIMIT)
    geometry = PageGeometry.for_code_size(flat.code_size)

    def limit_of(limit_bytes, device):
        lists = host_lists.HostLists(flat, geometry, limit_bytes)
        made = lists.memory_for(device)
        assert lists.due == (made is not None)
        return None if made is None else (made._blocks._limit_bytes, made._blocks._page_locked)

    assert limit_of(None, "cuda:0") == (LIMIT, True)
    assert limit_of(None, "cpu") is None
    assert limit_of(0, "cuda:0") is None
    assert limit_of(5000, "cuda:0") == (5000, True)
    assert limit_of(5000, "cpu") == (5000, False)
    # The stand-in beside a GPU fetches from what there is.
    lists = host_lists.HostLists(flat, geometry, None)
    assert lists.memory_for("cpu") is None
    assert lists.memory_for("cuda:0") is lists.memory_for("cpu") is not None


def test_an_opening_does_not_wait_for_lists_that_nobody_asked_for(flat, monkeypatch):
    monkeypatch.setattr(host_lists, "available_bytes", lambda: 8 * LIMIT)
    lists = host_lists.HostLists(flat, PageGeometry.for_code_size(flat.code_size), None)
    memory = lists.memory_for("cuda:0")
    # No page is locked here.
    monkeypatch.setattr(memory._blocks, "_page_locked", False)
    tiers = [SimpleNamespace(usable=True, ordinal=0, disabled_reason="")]
    lists.choose(None, tiers, lambda: False)
    assert (len(lists.list_ids()), lists.due) == (0, True)
    lists.choose(None, tiers, lambda: False, 0.5)
    assert (len(lists.list_ids()), lists.due) == (16, False)


def test_routers_of_a_process_share_a_share_of_the_memory(flat, monkeypatch):
    monkeypatch.setattr(host_lists, "available_bytes", lambda: 8 * LIMIT)
    monkeypatch.setattr(host_lists, "_shares", host_lists._Shares())
    geometry = PageGeometry.for_code_size(flat.code_size)
    every = [host_lists.HostLists(flat, geometry, None) for _ in range(4)]
    for lists in every:
        lists.memory_for("cuda:0")
    assert [lists._limit_bytes for lists in every] == [LIMIT, LIMIT, 0, 0]
    # Nothing was locked here.
    monkeypatch.setattr(host_lists, "give_back_locked", lambda: None)
    every[0].close()
    late = host_lists.HostLists(flat, geometry, None)
    late.memory_for("cuda:0")
    assert late._limit_bytes == LIMIT


def slow_index(flat, monkeypatch, seconds):
    """Copying a list takes so long."""
    codes_of = flat.piece_codes
    monkeypatch.setattr(flat, "piece_codes", lambda list_id: time.sleep(seconds) or codes_of(list_id))


def test_what_does_not_come_at_one_look_comes_at_the_next(flat, monkeypatch):
    """A device that fails meanwhile is tried between the looks."""
    monkeypatch.setattr(placement, "_LATE_S", 0.05)
    with Router(flat, devices=["cpu"], device_budget_bytes=8 << 20, pin_host_lists=LIMIT) as router:
        lists = router._served.opening.host_lists
        everything = len(router.page_locked_lists)
        lists.memory.hold([], [], flat.piece_codes, lambda: False)
        lists.due = True
        slow_index(flat, monkeypatch, 0.02)
        router._served.recovery.close()
        seen = [0]
        while lists.due:
            router._served.placement.complete()
            seen.append(len(router.page_locked_lists))
            assert len(seen) < 100
        assert len(seen) > 3
        assert seen == sorted(seen)
        assert seen[-1] == everything


def test_lists_come_after_a_change_of_plan_for_which_they_gave_way_has_failed(flat, monkeypatch):
    with Router(flat, devices=["cpu"], device_budget_bytes=8 << 20, pin_host_lists=LIMIT) as router:
        lists = router._served.opening.host_lists
        everything = len(router.page_locked_lists)
        lists.memory.hold([], [], flat.piece_codes, lambda: False)
        waits = iter([False] * 6)
        lists.choose(None, router.devices, lambda: next(waits, True))
        assert len(router.page_locked_lists) < everything
        assert lists.due
        lists.choose(None, router.devices, lambda: False)
        assert (len(router.page_locked_lists), lists.due) == (everything, False)


@pytest.mark.parametrize(
    ("devices", "pin_host_lists", "pins"),
    [((), None, False), (("cpu",), None, False), (("cpu", "cuda:0"), None, True), (("cuda:0",), 0, False)],
)
def test_windows_reckon_with_page_locked_memory_where_there_is_some(devices, pin_host_lists, pins):
    assert RouterConfig(devices=devices, pin_host_lists=pin_host_lists).pins_lists == pins


@pytest.mark.parametrize("pin_host_lists", [-1, 1.5, True])
def test_bytes_to_pin_are_whole(flat, pin_host_lists):
    with pytest.raises(InvalidInputError, match="pin_host_lists"):
        Router(flat, pin_host_lists=pin_host_lists)
