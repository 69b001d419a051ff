"""Routers change to the next generation of their index while they serve: answers, sessions, filters, devices, ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import InvalidInputError, ProfileError, RouterClosedError
from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.plans.following import plan_of_heir
from hybridindex.router import served as served_module
from hybridindex.router.devices import opening
from tests.clustered import NLIST, clustered, hand_made_plan, plan_in_pages, share_of_ids, small_index
from tests.index.changes.truth import Truth
from tests.router.test_router import check

WAIT_S = 300
MORE = clustered(4000, seed=77, offset=0.5)


@pytest.fixture
def index(tmp_path):
    """Beside it, what it holds."""
    with small_index(tmp_path / "i") as built:
        truth = Truth(built)
        with hx.open(tmp_path / "i") as opened:
            yield opened, truth


def plan_of(ivf, share=0.6):
    placement = np.full(ivf.nlist, -1)
    placement[np.argsort(-ivf.list_sizes, kind="stable")[: round(share * ivf.nlist)]] = 0
    return hand_made_plan(ivf, placement)


def change(index, truth, turn):
    """A third of the rows."""
    new = MORE[turn * 1000 : (turn + 1) * 1000]
    truth.add(new, index.add(new))
    gone = np.array(sorted(truth.rows))[turn::4][:900]
    truth.delete(gone)
    index.delete(gone)


def everything(router):
    """A number of lists that holds in all generations."""
    return max(NLIST, router.index.nlist)


@pytest.mark.parametrize("devices", [(), ("cpu",), ("cpu", "cpu")], ids=["host", "device", "devices"])
def test_answers_are_those_of_all_rows_before_while_and_after(index, devices):
    """Every way to search, from several threads, through three compactions."""
    index, truth = index
    wrong, done, stop = [], [0], threading.Event()
    options = {"devices": devices, "device_budget_bytes": 4 << 20} if devices else {"devices": ()}
    with index.router(**options) as router, router.session() as session:

        async def search_asynchronously(of, queries, nprobe):
            return await of.asearch(queries, 10, nprobe)

        def load(number):
            seed = 1000 * number
            try:
                while not stop.is_set():
                    seed += 1
                    queries, nprobe = clustered(2, seed=seed), everything(router)
                    of = (router, session)[seed % 2]
                    session.lookahead(queries, nprobe=4)
                    match seed % 3:
                        case 0:
                            found = of.search(queries, 10, nprobe)
                        case 1:
                            found = of.submit(queries, 10, nprobe).result(WAIT_S)
                        case 2:
                            found = asyncio.run(search_asynchronously(of, queries, nprobe))
                    # Rows change only between compactions, and nobody searches then.
                    truth.check(queries, 10, found)
                    done[0] += 1
            except BaseException as error:
                wrong.append(error)
                raise

        for turn in range(3):
            change(index, truth, turn)
            threads = [threading.Thread(target=load, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            index.compact()
            before = done[0]
            while done[0] < before + 6 and not wrong:
                time.sleep(0.01)
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
            stop.clear()
            assert not wrong
            assert router.index.generation == index.ivf.generation == turn + 2
            assert len(router.devices) == len(devices)
            router.check_invariants()
        if devices:
            session.lookahead(clustered(2, seed=5), nprobe=4).result(WAIT_S)
            assert session.stats.lookaheads > 1
            assert router.residency.resident_lists().size
        assert router.stats().requests >= done[0]


def test_a_plan_and_its_heir_have_the_pages_of_the_arenas_that_are_opened_with_them(tmp_path):
    """And no byte of the budget to spare: an arena of other pages than its plan's would leave lists without room."""
    with hx.build(clustered(6000, seed=1), tmp_path / "i", nlist=64, metric="l2") as index:
        profile = index.profile(clustered(400, seed=3), nprobe=8, devices=["cpu"], max_seconds=1)
        budget = 2 * int(index.list_bytes.sum())
        early = plan_in_pages(index, profile, DEFAULT_PAGE_BYTES, budget, 1.0)
        with index.router(early, devices=["cpu"], lookahead_bytes=0) as router:
            for turn in range(3):
                plan, [tier] = router.plan, router.devices
                assert router.page_bytes == plan.request.page_bytes
                assert tier.geometry.page_bytes == plan.page_bytes
                # Of an heir they fit its lists, as of any plan that is made for devices to be opened.
                assert (router.page_bytes == DEFAULT_PAGE_BYTES) == (turn == 0)
                assert router.stats().unplaced_lists == 0 < router.residency.n_resident
                assert tier.arena.nbytes + tier.scratch_bytes <= budget
                queries = clustered(8, seed=turn)
                check(router.index, queries, 10, 8, router.search(queries, 10, 8))
                index.delete(share_of_ids(0.3, seed=turn, n=6000))
                index.add(clustered(500, seed=20 + turn))
                index.compact()


