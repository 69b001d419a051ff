"""Profiles of searches by codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.config import MAX_K
from hybridindex.errors import InvalidInputError, ProfileError, ProfileMismatchError
from hybridindex.index import open_index
from hybridindex.index.compress import compress
from hybridindex.paging import CODE_PAGE_BYTES, PageGeometry
from hybridindex.partitioner import make_plan
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.models.coverage import code_size_of, group_rows_of
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler import ProfileRequest, device, profile_index
from hybridindex.profiler.access import sample_access, split_halves
from hybridindex.profiler.candidates import carry_candidates, count_candidates, counts_by_probe
from hybridindex.profiler.host import time_host
from hybridindex.profiler.recall import recall_by_codes, search_exhaustively
from hybridindex.profiler.searching import open_searching
from hybridindex.router.batch import comparison
from hybridindex.router.router import Router
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.paged.codes.native_row_pages import NativeRowPages
from tests.clustered import small_index
from tests.coded import with_codes

QUICK = {"batches": (1, 4), "repeats": 2, "coverages": (0.2,), "threads": 1, "k": 5}


@pytest.fixture(scope="module", params=[1, 2])
def index(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("coded") / "idx"
    with small_index(path) as made:
        compress(made, bits=request.param, queries=None)
    with open_index(path) as made:
        yield made


def profiled(index, queries, **asked):
    return profile_index(index, queries, ProfileRequest(**{**QUICK, **asked}))


def test_a_profile_of_codes_holds_what_a_search_by_codes_costs(index, queries):
    view = index.by_codes()
    bits = index.rabitq.spec.bits
    profile = profiled(view, queries, nprobe=6)
    assert profile.index_fingerprint == view.fingerprint != index.fingerprint
    assert (profile.codec, profile.bits, profile.scanner, profile.nprobe) == (f"rabitq{bits}", bits, "rabitq", 6)
    np.testing.assert_array_equal(profile.list_bytes, index.rabitq.list_bytes)
    # A page holds whole blocks of codes, padding included.
    assert (code_size_of(profile), group_rows_of(profile)) == (view.code_size, view.group_rows)
    assert {s.stage for s in profile.stages} == {"coarse", "host_scan", "rerank"}
    scans = [s for s in profile.stages if s.stage == "host_scan" and s.coverage == 0]
    assert {s.batch for s in scans} == {1, 4}
    assert all(0 < s.work_bytes <= s.batch * profile.list_bytes.sum() for s in scans)
    said = profile.notes["codes"]
    assert said == {
        "of": index.rows.fingerprint,
        "bits": bits,
        "candidates": index.rabitq.spec.candidates_for(5, 6),
        "recall_loss": index.rabitq.spec.recall_loss,
        "row_bytes": int(index.list_bytes.sum()),
        "rows_on_devices": True,
    }
    assert profile.notes["host"]["candidates"] == said["candidates"]
    assert profile.notes["host"]["coarse"] == "quantization and products with centroids"
    rows = profiled(index, queries, nprobe=6)
    assert (rows.bits, "codes" in rows.notes, "candidates" in rows.notes["host"]) == (None, False, False)
    np.testing.assert_array_equal(rows.access.held_probes, profile.access.held_probes)


class Calls:
    """A clock of calls, which take what a test says and nothing else does."""

    def __init__(self, monkeypatch):
        self._now, self._patch = 0.0, monkeypatch

    def cost(self, owner, name, seconds):
        call = getattr(owner, name)

        def timed(*args, **kwargs):
            self._now += seconds
            return call(*args, **kwargs)

        self._patch.setattr(owner, name, timed)

    def __call__(self):
        return self._now


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def test_the_stages_beside_the_scan_are_timed_apart(index, queries, calls, monkeypatch):
    """Each call of the scanner or reranker takes a second of its own."""
    view = index.by_codes()
    searching = open_searching(view, threads=1)
    scanner, reranker = searching.scanner, searching.scanner.reranker
    kept = searching.kept(3, 4)

    asked = []
    scan = scanner.scan
    monkeypatch.setattr(scanner, "scan", lambda *a, **k: asked.append(a[3]) or scan(*a, **k))
    calls.cost(scanner, "centre_products", 1.0)
    calls.cost(reranker, "rerank", 10.0)
    calls.cost(scanner, "scan", 100.0)
    request = ProfileRequest(nprobe=4, k=3, batches=(1, 4), coverages=(0.25,), repeats=2)
    order = np.arange(index.nlist)
    x = index.transform(queries)
    timing = time_host(view, scanner, x, order, request, max_seconds=1e9, clock=calls)
    searching.close()
    coarse, reranks = ([s for s in timing.samples if s.stage == stage] for stage in ("coarse", "rerank"))
    assert {s.seconds for s in coarse} == {1.0}
    # After scans of all lists alone: the candidates of the others are not those of a search.
    assert [s.batch for s in sorted(reranks, key=lambda s: s.batch)] == [1, 1, 4, 4]
    assert {s.seconds for s in reranks} == {10.0}
    for sample in reranks:
        assert 0 < sample.probes <= sample.batch * kept
        assert sample.work_bytes == sample.probes * index.code_size
        assert sample.probes == sample.batch * kept or sample.coverage > 0
    assert {s.seconds for s in timing.samples if s.stage == "host_scan"} == {100.0}
    assert set(asked) == {kept}


def test_candidates_are_counted_where_they_lie(index, queries):
    view, nprobe = index.by_codes(), 6
    made = profiled(view, queries, nprobe=nprobe)
    access = made.access
    kept = made.notes["codes"]["candidates"]
    assert access.held_candidates.shape == access.held_probes.shape
    searching = open_searching(view, threads=1)
    # The same queries, one by one.
    halves = [index.transform(queries[part]) for part in split_halves(len(queries), made.seed)]
    sums = np.zeros(index.nlist)
    for query, probes in zip(halves[0], access.fit_probes, strict=True):
        np.add.at(sums, found_lists(searching, query, probes, kept), 1)
    np.testing.assert_allclose(access.list_candidates, sums)
    for query, probes, counts in zip(halves[1], access.held_probes, access.held_candidates, strict=True):
        lists = found_lists(searching, query, probes, kept)
        np.testing.assert_array_equal(counts, [np.count_nonzero(lists == one) for one in probes])
    searching.close()
    assert made.notes["candidates"] == {"queries": len(queries)}
    assert profiled(index, queries, nprobe=nprobe).access.list_candidates is None
    curve = analyse(made).curve
    assert curve.rows.every.sum() == pytest.approx(access.held_candidates.sum())


def found_lists(searching, query, probes, kept):
    one, mine = query[None], probes[None].astype(np.int64)
    _, positions = searching.scanner.scan(one, mine, searching.coarse_of(one, mine), kept)
    return positions[positions >= 0] >> POSITION_BITS


def test_devices_compare_as_many_candidates_as_was_predicted(index, queries):
    """Exactly, of the queries that it was predicted from."""
    view = index.by_codes()
    made = profiled(view, queries, nprobe=6)
    held = queries[split_halves(len(queries), made.seed)[1]]
    analysis = analyse(made)
    plan = make_plan(
        made,
        PlanRequest.resolve(slo_ms=1e3, device_budget_bytes=8 << 20, coverage=0.3, page_bytes=CODE_PAGE_BYTES),
        analysis=analysis,
    )
    for count in (3, 12, analysis.curve.rows.n_lists):
        lists = analysis.curve.rows.order[:count]
        device = np.full(index.nlist, -1, dtype=np.int16)
        device[lists] = 0
        placed = replace(plan, resident_rows=lists, row_device=device)
        with Router(index, precision="codes", plan=placed, devices=["cpu"], threads=1, lookahead_bytes=0) as router:
            router.search(held, 5, 6)
            found = router.stats()
        assert found.unplaced_lists == 0
        assert found.device_fallbacks == 0
        assert placed.predicted_row_hit_rate == pytest.approx(found.rerank_hit_rate)
        assert placed.predicted_hit_rate == pytest.approx(found.hit_rate, abs=0.05)


def test_queries_beyond_the_time_are_taken_to_be_like_the_others(index, queries):
    view, rng = index.by_codes(), np.random.default_rng(3)
    searching = open_searching(view, threads=1)
    x = index.transform(queries[rng.integers(0, len(queries), 400)])
    access = sample_access(index, x[:200], x[200:], 6)
    halves = x[:200], x[200:]
    every, n_every = count_candidates(searching, access, halves, 5, max_seconds=1e9)
    few, n_few = count_candidates(searching, access, halves, 5, max_seconds=0.0)
    searching.close()
    assert (n_every, n_few) == (400, 128)
    np.testing.assert_array_equal(few.held_candidates[:64], every.held_candidates[:64])
    np.testing.assert_allclose(few.held_candidates.sum(axis=1), every.held_candidates.sum(axis=1), rtol=1e-5)
    hot = np.argsort(-every.list_candidates)[: index.nlist // 2]
    assert few.list_candidates[hot].sum() == pytest.approx(every.list_candidates[hot].sum(), rel=0.1)
    # A renewed profile has scanned none of its queries.
    later = carry_candidates(sample_access(index, x[200:], x[:200], 6), every)
    assert later.list_candidates[hot].sum() == pytest.approx(every.list_candidates[hot].sum(), rel=0.1)
    np.testing.assert_allclose(later.held_candidates.sum(axis=1), searching.kept(5, 6), rtol=1e-5)
    assert carry_candidates(access, access).list_candidates is None


def test_a_query_with_few_lists_counts_no_other_lists_candidates():
    probes = np.array([[3, 5, -1], [5, -1, -1], [-1, -1, -1]])
    positions = np.array([[3 << 32 | 7, 5 << 32, 3 << 32], [5 << 32 | 1, -1, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(counts_by_probe(probes, positions), [[2, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_the_products_that_the_quantizer_gave_are_not_computed_again(tmp_path, monkeypatch, queries):
    made = small_index(tmp_path / "idx", metric="ip", n=800)
    with with_codes(made) as index:
        searching = open_searching(index.by_codes(), threads=1)
        x = index.transform(queries[:10])
        probes, products = searching.quantize(x, 4)
        monkeypatch.setattr(searching.scanner, "_centroids", None)
        again = searching.quantize(x, 4)
        searching.close()
    assert (again[0].tobytes(), again[1].tobytes()) == (probes.tobytes(), products.tobytes())


def test_the_recall_is_that_of_searches_by_codes(index, queries):
    rows, codes = open_searching(index, threads=1), open_searching(index.by_codes(), threads=1)
    x = index.transform(queries[:40])
    reference = search_exhaustively(index, rows.scanner, x, 5, max_seconds=60)
    for nprobe in (2, 8, index.nlist):
        point = recall_by_codes(codes, reference, nprobe)
        answers = codes.search(np.ascontiguousarray(x), 5, nprobe)
        found = [len(np.intersect1d(a, b)) / 5 for a, b in zip(reference.ids, answers, strict=True)]
        assert point.recall == pytest.approx(np.mean(found))
        assert (point.nprobe, point.k, point.n_queries) == (nprobe, 5, 40)
    rows.close()
    codes.close()
    made = profiled(index.by_codes(), queries, recall_target=0.9)
    assert "rows of" in made.notes["recall"]["reference"]
    by_nprobe = {p.nprobe: p.recall for p in made.recall}
    assert by_nprobe[made.nprobe] >= 0.9
    rows_alone = profiled(index, queries, nprobe=made.nprobe)
    lost = {p.nprobe: p.recall for p in rows_alone.recall}[made.nprobe] - by_nprobe[made.nprobe]
    assert made.notes["recall"]["lost_to_candidates"] == pytest.approx(lost)
    assert lost > 0 or index.rabitq.spec.bits > 1
    assert "lost_to_candidates" not in rows_alone.notes["recall"]


def test_a_recall_that_candidates_cannot_reach_names_the_cure(index, queries, monkeypatch):
    monkeypatch.setattr("hybridindex.profiler.searching.Searching.kept", lambda self, k, nprobe: k)
    with pytest.raises(ProfileError, match="search by rows, or compress the index with more bits"):
        profiled(index.by_codes(), queries, recall_target=1.0)


def test_a_scan_may_keep_more_candidates_than_a_search_answers(index, queries, monkeypatch):
    monkeypatch.setattr("hybridindex.profiler.searching.Searching.kept", lambda self, k, nprobe: MAX_K + 1)
    profile = profiled(index.by_codes(), queries, nprobe=6)
    assert all(point.recall > 0.99 for point in profile.recall if point.nprobe == index.nlist)


def test_a_history_of_rows_is_refused(index, queries):
    rows = profiled(index, queries, nprobe=6)
    with pytest.raises(ProfileMismatchError):
        profiled(index.by_codes(), queries, nprobe=6, history=rows)
    with pytest.raises(InvalidInputError, match="host_scanner is 'faiss', which scans rows"):
        profiled(index.by_codes(), queries, nprobe=6, host_scanner="faiss")


def test_a_search_of_the_measured_kind_answers_as_a_router(index, queries):
    searching = open_searching(index.by_codes(), threads=1)
    with Router(index, precision="codes", threads=1) as router:
        expected = router.search(queries[:20], 5, 6).ids
    np.testing.assert_array_equal(searching.search(index.transform(queries[:20]), 5, 6), expected)
    searching.close()


def test_devices_are_timed_with_codes(index, queries):
    view = index.by_codes()
    profile = profiled(view, queries, nprobe=6, devices=["cpu"])
    scans = [s for s in profile.stages if s.stage == "device_scan"]
    assert scans
    assert all(0 < s.unique_bytes <= view.list_bytes.sum() for s in scans)
    assert profile.notes["device cpu"]["lists_loaded"] == index.nlist
    # With scratch for the candidates, and room for the rows.
    pages = PageGeometry.for_code_size(view.code_size, CODE_PAGE_BYTES, group_rows=view.group_rows)
    beside = int(pages.pages_of_bytes(index.list_bytes).sum()) * pages.page_bytes
    assert profile.notes["device cpu"]["budget_bytes"] == (8 << 20) + beside
    assert profile.notes["device cpu"]["rows_loaded"] == np.count_nonzero(index.list_sizes)
    compared = [s for s in profile.stages if s.stage == "rerank" and s.device]
    assert len(compared) == len(scans)
    kept = index.rabitq.spec.candidates_for(5, 6)
    for sample in compared:
        assert 0 < sample.probes <= sample.batch * kept
        assert sample.work_bytes == sample.probes * index.code_size
    latency = analyse(profile).latency
    assert latency.rerank is not None
    assert latency.device_rerank is not None


def test_comparisons_on_devices_are_timed_with_what_a_router_adds_to_them(index, queries, calls):
    searching = open_searching(index.by_codes(), threads=1)
    calls.cost(device, "split_positions", 1.0)
    calls.cost(NativeRowPages, "distances", 10.0)
    calls.cost(searching.scanner.reranker, "ids_of", 100.0)
    calls.cost(comparison, "merge_topk", 1000.0)
    request = ProfileRequest(nprobe=4, k=3, batches=(1, 4), repeats=1)
    x, order = index.transform(queries), np.arange(index.nlist)
    timing = device.time_device(searching, "cpu", x, order, request, max_seconds=1e9, clock=calls)
    searching.close()
    assert {s.seconds for s in timing.samples if s.stage == "rerank"} == {1111.0}
    assert {s.seconds for s in timing.samples if s.stage == "device_scan"} == {0.0}
