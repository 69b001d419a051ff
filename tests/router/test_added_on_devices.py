"""Added rows in the memory of devices: the same answers as on the host alone, in lists that grow."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.router import Router
from hybridindex.router.devices.added_on_devices import AddedOnDevices
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.paged.copier import Copier
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.coded import with_codes
from tests.router.code_searches import differences
from tests.stuck import Stuck

N = 3000
CASES = [(codec, metric) for codec in ("flat", "fp16", "bf16", "sq8") for metric in ("ip", "l2")]
MIXED = np.tile([0, 1, -1, -1], NLIST // 4)
WAIT_S = 60


def placed(index, where=MIXED, **options):
    plan = hand_made_plan(index.ivf, where, n_devices=2, **options)
    # Small ones, so that there are many.
    plan.request.page_bytes = 1024
    return Router(index.ivf, plan=plan, devices=["cpu", "cpu"], scrub_bytes_per_s=0)


@pytest.fixture(params=CASES, ids="-".join)
def index(request, tmp_path):
    codec, metric = request.param
    small_index(tmp_path / "i", codec=codec, metric=metric).close()
    with hx.open(tmp_path / "i", write=True) as index:
        yield index


@pytest.fixture
def plain(tmp_path):
    small_index(tmp_path / "i").close()
    with hx.open(tmp_path / "i", write=True) as index:
        yield index


def settled(router, index):
    """Searches until devices have all that they can take of the added rows; how many they have."""
    until = time.monotonic() + WAIT_S
    before = None
    while time.monotonic() < until:
        router.search(clustered(1), 1, 1)
        added = router._served.engine.added_on_devices
        copying = not all(each.done() for each in added._copying.values())
        live = index.ivf.live.current()
        seen = added._seen == (None if live is None else live.added, router._served.residency.current.version)
        if seen and not copying and router.added_on_devices == before:
            router.check_invariants()
            return before
        before = router.added_on_devices
        time.sleep(0.01)
    raise AssertionError("the copying does not end")


def added_in(index, lists):
    added = index.ivf.live.current().added
    return int(added.sizes[np.isin(np.arange(NLIST), lists)].sum())


def same(router, alone, seed=0):
    for n, k, nprobe in ((1, 10, 4), (7, 50, 8), (40, 3, NLIST)):
        queries = clustered(n, seed=seed + n)
        assert differences(router.search(queries, k, nprobe), alone.search(queries, k, nprobe)) == 0


def test_answers_are_those_of_the_host_alone_while_rows_come_and_go(index):
    rng = np.random.default_rng(0)
    there = list(range(N))
    with placed(index) as router, Router(index.ivf) as alone:
        for step in range(8):
            vectors = clustered(60, seed=100 + step)
            ids = np.arange(N + 60 * step, N + 60 * step + 60)
            index.add(vectors, ids)
            there += ids.tolist()
            # Before anything was copied, and after.
            same(router, alone, step)
            settled(router, index)
            same(router, alone, step)
            # Of old rows, and of those that came; some of these in the place of others.
            gone = rng.choice(there, 20, replace=False)
            index.delete(gone)
            there = sorted(set(there) - set(gone.tolist()))
            again = rng.choice(there, 10, replace=False)
            index.upsert(clustered(10, seed=200 + step), again)
            same(router, alone, step)
        held = settled(router, index)
        assert held == added_in(index, np.flatnonzero(MIXED >= 0)) > 50
        same(router, alone)


def test_a_list_that_grows_keeps_its_pages(plain):
    with placed(plain, np.zeros(NLIST)) as router:
        pages = router._served.engine.added_on_devices._pages
        before = {}
        for step in range(30):
            plain.add(clustered(40, seed=step))
            settled(router, plain)
            snapshot = pages.now[0]
            for each in range(NLIST):
                own = [] if snapshot.list_pages[each] is None else snapshot.list_pages[each].tolist()
                assert own[: len(before.get(each, []))] == before.get(each, [])
                before[each] = own
        assert router.added_on_devices == 1200
        copied = sum(tier.copy_stats.nbytes for tier in router._served.tiers)
    # Nothing was copied twice.
    lists = plain.ivf.piece_bytes.sum()
    geometry = router._served.tiers[0].geometry
    assert copied <= int((geometry.pages_of_bytes(plain.ivf.piece_bytes)).sum()) * geometry.page_bytes + 1200 * 4 * 24
    assert copied > lists


def test_devices_scan_them(plain, monkeypatch):
    plain.add(clustered(400, seed=3), np.arange(N, N + 400))
    scanned = []
    with placed(plain, np.zeros(NLIST)) as router:
        assert settled(router, plain) == 400
        host = router._served.engine._added.scan

        def noted(added, queries, probes, *rest, **more):
            scanned.append(int((probes >= 0).sum()))
            return host(added, queries, probes, *rest, **more)

        monkeypatch.setattr(router._served.engine._added, "scan", noted)
        found = router.search(clustered(400, seed=3), 1, 8)
        assert np.mean(found.ids[:, 0] == np.arange(N, N + 400)) > 0.9
    assert scanned == [0]


def test_pages_go_with_the_lists_and_with_the_rows(plain):
    plain.add(clustered(400, seed=3), np.arange(N, N + 400))
    with placed(plain) as router, Router(plain.ivf) as alone:
        assert settled(router, plain) == added_in(plain, np.flatnonzero(MIXED >= 0))
        elsewhere = np.tile([-1, -1, 1, 0], NLIST // 4)
        other = hand_made_plan(plain.ivf, elsewhere, n_devices=2)
        other.request.page_bytes = 1024
        router.apply_plan(other)
        assert settled(router, plain) == added_in(plain, np.flatnonzero(elsewhere >= 0))
        same(router, alone)
        plain.delete(np.arange(N, N + 400))
        assert settled(router, plain) == 0
        for tier in router._served.tiers:
            lists = router._served.residency.current.resident_lists(tier.ordinal)
            assert tier.used_bytes == int(router._served.parts.device_list_bytes[lists].sum())
        same(router, alone)


@pytest.mark.parametrize("begun", ["before", "meanwhile"])
def test_a_lower_budget_holds_while_they_are_copied(plain, monkeypatch, begun):
    """Their copying begins before the change of plan and ends in it; or searches ask for it during the change."""
    plain.add(clustered(400, seed=3))
    quarter, budget = np.where(np.arange(NLIST) < NLIST // 4, 0, -1), 120_000
    plan = hand_made_plan(plain.ivf, quarter, n_devices=2, budget=budget)
    plan.request.page_bytes = 1024
    with placed(plain, np.zeros(NLIST), budget=1 << 20) as router, Router(plain.ivf) as alone:
        placement, tier = router._served.placement, router._served.tiers[0]
        added, clear = router._served.engine.added_on_devices, AddedOnDevices.clear

        def after_a_search(call):
            def called(*given):
                added._look_again_s = 0.0
                router.search(clustered(1), 1, 1)
                for copying in added._copying.values():
                    copying.result(WAIT_S)
                return call(*given)

            return called

        def cleared(self):
            clear(self)
            put.go_on.set()

        if begun == "before":
            monkeypatch.setattr(AddedOnDevices, "clear", cleared)
            with Stuck(Copier, "put") as put:
                router.search(clustered(1), 1, 1)
                assert put.begun.wait(WAIT_S)
                router.apply_plan(plan)
        else:
            monkeypatch.setattr(placement, "_adopt", after_a_search(placement._adopt))
            monkeypatch.setattr(tier, "resize", after_a_search(tier.resize))
            router.apply_plan(plan)
        for _ in range(2):
            assert tier.arena.nbytes + tier.scratch_bytes <= tier.budget_bytes == budget
            assert settled(router, plain) > 0
        same(router, alone)


def test_what_finds_no_room_is_the_hosts(plain):
    plain.add(clustered(2000, seed=3))
    # Lists take about 300 pages of 960 bytes, and scans an eighth of the budget.
    for budget, expected in ((352_000, 100), (420_000, 900), (8 << 20, 2000)):
        with placed(plain, np.zeros(NLIST), budget=budget) as router, Router(plain.ivf) as alone:
            tier = router._served.tiers[0]
            held = settled(router, plain)
            assert held <= expected
            assert held > 0 or budget < 400_000
            assert tier.arena.nbytes + tier.scratch_bytes <= budget
            taken = int(router._served.engine.added_on_devices._pages.now[0].page_counts.sum())
            assert taken <= tier.pages.n_pages / 4
            same(router, alone)


def test_codes_that_nobody_searches_keep_no_row_from_devices(tmp_path):
    with_codes(small_index(tmp_path / "i")).close()
    with hx.open(tmp_path / "i", write=True) as index:
        plan = hand_made_plan(index.ivf, np.zeros(NLIST))
        with Router(index.ivf, plan=plan, devices=["cpu"], precision="rows", scrub_bytes_per_s=0) as router:
            index.add(clustered(50, seed=4))
            assert settled(router, index) == 50


def test_the_host_answers_for_a_device_that_fails(plain, monkeypatch):
    plain.add(clustered(400, seed=3))
    with placed(plain, np.zeros(NLIST)) as router, Router(plain.ivf) as alone:
        assert settled(router, plain) == 400
        queries = clustered(6)
        right = alone.search(queries, 10, 5)
        # When lists were scanned, and the added rows are next.
        scan, calls = NativePageScanner._scan, []

        def second_fails(*given):
            calls.append(given)
            return 1 / 0 if len(calls) == 2 else scan(*given)

        with monkeypatch.context() as patch:
            patch.setattr(NativePageScanner, "_scan", second_fails)
            assert differences(router.search(queries, 10, 5), right) == 0
        assert router.stats().device_fallbacks == 1
        assert differences(router.search(queries, 10, 5), right) == 0


def test_each_call_scans_its_own_rows_whoever_scans_meanwhile(plain):
    """As the engine's thread and a device's do, where rows come between."""
    queries, probes, moments = clustered(6), np.tile(np.arange(NLIST), (6, 1)), []
    for seed in (3, 4):
        plain.add(clustered(200, seed=seed))
        moments.append(plain.ivf.live.current().added)
    with Router(plain.ivf) as router:
        host = router._served.host
        right = [AddedScanner(plain.ivf, host).scan(added, queries, probes, 50) for added in moments]
        assert differences_of(*right) > 0
        scanner = AddedScanner(plain.ivf, host)

        class Meanwhile:
            """In the place of what was scanned last: memory that is let go lets other threads run."""

            def __del__(self):
                scanner.scan(moments[1], queries, probes, 50)

        scanner._last = Meanwhile(), None
        assert differences_of(scanner.scan(moments[0], queries, probes, 50), right[0]) == 0


def differences_of(found, right):
    return int((found[1] != right[1]).sum())


def test_a_copy_that_fails_costs_no_answer(plain, monkeypatch):
    with placed(plain, np.zeros(NLIST)) as router, Router(plain.ivf) as alone:
        with monkeypatch.context() as patch:
            patch.setattr(Copier, "put", lambda *_given: 1 / 0)
            plain.add(clustered(400, seed=3))
            same(router, alone)
            same(router, alone)
        until = time.monotonic() + WAIT_S
        while router._served.tiers[0].failure is not None or router.added_on_devices < 400:
            assert time.monotonic() < until
            same(router, alone)
        router.check_invariants()


def test_searches_beside_a_writer_see_what_was_acknowledged(plain):
    stop, failed = threading.Event(), []
    acknowledged = [N]

    def write():
        rng = np.random.default_rng(1)
        try:
            while not stop.is_set():
                first = acknowledged[0]
                plain.add(clustered(5, seed=first), np.arange(first, first + 5))
                acknowledged[0] = first + 5
                if rng.random() < 0.3:
                    plain.upsert(clustered(2, seed=first + 7), rng.choice(np.arange(N, first + 5), 2, replace=False))
        except Exception as error:  # noqa: BLE001 - told by the test
            failed.append(error)

    with placed(plain, np.zeros(NLIST)) as router:
        writer = threading.Thread(target=write)
        writer.start()
        try:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                last = acknowledged[0]
                if last == N:
                    continue
                # Rows that may be replaced by others are found by their ids, all in all.
                some = np.arange(max(N, last - 1000), last)
                found = router.search(clustered(1), 1000, NLIST, allow_ids=some)
                assert set(some.tolist()) == set(found.ids[0][: len(some)].tolist())
                mine = clustered(5, seed=last - 5)
                nearest = router.search(mine, 3, NLIST)
                for row, each in enumerate(range(last - 5, last)):
                    if nearest.distances[row, 0] > 1e-5:  # replaced meanwhile
                        assert each in router.search(clustered(1), 2048, NLIST, allow_ids=[each]).ids
        finally:
            stop.set()
            writer.join()
        assert not failed
        assert router.added_on_devices > 0
        router.check_invariants()


def test_a_device_that_recovered_has_none_of_what_it_held(plain):
    plain.add(clustered(400, seed=3))
    with placed(plain, np.zeros(NLIST)) as router, Router(plain.ivf) as alone:
        assert settled(router, plain) == 400
        tier = router._served.tiers[0]
        tier.fail(RuntimeError("gone"))
        router._served.residency.publish({}, drops=router._served.residency.current.resident_lists(0).tolist())
        # What was there is not what was copied.
        tier.arena.data.numpy()[:] = 0x3F
        until = time.monotonic() + WAIT_S
        while tier.failure is not None or router.added_on_devices < 400:
            assert time.monotonic() < until
            same(router, alone)
        assert settled(router, plain) == 400
        same(router, alone)


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "dropped"])
def test_lists_that_move_to_another_device_bring_their_rows_into_its_own_pages(plain, fails):
    plain.add(clustered(300, seed=3))
    with placed(plain, np.ones(NLIST)) as router, Router(plain.ivf) as alone:
        assert settled(router, plain) == 300
        served, lists = router._served, list(range(NLIST))
        if fails:
            served.tiers[1].fail(RuntimeError("out of order"))
        served.residency.publish({}, drops=lists)
        assert len(served.tiers[0].load(lists, served.residency).result(WAIT_S).loaded) == NLIST
        plain.add(clustered(100, seed=4))
        settled(router, plain)
        same(router, alone)
        snapshot = served.residency.current
        for each in snapshot.resident_lists(0).tolist():
            content = served.tiers[0].read_back(snapshot.list_pages[each]).result(WAIT_S)
            codes = plain.ivf.list_codes(each).reshape(-1)
            assert np.array_equal(content[: len(codes)], codes)


def test_lists_that_are_dropped_while_they_grow_give_their_pages_back(plain, monkeypatch):
    plain.add(clustered(400, seed=3))
    with placed(plain, np.zeros(NLIST)) as router, Router(plain.ivf) as alone:
        assert settled(router, plain) == 400
        added, put = router._served.engine.added_on_devices, Copier.put

        def dropping(self, places):
            monkeypatch.setattr(Copier, "put", put)
            added.clear()
            put(self, places)

        plain.add(clustered(400, seed=4))
        monkeypatch.setattr(Copier, "put", dropping)
        assert settled(router, plain) == 800
        assert router._served.tiers[0].failure is None
        page_bytes = router._served.tiers[0].geometry.page_bytes
        of_added = int(added._pages.now[0].page_counts.sum()) * page_bytes
        assert router._served.tiers[0].used_bytes == int(router._served.parts.device_list_bytes.sum()) + of_added
        same(router, alone)
