"""Searches by codes with devices: no placement, swap or failure changes a bit of an answer."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hybridindex.errors import CorruptIndexError, ProfileMismatchError
from hybridindex.plans.planner import devices_of
from hybridindex.plans.replan import PlanChanges, replan
from hybridindex.router import HealthPolicy, Router
from hybridindex.tiers.paged.codes.native_code_scanner import NativeCodeScanner
from hybridindex.tiers.paged.codes.torch_code_scanner import TorchCodeScanner
from tests.clustered import NLIST, hand_made_plan, small_index
from tests.coded import with_codes
from tests.examples import examples
from tests.router.code_searches import BUDGET, QUERIES, asked, differences, opened, search_beside_swaps

KINDS = [(metric, bits) for metric in ("ip", "l2") for bits in (1, 2, 4)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def index(request, tmp_path_factory):
    metric, bits = request.param
    made = small_index(tmp_path_factory.mktemp("idx") / "i", metric=metric, codec="sq8")
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


def planned(index, devices, n_devices=1):
    """Of codes, in small pages, so that lists take several."""
    plan = hand_made_plan(index.by_codes(), np.asarray(devices), n_devices=n_devices, budget=BUDGET)
    plan.request.page_bytes = 2048
    return plan


def placed(index, n_devices, seed):
    """A plan that puts a random part of the lists on random devices."""
    rng = np.random.default_rng(seed)
    share = rng.choice([0, 0.1, 0.5, 0.9, 1])
    devices = np.where(rng.random(NLIST) < share, rng.integers(n_devices, size=NLIST), -1)
    return planned(index, devices, n_devices)


@pytest.mark.hypothesis  # its examples are as many as the profile says
@pytest.mark.parametrize("n_devices", [1, 2])
def test_no_placement_changes_a_bit_of_an_answer(index, host, n_devices):
    """Of 12 x 1,000 queries; overnight, under the profile "deep", of 12 x 10,000."""
    assert settings.default is not None
    wanted = 10 * settings.default.max_examples
    answered, wrong, seed, hits = 0, 0, 0, 0.0
    rng = np.random.default_rng(n_devices)
    with opened(index, n_devices, plan=placed(index, n_devices, 0)) as router:
        while answered < wanted:
            seed += 1
            router.apply_plan(placed(index, n_devices, seed))
            for _ in range(5):
                queries, k, nprobe = asked(rng)
                found, right = router.search(queries, k, nprobe), host.search(queries, k, nprobe)
                wrong += differences(found, right)
                answered += len(queries)
                hits += float(found.hit_rate.sum())
        router.check_invariants()
        assert router.stats().device_fallbacks == 0
    assert wrong == 0, f"{wrong} of {answered} answers differ"
    assert 0.1 * answered < hits < 0.9 * answered


def test_scratch_of_an_arena_is_what_a_plan_reckons_with(one):
    budget = 1 << 30
    for precision, view, scratch in (("rows", one, 64 << 20), ("codes", one.by_codes(), 4 << 20)):
        with opened(one, 1, precision=precision, device_budget_bytes=budget) as router:
            [tier] = router.devices
            assert tier.scratch_bytes == scratch
        request = replan(None, PlanChanges(slo_ms=5), devices_of(view, 1, budget))
        assert request.scratch == (scratch,)


def test_torch_answers_the_same_where_the_extension_cannot(index, host, monkeypatch):
    monkeypatch.setattr(NativeCodeScanner, "supports", staticmethod(lambda _arena: False))
    with opened(index, 2, plan=placed(index, 2, 3)) as router:
        assert {tier._scanner_kind for tier in router.devices} == {TorchCodeScanner}
        for k, nprobe in ((1, 3), (10, NLIST), (40, 16)):
            assert differences(router.search(QUERIES, k, nprobe), host.search(QUERIES, k, nprobe)) == 0
        assert router.stats().device_fallbacks == 0


@given(seed=st.integers(0, 2**32), n_devices=st.integers(1, 2))
@examples(15, deadline=None)
def test_searches_beside_swaps_and_sessions(one, seed, n_devices):
    search_beside_swaps(one, n_devices, seed, placed)


def test_a_device_that_fails_is_replaced_by_the_host(index, host, monkeypatch):
    everywhere = planned(index, np.arange(NLIST) % 2, 2)
    right = host.search(QUERIES, 10, 8)
    with opened(index, 2, plan=everywhere) as router:
        scan = NativeCodeScanner._scan_codes

        def broken(scanner, *arguments):
            if scanner._ordinal == 1:
                raise RuntimeError("the device is gone")
            scan(scanner, *arguments)

        monkeypatch.setattr(NativeCodeScanner, "_scan_codes", broken)
        assert differences(router.search(QUERIES, 10, 8), right) == 0
        stats = router.stats()
        assert (stats.device_fallbacks, stats.device_failures) == (1, 1)
        assert set(router.residency.list_device.tolist()) == {0, -1}
        assert differences(router.search(QUERIES, 10, 8), right) == 0
        monkeypatch.undo()
        router._served.recovery.try_failed()
        router.devices[1].recover().result(300)
        router.apply_plan(everywhere)
        assert set(router.residency.list_device.tolist()) == {0, 1}
        assert differences(router.search(QUERIES, 10, 8), right) == 0


def test_a_slow_device_keeps_its_codes_while_the_host_scans(one, monkeypatch):
    everywhere = planned(one, np.zeros(NLIST))
    policy = HealthPolicy(judge="all", slow_margin_ms=60_000, slow_parts=1)
    with (
        Router(one, precision="codes") as alone,
        opened(one, 1, plan=everywhere, health=policy, early_dispatch=False) as router,
    ):
        right = alone.search(QUERIES, 10, 8)
        monkeypatch.setattr(router._served.engine.health, "_limit", lambda _host_s: -1.0)
        judged = threading.Event()
        first = router.submit(QUERIES, 10, 8, on_batch=lambda _report: judged.set()).result(300)
        assert judged.wait(300)
        monkeypatch.undo()
        second = router.search(QUERIES, 10, 8)
        assert (router.stats().device_slowdowns, router.stats().device_fallbacks) == (1, 0)
        [tier] = router.devices
        assert tier.recover(router._served.engine.health.trial(tier)).result(300)
        third = router.search(QUERIES, 10, 8)
        assert [float(found.hit_rate.mean()) for found in (first, second, third)] == [1, 0, 1]
        assert [differences(found, right) for found in (first, second, third)] == [0, 0, 0]


# What moves


def test_lookahead_moves_the_codes_of_lists(one):
    with opened(one, 1, pin_host_lists=4 << 20) as router, router.session() as session:
        session.lookahead(QUERIES[:2], nprobe=4).result(300)
        lists = router.residency.resident_lists(0)
        assert len(lists)
        geometry = router.devices[0].geometry
        assert geometry.rows_per_page % 16 == 0
        assert router.devices[0].moved_bytes == geometry.pages_for(one.list_sizes[lists]).sum() * geometry.page_bytes
        assert len(router.page_locked_lists) == NLIST
        assert (session.search(QUERIES[:2], 10, 4).hit_rate == 1).all()
        pages = router.residency.list_pages[lists[0]]
        held = router.devices[0].read_back(pages).result(300)
        codes = one.by_codes().stored_codes(lists[0])
        np.testing.assert_array_equal(held[: len(codes)], codes)


def test_arenas_hold_what_a_plan_of_codes_needs(one):
    everything = planned(one, np.zeros(NLIST))
    nothing = planned(one, np.full(NLIST, -1))
    with opened(one, 1, plan=nothing, lookahead_bytes=0) as router:
        assert router.devices[0].capacity_bytes == 0
        router.apply_plan(everything)
        assert router.stats().unplaced_lists == 0
        assert 0 < router.devices[0].capacity_bytes == router._served.opening.list_bytes[:NLIST].sum()
        assert (router.search(QUERIES, 10, 8).hit_rate == 1).all()
        router.apply_plan(nothing)
        assert router.devices[0].capacity_bytes == 0
        router.check_invariants()


def test_a_device_keeps_more_candidates_than_a_scan_of_rows_keeps_neighbours(one):
    everywhere = hand_made_plan(one.by_codes(), np.zeros(NLIST), budget=64 << 20)
    with (
        Router(one, precision="codes") as alone,
        opened(one, 1, plan=everywhere, device_budget_bytes=64 << 20) as router,
    ):
        found = router.search(QUERIES[:2], 10, NLIST, candidates=2900)
        assert differences(found, alone.search(QUERIES[:2], 10, NLIST, candidates=2900)) == 0
        assert router.stats().device_fallbacks == 0


# Damage


def test_copies_of_codes_are_no_copies_of_rows(one):
    everywhere = planned(one, np.zeros(NLIST))
    with opened(one, 1, plan=everywhere, pin_host_lists=4 << 20) as router:
        before = router.search(QUERIES, 10, 8)
        assert router.scrub().ok
        assert len(router.residency.resident_lists(0)) == NLIST
        assert router._served.scrub._copies.held(0, NLIST) == []
        damaged = int(np.argmax(one.list_sizes))
        assert router._served.scrub._copies.drop_damaged(damaged, suspect=True) == []
        assert len(router.residency.resident_lists(0)) == NLIST
        one.integrity.quarantine([damaged])
        try:
            with pytest.raises(CorruptIndexError, match=f"list {damaged}"):
                router.search(QUERIES, 10, NLIST)
        finally:
            one.integrity.lift([damaged])
        assert differences(router.search(QUERIES, 10, 8), before) == 0


# Which precision serves


def test_a_plan_is_of_rows_or_of_codes(one):
    rows = hand_made_plan(one, np.zeros(NLIST), budget=BUDGET)
    codes = planned(one, np.zeros(NLIST))
    with opened(one, 1, plan=rows, precision="auto") as router:
        assert router.precision == "rows: the index has codes, but the plan is of rows"
        assert router.index_fingerprint == one.fingerprint
        with pytest.raises(ProfileMismatchError, match="the plan is of codes, and rows are scanned"):
            router.apply_plan(codes)
    for precision in ("auto", "codes"):
        with opened(one, 1, plan=codes, precision=precision) as router:
            assert router.precision.startswith("codes: ")
            assert router.index_fingerprint == one.by_codes().fingerprint
            with pytest.raises(ProfileMismatchError, match="the plan is of rows, and codes are scanned"):
                router.apply_plan(rows)
    with pytest.raises(ProfileMismatchError, match="the plan is of rows, and codes are scanned"):
        opened(one, 1, plan=rows, precision="codes")
    with pytest.raises(ProfileMismatchError, match="the plan is of codes, and rows are scanned"):
        opened(one, 1, plan=codes, precision="rows")


def test_without_a_plan_devices_hold_codes_where_there_are_some(one):
    with opened(one, 1, precision="auto") as router:
        assert router.precision.startswith("codes: ")
        assert router.devices[0]._scanner_kind is NativeCodeScanner


def test_without_devices_a_plan_gives_nprobe_alone(one):
    rows = hand_made_plan(one, np.full(NLIST, -1))
    with Router(one, plan=rows) as router:
        assert router.precision.startswith("codes: ")