def test_the_plan_s_heir_decides_what_devices_hold(tmp_path):
    """Without devices' lists there would be no hits."""
    with hx.build(clustered(6000, seed=1), tmp_path / "i", nlist=64, metric="l2") as index:
        profile = index.profile(clustered(400, seed=3), nprobe=8, devices=["cpu"], max_seconds=2)
        plan = index.plan(50.0, 8 << 20, profile, coverage=0.5)
        with index.router(plan, devices=["cpu"]) as router, index.router(plan, devices=["cpu"], follow=False) as other:
            assert router.search(clustered(4, seed=9)).hit_rate.mean() > 0.2
            index.delete(share_of_ids(0.4, n=6000))
            index.compact()
            assert router.plan.index_fingerprint == router.index_fingerprint == index.fingerprint
            assert router.plan.request.coverage == 0.5
            resident = set(router.residency.resident_lists().tolist())
            assert resident >= set(router.plan.resident_lists.tolist()) != set()
            assert router.search(clustered(4, seed=9)).hit_rate.mean() > 0.2
            index.delete(share_of_ids(0.2, seed=1, n=6000))
            index.compact()
            assert router.plan.index_fingerprint == index.fingerprint
            # Whoever missed a generation has the profile that is stored, if one is.
            with index.store() as store:
                made = plan_of_heir(index.ivf, plan, store)
            assert made.index_fingerprint == index.fingerprint
            with pytest.raises(ProfileError, match="no profile of this index's rows is stored"):
                plan_of_heir(index.ivf, plan, None)
            # Who keeps what he has sees all changes.
            assert other.plan is plan
            assert other.index.generation == 1
            np.testing.assert_array_equal(
                np.sort(other.search(clustered(4, seed=9), 10, 64).ids),
                np.sort(router.search(clustered(4, seed=9), 10, 64).ids),
            )


def test_without_a_plan_for_its_devices_a_router_serves_on(index, caplog):
    """A plan whose profile is not that of the index."""
    index, truth = index
    plan = plan_of(index.ivf)
    profile = plan.analysis.profile
    profile.notes, profile.index_fingerprint, profile.scanner = {}, "another", "native"
    plan.request.row_cache_bytes = None
    with index.router(plan, devices=["cpu"]) as router:
        change(index, truth, 0)
        index.compact()
        assert router.index.generation == 1
        assert "does not serve generation 2" in caplog.text
        queries = clustered(3, seed=8)
        truth.check(queries, 10, router.search(queries, 10, NLIST))
        assert router.residency.resident_lists().size


def test_filters_and_lists_of_before_are_still_good(index):
    index, truth = index
    with index.router(devices=()) as router:
        wanted = np.array(sorted(truth.rows))[::3]
        row_filter = router.filter(allow_ids=wanted)
        change(index, truth, 0)
        index.compact()
        queries = clustered(3, seed=8)
        truth.check(queries, 10, router.search(queries, 10, NLIST, row_filter=row_filter), wanted)
        with pytest.raises(InvalidInputError, match="nprobe"):
            router.search(queries, 10, max(NLIST, router.index.nlist) + 1)


def test_a_search_may_ask_for_as_many_lists_as_there_were(index):
    """Lists that lost all rows are gone."""
    index, truth = index
    with index.router(devices=()) as router, router.session() as session:
        gone = np.concatenate([index.ivf.list_ids(i) for i in range(0, NLIST, 2)])
        truth.delete(gone)
        index.delete(gone)
        index.compact()
        assert router.index.nlist < NLIST
        queries = clustered(3, seed=8)
        for of in (router, session):
            found = of.search(queries, 10, NLIST)
            truth.check(queries, 10, found)
            assert (found.nprobe_used == router.index.nlist).all()
        session.lookahead(queries, nprobe=NLIST).result(WAIT_S)


def test_a_device_that_does_not_open_leaves_the_host_until_the_next_try(index, monkeypatch, caplog):
    index, truth = index
    with index.router(devices=["cpu"], device_budget_bytes=4 << 20) as router:
        change(index, truth, 0)
        monkeypatch.setattr(opening.TierOpening, "open", lambda *_: 1 / 0)
        index.compact()
        assert (router.index.generation, router.devices) == (2, ())
        assert "ZeroDivisionError" in caplog.text
        queries = clustered(3, seed=8)
        truth.check(queries, 10, router.search(queries, 10, NLIST))
        monkeypatch.undo()
        index._following.look()
        assert router.devices == ()  # not before its time
        index._following._routers[router] = 0.0
        index._following.look()
        assert len(router.devices) == 1
        truth.check(queries, 10, router.search(queries, 10, NLIST))


