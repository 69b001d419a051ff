"""Searches by codes with devices that hold codes, rows or both: no form, placement, swap or failure changes a bit."""

from __future__ import annotations

import itertools
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hybridindex.router import HealthPolicy, Router
from hybridindex.tiers.paged.codes.native_code_scanner import NativeCodeScanner
from hybridindex.tiers.paged.codes.native_row_pages import NativeRowPages
from hybridindex.tiers.paged.codes.torch_row_pages import TorchRowPages
from tests.clustered import NLIST, hand_made_plan, small_index
from tests.coded import with_codes
from tests.examples import examples
from tests.router.code_searches import BUDGET, QUERIES, asked, differences, opened, search_beside_swaps
from tests.stuck import WAIT_S, Stuck, on_watchdog

KINDS = [("ip", "flat", 1), ("l2", "flat", 2), ("ip", "sq8", 4), ("l2", "sq8", 1), ("l2", "fp16", 1), ("ip", "bf16", 2)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def index(request, tmp_path_factory):
    metric, codec, bits = request.param
    made = small_index(tmp_path_factory.mktemp("idx") / "i", metric=metric, codec=codec)
    with with_codes(made, bits=bits) as found:
        yield found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """An index, where one kind says enough."""
    with with_codes(small_index(tmp_path_factory.mktemp("idx") / "i")) as found:
        yield found


@pytest.fixture(scope="module")
def host(index):
    with Router(index, precision="codes", scrub_bytes_per_s=0) as router:
        yield router


def planned(index, codes, rows, n_devices=1):
    """Codes and rows on these devices, in small pages: lists take several, and rows lie across two."""
    plan = hand_made_plan(
        index.by_codes(), np.asarray(codes), row_device=np.asarray(rows), n_devices=n_devices, budget=BUDGET
    )
    plan.request.page_bytes = 2048
    return plan


def placed(index, n_devices, seed):
    """A plan that puts a random part of the lists on random devices, each in a random form or both."""
    rng = np.random.default_rng(seed)

    def some():
        share = rng.choice([0, 0.2, 0.5, 0.9, 1])
        return np.where(rng.random(NLIST) < share, rng.integers(n_devices, size=NLIST), -1)

    return planned(index, some(), some(), n_devices)


def counted(router, queries, *args):
    """An answer, and what the batch that gave it added to the counters: (candidates, on devices, fallbacks)."""
    before, ended = router.stats(), threading.Event()
    found = router.submit(queries, *args, on_batch=lambda _report: ended.set()).result(WAIT_S)
    assert ended.wait(WAIT_S)
    after = router.stats()
    names = ("candidates", "device_candidates", "device_fallbacks")
    return found, tuple(getattr(after, name) - getattr(before, name) for name in names)


@pytest.mark.hypothesis  # its examples are as many as the profile says
@pytest.mark.parametrize("n_devices", [1, 2])
def test_no_form_or_placement_changes_a_bit_of_an_answer(index, host, n_devices):
    """Of 12 x 1,000 queries; overnight, under the profile "deep", of 12 x 10,000."""
    assert settings.default is not None
    wanted = 10 * settings.default.max_examples
    answered, wrong, seed = 0, 0, 0
    rng = np.random.default_rng(n_devices)
    with opened(index, n_devices, plan=placed(index, n_devices, 0)) as router:
        while answered < wanted:
            seed += 1
            router.apply_plan(placed(index, n_devices, seed))
            for _ in range(5):
                queries, k, nprobe = asked(rng)
                wrong += differences(router.search(queries, k, nprobe), host.search(queries, k, nprobe))
                answered += len(queries)
        router.check_invariants()
        stats = router.stats()
        assert stats.device_fallbacks == 0
        assert stats.unplaced_lists == 0
    assert wrong == 0, f"{wrong} of {answered} answers differ"
    assert 0.1 < stats.rerank_hit_rate < 0.9
    assert 0.1 < stats.hit_rate < 0.9


def test_rows_on_a_device_are_compared_there(one):
    with (
        Router(one, precision="codes") as alone,
        opened(one, 2, plan=planned(one, [-1] * NLIST, [1] * NLIST, 2)) as router,
    ):
        assert router.residency.n_resident == 0
        assert router.row_residency.resident_lists(1).tolist() == list(range(NLIST))
        found, (candidates, on_devices, fallbacks) = counted(router, QUERIES, 10, 8)
        assert candidates == on_devices > 0
        assert fallbacks == 0
        assert (found.hit_rate == 0).all(), "codes are on the host"
        assert differences(found, alone.search(QUERIES, 10, 8)) == 0
        assert router.stats().rerank_hit_rate == 1
        router.apply_plan(planned(one, [0] * NLIST, [-1] * NLIST, 2))
        found, (candidates, on_devices, _) = counted(router, QUERIES, 10, 8)
        assert on_devices == 0 < candidates
        assert differences(found, alone.search(QUERIES, 10, 8)) == 0
        router.check_invariants()
    with opened(one, 1, plan=planned(one, [-1] * NLIST, [-1] * NLIST), precision="auto") as router:
        assert router.row_residency.n_resident == 0


def test_arenas_hold_both_forms(one):
    with opened(one, 1, plan=planned(one, [-1] * NLIST, [-1] * NLIST), lookahead_bytes=0) as router:
        [tier] = router.devices
        assert tier.capacity_bytes == 0
        router.apply_plan(planned(one, [0] * NLIST, [0] * NLIST))
        page = tier.geometry.page_bytes
        codes = -(-one.by_codes().list_bytes // page) * page
        rows = -(-one.list_sizes * one.code_size // page) * page
        assert tier.capacity_bytes == tier.used_bytes == codes.sum() + rows.sum()
        assert router.arena_use()[0].pinned_bytes == tier.used_bytes
        pages = router.row_residency.list_pages[3]
        held = tier.read_back(pages).result(300)
        stored = one.stored_codes(3)
        np.testing.assert_array_equal(held[: len(stored)], stored)
        router.apply_plan(planned(one, [0] * NLIST, [-1] * NLIST))
        assert tier.used_bytes == codes.sum()
        router.check_invariants()


def test_torch_answers_the_same_where_the_extension_cannot(index, host, monkeypatch):
    monkeypatch.setattr(NativeRowPages, "supports", staticmethod(lambda _arena: False))
    with opened(index, 2, plan=placed(index, 2, 3)) as router:
        residency = router._served.residency.current
        assert {type(tier.row_pages(residency)) for tier in router.devices} == {TorchRowPages}
        for k, nprobe in ((1, 3), (10, NLIST), (40, 16)):
            found, (_, on_devices, fallbacks) = counted(router, QUERIES, k, nprobe)
            assert differences(found, host.search(QUERIES, k, nprobe)) == 0
            assert on_devices > 0 == fallbacks


def test_the_host_compares_what_no_device_can_as_it_does(one, monkeypatch):
    for kind in (NativeRowPages, TorchRowPages):
        monkeypatch.setattr(kind, "supports", staticmethod(lambda _arena: False))
    with Router(one, precision="codes") as alone, opened(one, 1, plan=planned(one, [0] * NLIST, [0] * NLIST)) as router:
        found, (candidates, on_devices, fallbacks) = counted(router, QUERIES, 10, 8)
        assert differences(found, alone.search(QUERIES, 10, 8)) == 0
        assert (on_devices, fallbacks) == (0, 1)
        assert candidates > 0
        assert router.devices[0].usable


def test_requests_that_share_a_batch_are_answered_as_alone(one):
    calls = [(QUERIES[:1], 1, 1), (QUERIES[1:4], 10, 8), (QUERIES[4:5], 40, NLIST), (QUERIES[5:9], 3, 3)]
    with Router(one, precision="codes") as alone, opened(one, 2, plan=placed(one, 2, 5)) as router:
        with router._served.engine._turn.of_engine():
            futures = [router.submit(*call) for call in calls]
        for call, future in zip(calls, futures, strict=True):
            assert differences(future.result(WAIT_S), alone.search(*call)) == 0
        assert router.stats().largest_batch == sum(len(queries) for queries, _, _ in calls)


@given(seed=st.integers(0, 2**32), n_devices=st.integers(1, 2))
@examples(15, deadline=None)
def test_searches_beside_swaps_and_sessions(one, seed, n_devices):
    search_beside_swaps(one, n_devices, seed, placed)


# Devices that fail


def test_the_host_compares_what_a_broken_device_does_not(index, host, monkeypatch):
    everywhere = planned(index, np.arange(NLIST) % 2, np.arange(NLIST) // 2 % 2, 2)
    right = host.search(QUERIES, 10, 8)
    with opened(index, 2, plan=everywhere) as router:
        compare = NativeRowPages._compare

        def broken(rows, *arguments):
            if rows._ordinal == 1:
                raise RuntimeError("the device is gone")
            compare(rows, *arguments)

        monkeypatch.setattr(NativeRowPages, "_compare", broken)
        found, (candidates, on_devices, fallbacks) = counted(router, QUERIES, 10, 8)
        assert differences(found, right) == 0
        assert 0 < on_devices < candidates
        assert fallbacks == 1
        assert router.stats().device_failures == 1
        assert set(router.residency.list_device.tolist()) == {0, -1}
        assert set(router.row_residency.list_device.tolist()) == {0, -1}
        found, (_, _, fallbacks) = counted(router, QUERIES, 10, 8)
        assert differences(found, right) == 0
        assert fallbacks == 0
        monkeypatch.undo()
        router._served.recovery.try_failed()
        router.devices[1].recover().result(300)
        router.apply_plan(everywhere)
        found, (candidates, on_devices, _) = counted(router, QUERIES, 10, 8)
        assert differences(found, right) == 0
        assert on_devices == candidates
        router.check_invariants()


def test_a_device_that_does_not_end_keeps_nobody_waiting(one):
    everywhere = planned(one, [-1] * NLIST, [0] * NLIST)
    policy = HealthPolicy(judge="all", stuck_s=0.2)
    with (
        Router(one, precision="codes") as alone,
        opened(one, 1, plan=everywhere, health=policy) as router,
    ):
        right = alone.search(QUERIES, 10, 8)
        with Stuck(NativeRowPages, "distances"):
            assert differences(router.submit(QUERIES, 10, 8).result(WAIT_S), right) == 0
            assert router.stats().device_slowdowns == 1
            found = router.submit(QUERIES, 10, 8).result(WAIT_S)
            assert differences(found, right) == 0
            assert router.row_residency.n_resident == NLIST, "a slow device keeps its rows"
        queue = router._served.engine._device_queues[0]
        while queue.taken_over:
            threading.Event().wait(0.001)
        [tier] = router.devices
        assert tier.recover(router._served.engine.health.trial(tier)).result(WAIT_S)
        found, (candidates, on_devices, _) = counted(router, QUERIES, 10, 8)
        assert differences(found, right) == 0
        assert on_devices == candidates
        router.check_invariants()


def test_a_comparison_that_the_host_would_not_do_faster_is_waited_for(one):
    policy = HealthPolicy(judge="all", stuck_s=0.2)
    with opened(one, 1, plan=planned(one, [-1] * NLIST, np.arange(NLIST) % 2 - 1), health=policy) as router:
        engine, looks, long_ago = router._served.engine, itertools.count(1), threading.Event()
        look = engine._watchdog._look

        def counted_look(queue):
            look(queue)
            if next(looks) > 20:
                long_ago.set()

        counted(router, QUERIES, 10, 8)
        assert engine.health.expected_rerank_s(1000) > 0, "the host's part was not timed"
        engine._rerank_pace.observe(1, 1e6)
        with Stuck(NativeRowPages, "distances") as on_device:
            waiting = router.submit(QUERIES, 10, 8)
            assert on_device.begun.wait(WAIT_S)
            engine._watchdog._look = counted_look
            assert long_ago.wait(WAIT_S)
        waiting.result(WAIT_S)
        stats = router.stats()
        assert (stats.device_slowdowns, stats.device_fallbacks) == (0, 0)


def test_rows_stay_until_the_host_has_answered_for_a_device_even_if_that_ends_before(one):
    on_two = planned(one, [0] * NLIST, [1] * NLIST, 2)
    ended = []
    with (
        Router(one, precision="codes") as alone,
        opened(one, 2, plan=on_two, lookahead_bytes=0, health=HealthPolicy(judge="all", stuck_s=0.2)) as router,
    ):
        right = alone.search(QUERIES, 10, 8)
        router.on_batch.append(lambda report: ended.append(report.number))
        with (
            Stuck(router._served.host, "scan_checked", on_watchdog) as on_host,
            Stuck(NativeCodeScanner, "_scan_codes") as on_device,
        ):
            waiting = router.submit(QUERIES, 10, 8)
            assert on_host.begun.wait(WAIT_S)
            on_device.go_on.set()
            assert router._served.engine._device_queues[0].close(WAIT_S), "the device's scan has not ended"
            # Other rows would come into the pages of these.
            rows = list(range(NLIST, 2 * NLIST))
            router._served.residency.publish({}, drops=rows)
            router.devices[1].load(rows[::-1], router._served.residency).result(WAIT_S)
        assert differences(waiting.result(WAIT_S), right) == 0
    assert ended == [1]


def test_a_router_that_closes_answers_what_is_queued(one):
    with Router(one, precision="codes") as alone:
        right = alone.search(QUERIES, 10, 8)
        for seed in range(5):
            router = opened(one, 2, plan=placed(one, 2, seed))
            futures = [router.submit(QUERIES, 10, 8) for _ in range(8)]
            router.close()
            assert [differences(future.result(0), right) for future in futures] == [0] * 8


def test_an_error_of_the_host_reaches_who_waits(one, monkeypatch):
    with opened(one, 1, plan=planned(one, [0] * NLIST, np.arange(NLIST) % 2 - 1)) as router:

        def broken(*_):
            raise RuntimeError("no memory")

        monkeypatch.setattr(router._served.host.reranker, "rerank", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            router.submit(QUERIES, 10, 8).result(WAIT_S)
        monkeypatch.undo()
        router.search(QUERIES, 10, 8)
        assert router._served.residency.n_leases == 0


# Lookahead


def test_lookahead_brings_rows_where_the_codes_of_all_lists_leave_room(one):
    with Router(one, precision="codes") as alone:
        right = alone.search(QUERIES[:2], 10, 4)
    for lookahead_bytes, brings_rows in ((None, False), (BUDGET, True)):
        with opened(one, 1, lookahead_bytes=lookahead_bytes) as router, router.session() as session:
            session.lookahead(QUERIES[:2], nprobe=4).result(WAIT_S)
            here, rows = router.residency.resident_lists(0), router.row_residency.resident_lists(0)
            assert len(here) >= 4
            assert rows.tolist() == (here.tolist() if brings_rows else [])
            found, (candidates, on_devices, _) = counted(router, QUERIES[:2], 10, 4)
            assert differences(found, right) == 0
            assert on_devices == (candidates if brings_rows else 0)
            session.search(QUERIES[:2], 10, 4)
            assert session.stats.lists_moved == len(here) + len(rows)
            assert session.stats.bytes_wasted == 0
            assert session.stats.lists_skipped == 0
            router.check_invariants()


def test_lookahead_has_room_for_all_codes_beside_planned_rows(one):
    codes = np.arange(NLIST) < 4
    with opened(one, 1, plan=planned(one, np.where(codes, 0, -1), [0] * NLIST)) as router:
        [tier] = router.devices
        page = tier.geometry.page_bytes
        elsewhere = (-(-one.by_codes().list_bytes // page) * page)[~codes].sum()
        assert router._served.opening.lookahead_bytes(router.plan, 0) == elsewhere
        with router.session() as session:
            session.lookahead(QUERIES, nprobe=8).result(WAIT_S)
            assert session.stats.lists_moved > 0 == session.stats.lists_skipped
        router.check_invariants()


# Damage


def test_a_damaged_copy_of_rows_leaves_the_device(one):
    with opened(one, 1, plan=planned(one, [0] * NLIST, [0] * NLIST)) as router:
        [tier] = router.devices
        assert router.scrub().ok
        assert router._served.scrub._copies.held(0, NLIST) == list(range(NLIST))
        before = router.search(QUERIES, 10, NLIST)
        page = int(router.row_residency.list_pages[5][0])
        tier.arena.data[page, 7] ^= 1
        router.scrub()
        assert router.row_residency.resident_lists().tolist() == [i for i in range(NLIST) if i != 5]
        assert len(router.residency.resident_lists()) == NLIST
        assert differences(router.search(QUERIES, 10, NLIST), before) == 0
        where, content = router._served.scrub._copies._device_codes(6)
        assert where == f"the memory of {tier.label}"
        np.testing.assert_array_equal(content, one.stored_codes(6))
