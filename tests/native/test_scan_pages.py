"""The stand-in's page scan: every set of kernels over every code, metric, page size and order of pages, against float64
and against the host scan; and what it refuses. Budgets and leases are tests/tiers' business."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import _native
from tests.examples import examples
from tests.native.lists import CODES, check, make_lists, make_probes, make_queries, scan
from tests.native.pages import paged, scan_arguments, scan_pages

KERNELS = _native.kernels_here()
METRICS = ("ip", "l2")
ORDERS = ("runs", "scattered", "backwards", "mixed")
# Multiples of a block, less, more, and neither.
ROWS_PER_PAGE = [1, 3, 7, 16, 21, 32, 42, 100]
DIMS = [1, 3, 16, 17, 64, 100, 256]
ALONE = _native.ThreadPool(0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kernels", KERNELS)
@examples(25)
@given(
    dim=st.sampled_from(DIMS),
    sizes=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 100, 250]), min_size=1, max_size=6),
    rows_per_page=st.sampled_from(ROWS_PER_PAGE),
    order=st.sampled_from(ORDERS),
    slack=st.sampled_from([0, 0, 8, 36]),
    n=st.sampled_from([0, 1, 2, 3, 4, 5, 9, 16, 17, 33]),
    k=st.sampled_from([1, 2, 7, 100, 2048]),
    residual=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_whole_numbers_are_answered_to_the_bit(
    kernels, code, metric, dim, sizes, rows_per_page, order, slack, n, k, residual, seed
):
    rng = np.random.default_rng(seed)
    lists = make_lists(rng, sizes, dim, code, exact=True, residual=residual, duplicates=0.3)
    made = paged(rng, lists, rows_per_page, order, slack=slack)
    queries = make_queries(rng, n, dim, exact=True)
    probes = make_probes(rng, n, min(4, len(sizes)), len(sizes))
    check(made.lists, metric, queries, probes, scan_pages(made, metric, queries, probes, k, kernels), exact=True)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kernels", KERNELS)
@examples(12)
@given(
    dim=st.sampled_from(DIMS),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    rows_per_page=st.sampled_from(ROWS_PER_PAGE),
    order=st.sampled_from(ORDERS),
    n=st.integers(1, 40),
    residual=st.booleans(),
    centre=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 10_000),
)
def test_a_row_has_the_distance_that_the_host_gives_it(
    kernels, code, metric, dim, sizes, rows_per_page, order, n, residual, centre, seed
):
    rng = np.random.default_rng(seed)
    lists = make_lists(rng, sizes, dim, code, residual=residual, centre=centre, duplicates=0.1)
    made = paged(rng, lists, rows_per_page, order)
    queries = make_queries(rng, n, dim, centre=centre)
    probes = make_probes(rng, n, min(4, len(sizes)), len(sizes))
    distances, positions = answer = scan_pages(made, metric, queries, probes, 20, kernels)
    check(made.lists, metric, queries, probes, answer)
    expected = scan(made.lists.scanner(metric, kernels), queries, probes, 20, ALONE)
    np.testing.assert_array_equal(distances, expected[0])
    np.testing.assert_array_equal(positions, expected[1])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", CODES)
def test_more_queries_than_a_group_and_lists_of_several_items(code, metric):
    rng = np.random.default_rng(1)
    lists = make_lists(rng, [9000, 10, 300], 32, code, exact=True)
    made = paged(rng, lists, 42, "mixed")
    queries = make_queries(rng, 300, 32, exact=True)
    probes = np.tile(np.array([0, 2]), (300, 1))
    check(made.lists, metric, queries, probes, scan_pages(made, metric, queries, probes, 30), exact=True)


@pytest.mark.parametrize("code", CODES)
def test_a_list_that_is_probed_twice_is_answered_twice(code):
    rng = np.random.default_rng(2)
    made = paged(rng, make_lists(rng, [70, 40], 20, code), 21)
    queries = make_queries(rng, 3, 20)
    _, positions = scan_pages(made, "l2", queries, np.full((3, 2), 0, np.int64), 10)
    assert (positions[:, ::2] == positions[:, 1::2]).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("code", ["f32", "f16", "bf16"])
def test_what_is_no_number_is_no_candidate(kernels, code):
    rng = np.random.default_rng(5)
    made = paged(rng, make_lists(rng, [40], 16, code, exact=True), 7, "scattered")
    one = {"f32": np.array(np.nan, "f4"), "f16": np.array(np.inf, "f2"), "bf16": np.array(0x7FC0, "u2")}[code]
    made.arena[made.pages[0][1], : one.nbytes] = one.reshape(1).view(np.uint8)
    queries = -np.ones((2, 16), np.float32)
    for metric in METRICS:
        distances, positions = scan_pages(made, metric, queries, np.zeros((2, 1), np.int64), 40, kernels)
        assert (np.sort(positions[:, :39]) == np.delete(np.arange(40), 7)).all()
        assert (positions[:, 39:] == -1).all()
        assert not np.isnan(distances).any()


def _masked(made, kept):
    """Arguments of a scan that may answer with these rows of all; and the mask as bits."""
    first = np.concatenate([[0], np.cumsum(made.lists.extents[:, 0])])
    bits = np.zeros(-(-int(first[-1]) // 64) * 64, dtype=bool)
    bits[kept] = True
    return {"mask": np.packbits(bits, bitorder="little"), "first_rows": first}


@pytest.mark.parametrize("layout", ["mixed", "scattered"])
@pytest.mark.parametrize("code", ["f32", "f16", "bf16", "sq8"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_mask_leaves_the_best_of_its_rows(code, share, layout):
    rng = np.random.default_rng(8)
    made = paged(rng, make_lists(rng, [70, 0, 45, 3], 24, code), 5, layout)
    queries, probes = make_queries(rng, 6, 24), np.tile(np.arange(4), (6, 1))
    kept = np.flatnonzero(rng.random(118) < share)
    first = np.array([0, 70, 70, 115])
    for metric in METRICS:
        whole = scan_pages(made, metric, queries, probes, 118)
        arguments = scan_arguments(made, metric, queries, probes, 20) | _masked(made, kept)
        _native.scan_pages(**arguments)
        for row in range(6):
            rows = first[whole[1][row] >> 32] + (whole[1][row] & 0xFFFFFFFF)
            left = np.flatnonzero(np.isin(rows, kept))[:20]
            np.testing.assert_array_equal(arguments["positions"][row, : len(left)], whole[1][row, left])
            np.testing.assert_array_equal(arguments["distances"][row, : len(left)], whole[0][row, left])
            assert (arguments["positions"][row, len(left) :] == -1).all()


def test_threads_scan_one_arena_at_the_same_time():
    """Also where the kernels hold registers that a scan sets up: AMX."""
    rng = np.random.default_rng(6)
    made = paged(rng, make_lists(rng, [900, 300, 77], 48, "sq8"), 42, "mixed")
    batches = [(make_queries(rng, n, 48), make_probes(rng, n, 2, 3), 9) for n in (1, 20, 64)]
    expected = [scan_pages(made, "l2", *batch) for batch in batches]
    wrong = []

    def work(which):
        for _ in range(30):
            answer = scan_pages(made, "l2", *batches[which])
            if not all(np.array_equal(a, b) for a, b in zip(answer, expected[which], strict=True)):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_scratch_that_is_needed_grows_with_what_is_asked():
    fixed, per_query = _native.page_scratch_need("f32", 64, False, 10)
    assert fixed >= 16 * 64 * 4
    assert per_query >= 64 * 4 + 10 * 12
    more = _native.page_scratch_need("f32", 64, False, 11)
    assert more == (fixed, per_query + 12)
    bytes_too = _native.page_scratch_need("sq8", 64, False, 10)
    assert bytes_too[1] >= 64 * 4 + 10 * 12 + 2 * 64
    # Residuals are decoded: the same floats, but for a block of 16 codes.
    assert _native.page_scratch_need("sq8", 64, True, 10) == (fixed - 16 * 64 * 3, per_query)


# -- Probes by list


def test_probes_are_turned_around_near_lists_first():
    extents = np.array([[3, 8, 0], [0, 0, 0], [5, 8, 0], [1, 8, 0]], np.int64)
    lists, starts, members, places = _native.group_probes(np.array([[2, 0], [-1, 3], [2, 1]]), extents, places=True)
    assert lists.tolist() == [2, 0, 3]
    assert starts.tolist() == [0, 2, 3, 4]
    assert members.tolist() == [0, 2, 0, 1]
    assert places.tolist() == [0, 4, 1, 3]
    with pytest.raises(IndexError, match="probe 4 of query 0"):
        _native.group_probes(np.array([[4]]), extents)
    with pytest.raises(ValueError, match=r"\(nlist, 3\)"):
        _native.group_probes(np.array([[0]]), extents[:, :2].copy())


# -- Bad input


def _arguments_of(code):
    """Two lists of 5 and 8 rows of 16 elements, four rows a page, three queries that probe both."""
    rng = np.random.default_rng(7)
    made = paged(rng, make_lists(rng, [5, 8], 16, code), 4)
    return scan_arguments(made, "l2", make_queries(rng, 3, 16), np.tile(np.arange(2), (3, 1)), 2)


def _arguments(**changes):
    return _arguments_of("f32") | changes


BIG = np.iinfo(np.int64).max
NO_FLOATS = np.empty(0, np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pages": np.array([0, 1, 2, 4], np.int32)}, "page 4 is outside the arena"),
        ({"pages": np.array([0, -1, 2, 3], np.int32)}, "page -1 is outside the arena"),
        ({"sizes": np.array([9, 8])}, "list 0 has more rows than its pages hold"),
        ({"sizes": np.array([5, BIG])}, "list 1 has more rows than its pages hold"),
        ({"sizes": np.array([5, -1])}, "list 1 has more rows"),
        ({"list_ids": np.array([0, -1])}, "list id -1 does not fit a position"),
        ({"list_ids": np.array([0, 2**31])}, "list id 2147483648 does not fit"),
        ({"members": np.array([0, 1, 2, 0, 1, 3], np.int32)}, "query 3 is outside the batch"),
        ({"members": np.array([0, 1, 2, 0, -1, 2], np.int32)}, "query -1 is outside the batch"),
    ],
)
def test_indices_that_lead_outside_are_named_before_anything_is_read(change, words):
    arguments = _arguments(**change)
    with pytest.raises(IndexError, match=words):
        _native.scan_pages(**arguments)
    assert np.isnan(arguments["distances"]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": "pq"}, 'code is "pq"'),
        ({"rows_per_page": 0}, "rows_per_page is 0"),
        ({"rows_per_page": 5}, "rows_per_page is 5; pages of 256 bytes hold 4"),
        ({"rows_per_page": BIG}, "rows_per_page is"),
        ({"arena": np.zeros((4, 258), np.uint8)}, "aligned to 4 bytes"),
        ({"arena": np.zeros(4 * 256 + 1, np.uint8)[1:].reshape(4, 256)}, "aligned to 4 bytes"),
        ({"scale": np.ones(16, np.float32)}, "scale and offset"),
        ({"code": "sq8"}, "scale and offset"),
        ({"code": "sq8", "scale": np.ones(15, np.float32), "offset": np.ones(16, np.float32)}, "scale and offset"),
        ({"sizes": np.array([5])}, "must match list_ids"),
        ({"page_starts": np.array([0, 2])}, "must match list_ids"),
        ({"member_starts": np.array([0, 3, 6, 6])}, "must match list_ids"),
        ({"page_starts": np.array([0, 2, 5])}, "must ascend"),
        ({"page_starts": np.array([0, 5, 4])}, "must ascend"),
        ({"member_starts": np.array([-1, 3, 6])}, "must ascend"),
        ({"centroids": np.zeros((1, 16), np.float32)}, "centroids must be"),
        ({"centroids": np.zeros((2, 15), np.float32)}, "centroids must be"),
        ({"queries": np.zeros((3, 0), np.float32)}, "dim must be 1"),
        ({"queries": np.zeros((2, 16), np.float32)}, r"must be \(n, k\)"),
        ({"positions": np.zeros((3, 3), np.int64)}, r"must be \(n, k\)"),
        ({"distances": np.zeros((3, 0), np.float32), "positions": np.zeros((3, 0), np.int64)}, "k at least 1"),
        ({"kernels": "sse9"}, '"sse9" do not run'),
    ],
)
def test_arguments_that_do_not_agree_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        _native.scan_pages(**_arguments(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"arena": np.zeros((4, 256), np.int8)},
        {"arena": np.zeros((4, 512), np.uint8)[:, ::2]},
        {"pages": np.zeros(4, np.int64)},
        {"members": np.zeros(6, np.int64)},
        {"sizes": np.zeros(2, np.int32)},
        {"queries": np.zeros((3, 16))},
        {"distances": np.zeros((3, 2))},
        {"positions": np.zeros((3, 4), np.int64)[:, ::2]},
        {"centroids": None},
    ],
)
def test_arrays_of_another_kind_are_type_errors(change):
    with pytest.raises(TypeError):
        _native.scan_pages(**_arguments(**change))


_INDEX_ARRAYS = ("list_ids", "sizes", "page_starts", "pages", "member_starts", "members")


@pytest.mark.parametrize("code", CODES)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from(_INDEX_ARRAYS),
            st.integers(0, 7),
            st.one_of(st.integers(-2, 20), st.sampled_from([BIG, -BIG - 1, 2**31, 2**32, 2**62])),
        ),
        min_size=1,
        max_size=3,
    ),
    rows_per_page=st.integers(1, 4),
)
def test_wrong_numbers_are_refused_or_answered_from_the_arena(code, faults, rows_per_page):
    arguments = _arguments_of(code) | {"rows_per_page": rows_per_page}
    for name, at, value in faults:
        changed = arguments[name].copy()
        changed[at % len(changed)] = np.array(value).astype(changed.dtype)
        arguments[name] = changed
    try:
        _native.scan_pages(**arguments)
    except (ValueError, IndexError) as error:
        assert str(error)  # noqa: PT017 - most are refused, a few still make sense
        return
    found = arguments["positions"][arguments["positions"] >= 0]
    # Two may have the same id.
    lists, most = set(arguments["list_ids"].tolist()), max(arguments["sizes"].tolist())
    assert all(position >> 32 in lists and position & 0xFFFFFFFF < most for position in found.tolist())


def test_a_mask_that_is_of_other_lists_is_refused():
    rng = np.random.default_rng(7)
    made = paged(rng, make_lists(rng, [5, 8], 16, "f32"), 4)
    good = scan_arguments(made, "l2", make_queries(rng, 3, 16), np.tile(np.arange(2), (3, 1)), 2)
    mask = _masked(made, [1])
    _native.scan_pages(**good, **mask)
    first = mask["first_rows"]
    for bad, error, words in (
        ({"first_rows": None}, ValueError, "without first_rows"),
        ({"first_rows": first[:0].copy()}, ValueError, "without first_rows"),
        ({"mask": mask["mask"][:3].copy()}, ValueError, "multiple of 8 bytes"),
        ({"mask": mask["mask"][:0].copy()}, IndexError, "does not have a bit for each"),
        ({"first_rows": first[:2].copy()}, IndexError, "list 1 does not have a bit"),
        ({"first_rows": first + 1}, IndexError, None),
        ({"first_rows": first - 1}, IndexError, "list 0 does not have a bit"),
        ({"first_rows": first * 100}, IndexError, "does not have a bit for each"),
    ):
        arguments = {**good, **mask, **bad}
        if words is None:  # one further, and still within the words
            _native.scan_pages(**arguments)
            continue
        with pytest.raises(error, match=words):
            _native.scan_pages(**arguments)
