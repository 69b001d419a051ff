"""The native encoder and scan of RaBitQ codes against their numpy references, to the bit; and the reranker of rows."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hybridindex import _native
from hybridindex.index.rabitq.encode import decode_blocks, encode_reference
from hybridindex.index.rabitq.estimate import LARGEST_ESTIMATE, CodedQueries, code_queries, estimates, prepare_queries
from hybridindex.index.rabitq.rotation import signs
from hybridindex.index.rabitq.spec import CodeFormat, pad_dim
from hybridindex.profiler.searching import open_searching
from tests.clustered import small_index
from tests.coded import with_codes
from tests.native.lists import CODES, make_lists, make_probes, make_queries, scan

KERNELS = _native.kernels_here()
ALONE, HELPED = _native.ThreadPool(0), _native.ThreadPool(2)
SIZES = np.array([0, 1, 15, 16, 17, 400, 100, 33, 5], dtype=np.int64)


class Coded:
    """Lists around centroids, coded by the reference."""

    def __init__(self, metric, bits, dim, sizes=SIZES, seed=0):
        rng = np.random.default_rng(seed)
        self.form = CodeFormat(
            bits=bits, dim=dim, padded_dim=pad_dim(dim), metric=metric, seed=7, rounds=4, f_scale=0.25, g_scale=0.5
        )
        self.sizes = sizes
        self.signs = signs(self.form.padded_dim, 7)
        self.centroids = rng.normal(size=(len(sizes), dim)).astype(np.float32)
        self.centroids[3] = 0
        self.rows = [
            (c + 0.3 * rng.normal(size=(n, dim))).astype(np.float32) for n, c in zip(sizes, self.centroids, strict=True)
        ]
        for rows, centroid in zip(self.rows, self.centroids, strict=True):
            rows[1:2] = centroid
        self.blocks = [
            encode_reference(r, c, self.signs, self.form) for r, c in zip(self.rows, self.centroids, strict=True)
        ]
        self.squares = np.square(self.centroids.astype(np.float64)).sum(1).astype(np.float32)

    def scanner(self, kernels=""):
        data = np.concatenate([*self.blocks, np.zeros(64, np.uint8)])
        form = self.form
        return _native.RabitqScanner(
            data, self.sizes, form.bits, form.dim, self.signs, self.squares, form.f_scale, form.g_scale,
            form.metric == "l2", kernels,
        )  # fmt: skip

    def scan(self, queries, probes, r, pool=ALONE, kernels="", on_done=None):
        found, positions = np.empty((len(queries), r), np.float32), np.empty((len(queries), r), np.int64)
        self.scanner(kernels).scan(queries, probes, self.products(queries, probes), found, positions, pool, on_done)
        return found, positions

    def products(self, queries, probes):
        out = np.empty(probes.shape, np.float32)
        _native.pair_products(queries, self.centroids, probes, out)
        return out

    def best(self, queries, probes, r):
        """What the scan must answer."""
        coded, products = prepare_queries(queries, self.signs, self.form), self.products(queries, probes)
        found = np.full((len(queries), r), np.inf, np.float32)
        positions = np.full((len(queries), r), -1, np.int64)
        for q, probed in enumerate(probes):
            one = CodedQueries(whole=coded.whole[q : q + 1], u=coded.u[q : q + 1])
            e, p = [], []
            for place, number in enumerate(probed):
                if number >= 0 and self.sizes[number]:
                    blocks = decode_blocks(self.blocks[number], int(self.sizes[number]), self.form)
                    e.append(
                        estimates(one, blocks, products[q : q + 1, place], float(self.squares[number]), self.form)[0]
                    )
                    p.append((number << 32) | np.arange(self.sizes[number]))
            if e:
                candidates = np.count_nonzero(np.concatenate(e) <= LARGEST_ESTIMATE)
                order = np.lexsort((np.concatenate(p), np.concatenate(e)))[: min(r, candidates)]
                found[q, : len(order)] = np.concatenate(e)[order]
                positions[q, : len(order)] = np.concatenate(p)[order]
        return found, positions


def queries_and_probes(dim, n=7, p=6, seed=1):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(n, dim)).astype(np.float32)
    queries[n // 2] = 0
    probes = np.stack([rng.permutation(len(SIZES))[:p] for _ in range(n)]).astype(np.int64)
    probes[0, 2] = -1
    return queries, probes


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [1, 3, 17, 32, 100, 256, 2100])
def test_codes_and_estimates_are_those_of_the_reference(metric, bits, dim):
    coded = Coded(metric, bits, dim)
    form = coded.form
    for rows, centroid, blocks in zip(coded.rows, coded.centroids, coded.blocks, strict=True):
        out = np.full(len(blocks), 7, np.uint8)
        _native.rabitq_encode(rows, centroid, coded.signs, bits, form.f_scale, form.g_scale, metric == "l2", out)
        np.testing.assert_array_equal(out, blocks)
    queries, probes = queries_and_probes(dim)
    for kernels in ("", *KERNELS[1:]):
        for r in (1, 10, 150, 700):
            for ours, right in zip(
                coded.scan(queries, probes, r, kernels=kernels), coded.best(queries, probes, r), strict=True
            ):
                np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_are_of_no_higher_level_than_asked_for(kernels):
    levels = ["portable", "neon", "avx2", "avx512", "amx"]
    found = Coded("ip", 1, 3).scanner(kernels).kernels.removesuffix("_dot")
    assert levels.index(found) <= levels.index(kernels)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_estimates_may_be_infinite_or_too_far_apart_to_subtract():
    coded = Coded("ip", 1, 32)
    queries, probes = queries_and_probes(32, p=9)
    products = np.tile([np.inf, -np.inf, 3e38, -3e38, 0, 1, np.nan, 2, 1e38], (7, 1)).astype(np.float32)
    coded.products = lambda *_: products
    for r in (1, 20, 150, 700):
        for ours, right in zip(coded.scan(queries, probes, r), coded.best(queries, probes, r), strict=True):
            np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("bits", [1, 4])
def test_answers_depend_neither_on_the_batch_nor_on_threads(bits):
    coded = Coded("ip", bits, 64, sizes=np.array([9000, 5, 12000, 700, 16, 3000, 1, 0, 2500], np.int64))
    queries, probes = queries_and_probes(64, n=70)
    alone = [coded.scan(queries[q : q + 1], probes[q : q + 1], 90) for q in range(len(queries))]
    for pool in (ALONE, HELPED):
        for _ in range(3):
            found, positions = coded.scan(queries, probes, 90, pool)
            np.testing.assert_array_equal(found, np.concatenate([f for f, _ in alone]))
            np.testing.assert_array_equal(positions, np.concatenate([p for _, p in alone]))


def test_equal_estimates_are_in_the_order_of_positions():
    coded = Coded("l2", 1, 32)
    same = np.tile(coded.rows[5][:1], (400, 1))
    coded.blocks[5] = encode_reference(same, coded.centroids[5], coded.signs, coded.form)
    queries, probes = queries_and_probes(32)
    probes[:] = [5, 5, -1, -1, -1, -1]
    probes[:, 1] = -1
    for r in (1, 100, 399, 400):
        _, positions = coded.scan(queries, probes, r)
        np.testing.assert_array_equal(positions, np.tile((5 << 32) | np.arange(r), (len(queries), 1)))


def check_against_the_reference(coded, queries, probes, r, kernels=KERNELS, pools=(ALONE, HELPED)):
    """All queries together, and each alone."""
    right = coded.best(queries, probes, r)
    for name in kernels:
        for pool in pools:
            for ours, expected in zip(coded.scan(queries, probes, r, pool, name), right, strict=True):
                np.testing.assert_array_equal(ours, expected)
            for q in range(len(queries)):
                one = slice(q, q + 1)
                for ours, expected in zip(coded.scan(queries[one], probes[one], r, pool, name), right, strict=True):
                    np.testing.assert_array_equal(ours, expected[one])


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_list_that_is_probed_twice_gives_each_row_twice(metric, bits):
    coded = Coded(metric, bits, 33)
    queries, probes = queries_and_probes(33, n=20)
    # Side by side, apart, three times, nothing else; small lists and large ones. Others probe the same lists once.
    probes[1] = [5, 5, 6, 7, 3, 2]
    probes[2] = [5, 6, 7, 5, 6, 5]
    probes[3] = [3, 5, 3, -1, 3, 8]
    probes[4] = 5
    probes[5] = 1
    probes[6:9] = [5, 6, 5, 6, 5, 6]
    for r in (1, 10, 63, 150, 700, 2500):
        check_against_the_reference(coded, queries, probes, r)
    found, positions = coded.scan(queries[4:5], probes[4:5], 800)
    np.testing.assert_array_equal(positions[0], np.repeat(positions[0, ::2], 2))
    np.testing.assert_array_equal(found[0], np.repeat(found[0, ::2], 2))


def test_many_queries_that_probe_a_large_list_twice_get_each_row_twice():
    """More than the kernels compare together, and more rows than they find room for at once."""
    coded = Coded("ip", 1, 64, sizes=np.array([0, 5000, 5, 0, 3000], np.int64))
    queries = make_queries(np.random.default_rng(8), 300, 64)
    probes = np.tile(np.array([1, 4, 1], np.int64), (300, 1))
    probes[::7] = [4, 1, 4]
    probes[::11, 1] = -1
    for r in (30, 3000):
        right = coded.best(queries, probes, r)
        for pool in (ALONE, HELPED):
            for ours, expected in zip(coded.scan(queries, probes, r, pool), right, strict=True):
                np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("pool", [ALONE, HELPED], ids=["alone", "helped"])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_of_thousands_of_equal_estimates_those_at_the_smallest_positions_stay(metric, pool):
    coded = Coded(metric, 1, 128, sizes=np.array([0, 3000, 5, 16, 4000, 6000, 1], np.int64))
    # Rows of all lists are the same one, around one centroid.
    coded.centroids[:] = coded.centroids[5]
    coded.squares[:] = np.square(coded.centroids[5].astype(np.float64)).sum().astype(np.float32)
    row = coded.rows[5][:1]
    coded.blocks = [
        encode_reference(np.tile(row, (n, 1)), coded.centroids[5], coded.signs, coded.form) for n in coded.sizes
    ]
    queries = make_queries(np.random.default_rng(9), 40, 128)
    rng = np.random.default_rng(10)
    probes = np.stack([rng.permutation(7) for _ in queries])  # larger positions come first in some
    positions = np.concatenate([(number << 32) | np.arange(size) for number, size in enumerate(coded.sizes)])
    for r in (1, 17, 100, 3001, 3030):
        for kernels in KERNELS:
            found, kept = coded.scan(queries, probes, r, pool, kernels)
            np.testing.assert_array_equal(kept, np.tile(positions[:r], (40, 1)))
            np.testing.assert_array_equal(found, np.tile(found[:, :1], r))
        for q in range(0, 40, 13):
            np.testing.assert_array_equal(coded.scan(queries[q : q + 1], probes[q : q + 1], r, pool)[1][0], kept[q])


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_of_estimates_of_few_values_the_best_are_in_the_order_of_positions(metric):
    """Each value comes hundreds of times, and somewhere in between the last candidate is."""
    coded = Coded(metric, 2, 32, sizes=np.array([2000, 0, 900, 5, 3000], np.int64))
    rng = np.random.default_rng(11)
    for number in (0, 2, 4):
        few = coded.rows[number][:7]
        rows = few[rng.integers(0, 7, coded.sizes[number])]
        coded.blocks[number] = encode_reference(rows, coded.centroids[number], coded.signs, coded.form)
    queries, probes = make_queries(rng, 5, 32), np.stack([rng.permutation(5) for _ in range(5)])
    for r in (1, 60, 500, 2345):
        check_against_the_reference(coded, queries, probes, r)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_estimate_of_zero_has_no_sign(kernels, zero):
    coded = Coded("ip", 4, 33)
    queries, probes = queries_and_probes(33, p=9)
    queries[:] = zero
    probes[:] = np.arange(9)
    coded.products = lambda _, probed: np.full(probed.shape, zero, np.float32)
    for n in (1, 7):
        for r in (20, 100, 700):
            found, positions = coded.scan(queries[:n], probes[:n], r, kernels=kernels)
            there = positions >= 0
            assert there.sum() == n * min(r, SIZES.sum())
            assert (found[there] == 0).all()
            assert not np.signbit(found).any()
            # Of one sign, they are equal.
            assert (np.diff(positions[:, : min(r, SIZES.sum())]) > 0).all()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_far_more_candidates_than_rows_are_all_rows_in_order(metric):
    coded = Coded(metric, 1, 17)
    queries, probes = queries_and_probes(17)
    check_against_the_reference(coded, queries, probes, 65_536, kernels=("", "portable"))
    found, positions = coded.scan(queries, probes, 65_536)
    assert (positions[:, SIZES.sum() :] == -1).all()
    assert (found[:, SIZES.sum() :] == np.inf).all()


def test_very_many_candidates_of_more_rows_are_the_best_in_order():
    coded = Coded("l2", 1, 3, sizes=np.array([30_000, 0, 50_000, 100], np.int64))
    queries = make_queries(np.random.default_rng(12), 3, 3)
    probes = np.array([[0, 1, 2, 3], [2, 0, -1, 3], [3, 2, 1, 0]])
    check_against_the_reference(coded, queries, probes, 65_536, kernels=("",))


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [1, 17, 100, 384])
def test_queries_are_rounded_as_by_the_reference(bits, dim):
    coded = Coded("ip", bits, dim)
    queries = make_queries(np.random.default_rng(bits), 9, dim)
    queries[0], queries[1] = 0, 1e-44
    ours = code_queries(queries, coded.signs, coded.form)
    right = prepare_queries(queries, coded.signs, coded.form)
    np.testing.assert_array_equal(ours.whole, right.whole)
    np.testing.assert_array_equal(ours.u, right.u)
    with pytest.raises(ValueError, match="whole must be"):
        _native.rabitq_queries(queries, coded.signs, bits, 1.0, ours.whole[1:], ours.u)


def test_each_query_is_reported_once():
    coded = Coded("ip", 2, 100)
    queries, probes = queries_and_probes(100, n=40)
    seen = []
    coded.scan(queries, probes, 10, HELPED, on_done=seen.extend)
    assert sorted(seen) == list(range(40))


def kilobytes(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def memory_of_a_scan(size, r):
    """Bytes that a scan of 20 lists for 256 queries takes at most, and those that are left of it."""
    sizes, turned = np.full(20, size, np.int64), signs(32, 7)
    blocks = np.zeros(20 * -(-size // 16) * 128, np.uint8)
    scanner = _native.RabitqScanner(blocks, sizes, 1, 32, turned, np.zeros(20, np.float32), 1.0, 1.0, False, "")
    queries, probes = np.ones((256, 32), np.float32), np.tile(np.arange(20), (256, 1))
    found, positions = np.zeros((256, r), np.float32), np.zeros((256, r), np.int64)
    # Pages of the answer count as taken before.
    found.fill(1), positions.fill(1)

    before = kilobytes("VmRSS")
    scanner.scan(queries, probes, np.zeros((256, 20), np.float32), found, positions, _native.ThreadPool(3), None)
    peak = kilobytes("VmHWM")
    ctypes.CDLL(None).malloc_trim(0)
    return (peak - before) << 10, (kilobytes("VmRSS") - before) << 10


def in_a_process_of_its_own(function, *args):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result(300)


counts_bytes = pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer takes its own")


@counts_bytes
def test_threads_take_no_memory_for_candidates_that_are_not_there():
    # Of 4,000 rows; places for 32,768 would be 100 MB for each helper.
    taken, _ = in_a_process_of_its_own(memory_of_a_scan, 200, 32_768)
    assert taken < 120 << 20


@counts_bytes
def test_memory_of_a_large_scan_is_given_back():
    taken, left = in_a_process_of_its_own(memory_of_a_scan, 2_000, 20_000)
    assert taken > 200 << 20
    assert left < 60 << 20


def memory_after(path, kind):
    """Bytes that are left of a call for 30,000 queries of 512 dimensions."""
    with with_codes(small_index(path, dim=512, n=64, nlist=1)) as index:
        view = index if kind == "rows" else index.by_codes()
        with closing(open_searching(view, threads=1)) as searching:
            # Pages of what is asked count as taken before.
            queries, probes = np.ones((30_000, 512), np.float32), np.full((30_000, 1), 0)
            products = np.full(probes.shape, 0, np.float32)
            scanner = searching.scanner

            def call(n):
                if kind == "chosen rows":
                    scanner.reranker.rerank(queries[:n], probes[:n], 1)
                else:
                    scanner.scan(queries[:n], probes[:n], products[:n], 1)

            call(1)
            before = kilobytes("VmRSS")
            call(len(queries))
            ctypes.CDLL(None).malloc_trim(0)
            return (kilobytes("VmRSS") - before) << 10


@counts_bytes
@pytest.mark.parametrize("kind", ["codes", "rows", "chosen rows"])
def test_memory_of_many_queries_is_given_back(tmp_path, kind):
    # 60 MB of them, or more.
    assert in_a_process_of_its_own(memory_after, tmp_path / "i", kind) < 30 << 20


def test_bad_arguments_are_refused():
    coded = Coded("ip", 1, 17)
    queries, probes = queries_and_probes(17)
    with pytest.raises(IndexError, match=r"probe 9 of query 0 is not a list id"):
        coded.scanner().scan(
            queries, np.full_like(probes, 9), np.zeros(probes.shape, np.float32),
            np.empty((7, 3), np.float32), np.empty((7, 3), np.int64), ALONE, None,
        )  # fmt: skip
    with pytest.raises(ValueError, match="centre_products"):
        coded.scanner().scan(
            queries,
            probes,
            np.zeros((7, 1), np.float32),
            np.empty((7, 3), np.float32),
            np.empty((7, 3), np.int64),
            ALONE,
            None,
        )
    coded.sizes = coded.sizes * 2
    with pytest.raises(ValueError, match="leaves the buffer of codes"):
        coded.scanner()
    with pytest.raises(ValueError, match="bits must be 1, 2 or 4"):
        _native.rabitq_encode(
            coded.rows[2], coded.centroids[2], coded.signs, 3, 1.0, 1.0, False, np.empty(64, np.uint8)
        )
    with pytest.raises(ValueError, match="out must have"):
        _native.rabitq_encode(
            coded.rows[2], coded.centroids[2], coded.signs, 1, 1.0, 1.0, False, np.empty(64, np.uint8)
        )


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_reranked_distances_are_those_of_a_scan_of_rows(code, metric):
    rng = np.random.default_rng(3)
    lists = make_lists(rng, [0, 5, 300, 64, 17, 1, 120, 33], 33, code)
    queries, probes = make_queries(rng, 20, 33), make_probes(rng, 20, 4, 8)
    positions = np.full((20, 600), -1, np.int64)
    for q, probed in enumerate(probes):
        own = np.concatenate(
            [(number << 32) | np.arange(lists.extents[number, 0]) for number in probed if number >= 0]
            or [np.empty(0, np.int64)]
        )
        positions[q, : len(own)] = rng.permutation(own)
    for pool in (ALONE, HELPED):
        distances, ids = np.empty((20, 9), np.float32), np.empty((20, 9), np.int64)
        lists.reranker(metric).rerank(queries, positions, distances, ids, pool)
        right_distances, right_ids = scan(lists.scanner(metric), queries, probes, 9, ALONE)
        np.testing.assert_array_equal(ids, right_ids)
        np.testing.assert_array_equal(distances, right_distances)


def test_positions_that_are_no_rows_are_refused():
    lists = make_lists(np.random.default_rng(4), [3, 5], 8, "f32")
    for position in (3, (1 << 32) | 5, 2 << 32, -2):
        with pytest.raises(IndexError, match="is no row"):
            lists.reranker("ip").rerank(
                np.ones((1, 8), np.float32),
                np.array([[position]]),
                np.empty((1, 1), np.float32),
                np.empty((1, 1), np.int64),
                ALONE,
            )


@pytest.mark.parametrize("dim", [1, 16, 33])
def test_products_of_pairs_do_not_depend_on_their_neighbours(dim):
    rng = np.random.default_rng(5)
    queries, centroids = rng.normal(size=(9, dim)).astype(np.float32), rng.normal(size=(30, dim)).astype(np.float32)
    probes = rng.integers(-1, 30, (9, 11))
    together = np.empty(probes.shape, np.float32)
    _native.pair_products(queries, centroids, probes, together)
    right = np.einsum("nd,npd->np", queries.astype(np.float64), centroids[probes].astype(np.float64))
    np.testing.assert_allclose(together, np.where(probes < 0, 0, right), atol=1e-4)
    for q in range(9):
        for i in range(11):
            one = np.empty((1, 1), np.float32)
            _native.pair_products(queries[q : q + 1], centroids, probes[q : q + 1, i : i + 1], one)
            assert one[0, 0] == together[q, i]
    with pytest.raises(IndexError, match="is not a list id"):
        _native.pair_products(queries, centroids, np.full((9, 11), 30), together)


@pytest.mark.parametrize("dim", [1, 16, 33])
def test_products_of_pairs_are_those_of_coarse_quantization(dim):
    rng = np.random.default_rng(6)
    queries, centroids = rng.normal(size=(70, dim)).astype(np.float32), rng.normal(size=(90, dim)).astype(np.float32)
    probes, coarse = np.empty((70, 40), np.int64), np.empty((70, 40), np.float32)
    _native.CoarseQuantizer(centroids, True, "").quantize(queries, probes, coarse)
    products = np.empty(probes.shape, np.float32)
    _native.pair_products(queries, centroids, probes, products)
    np.testing.assert_array_equal(products, coarse)
