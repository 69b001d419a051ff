"""What must not stop the router or change an answer: callbacks, reused buffers, dying scans, plans under traffic."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, RouterError
from hybridindex.index import build
from hybridindex.router import Router
from hybridindex.router.batch.batch import Batch
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from tests.clustered import NLIST, clustered, hand_made_plan, page_bytes_of, small_index
from tests.router.test_router import check

WAIT_S = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def everything(index):
    return hand_made_plan(index, np.zeros(NLIST))


def test_a_scan_that_cannot_be_merged_fails_its_batch_alone(index, monkeypatch):
    complete, failures = Batch.complete_part, iter([MemoryError("no room")])

    def broken(self, *args):
        error = next(failures, None)
        if error is not None:
            raise error
        complete(self, *args)

    monkeypatch.setattr(Batch, "complete_part", broken)
    with Router(index, plan=everything(index), devices=["cpu"]) as router:
        with pytest.raises(MemoryError):
            router.submit(clustered(2)).result(WAIT_S)
        check(index, clustered(2), 10, 8, router.submit(clustered(2)).result(WAIT_S))


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)])
def test_a_callback_that_raises_stops_nobody(index, error, monkeypatch):
    def raising(_future):
        raise error

    with Router(index) as router:
        entered, resume = threading.Event(), threading.Event()
        quantize = index.quantize

        def held(queries, nprobe, *pool):
            entered.set()
            assert resume.wait(WAIT_S)
            return quantize(queries, nprobe, *pool)

        monkeypatch.setattr(index, "quantize", held)
        future = router.submit(clustered(1))
        assert entered.wait(WAIT_S)
        future.add_done_callback(raising)
        resume.set()
        future.result(WAIT_S)
        check(index, clustered(2), 10, 8, router.submit(clustered(2)).result(WAIT_S))


def test_waiting_on_the_routers_own_thread_is_refused(index):
    seen = []

    def reenter(call):
        try:
            call()
        except RouterError as error:
            seen.append(str(error))

    with Router(index, plan=everything(index), devices=["cpu"]) as router:
        for call in (lambda: router.search(clustered(1)), router.close, lambda: router.apply_plan(everything(index))):
            done = threading.Event()

            def on_probes(_probes, call=call, done=done):
                reenter(call)
                done.set()

            router.submit(clustered(1), on_probes=on_probes).result(WAIT_S)
            assert done.wait(WAIT_S)
        assert [text.split()[0] for text in seen] == ["search", "close", "apply_plan"]
        check(index, clustered(2), 10, 8, router.search(clustered(2)))


def test_one_callers_probe_callback_neither_fails_nor_changes_others(index):
    def spoil(probes):
        probes[:] = -1
        raise RuntimeError("mine alone")

    with Router(index) as router:
        check(index, clustered(2), 10, 8, router.submit(clustered(2), on_probes=spoil).result(WAIT_S))


@pytest.mark.parametrize("given", [lambda a: a, lambda a: a[:]], ids=["array", "view"])
def test_a_buffer_may_be_reused_as_soon_as_submit_returned(index, monkeypatch, given):
    entered, resume = threading.Event(), threading.Event()
    quantize = index.quantize

    def held(queries, nprobe, *pool):
        entered.set()
        assert resume.wait(WAIT_S)
        return quantize(queries, nprobe, *pool)

    queries = clustered(3, seed=4)
    buffer = queries.copy()
    with Router(index) as router:
        monkeypatch.setattr(index, "quantize", held)
        future = router.submit(given(buffer))
        assert entered.wait(WAIT_S)
        buffer[:] = np.nan
        resume.set()
        result = future.result(WAIT_S)
        monkeypatch.undo()
        check(index, queries, 10, 8, result)


def test_a_plan_change_waits_for_the_pages_of_the_old_one(index):
    """Two disjoint halves in an arena that holds only one of them, under a lease on the old one."""
    sizes = index.list_sizes
    first = np.where(np.arange(NLIST) < NLIST // 2, 0, -1)
    second = np.where(np.arange(NLIST) < NLIST // 2, -1, 0)
    if sizes[: NLIST // 2].sum() < sizes[NLIST // 2 :].sum():
        first, second = second, first
    with Router(index, plan=hand_made_plan(index, first), devices=["cpu"], lookahead_bytes=0) as router:
        lease = router._served.residency.lease()
        planner = threading.Thread(target=router.apply_plan, args=(hand_made_plan(index, second),))
        planner.start()
        planner.join(0.2)
        assert planner.is_alive()
        lease.release()
        planner.join(WAIT_S)
        page = router.devices[0].geometry
        fits = page.pages_for(sizes[second == 0]).sum() <= page.pages_for(sizes[first == 0]).sum()
        assert (router.stats().unplaced_lists == 0) == fits


def test_applying_the_same_plan_leaves_sessions_alone(index):
    nothing = hand_made_plan(index, np.full(NLIST, -1))
    with Router(index, plan=nothing, devices=["cpu"]) as router, router.session() as session:
        session.lookahead(clustered(1, seed=7)).result(WAIT_S)
        held = router.residency.n_resident
        router.apply_plan(nothing)
        assert router.residency.n_resident == held > 0


def test_rounds_of_a_session_share_its_budget(index):
    page = page_bytes_of(index)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        session = router.session(lookahead_bytes=4 * page)
        for seed in range(6):
            session.lookahead(clustered(2, seed=seed), nprobe=NLIST).result(WAIT_S)
        assert 0 < router.devices[0].used_bytes <= 4 * page


def test_a_dropped_session_gives_its_pages_back(index):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=0) as router:
        session = router.session()
        session.lookahead(clustered(1, seed=7)).result(WAIT_S)
        assert router.residency.n_resident > 0
        del session
        gc.collect()
        with router.session() as later:  # comes after the dropped one in the queue
            later.lookahead(clustered(1), budget_bytes=0).result(WAIT_S)
        assert router.residency.n_resident == 0


def test_a_session_collected_while_lookahead_works_stops_nothing(index):
    """A collector may run anywhere, also in the thread that holds the lock which ending a session takes."""
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        cycle = [router.session()]
        cycle.append(cycle)
        with router._served.lookahead._lock:
            del cycle
            gc.collect()
        check(index, clustered(3), 10, 8, router.search(clustered(3)))


def test_a_closed_router_keeps_no_arena(index):
    router = Router(index, plan=everything(index), devices=["cpu"])
    arena = weakref.ref(router.devices[0].arena.data)
    router.close()
    assert arena() is None


@pytest.mark.parametrize("scanner", [NativePageScanner, TorchScanner])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_overflow_is_no_candidate_on_any_tier(tmp_path, monkeypatch, scanner, metric):
    """Halves that became infinite: every tier answers like the host."""
    monkeypatch.setattr(NativePageScanner, "supports", staticmethod(lambda *_: scanner is NativePageScanner))
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((300, 8)).astype(np.float32)
    with build(vectors, tmp_path / "i", nlist=1, metric=metric, codec="fp16", nprobe=1) as index:
        codes = index.list_codes(0).view(np.float16)
        spoiled = np.array(codes)
        spoiled[:40] = np.inf
        spoiled[40:60] = -np.inf
        spoiled[60:70, 0] = np.nan
        queries = rng.standard_normal((6, 8)).astype(np.float32)
        monkeypatch.setattr(index, "list_codes", lambda _l: spoiled.view(np.uint8))
        plan = hand_made_plan(index, np.zeros(1))
        with Router(index, plan=plan, devices=["cpu"]) as router:
            result = router.search(queries, 100, 1)
    decoded = spoiled.astype(np.float32)
    with np.errstate(all="ignore"):
        exact = queries @ decoded.T if metric == "ip" else ((queries[:, None] - decoded) ** 2).sum(axis=2)
    for row in range(6):
        possible = exact[row] > -np.inf if metric == "ip" else exact[row] < np.inf
        possible &= ~np.isnan(exact[row])
        ranked = np.argsort(-exact[row] if metric == "ip" else exact[row], kind="stable")
        wanted = [i for i in ranked if possible[i]][:100]
        assert not np.isnan(result.distances[row]).any()
        np.testing.assert_allclose(result.distances[row, : len(wanted)], exact[row, wanted], rtol=1e-3, atol=1e-3)


def test_numpy_integers_are_integers(index):
    with Router(index, threads=np.int64(2), max_batch=np.int64(64)) as router:
        check(index, clustered(2), 3, 5, router.search(clustered(2), k=np.int64(3), nprobe=np.int32(5)))
    with Router(index, devices=["cpu"], device_budget_bytes=np.int64(8 << 20)) as router:
        assert router.devices[0].budget_bytes == 8 << 20


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1.5},
        {"max_batch": 1.5},
        {"devices": None},
        {"devices": [0]},
        {"devices": ["cuda:0", "cuda"], "device_budget_bytes": [1]},
        {"devices": ["cpu"], "device_budget_bytes": 1.5},
        {"devices": ["cpu"], "device_budget_bytes": "1"},
        {"devices": ["cpu"], "device_budget_bytes": [float("nan")]},
        {"devices": ["cpu"], "device_budget_bytes": 1 << 20, "lookahead_bytes": -1},
    ],
)
def test_odd_options_are_named(index, options):
    with pytest.raises(InvalidInputError):
        Router(index, **options)


@pytest.mark.parametrize("change", [{"deadline_ms": "5"}, {"deadline_ms": True}, {"min_nprobe": -1}])
def test_odd_search_arguments_are_named(index, change):
    with Router(index) as router, pytest.raises(InvalidInputError):
        router.search(clustered(1), **change)
