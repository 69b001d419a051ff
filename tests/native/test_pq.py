"""The native scans of product-quantized rows equal the references in numpy, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridindex import _native
from hybridindex.index.pq import distances
from hybridindex.index.pq.form import PqForm
from hybridindex.index.storage.layout import plan_extents, total_bytes
from hybridindex.index.storage.pqfs import pack_pqfs

#: dim, parts, bits: one part, odd ones, more than fit 16 bits in bytes of 255.
SHAPES = [(24, 8, 8), (6, 1, 8), (33, 11, 8), (24, 12, 4), (30, 15, 4), (7, 7, 4), (1200, 1200, 4), (600, 300, 8)]
FORMS = [("ip", True), ("ip", False), ("l2", True), ("l2", False)]


class Made:
    """Random lists of a form, empty ones among them, as they lie in ``lists.bin``. Ids are not in order."""

    def __init__(self, dim, parts, bits, metric, residual, *, offset=0.0, kernels="", seed=0):
        rng = self.rng = np.random.default_rng(seed)
        words = 1 << bits
        self.centroids = (rng.standard_normal((9, dim)) + offset).astype(np.float32)
        self.form = PqForm(
            dim=dim,
            parts=parts,
            metric=metric,
            residual=residual,
            codewords=rng.standard_normal((dim, words)).astype(np.float32),
            middle=self.centroids.mean(axis=0) if residual else np.zeros(dim, np.float32),
        )
        self.sizes = np.array([0, 1, 31, 32, 33, 64, 100, 5, 17])
        self.extents = plan_extents(self.sizes, self.form.code_size, "rows" if bits == 8 else "pqfs32")
        self.data = np.zeros(total_bytes(self.extents, self.form.code_size), np.uint8)
        self.ids, self.codes = [], []
        numbers = rng.permutation(int(self.sizes.sum()))
        # Few rows, so that many are as far as others.
        few = rng.integers(0, 256, (20, self.form.code_size), dtype=np.uint8)
        if bits == 4 and parts % 2:
            few[:, -1] &= 15
        for size, capacity, start in self.extents.tolist():
            rows = few[rng.integers(0, len(few), size)]
            stored = (rows if bits == 8 else pack_pqfs(rows)).reshape(-1)
            self.codes.append(stored)
            self.ids.append(numbers[:size].astype(np.int64))
            numbers = numbers[size:]
            self.data[start : start + len(stored)] = stored
            at = start + capacity * self.form.code_size
            self.data[at : at + 8 * size] = self.ids[-1].view(np.uint8)
        self.native = distances.native_form(self.form, kernels)
        self.none = np.empty((0, dim), np.float32)

    def scanner(self):
        return _native.PqScanner(
            self.data, self.extents, self.native, self.centroids if self.form.residual else self.none
        )

    def queries(self, n=6, p=5):
        queries = (self.rng.standard_normal((n, self.form.dim)) + self.centroids[0].mean()).astype(np.float32)
        probes = np.stack([self.rng.permutation(9)[:p] for _ in range(n)])
        probes[self.rng.random(probes.shape) < 0.1] = -1
        return queries, probes

    def best(self, queries, probes, k, labels):
        """(distance, label) of the best rows, by the references."""
        form = self.form
        tables = distances.tables_reference(queries, form)
        bases = np.zeros(probes.shape, np.float32)
        if form.residual:
            bases = distances.bases_reference(queries, self.centroids, probes, form)
        found = np.full((len(queries), k), np.inf, np.float32)
        at = np.full((len(queries), k), -1, np.int64)
        for q, lists in enumerate(probes):
            every, of_rows = [np.empty(0, np.float32)], [np.empty(0, np.int64)]
            for column, one in enumerate(lists):
                if one < 0:
                    continue
                size = int(self.sizes[one])
                numbers = distances.numbers_of(self.codes[one], size, form)
                terms = None
                if form.has_terms:
                    terms = distances.terms_reference(self.codes[one], size, self.centroids[one], form)
                own = distances.distances(tables[q : q + 1], bases[q : q + 1, column], terms, numbers, form)
                every.append(own[0])
                of_rows.append(labels[one])
            every, of_rows = np.concatenate(every), np.concatenate(of_rows)
            order = np.lexsort((of_rows, every))[:k]
            found[q, : len(order)], at[q, : len(order)] = every[order], of_rows[order]
        return (-found if form.metric == "ip" else found), at


#: Best first.
KERNELS = _native.kernels_here()


@pytest.fixture(params=KERNELS)
def kernels(request):
    return request.param


@pytest.mark.parametrize(("metric", "residual"), FORMS)
@pytest.mark.parametrize(("dim", "parts", "bits"), SHAPES)
def test_parts_of_distances_are_those_of_numpy(dim, parts, bits, metric, residual, kernels):
    made = Made(dim, parts, bits, metric, residual, kernels=kernels, offset=3.0)
    queries, probes = made.queries()
    form = made.form
    tables = np.empty((len(queries), parts << bits), np.float32)
    made.native.tables(queries, tables)
    np.testing.assert_array_equal(tables.reshape(len(queries), parts, -1), distances.tables_reference(queries, form))
    if residual:
        bases = np.empty(probes.shape, np.float32)
        made.native.bases(queries, made.centroids, probes, bases)
        np.testing.assert_array_equal(bases, distances.bases_reference(queries, made.centroids, probes, form))
    if form.has_terms:
        for codes, size, centroid in zip(made.codes, made.sizes.tolist(), made.centroids, strict=True):
            terms = np.empty(size, np.float32)
            made.native.terms(codes, centroid, terms)
            np.testing.assert_array_equal(terms, distances.terms_reference(codes, size, centroid, form))


@pytest.mark.parametrize("asked", ["", *KERNELS])
def test_kernels_are_the_best_of_what_is_asked_for(asked):
    level = asked or KERNELS[0]
    wide = level in ("avx512", "amx") and "avx512vbmi" in Path("/proc/cpuinfo").read_text()
    expected = "avx512" if wide else "avx2" if level in ("avx2", "avx512", "amx") else level
    made = Made(24, 8, 8, "ip", False, kernels=asked)
    assert made.native.kernels == made.scanner().kernels == expected


def test_kernels_that_do_not_run_here_are_refused():
    with pytest.raises(ValueError, match='kernels "abacus" do not run'):
        Made(24, 8, 8, "ip", False, kernels="abacus")


@pytest.mark.parametrize("k", [1, 7, 300])
@pytest.mark.parametrize(("metric", "residual"), FORMS)
@pytest.mark.parametrize(("dim", "parts", "bits"), SHAPES)
def test_a_scan_is_that_of_numpy(dim, parts, bits, metric, residual, k, kernels):
    made = Made(dim, parts, bits, metric, residual, kernels=kernels)
    queries, probes = made.queries()
    expected = made.best(queries, probes, k, made.ids)
    for threads in (0, 2):
        answer = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        made.scanner().scan(queries, probes, *answer, _native.ThreadPool(threads))
        np.testing.assert_array_equal(answer[1], expected[1])
        np.testing.assert_array_equal(answer[0], expected[0])


@pytest.mark.parametrize(("metric", "residual"), FORMS)
@pytest.mark.parametrize(("dim", "parts", "bits"), [(24, 8, 8), (30, 15, 4)])
def test_only_rows_that_a_filter_names_are_found(dim, parts, bits, metric, residual):
    made = Made(dim, parts, bits, metric, residual)
    queries, probes = made.queries()
    allowed = np.arange(0, int(made.sizes.sum()), 3)
    every = made.best(queries, probes, 400, made.ids)
    answer = np.empty((len(queries), 9), np.float32), np.empty((len(queries), 9), np.int64)
    made.scanner().scan(queries, probes, *answer, _native.ThreadPool(0), None, allowed)
    for row in range(len(queries)):
        named = np.isin(every[1][row], allowed)
        np.testing.assert_array_equal(answer[1][row], every[1][row][named][:9])
        np.testing.assert_array_equal(answer[0][row], every[0][row][named][:9])


@pytest.mark.parametrize("rows_per_page", [32, 96])
@pytest.mark.parametrize(("metric", "residual"), FORMS)
@pytest.mark.parametrize(("dim", "parts", "bits"), SHAPES)
def test_pages_are_scanned_as_lists_are(dim, parts, bits, metric, residual, rows_per_page, kernels):
    made = Made(dim, parts, bits, metric, residual, kernels=kernels)
    rows_per_page -= 0 if bits == 4 else 5
    queries, probes = made.queries()
    row_bytes = made.form.row_bytes
    counts = -(-made.sizes // rows_per_page)
    order = made.rng.permutation(counts.sum() + 3).astype(np.int32)[: counts.sum()]
    starts = np.append(0, np.cumsum(counts))
    arena = np.full((counts.sum() + 3, rows_per_page * row_bytes), 0xFF, np.uint8)
    for i, codes in enumerate(made.codes):
        stored = distances.page_rows(codes, int(made.sizes[i]), made.centroids[i], made.form).reshape(-1)
        for at in range(0, len(stored), arena.shape[1]):
            part = stored[at : at + arena.shape[1]]
            arena[order[starts[i] + at // arena.shape[1]], : len(part)] = part
    lists, member_starts, members, _ = _native.group_probes(probes, made.extents)
    answer = np.empty((len(queries), 11), np.float32), np.empty((len(queries), 11), np.int64)
    all_ids, id_starts = np.concatenate(made.ids), (np.cumsum(made.sizes) - made.sizes)[lists]
    arguments = [
        arena,
        rows_per_page,
        lists,
        made.sizes[lists],
        np.append(0, np.cumsum(counts[lists])),
        np.concatenate([order[starts[i] : starts[i + 1]] for i in lists]),
        member_starts,
        members,
        made.centroids[lists] if residual else made.none,
        all_ids,
        id_starts,
        queries,
        *answer,
    ]
    made.native.scan_pages(*arguments)
    expected = made.best(queries, probes, 11, made.ids)
    np.testing.assert_array_equal(answer[1], expected[1])
    np.testing.assert_array_equal(answer[0], expected[0])
    for starts in (id_starts - all_ids.size, id_starts + all_ids.size):
        arguments[10] = starts
        with pytest.raises(IndexError, match=f"ids of list {lists[0]} begin at"):
            made.native.scan_pages(*arguments)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-30, 1e19, 1e25, 3e38])
@pytest.mark.parametrize(("metric", "residual"), FORMS)
def test_vectors_of_any_size_are_compared_and_what_is_no_number_is_no_answer(metric, residual, size, bits):
    made = Made(24, 8, bits, metric, residual)
    queries, probes = made.queries()
    queries *= np.float32(size) / np.abs(queries).max()
    answer = np.empty((len(queries), 9), np.float32), np.empty((len(queries), 9), np.int64)
    made.scanner().scan(queries, probes, *answer, _native.ThreadPool(0))
    with np.errstate(over="ignore", invalid="ignore"):
        every = made.best(queries, probes, 400, made.ids)
    for row in range(len(queries)):
        far = -every[0][row] if metric == "ip" else every[0][row]
        numbers = far <= distances.LARGEST
        expected = every[1][row][numbers][:9]
        np.testing.assert_array_equal(answer[1][row, : len(expected)], expected)
        np.testing.assert_array_equal(answer[0][row, : len(expected)], every[0][row][numbers][:9])
        assert (answer[1][row, len(expected) :] == -1).all()


def test_far_from_the_origin_no_digits_are_lost():
    made = Made(24, 8, 8, "l2", True, offset=1000.0)
    queries, probes = made.queries()
    answer = np.empty((len(queries), 5), np.float32), np.empty((len(queries), 5), np.int64)
    made.scanner().scan(queries, probes, *answer, _native.ThreadPool(0))
    words = made.form.codewords.reshape(8, 3, 256).astype(np.float64)
    where = {int(i): (one, row) for one, ids in enumerate(made.ids) for row, i in enumerate(ids)}
    for row, (found, ids) in enumerate(zip(*answer, strict=True)):
        for distance, i in zip(found, ids, strict=True):
            one, at = where[int(i)]
            numbers = distances.numbers_of(made.codes[one], int(made.sizes[one]), made.form)[at]
            decoded = made.centroids[one] + np.concatenate([words[m, :, n] for m, n in enumerate(numbers)])
            exact = ((decoded - queries[row]) ** 2).sum()
            assert abs(distance - exact) <= 1e-5 * (1 + exact)


def test_terms_that_were_forgotten_come_from_what_the_lists_hold_now():
    made = Made(24, 8, 8, "l2", True)
    queries, probes = made.queries(3, 9)
    scanner, pool = made.scanner(), _native.ThreadPool(0)
    answer = np.empty((3, 9), np.float32), np.empty((3, 9), np.int64)
    scanner.prepare(np.arange(9))
    kept = made.codes[6].copy()
    start = int(made.extents[6, 2])
    made.codes[6] = np.roll(kept, 8)
    made.data[start : start + len(kept)] = made.codes[6]
    scanner.forget(np.array([6]))
    scanner.scan(queries, probes, *answer, pool)
    expected = made.best(queries, probes, 9, made.ids)
    np.testing.assert_array_equal(answer[0], expected[0])
    np.testing.assert_array_equal(answer[1], expected[1])
    # They are kept from this scan on: other bytes, of which the scanner is told nothing, do not change them.
    made.data[start : start + len(kept)] = kept
    scanner.scan(queries, probes, *answer, pool)
    other = made.scanner()
    fresh = np.empty_like(answer[0]), np.empty_like(answer[1])
    other.scan(queries, probes, *fresh, pool)
    assert (answer[0] != fresh[0]).any()


def test_what_cannot_be_is_refused():
    made = Made(24, 8, 8, "l2", True)
    form = made.form
    with pytest.raises(ValueError, match="parts is 7; expected a divisor of 24"):
        _native.PqForm(form.codewords, form.middle, 7, True, True)
    with pytest.raises(ValueError, match="codewords must be"):
        _native.PqForm(form.codewords[:, :5].copy(), form.middle, 8, True, True)
    with pytest.raises(ValueError, match="centroids must be"):
        _native.PqScanner(made.data, made.extents, made.native, made.centroids[:3])
    with pytest.raises(ValueError, match="leaves the buffer"):
        _native.PqScanner(made.data[:64], made.extents, made.native, made.centroids)
    with pytest.raises(IndexError, match="list 9"):
        made.scanner().prepare(np.array([9]))