def test_what_another_process_compacted_is_served_before_long(index, tmp_path):
    index, truth = index
    with index.router(devices=()) as router, hx.open(tmp_path / "i", write=True) as writer:
        change(writer, truth, 0)
        # As if it were another process: nobody tells this one.
        writer.compact()
        ends = time.monotonic() + WAIT_S
        while router.index.generation == 1 and time.monotonic() < ends:
            time.sleep(0.05)
        assert router.index.generation == 2
        truth.check(clustered(3, seed=8), 10, router.search(clustered(3, seed=8), 10, everything(router)))


@pytest.mark.parametrize("how", ["close", "settle"])
def test_a_router_that_ends_meanwhile_does_not_follow(index, monkeypatch, how):
    index, truth = index
    change(index, truth, 0)
    router = index.router(devices=(), follow=False)
    opened, going = threading.Event(), threading.Event()
    start = served_module.Served.start

    def late(self):
        opened.set()
        assert going.wait(WAIT_S)
        start(self)

    index.compact()
    monkeypatch.setattr(served_module.Served, "start", late)
    errors = []

    def follow():
        try:
            router.follow(index.ivf)
        except RouterClosedError as error:
            errors.append(error)

    following = threading.Thread(target=follow)
    following.start()
    assert opened.wait(WAIT_S)
    ending = threading.Thread(target=getattr(router, how))
    ending.start()
    going.set()
    following.join(WAIT_S)
    ending.join(WAIT_S)
    assert not following.is_alive()
    assert not ending.is_alive()
    with pytest.raises(RouterClosedError):
        router.follow(index.ivf)
    router.close()
    with pytest.raises(RouterClosedError):
        router.search(clustered(1))
    assert not [t for t in threading.enumerate() if t.name.startswith("hybridindex-engine")]


def test_another_index_is_refused(index, tmp_path):
    index, _ = index
    with (
        small_index(tmp_path / "other", dim=16) as other,
        index.router(devices=()) as router,
        pytest.raises(InvalidInputError, match="dim of the other generation is 16; this router answers 24"),
    ):
        router.follow(other)


def test_threads_and_memory_of_generations_before_are_given_back(index):
    index, truth = index
    with index.router(devices=["cpu"], device_budget_bytes=4 << 20) as router:
        router.search(clustered(2))
        index._following.look()
        before = sorted(t.name for t in threading.enumerate())
        for turn in range(3):
            change(index, truth, turn)
            index.compact()
            router.search(clustered(2))
            assert sorted(t.name for t in threading.enumerate()) == before
            assert router.devices[0].used_bytes <= 4 << 20


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["host", "device"])
def test_a_generation_that_serves_no_more_is_gone_at_once(index, devices):
    """Writers tell all open generations of their changes."""
    index, truth = index
    options = {"devices": devices, "device_budget_bytes": 4 << 20} if devices else {"devices": ()}
    gc.collect()
    gc.disable()
    try:
        with index.router(**options) as router, router.session() as session:
            session.search(clustered(2), 5)
            session.lookahead(clustered(2)).result(WAIT_S)
            served = weakref.ref(router._served)
            before = weakref.ref(index.ivf)
            change(index, truth, 0)
            index.compact()
            session.search(clustered(2), 5)
            # Threads that have ended may still be on their way out.
            ends = time.monotonic() + WAIT_S
            while (served() or before()) and time.monotonic() < ends:
                time.sleep(0.01)
            assert served() is None
            assert before() is None
    finally:
        gc.enable()


def test_callbacks_on_the_routers_own_threads_wait_for_nobody(index):
    """Who answers is what a follow waits for."""
    index, truth = index
    told = []

    def back(_):
        index._following.look()
        with index.router(devices=()) as other:
            told.append(other.index.generation)

    with index.router(devices=["cpu"], device_budget_bytes=4 << 20) as router:
        for turn in range(2):
            change(index, truth, turn)
            futures = [router.submit(clustered(2), 5) for _ in range(20)]
            for future in futures:
                future.add_done_callback(back)
            compacting = threading.Thread(target=index.compact)
            compacting.start()
            compacting.join(WAIT_S)
            assert not compacting.is_alive()
            for future in futures:
                future.result(WAIT_S)
        assert router.index.generation == 3
    assert told


def test_a_plan_in_force_is_inherited_by_whoever_follows(index):
    index, _ = index
    with index.router(plan_router_like(index), devices=["cpu"], follow=False) as router:
        other = plan_router_like(index, 0.3)
        router.apply_plan(other)
        seen = []

        def heir(plan):
            seen.append(plan)
            return plan_of(index.ivf, 0.2)

        index.delete([1, 2, 3])
        index.compact()
        router.follow(index.ivf, heir_of=heir)
        assert seen == [other]
        assert router.residency.resident_lists().size
        router.check_invariants()


def plan_router_like(index, share=0.6):
    plan = plan_of(index.ivf, share)
    plan.analysis.profile.scanner, plan.request.row_cache_bytes = "native", None
    return plan
