"""The native list scanner beyond its arithmetic: filters, reports, threads, big batches, hubs, children, bad input."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybridindex import _native
from tests.native.lists import CODES, check, make_lists, make_probes, make_queries, scan, with_ids

METRICS = ("ip", "l2")
POOL = _native.ThreadPool(2)
ALONE = _native.ThreadPool(0)


@pytest.fixture(params=["f32", "sq8"])
def case(request):
    """(lists, queries, probes) of whole numbers; work enough for helpers."""
    rng = np.random.default_rng(7)
    lists = make_lists(rng, [0, 5, 3000, 64, 17, 1, 1200, 33], 33, request.param, exact=True, duplicates=0.2)
    return lists, make_queries(rng, 50, 33, exact=True), make_probes(rng, 50, 4, 8)


# -- filters


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_both_kinds_of_filter_let_through_what_they_name(case, metric, share):
    lists, queries, probes = case
    rng = np.random.default_rng(8)
    allowed = np.sort(lists.ids[rng.random(len(lists.ids)) < share])
    named = np.zeros(int(allowed[-1]) + 1 if len(allowed) else 0, np.bool_)
    named[allowed] = True
    scanner = lists.scanner(metric)
    for options in ({"bitmap": np.packbits(named, bitorder="little")}, {"sorted": allowed}):
        answer = scan(scanner, queries, probes, 9, POOL, **options)
        check(lists, metric, queries, probes, answer, allowed=allowed, exact=True)


def test_ids_beyond_a_bitmap_and_below_zero_are_not_allowed():
    lists = make_lists(np.random.default_rng(9), [24], 8, "f32", exact=True)
    lists = with_ids(lists, np.r_[-3, 0, 7, 8, 2**62, np.arange(1000, 1019)].astype(np.int64))
    queries = np.ones((1, 8), np.float32)
    _, ids = scan(
        lists.scanner("ip"), queries, np.zeros((1, 1), np.int64), 24, ALONE, bitmap=np.full(1, 0xFF, np.uint8)
    )
    assert sorted(ids[0, :2].tolist()) == [0, 7]
    assert (ids[0, 2:] == -1).all()


def test_an_empty_filter_without_an_address_allows_nothing(case):
    torch = pytest.importorskip("torch")
    lists, queries, probes = case
    for options in ({"bitmap": torch.empty(0, dtype=torch.uint8)}, {"sorted": torch.empty(0, dtype=torch.int64)}):
        _, ids = scan(lists.scanner("l2"), queries, probes, 3, POOL, **options)
        assert (ids == -1).all()


# -- reports


@pytest.mark.parametrize("pool", [ALONE, POOL], ids=["alone", "helped"])
def test_every_row_is_reported_once_when_it_is_complete(case, pool):
    lists, queries, probes = case
    probes[4] = -1
    scanner = lists.scanner("l2")
    expected = scan(scanner, queries, probes, 5, ALONE)
    distances, ids = np.empty((50, 5), np.float32), np.empty((50, 5), np.int64)
    for _ in range(20):
        reported = []

        def on_done(rows, reported=reported):
            assert rows
            reported += rows
            np.testing.assert_array_equal(distances[rows], expected[0][rows])
            np.testing.assert_array_equal(ids[rows], expected[1][rows])

        scanner.scan(queries, probes, distances, ids, pool, on_done=on_done)
        assert sorted(reported) == list(range(50))


@pytest.mark.parametrize("pool", [ALONE, POOL], ids=["alone", "helped"])
def test_an_error_in_on_done_ends_that_scan_and_no_other(case, pool):
    lists, queries, probes = case
    scanner = lists.scanner("ip")
    for fails_at in (1, 2, 3):
        calls = []

        def on_done(rows, fails_at=fails_at, calls=calls):
            calls.append(rows)
            if len(calls) == fails_at:
                raise LookupError("enough")

        try:
            scan(scanner, queries, probes, 5, pool, on_done=on_done)
        except LookupError as error:
            assert str(error) == "enough"  # noqa: PT017 - with helpers all rows may be in fewer reports
            assert len(calls) == fails_at
        else:
            assert len(calls) < fails_at
        check(lists, "ip", queries, probes, scan(scanner, queries, probes, 5, pool), exact=True)


@pytest.mark.parametrize("kernels", _native.kernels_here())
def test_on_done_may_scan(case, kernels):
    """Also where the kernels hold registers that a scan sets up: AMX."""
    lists, queries, probes = case
    probes[0] = -1
    scanner = lists.scanner("ip", kernels)
    inner = []
    answer = scan(
        scanner, queries, probes, 5, POOL, on_done=lambda _: inner.append(scan(scanner, queries, probes, 5, POOL))
    )
    for one in [answer, *inner]:
        check(lists, "ip", queries, probes, one, exact=True)


# -- threads and sizes


@pytest.mark.parametrize("code", CODES)
def test_threads_share_a_scanner_and_a_pool(code):
    rng = np.random.default_rng(11)
    lists = make_lists(rng, [400, 30, 0, 77, 160, 900], 48, code)
    scanner = lists.scanner("l2")
    batches = [
        (make_queries(rng, n, 48), make_probes(rng, n, 4, 6), k) for n, k in [(1, 3), (40, 10), (7, 50), (90, 1)]
    ]
    expected = [scan(scanner, *batch, ALONE) for batch in batches]
    start = threading.Barrier(4)

    def work(which):
        start.wait()
        for turn in range(40):
            at = (which + turn) % 4
            reported = []
            distances, ids = scan(scanner, *batches[at], POOL, on_done=reported.extend if turn % 2 else None)
            np.testing.assert_array_equal(distances, expected[at][0])
            np.testing.assert_array_equal(ids, expected[at][1])
            assert len(reported) == (len(ids) if turn % 2 else 0)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, which) for which in range(4)]:
            done.result()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", _native.kernels_here())
def test_what_is_kept_of_bytes_changes_no_answer(metric, kernels):
    """A scan keeps what it computed of each block; others find blocks kept in part, by several threads at once."""
    rng = np.random.default_rng(14)
    lists = make_lists(rng, [400, 7, 0, 5000, 16, 33], 2, "sq8", centre=3.0)
    queries, probes = make_queries(rng, 60, 2, centre=3.0), make_probes(rng, 60, 3, 6)
    fresh = scan(lists.scanner(metric, kernels), queries, probes, 300, ALONE)
    check(lists, metric, queries, probes, fresh)
    used = lists.scanner(metric, kernels)
    scan(used, queries[:1], np.array([[0, 5]]), 300, ALONE)
    start = threading.Barrier(4)

    def work():
        start.wait()
        return [scan(used, queries, probes, 300, POOL) for _ in range(3)]

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            for distances, ids in done.result():
                np.testing.assert_array_equal(distances, fresh[0])
                np.testing.assert_array_equal(ids, fresh[1])


@pytest.mark.parametrize("code", ["f32", "sq8"])
def test_a_batch_of_4096(code):
    rng = np.random.default_rng(12)
    lists = make_lists(rng, rng.integers(0, 120, 40).tolist(), 24, code, exact=True)
    queries, probes = make_queries(rng, 4096, 24, exact=True), make_probes(rng, 4096, 5, 40)
    answer = scan(lists.scanner("l2"), queries, probes, 10, POOL)
    some = rng.choice(4096, 400, replace=False)
    check(lists, "l2", queries[some], probes[some], (answer[0][some], answer[1][some]), exact=True)
    one_by_one = scan(lists.scanner("l2"), queries[some], probes[some], 10, ALONE)
    np.testing.assert_array_equal(answer[0][some], one_by_one[0])
    np.testing.assert_array_equal(answer[1][some], one_by_one[1])


@pytest.mark.parametrize("kernels", _native.kernels_here())
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", ["f32", "sq8"])
@pytest.mark.parametrize("dim", [16, 33, 128, 400])
def test_a_distance_is_the_same_however_many_queries_share_the_list(code, metric, kernels, dim):
    """Few queries take the rows of a block in turn, more take them side by side; the sums are the same, to the bit."""
    rng = np.random.default_rng(14)
    lists = make_lists(rng, [75, 16, 3], dim, code)
    scanner = lists.scanner(metric, kernels)
    queries = make_queries(rng, 17, dim)
    probes = np.tile(np.arange(3), (17, 1))
    together = scan(scanner, queries, probes, 94, ALONE)
    for group in (1, 2, 3, 5):
        apart = [scan(scanner, queries[i : i + group], probes[i : i + group], 94, ALONE) for i in range(0, 17, group)]
        np.testing.assert_array_equal(np.concatenate([d for d, _ in apart]).view(np.int32), together[0].view(np.int32))
        np.testing.assert_array_equal(np.concatenate([i for _, i in apart]), together[1])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", ["f32", "sq8"])
def test_a_hub_that_everybody_probes(code, metric):
    """20,000 rows: cut into items that several threads take, whose heaps are shared."""
    rng = np.random.default_rng(13)
    lists = make_lists(rng, [20_000, 10, 300], 32, code)
    n = 300  # more than one group of queries
    queries = make_queries(rng, n, 32)
    probes = np.tile(np.array([0, 2]), (n, 1))
    scanner = lists.scanner(metric)
    reported = []
    first = scan(scanner, queries, probes, 100, ALONE)
    check(lists, metric, queries[:40], probes[:40], (first[0][:40], first[1][:40]))
    for helpers in (1, 2, 4):
        reported.clear()
        distances, ids = scan(scanner, queries, probes, 100, _native.ThreadPool(helpers), on_done=reported.extend)
        np.testing.assert_array_equal(distances, first[0])
        np.testing.assert_array_equal(ids, first[1])
        assert sorted(reported) == list(range(n))


def test_a_list_that_is_probed_twice_is_answered_twice(case):
    lists, queries, _ = case
    _, ids = scan(lists.scanner("ip"), queries, np.full((50, 2), 1, np.int64), 10, POOL)
    assert (ids[:, ::2] == ids[:, 1::2]).all()


def test_no_lists_no_queries_no_probes():
    rng = np.random.default_rng(14)
    none = make_lists(rng, [], 8, "f32")
    _, ids = scan(none.scanner("ip"), make_queries(rng, 3, 8), np.full((3, 2), -1), 4, POOL)
    assert (ids == -1).all()
    lists = make_lists(rng, [9], 8, "f32")
    assert scan(lists.scanner("l2"), make_queries(rng, 0, 8), np.empty((0, 2), np.int64), 4, POOL)[1].shape == (0, 4)
    reported = []
    distances, ids = scan(
        lists.scanner("l2"), make_queries(rng, 3, 8), np.empty((3, 0), np.int64), 4, POOL, on_done=reported.extend
    )
    assert (ids == -1).all()
    assert (distances == np.inf).all()
    assert sorted(reported) == [0, 1, 2]


_FORK = """
import os, sys, threading
import numpy as np
from hybridindex import _native
from tests.native.lists import make_lists, make_probes, make_queries, scan

