"""Searches of a share: what the whole index answers, or an error that names the lists that are not held; also while
lists come and go, with a device, and where a list turns out to be damaged."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import DamagedListsError, NotHeldError
from hybridindex.index import open_index, verify
from hybridindex.index.integrity import Integrity
from hybridindex.index.share.share import create_share
from hybridindex.router import Router
from hybridindex.router.batch.request import GivenProbes
from tests.clustered import NLIST, hand_made_plan
from tests.index.share.shares import NPROBE, QUERIES, K, Pair, share_of
from tests.oracle import check_answer
from tests.router.slow_copies import until

FORMS = [
    ("flat", "l2"),
    ("flat", "ip"),
    ("sq8", "l2"),
    ("sq8", "ip"),
    ("pq6", "l2"),
    ("pq6", "ip"),
    ("bf16", "l2"),
    ("pqfs6", "l2"),
]


@pytest.fixture(autouse=True)
def _damage_is_logged(caplog):
    caplog.set_level(logging.CRITICAL, logger="hybridindex")


def check(pair: Pair, router: Router) -> tuple[int, int]:
    """Each query alone, then those that can be answered together: exact, or refused; how many of each."""
    answered = []
    for row, query in enumerate(QUERIES):
        lacking = pair.lacking(row)
        if lacking:
            with pytest.raises(NotHeldError) as refused:
                router.search(query, K, NPROBE)
            assert list(refused.value.lists) == lacking
            continue
        assert pair.is_whole_answer(row, router.search(query, K, NPROBE))
        answered.append(row)
    if answered:
        queries = QUERIES[answered]
        found = router.search(queries, K, NPROBE)
        own = pair.whole.transform(queries)
        if pair.whole.codec != "pqfs6":  # whose distances are rounded
            check_answer(pair.whole, own, pair.probes[answered], K, found.distances, found.ids)
    return len(answered), len(QUERIES) - len(answered)


@pytest.mark.parametrize(("codec", "metric"), FORMS)
def test_held_lists_are_searched_as_in_the_whole_index(make, codec, metric):
    pair = make(codec=codec, metric=metric)
    with Router(pair.index) as router:
        assert check(pair, router) == (0, len(QUERIES))
        pair.share.hold(pair.hottest()[:12], pair.source)
        answered, refused = check(pair, router)
        assert answered > 0 < refused
        pair.share.drop(pair.hottest()[:1])
        assert check(pair, router)[0] < answered
        pair.share.hold(range(NLIST), pair.source)
        assert check(pair, router) == (len(QUERIES), 0)


def test_what_is_held_is_searched_without_a_wait_unless_most_is_not(make, monkeypatch):
    # Whether a call is tried depends on how long quantization takes: here 0.1 ms, however fast the machine is.
    clock = itertools.count()
    monkeypatch.setattr("hybridindex.router.direct.time", SimpleNamespace(perf_counter=lambda: next(clock) * 1e-4))
    pair = make()
    quantized = []
    quantize = type(pair.index).quantize
    with Router(pair.index) as router:
        monkeypatch.setattr(
            type(router._served.host), "quantize", lambda _, *given: quantized.append(1) or quantize(*given)
        )
        pair.share.hold(pair.hottest()[:12], pair.source)
        held = [row for row in range(len(QUERIES)) if not pair.lacking(row)]
        lacking = [row for row in range(len(QUERIES)) if pair.lacking(row)]
        for row in held[:3]:
            assert pair.is_whole_answer(row, router.search_directly(QUERIES[row], K, NPROBE))
        assert len(quantized) == 3
        for row in (lacking * 20)[:400]:
            assert router.search_directly(QUERIES[row], K, NPROBE) is None
        assert 3 < len(quantized) < 100
        # The queries have changed.
        answered = [router.search_directly(QUERIES[held[0]], K, NPROBE) is not None for _ in range(100)]
        assert all(answered[-50:])


@pytest.mark.parametrize(("codec", "metric"), FORMS[:6])
def test_a_plan_places_what_is_held(make, codec, metric):
    pair = make(codec=codec, metric=metric)
    wanted = pair.hottest()[:16]
    pair.share.hold([*wanted[:8], *pair.hottest()[16:24]], pair.source)
    plan = hand_made_plan(pair.index, np.where(np.isin(np.arange(NLIST), wanted), 0, -1))
    with Router(pair.index, plan=plan, devices=["cpu"]) as router:
        held = {list_id for list_id in wanted[:8] if pair.whole.list_sizes[list_id]}
        residency = router._served.residency
        assert set(residency.current.resident_lists(0).tolist()) == held
        assert router.stats().unplaced_lists == 0
        answered, refused = check(pair, router)
        assert answered > 0 < refused
        assert router.stats().device_work_bytes > 0
        # The router looks for what is missing all the time.
        pair.share.hold(wanted, pair.source)
        held = {list_id for list_id in wanted if pair.whole.list_sizes[list_id]}
        until(lambda: set(residency.current.resident_lists(0).tolist()) == held)
        check(pair, router)
        pair.share.drop(wanted[:4])
        check(pair, router)
        router.apply_plan(plan)
        assert not set(residency.current.resident_lists(0).tolist()) & set(wanted[:4])
        check(pair, router)
        router.check_invariants()


@pytest.mark.parametrize("devices", [[], ["cpu"]])
@pytest.mark.parametrize(("codec", "metric"), [("flat", "l2"), ("sq8", "ip"), ("pq6", "l2")])
def test_lists_come_and_go_while_threads_search(make, devices, codec, metric):
    pair = make(codec=codec, metric=metric)
    hot = pair.hottest()[:10]
    pair.share.hold(pair.hottest()[5:24], pair.source)
    plan = hand_made_plan(pair.index, np.where(np.isin(np.arange(NLIST), hot), 0, -1)) if devices else None
    ended = threading.Event()
    wrong: list[object] = []
    n_answered, n_refused = [0] * 3, [0] * 3

    with Router(pair.index, plan=plan, devices=devices) as router:

        def search(thread: int) -> None:
            rng = np.random.default_rng(thread)
            while not ended.is_set():
                row = int(rng.integers(len(QUERIES)))
                try:
                    found = router.search(QUERIES[row], K, NPROBE)
                except NotHeldError as error:
                    n_refused[thread] += 1
                    if not set(error.lists) <= set(pair.probes[row].tolist()):
                        wrong.append((row, error))
                except BaseException as error:  # noqa: BLE001 - told to the test's thread
                    wrong.append((row, error))
                    return
                else:
                    n_answered[thread] += 1
                    own = pair.whole.transform(QUERIES[row : row + 1])
                    try:
                        check_answer(pair.whole, own, pair.probes[row : row + 1], K, found.distances, found.ids)
                    except AssertionError as error:
                        wrong.append((row, error))

        threads = [threading.Thread(target=search, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        try:
            rng = np.random.default_rng(7)
            for _ in range(40):
                chosen = rng.choice(hot, 5, replace=False).tolist()
                pair.share.drop(chosen)
                pair.share.hold(chosen[:4], pair.source)
            # On a busy machine threads may have had no turn yet.
            for attempt in range(10_000):
                if all(n_answered) and any(n_refused):
                    break
                (pair.share.drop if attempt % 2 else lambda lists: pair.share.hold(lists, pair.source))(hot)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert all(n_answered)
        assert any(n_refused)
        pair.share.hold(range(NLIST), pair.source)
        assert check(pair, router) == (len(QUERIES), 0)


@pytest.mark.parametrize("size", [1, len(QUERIES)])
def test_a_list_that_goes_while_it_is_scanned_is_not_answered_from(make, size):
    pair = make()
    pair.share.hold(range(NLIST), pair.source)
    gone = pair.hottest()[0]
    rows = [row for row in range(len(QUERIES)) if gone in pair.probes[row]][:size]
    with Router(pair.index) as router:
        host = router._served.host
        scan, n_scans = host.scan_checked, 0

        def scan_zeros(*args, **kwargs):
            nonlocal n_scans
            n_scans += 1
            pair.share.drop([gone])
            # But for pages that it shares with others.
            assert (pair.index.list_codes(gone) == 0).all(axis=1).any()
            return scan(*args, **kwargs)

        host.scan_checked = scan_zeros
        with pytest.raises(NotHeldError, match=rf"list {gone} "):
            router.search(QUERIES[rows], K, NPROBE)
        assert n_scans >= 1
        host.scan_checked = scan
        pair.share.hold([gone], pair.source)
        assert check(pair, router) == (len(QUERIES), 0)


def test_a_scrub_tells_what_is_damaged_from_what_is_not_held(make):
    pair = make()
    pair.share.hold(pair.hottest()[:12], pair.source)
    hot, cold = pair.hottest()[0], pair.hottest()[-1]
    integrity: Integrity = pair.index.integrity
    with Router(pair.index, scrub_bytes_per_s=0) as router:
        report = router.scrub()
        assert (report.ok, report.quarantined, report.found) == (True, (), 0)
        # Twice the bytes that are held at most: pieces that differ from the last pass are read twice.
        assert report.nbytes <= 2 * int(integrity.spans[pair.share.held, 1, 1].sum())
        start = int(integrity.spans[hot, 0, 0])
        with pair.file.open("r+b") as file:
            file.seek(start)
            file.write(b"\xff" * 64)
        report = router.scrub()
        assert (report.ok, report.quarantined, report.mended) == (False, (hot,), ())
        assert not pair.share.held[hot]
        only = next(row for row in range(len(QUERIES)) if pair.lacking(row) == [hot])
        with pytest.raises(DamagedListsError) as refused:
            router.search(QUERIES[only], K, NPROBE)
        assert refused.value.lists == (hot,)
        both = integrity.error([hot, cold])
        assert isinstance(both, DamagedListsError)
        assert both.lists == (hot, cold)
        assert f"list {hot} (and list {cold}, which this share does not hold)" in str(both)
        with pytest.raises(NotHeldError):
            pair.share.read([hot])
        # Whoever fills it gives the list anew.
        assert pair.share.hold([hot], pair.source) > 0
        assert router.scrub().ok
        check(pair, router)


def test_a_file_that_was_cut_is_filled_again(make):
    pair = make(n=20000)
    pair.share.hold(range(NLIST), pair.source)
    with Router(pair.index, scrub_bytes_per_s=0) as router:
        assert check(pair, router) == (len(QUERIES), 0)
        os.truncate(pair.file, pair.file.stat().st_size // 2)
        n_refused = 0
        for row, query in enumerate(QUERIES):
            try:
                assert pair.is_whole_answer(row, router.search(query, K, NPROBE))
            except DamagedListsError:
                n_refused += 1
        assert n_refused > 0
        assert not pair.share.held.all()
        pair.share.hold(range(NLIST), pair.source)
        assert pair.share.held.all()
        assert check(pair, router) == (len(QUERIES), 0)
    verify(pair.path)


@pytest.mark.parametrize("codec", ["flat", "pq6"])
def test_only_held_lists_are_page_locked(make, codec, monkeypatch):
    pair = make(codec=codec)
    hot = pair.hottest()
    pair.share.hold(hot[:20], pair.source)
    plan = hand_made_plan(pair.index, np.where(np.isin(np.arange(NLIST), hot[:4]), 0, -1))
    with Router(pair.index, plan=plan, devices=["cpu"], pin_host_lists=64 << 20) as router:
        host_lists = router._served.opening.host_lists
        pinned = set(hot[4:20])
        assert set(host_lists.list_ids().tolist()) == {i for i in pinned if pair.whole.list_sizes[i]}
        # Lists that go while they are copied leave no copy behind.
        pair.share.hold(hot[20:], pair.source)
        copy_of = pair.index.piece_codes

        def gone(list_id):
            codes = copy_of(list_id)
            pair.share.drop([list_id])
            return np.zeros_like(codes)

        monkeypatch.setattr(pair.index, "piece_codes", gone)
        router._served.placement.pin_host_lists()
        monkeypatch.undo()
        assert set(host_lists.list_ids().tolist()) <= pinned
        pair.share.hold(range(NLIST), pair.source)
        router.apply_plan(hand_made_plan(pair.index, np.where(np.isin(np.arange(NLIST), hot), 0, -1)))
        assert check(pair, router) == (len(QUERIES), 0)


def test_scrubs_and_changes_of_a_share_find_no_damage(make):
    pair = make(codec="sq8")
    with Router(pair.index, scrub_bytes_per_s=0) as router:
        ended = threading.Event()
        reports = []

        def scrub() -> None:
            while not ended.is_set():
                reports.append(router.scrub())

        thread = threading.Thread(target=scrub)
        thread.start()
        rng = np.random.default_rng(3)
        while len(reports) < 20:
            chosen = rng.choice(NLIST, 8, replace=False).tolist()
            pair.share.hold(chosen, pair.source)
            pair.share.drop(chosen[:6])
        ended.set()
        thread.join()
        assert all(report.ok and report.found == 0 for report in reports)


def test_only_held_lists_are_warmed(make, tmp_path):
    pair = make(n=20000)
    lists = pair.hottest()[:5]
    pair.share.hold(lists, pair.source)
    with Router(pair.index) as router:
        warmed = router._served.warmed
        assert sorted(warmed.lists.tolist()) == sorted(lists)
        assert pair.share.held_bytes <= warmed.nbytes <= pair.share.held_bytes + 64 * len(lists)
        assert warmed.total_bytes < pair.whole.mapped_lists().nbytes / 2
    create_share(tmp_path / "empty", pair.source)
    with open_index(tmp_path / "empty") as empty, Router(empty) as router:
        assert not share_of(empty).held.any()
        assert router._served.warmed.nbytes == 0


def test_ids_are_filtered_where_all_that_they_need_is_held(make):
    pair = make()
    hot = pair.hottest()
    pair.share.hold(hot[:31], pair.source)
    row = next(row for row in range(len(QUERIES)) if not pair.lacking(row))
    denied = pair.answers[row].ids[0, :2]
    with Router(pair.whole) as whole:
        expected = whole.search(QUERIES[row], K, NPROBE, deny_ids=denied)
    with Router(pair.index) as router:
        for lists in ([], hot[31:]):
            pair.share.hold(lists, pair.source)
            try:
                found = router.search(QUERIES[row], K, NPROBE, deny_ids=denied)
            except NotHeldError:
                assert not pair.share.held.all()
                continue
            assert np.array_equal(found.ids, expected.ids)
        assert pair.share.held.all()
        assert np.array_equal(router.search(QUERIES[row], K, NPROBE, deny_ids=denied).ids, expected.ids)


def test_given_lists_are_scanned_or_refused(make):
    """As another node of a cluster gives them, many at once."""
    pair = make()
    pair.share.hold(pair.hottest()[:20], pair.source)
    queries = pair.whole.transform(QUERIES)
    probes, coarse = pair.whole.quantize(queries, NPROBE)

    async def scan(router: Router):
        rows = [slice(row, row + 1) for row in range(len(QUERIES))]
        scans = [router.ascan(queries[row], K, GivenProbes(probes[row], coarse[row])) for row in rows]
        return await asyncio.gather(*scans, return_exceptions=True)

    with Router(pair.index) as router:
        found = asyncio.run(scan(router))
    n_refused = 0
    for row, outcome in enumerate(found):
        lacking = pair.lacking(row)
        if lacking:
            n_refused += 1
            assert isinstance(outcome, NotHeldError)
            assert list(outcome.lists) == lacking
        else:
            check_answer(pair.whole, queries[row : row + 1], probes[row : row + 1], K, outcome.distances, outcome.ids)
    assert 0 < n_refused < len(QUERIES)
