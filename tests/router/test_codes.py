"""Searches by codes: the exact answer among the candidates of each query, whatever it shares its batch with."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hybridindex.config import MAX_CANDIDATES
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index import build, open_index
from hybridindex.index.rabitq.spec import CandidateTable
from hybridindex.plans.precision import view_to_profile
from hybridindex.router import Router
from hybridindex.router.precision import CandidateCount
from hybridindex.tiers.host import rabitq_scanner, reranker
from hybridindex.tiers.host.reranker import Reranker
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.coded import TABLE, best_of, with_codes
from tests.examples import examples
from tests.router.slow_copies import until

KINDS = [(m, b, c) for m, b, c in (("ip", 1, "flat"), ("l2", 1, "sq8"), ("l2", 2, "flat"), ("ip", 4, "sq8"))]
QUERIES = clustered(40, seed=5)
WAIT_S = 300


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
def index(request, tmp_path_factory):
    metric, bits, codec = request.param
    made = small_index(tmp_path_factory.mktemp("idx") / "i", metric=metric, codec=codec, n=1500)
    with with_codes(made, bits=bits) as found:
        yield found


def without_extension(patch):
    patch.setattr(rabitq_scanner, "native", None)
    patch.setattr(reranker, "native", None)


@pytest.fixture(params=["numpy", "extension"])
def kernels(request, monkeypatch):
    if request.param == "numpy":
        without_extension(monkeypatch)
    return request.param


def opened(index, **options):
    options = {"precision": "codes", "scrub_bytes_per_s": 0, "warm_bytes": 0, **options}
    return Router(index, **options)


def check(index, router, queries, answer, k, nprobe, candidates):
    """Asserts an answer against the oracle, query by query."""
    transformed = index.transform(queries)
    probes, _ = index.quantize(transformed, nprobe)
    for row in range(len(queries)):
        one = transformed[row : row + 1]
        products = router._served.host.centre_products(one, probes[row : row + 1])[0]
        ids, exact = best_of(index, one[0], probes[row], products, candidates, k)
        n = len(ids)
        assert answer.ids[row, :n].tolist() == ids.tolist()
        np.testing.assert_allclose(answer.distances[row, :n], exact, rtol=1e-5, atol=1e-4)
        assert (answer.ids[row, n:] == -1).all()
        assert (answer.distances[row, n:] == (-np.inf if index.metric == "ip" else np.inf)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_answers_are_the_nearest_of_the_candidates(index, kernels, threads):
    with opened(index, threads=threads) as router:
        for k, nprobe in ((1, 1), (10, 8), (7, NLIST)):
            answer = router.search(QUERIES, k, nprobe)
            check(index, router, QUERIES, answer, k, nprobe, TABLE.candidates_for(k, nprobe))
            assert answer.nprobe_used.tolist() == [nprobe] * len(QUERIES)
            assert not answer.hit_rate.any()


@pytest.mark.parametrize("early", [True, False])
def test_a_request_gets_the_same_bits_whatever_shares_its_batch(index, kernels, early):
    asked = [(1, 1, 1), (3, 10, 8), (1, 100, 32), (2, 5, 3), (1, 10, 8)]
    cut = np.cumsum([0, *(n for n, _, _ in asked)])
    parts = [QUERIES[a:b] for a, b in itertools.pairwise(cut)]
    with opened(index, early_dispatch=early, threads=2) as router, router.session() as session:
        alone = [router.search(part, k, nprobe) for part, (_, k, nprobe) in zip(parts, asked, strict=True)]
        with router._served.engine._turn.of_engine():  # everything gathers to one batch
            futures = [router.submit(part, k, nprobe) for part, (_, k, nprobe) in zip(parts, asked, strict=True)]
        together = [future.result() for future in futures]
        assert router.stats().largest_batch == cut[-1]

        async def at_once():
            calls = [router.asearch(part, k, nprobe) for part, (_, k, nprobe) in zip(parts, asked, strict=True)]
            return await asyncio.gather(*calls)

        others = [asyncio.run(at_once()), [session.search(p, k, n) for p, (_, k, n) in zip(parts, asked, strict=True)]]
        for answers in (together, *others):
            for one, other in zip(alone, answers, strict=True):
                assert one.ids.tobytes() == other.ids.tobytes()
                assert one.distances.tobytes() == other.distances.tobytes()


@examples(25)
@given(
    asked=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 120), st.integers(1, NLIST)), min_size=1, max_size=6),
    fixed=st.none() | st.integers(120, 2000),
)
def test_any_mix_of_requests_is_answered_as_by_the_oracle(index, asked, fixed):
    rng = np.random.default_rng(len(asked))
    with opened(index, candidates=fixed, threads=1) as router:
        with router._served.engine._turn.of_engine():
            calls = [(QUERIES[rng.choice(len(QUERIES), n)], k, nprobe) for n, k, nprobe in asked]
            futures = [router.submit(*call) for call in calls]
        for (queries, k, nprobe), future in zip(calls, futures, strict=True):
            candidates = TABLE.candidates_for(k, nprobe) if fixed is None else fixed
            check(index, router, queries, future.result(), k, nprobe, candidates)


def test_with_all_rows_for_candidates_the_answer_is_that_of_rows(index, kernels):
    with opened(index, candidates=65_536) as codes, opened(index, precision="rows") as rows:
        for k, nprobe in ((1, 1), (10, 8), (200, NLIST)):
            found, exact = codes.search(QUERIES, k, nprobe), rows.search(QUERIES, k, nprobe)
            assert found.ids.tolist() == exact.ids.tolist()
            if kernels == "extension":
                assert found.distances.tobytes() == exact.distances.tobytes()
            else:
                np.testing.assert_allclose(found.distances, exact.distances, rtol=1e-4, atol=1e-4)


def test_more_neighbours_than_rows_leave_empty_places(tmp_path, kernels):
    made = build(clustered(20), tmp_path / "i", nlist=8, codec="flat", metric="l2")
    with with_codes(made) as index, opened(index) as router:
        answer = router.search(QUERIES[:3], 50, 8)
        assert ((answer.ids >= 0).sum(axis=1) == 20).all()
        assert np.isinf(answer.distances[:, 20:]).all()
        few = router.search(QUERIES[:3], 50, 1)
        assert ((few.ids >= 0).sum(axis=1) < 20).all()


def test_a_rerank_that_fails_fails_its_requests_and_not_the_router(index, monkeypatch):
    with opened(index) as router:
        with monkeypatch.context() as patch:
            patch.setattr(Reranker, "rerank", lambda *_: (_ for _ in ()).throw(OSError("no row")))
            with pytest.raises(OSError, match="no row"):
                router.search(QUERIES[:2])
            with router._served.engine._turn.of_engine():
                futures = [router.submit(QUERIES[:1]) for _ in range(3)]
            assert all(isinstance(future.exception(), OSError) for future in futures)
        assert (router.search(QUERIES[:2]).ids >= 0).all()


def test_time_and_candidates_are_counted(index):
    with opened(index) as router:
        reports = queue.SimpleQueue()
        router.on_batch.append(reports.put)
        router.search(QUERIES[:4], 10, 8)
        report, stats = reports.get(timeout=WAIT_S), router.stats()
        assert [stage.stage for stage in report.stages] == ["coarse", "split", "host_scan", "merge", "rerank"]
        assert (report.k, report.candidates) == (10, stats.candidates)
        assert 0 < stats.candidates <= 4 * TABLE.candidates_for(10, 8)
        assert stats.stages["rerank"].count == 1
        probes, _ = index.quantize(index.transform(QUERIES[:4]), 8)
        assert stats.host_work_bytes == index.rabitq.list_bytes[probes].sum()
        router.forget_load()
        assert router.stats().candidates == 0
    with opened(index, precision="rows") as router:
        router.search(QUERIES[:4], 10, 8)
        assert "rerank" not in router.stats().stages


def test_a_deadline_lowers_nprobe_and_keeps_the_candidates(index):
    with opened(index) as router:
        router.search(QUERIES[:1], 10, NLIST)
        answer = router.search(QUERIES[:1], 10, NLIST, deadline_ms=1e-3, min_nprobe=2)
        assert answer.nprobe_used.tolist() == [2]
        check(index, router, QUERIES[:1], answer, 10, 2, TABLE.candidates_for(10, NLIST))


def test_bytes_that_are_gone_while_candidates_are_compared_are_searched_again(index, monkeypatch):
    """Nothing that was read of them is answered; afterwards the search is refused."""
    rerank, seen = Reranker.rerank, []

    def losing(self, *asked):
        answer = rerank(self, *asked)
        if not seen:
            seen.append(1)
            index.integrity.quarantine([int(probes[0, 0])])
        return answer

    probes, _ = index.quantize(index.transform(QUERIES[:1]), 8)
    with opened(index) as router, monkeypatch.context() as patch:
        patch.setattr(Reranker, "rerank", losing)
        with pytest.raises(Exception, match="bytes there are not what was written"):
            router.search(QUERIES[:1], 10, 8)
        index.integrity.lift([int(probes[0, 0])])
        assert (router.search(QUERIES[:1], 10, 8).ids >= 0).all()


# Which precision serves


def test_auto_takes_codes_where_they_are_scanned_fast(index, monkeypatch):
    without_extension(monkeypatch)
    for options, said in (
        ({}, "rows: the index has codes, but the extension"),
        ({"devices": ["cpu"], "device_budget_bytes": 1 << 24}, "rows: the index has codes, but the extension"),
        ({"host_scanner": "faiss"}, "rows: the index has codes, but host_scanner 'faiss' scans rows"),
        ({"precision": "rows"}, "rows"),
    ):
        with opened(index, **{"precision": "auto", **options}) as router:
            if said.startswith("rows"):
                assert router.precision.startswith(said)
                assert router.stats().precision == router.precision
            assert router.host_scanner != "rabitq"
    with opened(index, precision="codes") as router:
        bits = index.rabitq.spec.bits
        said = f"codes: rabitq {bits} bit{'s' if bits > 1 else ''}, 40 candidates for k 10 at nprobe 8"
        assert router.precision == router.stats().precision == said
        assert router.host_scanner == "rabitq"


def test_auto_takes_codes_where_the_extension_scans_them(index):
    with Router(index) as router:
        assert router.precision.startswith("codes: ")


def test_auto_takes_rows_where_many_of_them_would_be_candidates(tmp_path):
    table = CandidateTable(k=(10,), nprobe=(8,), r=((300,),))
    with with_codes(small_index(tmp_path / "i", n=4000), table=table) as index:
        why = "the index has codes, but searches by them compare 300 candidates for k 10 at nprobe 8, of some 1,000"
        with opened(index, precision="auto") as router:
            assert router.precision == f"rows: {why} rows probed"
        for options in ({"precision": "codes"}, {"precision": "auto", "candidates": 50}):
            with opened(index, **options) as router:
                assert router.precision.startswith("codes: ")
        of_codes = hand_made_plan(index.by_codes(), np.zeros(index.nlist))
        with opened(index, precision="auto", plan=of_codes, devices=["cpu"]) as router:
            assert router.precision.startswith("codes: ")
        assert view_to_profile(index, "auto") is index
        assert view_to_profile(index, "codes") is not index
        with opened(index, precision="auto", rows="mapped") as router:  # a scan of rows is what it rules out
            assert router.precision.startswith("codes: ")
        assert view_to_profile(index, "auto", mapped=True) is not index


def test_codes_that_cannot_be_scanned_are_refused(index, tmp_path):
    with pytest.raises(InvalidInputError, match="precision is 'codes' with host_scanner 'faiss'"):
        Router(index, precision="codes", host_scanner="faiss")
    with pytest.raises(InvalidInputError, match="precision is 'bits'; expected 'auto', 'codes' or 'rows'"):
        Router(index, precision="bits")
    with (
        small_index(tmp_path / "plain", n=200, nlist=4) as plain,
        pytest.raises(UnsupportedIndexError, match="has no codes that can be used: hybridindex compress"),
    ):
        Router(plain, precision="codes")


def test_fewer_candidates_than_neighbours_are_refused_at_the_search(index):
    with opened(index, candidates=20) as router:
        assert router.precision.endswith("20 candidates")
        assert (router.search(QUERIES[:1], 20).ids >= 0).all()
        with pytest.raises(InvalidInputError, match="candidates is 20 and k is 21; expected"):
            router.search(QUERIES[:1], 21)
        more = router.search(QUERIES[:1], 21, 8, candidates=30)
        check(index, router, QUERIES[:1], more, 21, 8, 30)
        with pytest.raises(InvalidInputError, match="candidates is 5 and k is 10"):
            router.submit(QUERIES[:1], candidates=5)
        with pytest.raises(InvalidInputError, match="candidates is 'all'"):
            router.search(QUERIES[:1], candidates="all")
    with pytest.raises(InvalidInputError, match=r"candidates is 0; expected 1\.\.65536"):
        opened(index, candidates=0)


def test_candidates_are_bounded_by_the_memory_that_they_take(index):
    count = CandidateCount(index.rabitq.spec, None)
    assert (count.queries_at_once(1000), count.queries_at_once(MAX_CANDIDATES)) == (40265, 614)


@pytest.fixture
def few_at_once(monkeypatch):
    """Requests of at most six queries with 50 candidates, each in a batch of its own."""
    monkeypatch.setattr("hybridindex.router.precision._MOST_CELLS", 300)
    monkeypatch.setattr("hybridindex.router.batch.batching.MAX_BATCH_CELLS", 300)


def test_a_call_with_too_many_candidates_is_divided(index, few_at_once):
    with opened(index, candidates=50) as router:
        rows = np.concatenate([router.search(query, 10, 8).ids for query in QUERIES])
        sizes, probed = [], []
        router.on_batch.append(lambda report: sizes.append((report.n_queries, report.candidates)))
        answers = {
            "search": router.search(QUERIES, 10, 8),
            "submit": router.submit(QUERIES, 10, 8, on_probes=probed.append).result(WAIT_S),
            "asearch": asyncio.run(router.asearch(QUERIES, 10, 8)),
            "deadline": router.search(QUERIES, 10, 8, deadline_ms=1e6),
        }
        with router.session() as session:
            answers["session"] = session.search(QUERIES, 10, 8)
            assert (session.stats.searches, session.stats.hit_rate) == (1, 0)
        until(lambda: len(sizes) == 7 * len(answers))  # batches end after the answer
        assert sorted(set(sizes)) == [(4, 200), (6, 300)]
        assert (np.concatenate(probed) == index.quantize(index.transform(QUERIES), 8)[0]).all()
        for answer in answers.values():
            assert (answer.ids == rows).all()
            assert (answer.nprobe_used == 8).all()
            check(index, router, QUERIES, answer, 10, 8, 50)


def test_parts_of_a_divided_call_share_its_deadline(index, few_at_once, monkeypatch):
    with opened(index, candidates=50) as router:
        asked, submit = [], router._served.engine.submit
        monkeypatch.setattr(router._served.engine, "submit", lambda request: asked.append(request) or submit(request))
        begun = time.monotonic()
        router.search(QUERIES[:20], 10, 8, deadline_ms=1e6)
    left_s = np.array([request.deadline_s for request in asked]) - begun
    assert np.diff(left_s) == pytest.approx([300, 300, 100])
    assert left_s[-1] >= 1000


def test_a_divided_call_fails_as_a_whole_and_the_next_one_is_answered(index, few_at_once, monkeypatch):
    with opened(index, candidates=50) as router:
        rerank, calls = Reranker.rerank, []

        def fail_once(*args):
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no room for the third part")
            return rerank(*args)

        monkeypatch.setattr(Reranker, "rerank", fail_once)
        with pytest.raises(MemoryError, match="third part"):
            router.search(QUERIES, 10, 8)
        assert len(calls) == 7
        assert isinstance(router.submit(QUERIES, 10, 8).result(WAIT_S).ids, np.ndarray)


def test_damaged_codes_are_left_out_and_rows_serve(tmp_path, caplog):
    with with_codes(small_index(tmp_path / "i", n=400, nlist=8)) as index:
        with opened(index, precision="rows") as router:
            expected = router.search(QUERIES, 5, 8)
        file = next((tmp_path / "i").glob("gen-*/rabitq-*.bin"))
    damaged = bytearray(file.read_bytes())
    damaged[70] ^= 1
    file.write_bytes(damaged)
    with open_index(tmp_path / "i") as index, Router(index) as router:
        assert index.rabitq is None
        assert router.precision.startswith("rows: ")
        assert "hybridindex compress INDEX" in router.precision
        assert str(tmp_path) not in router.precision  # clients are told it
        assert router.search(QUERIES, 5, 8).ids.tolist() == expected.ids.tolist()
        with pytest.raises(UnsupportedIndexError, match="differs from its checksum"):
            Router(index, precision="codes")