rng = np.random.default_rng(15)
lists = make_lists(rng, [3000, 40, 5000], 32, "sq8")
queries, probes = make_queries(rng, 30, 32), make_probes(rng, 30, 2, 3)
pool, scanner = _native.ThreadPool(2), lists.scanner("ip")
before = scan(scanner, queries, probes, 7, pool)
child = os.fork()
if child == 0:  # new threads, which may have the handles of those that the parent had
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    other = _native.ThreadPool(2)
reported = []
after = scan(scanner, queries, probes, 7, pool, on_done=reported.extend)
same = all(np.array_equal(a, b) for a, b in zip(before, after)) and sorted(reported) == list(range(30))
del pool
if child == 0:
    same &= all(map(np.array_equal, scan(scanner, queries, probes, 7, other), before))
    del other
    os._exit(0 if same else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status if status else not same)
"""


def test_a_child_process_scans_alone_and_lets_go_of_the_pool():
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], check=True, timeout=300)


_STUCK = """
import ctypes, gc, os, signal, sys, threading
import numpy as np
from hybridindex import _native
from tests.native.lists import make_lists, make_queries, scan

before = set(os.listdir("/proc/self/task"))
pool, alone = _native.ThreadPool(1), _native.ThreadPool(0)
(helper,) = map(int, set(os.listdir("/proc/self/task")) - before)

