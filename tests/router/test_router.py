"""The router: placement, swaps, lookahead and failures never change an answer; what it starts, it joins."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridindex.config import RouterConfig
from hybridindex.errors import (
    DeviceNotFoundError,
    HybridIndexError,
    InvalidInputError,
    OutOfBudgetError,
    ProfileMismatchError,
    RouterClosedError,
)
from hybridindex.index import codec
from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.router import Router, served
from hybridindex.router.devices.opening import device_budgets
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from tests.clustered import DIM, NLIST, clustered, hand_made_plan, page_bytes_of, small_index
from tests.examples import examples
from tests.oracle import check_answer
from tests.stuck import held_quantizer

CODECS = ["flat", "fp16", "sq8", "pq8", "pqfs12"]


@pytest.fixture(scope="module", params=[(c, m) for c in CODECS for m in ("ip", "l2")], ids="-".join)
def any_index(request, tmp_path_factory):
    codec, metric = request.param
    with small_index(tmp_path_factory.mktemp("idx") / "i", codec=codec, metric=metric) as index:
        yield index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def random_placement(rng, n_devices, fraction):
    placed = rng.random(NLIST) < fraction
    return np.where(placed, rng.integers(0, n_devices, NLIST), -1)


def check(index, queries, k, nprobe, result):
    transformed = index.transform(index.check_queries(queries))
    probes, _ = index.quantize(transformed, nprobe)
    check_answer(index, transformed, probes, k, result.distances, result.ids)
    assert (result.nprobe_used == nprobe).all()


def test_lists_of_the_host_are_read_into_memory_before_those_of_devices_hottest_first(index, monkeypatch):
    told = []
    read = served.warm_lists
    monkeypatch.setattr(served, "warm_lists", lambda *given: told.append(given) or read(*given))
    plan = hand_made_plan(index, random_placement(np.random.default_rng(3), 1, 0.4))
    with Router(index, plan=plan, devices=["cpu"], warm_bytes=4096) as router:
        queries = clustered(5, seed=4)
        check(index, queries, 5, 8, router.search(queries, 5))
    ((_, most_bytes, order),) = told
    assert most_bytes == 4096
    on_device, accesses = plan.list_device[order] >= 0, plan.analysis.profile.access.list_accesses[order]
    n_host = int((~on_device).sum())
    assert 0 < n_host < NLIST
    assert not on_device[:n_host].any()
    assert (np.diff(accesses[:n_host]) <= 0).all()
    assert (np.diff(accesses[n_host:]) <= 0).all()
    assert sorted(order) == list(range(NLIST))


@examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    fraction=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    n_devices=st.integers(1, 3),
    n=st.integers(1, 20),
    k=st.sampled_from([1, 10, 300]),
    nprobe=st.integers(1, NLIST),
)
def test_placement_never_changes_an_answer(any_index, seed, fraction, n_devices, n, k, nprobe):
    rng = np.random.default_rng(seed)
    plan = hand_made_plan(any_index, random_placement(rng, n_devices, fraction), n_devices=n_devices)
    queries = clustered(n, seed=seed)
    with Router(any_index, plan=plan, devices=["cpu"] * n_devices) as router:
        check(any_index, queries, k, nprobe, router.search(queries, k, nprobe))
        router.check_invariants()


def test_a_fast_scan_that_no_device_takes_equals_faiss_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 11)
    with small_index(tmp_path / "i", codec="pqfs12", metric="l2") as index:
        plan = hand_made_plan(index, np.zeros(NLIST))
        queries = clustered(16, seed=3)
        ivf = index.open_faiss()
        ivf.nprobe = 8
        expected_distances, expected = ivf.search(queries, 10)
        with Router(index, plan=plan, devices=["cpu"]) as router:
            result = router.search(queries, 10, 8)
            assert router.stats().unplaced_lists == NLIST
        np.testing.assert_array_equal(result.distances, expected_distances)
        for row in range(16):
            assert set(result.ids[row]) == set(expected[row])


def test_single_query_and_defaults(index):
    with Router(index) as router:
        result = router.search(clustered(1, seed=9)[0])
        assert result.ids.shape == result.distances.shape == (1, 10)
        check(index, clustered(1, seed=9), 10, 8, result)
        assert result.hit_rate.tolist() == [0.0]


def test_mixed_requests_share_a_batch_and_keep_their_own_k_and_nprobe(index, monkeypatch):
    """Requests queued while the engine is held must form one batch."""
    plan = hand_made_plan(index, random_placement(np.random.default_rng(1), 1, 0.5))
    with Router(index, plan=plan, devices=["cpu"]) as router:
        entered, resume = held_quantizer(index, monkeypatch)
        try:
            first = router.submit(clustered(1, seed=1), 5, 4)
            assert entered.wait(300)
            wanted = [(clustered(n, seed=n), k, p) for n, k, p in [(1, 3, 2), (7, 10, 8), (2, 40, 32), (30, 1, 5)]]
            futures = [router.submit(q, k, p) for q, k, p in wanted]
        finally:
            resume.set()
        first.result(300)
        for (queries, k, nprobe), future in zip(wanted, futures, strict=True):
            check(index, queries, k, nprobe, future.result(300))
        stats = router.stats()
        assert stats.batches == 2
        assert stats.largest_batch == 40
        assert stats.requests == 5


def test_batch_cap_is_kept_and_nothing_is_lost(index):
    with Router(index, max_batch=8) as router:
        futures = [router.submit(clustered(3, seed=i), 5, 4) for i in range(20)]
        for i, future in enumerate(futures):
            check(index, clustered(3, seed=i), 5, 4, future.result(300))
        assert router.stats().largest_batch <= 8


def test_asearch_shares_batches(index):
    async def many(router):
        return await asyncio.gather(*(router.asearch(clustered(1, seed=i), 5) for i in range(30)))

    with Router(index) as router:
        for i, result in enumerate(asyncio.run(many(router))):
            check(index, clustered(1, seed=i), 5, 8, result)


@pytest.mark.parametrize("cache_fraction", [0.0, 0.3])
def test_answers_stay_right_while_snapshots_swap_under_load(index, cache_fraction):
    rng = np.random.default_rng(4)
    plans = [hand_made_plan(index, random_placement(rng, 2, f), n_devices=2) for f in (0.1, 0.5, 0.9, 0.4)]
    failures: list[BaseException] = []
    stop = threading.Event()
    with Router(index, plan=plans[0], devices=["cpu", "cpu"], cache_fraction=cache_fraction) as router:

        def client(seed):
            try:
                while not stop.is_set():
                    queries = clustered(5, seed=seed)
                    check(index, queries, 10, 8, router.search(queries, 10, 8))
                    with router.session() as session:
                        session.lookahead(queries, nprobe=12)
                        check(index, queries, 10, 16, session.search(queries, 10, 16))
                    seed += 10
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                failures.append(error)

        clients = [threading.Thread(target=client, args=(i,)) for i in range(3)]
        for thread in clients:
            thread.start()
        for turn in range(40):
            router.apply_plan(plans[turn % 4])
            router.check_invariants()
        stop.set()
        for thread in clients:
            thread.join()
        assert failures == []
        router.apply_plan(plans[1])
        planned = plans[1].list_device >= 0
        device = router.residency.list_device
        np.testing.assert_array_equal(device[planned & (index.list_sizes > 0)], plans[1].list_device[planned])
        assert (device[~planned] >= 0).sum() == router.stats().cached_lists
        assert cache_fraction or not router.stats().cached_lists
        for tier in router.devices:
            resident = router.residency.resident_lists(tier.ordinal)
            used = int(tier.geometry.pages_for(index.list_sizes[resident]).sum()) * tier.geometry.page_bytes
            assert tier.used_bytes == used


def test_plan_change_moves_only_the_difference(index):
    first, second = np.full(NLIST, -1), np.full(NLIST, -1)
    first[:10], second[5:12] = 0, 0
    with Router(index, plan=hand_made_plan(index, first), devices=["cpu"]) as router:
        [tier], before, moved = router.devices, router.residency, router.devices[0].moved_bytes
        router.apply_plan(hand_made_plan(index, second))
        after = router.residency
        assert after.resident_lists().tolist() == list(range(5, 12))
        assert all(after.holds(i, 0, before.list_pages[i]) for i in range(5, 10))
        n_pages = tier.geometry.pages_for(index.list_sizes[[10, 11]]).sum()
        assert tier.moved_bytes - moved == n_pages * tier.geometry.page_bytes


def test_an_arena_is_no_larger_than_the_index(index):
    options = {"device_budget_bytes": 256 << 20, "lookahead_bytes": 128 << 20}
    where = np.full(NLIST, -1)
    where[:5] = 0
    for plan in (None, hand_made_plan(index, where, budget=256 << 20)):
        with Router(index, plan=plan, devices=["cpu"], **options) as router:
            [tier] = router.devices
            assert tier.capacity_bytes == tier.geometry.pages_for(index.list_sizes).sum() * tier.geometry.page_bytes


def test_one_gpu_may_have_several_arenas():
    assert device_budgets(None, RouterConfig(devices=("cuda:0", "cuda"), device_budget_bytes=(5, 6))) == (5, 6)


# Failures


def test_failed_device_degrades_to_the_host_and_is_counted(index, monkeypatch, caplog):
    def broken(self, *args, **kwargs):
        raise RuntimeError("the device fell off the bus")

    plan = hand_made_plan(index, np.zeros(NLIST))
    queries = clustered(12, seed=2)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        assert router.search(queries, 10, 8).hit_rate.min() == 1.0
        monkeypatch.setattr(NativePageScanner, "scan", broken)
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        monkeypatch.undo()
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        stats = router.stats()
        assert stats.device_fallbacks == 1
        assert stats.host_work_bytes == 2 * stats.device_work_bytes > 0, "two of three searches were the host's"
        assert router.residency.n_resident == 0
        assert not router.devices[0].usable
        assert caplog.text.count("fell off the bus") == 1
        assert router.devices[0].recover().result(300)
        router.apply_plan(plan)
        assert router.search(queries, 10, 8).hit_rate.min() == 1.0


def test_a_scan_without_memory_is_the_host_s_and_the_lists_stay(index, monkeypatch, caplog):
    plan = hand_made_plan(index, np.zeros(NLIST))
    queries = clustered(12, seed=2)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        fallen = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no page-locked memory")]
        for error in (*fallen, None):

            def short(*_, error=error):
                if error is None:
                    torch.empty(1 << 50, dtype=torch.uint8)
                raise error

            monkeypatch.setattr(NativePageScanner, "scan", short)
            check(index, queries, 10, 8, router.search(queries, 10, 8))
            monkeypatch.undo()
            assert router.search(queries, 10, 8).hit_rate.min() == 1.0
        stats = router.stats()
        assert (stats.device_failures, stats.device_fallbacks, router.devices[0].failure) == (0, 3, None)
        assert caplog.text.count("had no memory for a scan") == 1


def test_a_scratch_that_has_no_room_is_told(index, monkeypatch, caplog):
    def short(*_):
        raise OutOfBudgetError("no room for scratch") from torch.OutOfMemoryError("CUDA out of memory")

    queries = clustered(12, seed=2)
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"]) as router:
        monkeypatch.setattr(NativePageScanner, "scan", short)
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        assert (router.stats().device_failures, router.stats().device_fallbacks) == (0, 1)
    assert caplog.text.count("no room for scratch") == 1


def test_a_device_that_works_again_gets_its_lists_back(index, monkeypatch):
    plan = hand_made_plan(index, np.zeros(NLIST))
    queries = clustered(12, seed=2)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        tier = router.devices[0]
        tier.fail(RuntimeError("the device fell off the bus"))
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        assert router.residency.n_resident == 0
        monkeypatch.setattr(tier, "retry_due", lambda now: tier.failure is not None)
        router._served.recovery.try_failed()
        assert router.search(queries, 10, 8).hit_rate.min() == 1.0
        assert (router.stats().device_failures, router.stats().device_recoveries) == (1, 1)


def test_copy_that_fails_loses_nothing(index, monkeypatch):
    from hybridindex.tiers.paged.arena import PageArena

    def broken(self, pages, codes):
        raise RuntimeError("copy failed")

    monkeypatch.setattr(PageArena, "write", broken)
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"]) as router:
        check(index, clustered(4), 10, 8, router.search(clustered(4), 10, 8))
        assert router.devices[0].used_bytes == 0
        assert router.stats().unplaced_lists == (index.list_sizes > 0).sum()


def test_host_scan_error_reaches_the_caller_and_the_router_goes_on(index, monkeypatch):
    from hybridindex.tiers.host.native_scanner import HostNativeScanner

    with Router(index) as router:
        with monkeypatch.context() as patch:
            patch.setattr(
                HostNativeScanner, "scan_checked", lambda *a, **k: (_ for _ in ()).throw(MemoryError("no room"))
            )
            with pytest.raises(MemoryError):
                router.search(clustered(2))
        check(index, clustered(2), 10, 8, router.search(clustered(2), 10, 8))


def test_close_joins_every_thread_and_answers_what_waits(index):
    before = set(threading.enumerate())
    router = Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"])
    futures = [router.submit(clustered(2, seed=i), 5, 8) for i in range(50)]
    router.close()
    router.close()
    assert set(threading.enumerate()) <= before
    for i, future in enumerate(futures):
        check(index, clustered(2, seed=i), 5, 8, future.result(0))
    with pytest.raises(RouterClosedError):
        router.search(clustered(1))
    with pytest.raises(RouterClosedError):
        router.session()


# Budgets


def test_budget_below_one_page_means_host_only_and_is_counted(index):
    plan = hand_made_plan(index, np.zeros(NLIST), budget=1000)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        check(index, clustered(3), 10, 8, router.search(clustered(3), 10, 8))
        assert router.stats().unplaced_lists == (index.list_sizes > 0).sum()
        assert router.devices[0].arena.nbytes == 0
        assert "below one page" in router.devices[0].disabled_reason


def test_huge_budget_allocates_only_what_is_needed(index):
    plan = hand_made_plan(index, np.zeros(NLIST), budget=1 << 50)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        page_bytes = router.devices[0].geometry.page_bytes
        assert router.devices[0].arena.nbytes <= (index.list_bytes + page_bytes).sum()
        assert router.search(clustered(3)).hit_rate.min() == 1.0


def test_k_too_large_for_the_scratch_falls_back_without_failing_the_device(index):
    page = page_bytes_of(index, DEFAULT_PAGE_BYTES)
    plan = hand_made_plan(index, np.zeros(NLIST), budget=3 * page)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        assert router.residency.n_resident > 0
        check(index, clustered(3), 2048, NLIST, router.search(clustered(3), 2048, NLIST))
        assert router.stats().device_fallbacks == 1
        assert router.devices[0].usable
        assert router.search(clustered(3), 5, NLIST).hit_rate.min() > 0
        assert router.stats().device_fallbacks == 1


# Deadlines


def test_deadline_lowers_nprobe_to_the_floor_and_says_so(index):
    queries = clustered(3, seed=5)
    with Router(index) as router:
        router._served.engine._host_parts._pace.observe(1, 3600.0)  # a host so slow that nothing fits
        result = router.search(queries, 5, 16, deadline_ms=50, min_nprobe=3)
        assert (result.nprobe_used == 3).all()
        check(index, queries, 5, 3, result)
        assert router.stats().nprobe_lowered == 1
        assert (router.search(queries, 5, 16).nprobe_used == 16).all()


def test_generous_deadline_changes_nothing(index):
    with Router(index) as router:
        router.search(clustered(3), 5, 16)
        assert (router.search(clustered(3), 5, 16, deadline_ms=60_000).nprobe_used == 16).all()


def test_a_deadline_foretells_what_surrounds_the_scan(index, monkeypatch):
    from hybridindex.router import direct, engine

    split = engine.split_probes

    def slow(*given):
        time.sleep(0.05)
        return split(*given)

    with Router(index) as router:
        for room in (engine, direct):
            monkeypatch.setattr(room, "split_probes", slow)
        for _ in range(3):
            router.search(clustered(3), 5, 16)
        assert router.search(clustered(3), 5, 16, deadline_ms=30).nprobe_used.max() < 16


# Bad input

BAD_CALLS = [
    ({"queries": np.zeros((2, DIM + 1), np.float32)}, f"(n, {DIM})"),
    ({"queries": np.zeros((2, DIM))}, "float64"),
    ({"queries": np.zeros((2, 2, DIM), np.float32)}, "shape"),
    ({"queries": np.full((1, DIM), np.nan, np.float32)}, "NaN"),
    ({"queries": np.full((1, DIM), np.inf, np.float32)}, "infinity"),
    ({"queries": np.zeros((0, DIM), np.float32)}, "0 rows"),
    ({"queries": [[0.0] * DIM]}, "list"),
    ({"k": 0}, "k is 0"),
    ({"k": -1}, "k is -1"),
    ({"k": 2049}, "2048"),
    ({"k": 2.0}, "integer"),
    ({"k": True}, "integer"),
    ({"nprobe": 0}, f"nprobe is 0; expected 1..{NLIST}"),
    ({"nprobe": NLIST + 1}, f"nprobe is {NLIST + 1}; expected 1..{NLIST}"),
    ({"nprobe": 2.0}, "nprobe is 2.0; expected an integer"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"deadline_ms": float("nan")}, "deadline_ms"),
    ({"deadline_ms": 10, "min_nprobe": 0}, f"min_nprobe is 0; expected 1..{NLIST}"),
]


@pytest.mark.parametrize(("change", "words"), BAD_CALLS)
def test_bad_search_input_is_named_and_harmless(index, change, words):
    with Router(index) as router:
        with pytest.raises(InvalidInputError) as raised:
            router.search(**{"queries": clustered(1), **change})
        assert words in str(raised.value)
        check(index, clustered(1), 10, 8, router.search(clustered(1), 10, 8))


def test_bad_construction(index):
    plan = hand_made_plan(index, np.full(NLIST, -1))
    foreign = hand_made_plan(index, np.full(NLIST, -1))
    foreign.index_fingerprint = "another"
    before = set(threading.enumerate())
    for error, options, words in [
        (DeviceNotFoundError, {"devices": ["gpu"], "device_budget_bytes": 1}, "cuda:N"),
        (DeviceNotFoundError, {"devices": ["cuda:99"], "device_budget_bytes": 1}, "cuda:99"),
        (InvalidInputError, {"devices": "cpu"}, "list"),
        (InvalidInputError, {"devices": ["cpu"]}, "device_budget_bytes is missing"),
        (InvalidInputError, {"devices": ["cpu"], "device_budget_bytes": -1}, "0 or more"),
        (InvalidInputError, {"devices": ["cpu"], "device_budget_bytes": (1, 2)}, "2 entries"),
        (InvalidInputError, {"devices": ["cpu", "cpu"], "plan": plan}, "1 device"),
        (InvalidInputError, {"max_batch": 0}, "max_batch"),
        (InvalidInputError, {"threads": 0}, "threads"),
        (ProfileMismatchError, {"plan": foreign}, "another"),
    ]:
        with pytest.raises(error) as raised:
            Router(index, **options)
        assert words in str(raised.value)
        assert isinstance(raised.value, HybridIndexError)
    assert set(threading.enumerate()) <= before