# A signal whose handler is pause() stops the one thread that gets it, wherever it is; any other lets it go on.
libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))
libc.signal(signal.SIGUSR2, ctypes.cast(libc.getppid, ctypes.c_void_p))

def state_of_helper():
    with open(f"/proc/self/task/{helper}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

def stopped():
    with open(f"/proc/self/task/{helper}/status") as file:
        return any(int(line.split()[1], 16) >> signal.SIGUSR1 - 1 & 1 for line in file if line.startswith("SigBlk"))

def stop_or_go(number, wanted):
    while stopped() != wanted:
        libc.tgkill(os.getpid(), helper, number)
        os.sched_yield()

rng = np.random.default_rng(16)
code, filtered = sys.argv[1], sys.argv[2] == "filtered"
lists = make_lists(rng, [20_000, 10, 300], 32, code)
scanner = lists.scanner("l2", "portable")
queries, probes = make_queries(rng, 300, 32), np.tile(np.array([0, 2]), (300, 1))
probes[0] = -1  # is done before anything is scanned, and told while there is work for the helper
one = queries[1:2].copy(), np.array([[0, 2]])

def some_filter():
    return {"sorted": np.sort(lists.ids)[::2].copy()} if filtered else {}

expected = scan(scanner, queries, probes, 100, alone, **some_filter())
expected_of_one = scan(scanner, *one, 10, alone)
inside = 0
for turn in range(6):
    seen = []

    def on_done(rows):
        if not seen:
            for _ in range(1000):
                if state_of_helper() == "R":
                    break
                os.sched_yield()
            seen.append(state_of_helper())
            stop_or_go(signal.SIGUSR1, True)

    answer = scan(scanner, queries.copy(), probes.copy(), 100, pool, on_done=on_done, **some_filter())
    assert stopped()
    inside += seen == ["R"]
    gc.collect()
    # The helper is still where it was; nobody misses it.
    of_one = scan(scanner, *one, 10, pool)
    again = scan(scanner, queries, probes, 100, pool, **some_filter())
    for got, want in zip((*answer, *of_one, *again), (*expected, *expected_of_one, *expected)):
        np.testing.assert_array_equal(got, want)
    if inside == 2:
        break
    stop_or_go(signal.SIGUSR2, False)
assert inside, "the helper was never at work when it was stopped"

# The end of a scanner waits for it, and not with the interpreter: a thread that needs that lets the helper go on.
sys.setswitchinterval(100)
ends = threading.Event()
other = threading.Thread(target=lambda: (ends.wait(), stop_or_go(signal.SIGUSR2, False)))
other.start()
ends.set()
del scanner
other.join()
del pool
"""


@pytest.mark.parametrize("filtered", ["filtered", "unfiltered"])
@pytest.mark.parametrize("code", ["f32", "sq8"])
def test_a_scan_does_not_wait_for_a_helper_without_a_core(code, filtered):
    """Stopped in the middle of its work, for as long as several scans take: minutes under a sanitizer."""
    subprocess.run([sys.executable, "-c", _STUCK, code, filtered], check=True, timeout=280)


# -- what is computed before


@pytest.mark.parametrize("kernels", _native.kernels_here())
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dim", [33, 64])
def test_prepared_lists_answer_as_others_do(metric, kernels, dim):
    rng = np.random.default_rng(17)
    lists = make_lists(rng, [100, 0, 16, 3000, 1], dim, "sq8")
    queries, probes = make_queries(rng, 9, dim), make_probes(rng, 9, 4, 5)
    scanner = lists.scanner(metric, kernels)
    scanner.prepare(np.array([3, 1, 4, 3, 0]))
    for got, want in zip(
        scan(scanner, queries, probes, 7, POOL),
        scan(lists.scanner(metric, kernels), queries, probes, 7, ALONE),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_scans_compute_nothing_of_a_prepared_list_again():
    """Seen by lists that change, which none may: the lengths of rows that were far away rule out too much."""
    metric, rng = "l2", np.random.default_rng(18)
    lists = make_lists(rng, [500, 500], 32, "sq8")
    rows, lists.data[:] = lists.data.copy(), 255
    queries, both = make_queries(rng, 8, 32), np.tile(np.array([0, 1]), (8, 1))
    prepared, fresh = lists.scanner(metric), lists.scanner(metric)
    prepared.prepare(np.array([0, 1]))
    lists.data[:] = rows
    check(lists, metric, queries, both, scan(fresh, queries, both, 10, ALONE))
    with pytest.raises(AssertionError):
        check(lists, metric, queries, both, scan(prepared, queries, both, 10, ALONE))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("residual", ["residual", "whole"])
def test_lists_without_lengths_need_no_preparation(code, residual):
    rng = np.random.default_rng(19)
    lists = make_lists(rng, [40, 7], 16, code, residual=residual == "residual")
    scanner = lists.scanner("l2")
    scanner.prepare(np.array([0, 1]))
    scanner.prepare(np.empty(0, np.int64))
    queries, probes = make_queries(rng, 3, 16), make_probes(rng, 3, 2, 2)
    check(lists, "l2", queries, probes, scan(scanner, queries, probes, 4, ALONE))


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_what_is_no_list_cannot_be_prepared(wrong):
    with pytest.raises(IndexError, match=rf"list {wrong}; expected 0\.\.2"):
        _scanner().prepare(np.array([0, wrong]))


# -- bad input


def _extents(change):
    """Three good extents of 8 rows of 16 floats, changed."""
    good = np.array([[8, 8, 0], [5, 8, 576], [0, 8, 1152]], np.int64)
    for (row, column), value in change.items():
        good[row, column] = value
    return good


BIG = np.iinfo(np.int64).max
EXTENT_FAULTS = [
    ({(0, 0): -1}, "list 0 has size -1"),
    ({(0, 0): 9}, "size 9 and capacity 8"),
    ({(1, 1): -8}, "capacity -8"),
    ({(1, 2): -8}, "list 1 leaves the buffer"),
    ({(2, 2): 1160}, "list 2 leaves the buffer"),
    ({(2, 2): 1729}, "list 2 leaves the buffer"),
    ({(2, 1): 16}, "list 2 leaves the buffer"),
    ({(2, 1): BIG}, "list 2 leaves the buffer"),
    ({(2, 2): BIG}, "list 2 leaves the buffer"),
    ({(2, 0): BIG, (2, 1): BIG}, "list 2 has size"),
    ({(1, 2): 580}, "list 1 is not aligned"),
    ({(1, 2): 568}, "overlaps list 0"),
    ({(1, 2): 0}, "overlaps list"),
    ({(0, 0): np.iinfo(np.int64).min}, "list 0 has size"),
    ({(0, 2): np.iinfo(np.int64).min}, "list 0 leaves the buffer"),
]


def _scanner(**changes):
    arguments = {
        "data": np.zeros(1728, np.uint8),
        "extents": _extents({}),
        "code": "f32",
        "dim": 16,
        "scale": np.empty(0, np.float32),
        "offset": np.empty(0, np.float32),
        "centroids": np.empty((0, 16), np.float32),
        "keep_max": True,
        "kernels": "",
    }
    return _native.ListScanner(**(arguments | changes))


@pytest.mark.parametrize(("change", "words"), EXTENT_FAULTS)
def test_extents_that_are_wrong_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        _scanner(extents=_extents(change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": np.zeros(1727, np.uint8)}, "list 2 leaves the buffer"),
        ({"data": np.zeros(0, np.uint8)}, "list 0 leaves the buffer"),
        ({"data": np.zeros(1729, np.uint8)[1:]}, "multiple of 8 bytes"),
        ({"extents": np.zeros((3, 2), np.int64)}, r"\(nlist, 3\)"),
        ({"extents": np.array([[3, 3, 0]]), "code": "f16", "dim": 3}, "not aligned"),
        ({"code": "pq"}, 'code is "pq"'),
        ({"dim": 0}, "dim must be 1"),
        ({"dim": -16}, "dim must be 1"),
        ({"dim": 1 << 40}, "dim must be 1"),
        ({"code": "sq8"}, "scale and offset"),
        ({"scale": np.ones(16, np.float32)}, "scale and offset"),
        ({"centroids": np.zeros((2, 16), np.float32)}, r"centroids must be \(nlist, dim\)"),
        ({"centroids": np.zeros((3, 15), np.float32)}, r"centroids must be \(nlist, dim\)"),
        ({"kernels": "sse9"}, '"sse9" do not run'),
    ],
)
def test_scanners_that_cannot_be_made_say_why(change, words):
    with pytest.raises(ValueError, match=words):
        _scanner(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"data": np.zeros(1728, np.int8)},
        {"data": np.zeros((1728, 1), np.uint8)},
        {"data": np.zeros(3456, np.uint8)[::2]},
        {"extents": _extents({}).astype(np.int32)},
        {"extents": np.asfortranarray(_extents({}))},
        {"scale": np.empty(0)},
        {"centroids": np.zeros((3, 16))},
        {"centroids": np.zeros((3, 32), np.float32)[:, ::2]},
        {"data": None},
        {"dim": "16"},
    ],
)
def test_arrays_of_another_kind_are_type_errors_for_a_scanner(change):
    with pytest.raises(TypeError):
        _scanner(**change)


def _arguments(**changes):
    return {
        "queries": np.zeros((2, 16), np.float32),
        "probes": np.zeros((2, 3), np.int64),
        "distances": np.empty((2, 4), np.float32),
        "ids": np.empty((2, 4), np.int64),
        "pool": POOL,
    } | changes


@pytest.mark.parametrize("probe", [3, -2, BIG, np.iinfo(np.int64).min, 2**32])
def test_probes_that_are_no_lists_are_named(probe):
    probes = np.array([[0, 1, -1], [2, probe, 0]])
    scanner = _scanner()
    with pytest.raises(IndexError, match=rf"probe {probe} of query 1 is not a list id: expected -1 or 0\.\.2"):
        scanner.scan(**_arguments(probes=probes))
    distances, ids = scan(scanner, np.zeros((2, 16), np.float32), np.array([[0, 1, -1], [2, -1, -1]]), 20, POOL)
    assert (np.isfinite(distances).sum(axis=1) == [13, 0]).all()
    assert (ids[1] == -1).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": np.zeros((2, 15), np.float32)}, r"queries must be \(n, 16\)"),
        ({"queries": np.zeros((3, 16), np.float32)}, "agree on n and k"),
        ({"probes": np.zeros((1, 3), np.int64)}, "agree on n and k"),
        ({"ids": np.zeros((1, 4), np.int64)}, "agree on n and k"),
        ({"distances": np.zeros((2, 3), np.float32)}, "agree on n and k"),
        ({"distances": np.zeros((2, 0), np.float32), "ids": np.zeros((2, 0), np.int64)}, "k must be at least 1"),
    ],
)
def test_shapes_that_do_not_agree_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        _scanner().scan(**_arguments(**change))


_READ_ONLY = np.zeros((2, 4), np.float32)
_READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "change",
    [
        {"queries": np.zeros((2, 16))},
        {"queries": np.zeros((2, 32), np.float32)[:, ::2]},
        {"queries": np.zeros(16, np.float32)},
        {"probes": np.zeros((2, 3), np.int32)},
        {"probes": np.zeros((3, 2), np.int64).T},
        {"distances": np.zeros((2, 4))},
        {"distances": _READ_ONLY},
        {"distances": np.zeros((2, 8), np.float32)[:, ::2]},
        {"ids": np.zeros((2, 4), np.int32)},
        {"pool": None},
        {"pool": 2},
        {"bitmap": "all"},
        {"sorted": np.zeros((2, 2), np.int64)},
    ],
)
def test_arrays_of_another_kind_are_type_errors_for_a_scan(change):
    with pytest.raises(TypeError):
        _scanner().scan(**_arguments(**change))


def test_a_pool_has_no_negative_number_of_helpers():
    with pytest.raises(ValueError, match="n_helpers is -1"):
        _native.ThreadPool(-1)
