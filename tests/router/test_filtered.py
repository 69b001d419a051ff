"""Searches with filters: exact over the rows that are left, whatever scans, wherever lists lie, whoever shares the
batch."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import DamagedListsError, InvalidInputError, RouterClosedError
from hybridindex.index.filters.write_attributes import write_attributes
from hybridindex.router import Router
from hybridindex.tiers.host import filtered_scanner
from tests.clustered import NLIST, clustered, hand_made_plan, share_of_ids, small_index
from tests.coded import with_codes
from tests.oracle import TOLERANCE, candidate_distances
from tests.router.code_searches import differences

WAIT_S = 300
N = 3000
#: Codec, and what searches scan.
KINDS = [
    *((codec, "rows") for codec in ("flat", "fp16", "bf16", "sq8", "pq8", "pqfs12", "faiss:SQ4")),
    ("flat", "codes"),
    ("sq8", "codes"),
]


@pytest.fixture(scope="module", params=[(*kind, m) for kind in KINDS for m in ("ip", "l2")], ids="-".join)
def router(request, tmp_path_factory):
    codec, precision, metric = request.param
    index = small_index(tmp_path_factory.mktemp("idx") / "i", codec=codec, metric=metric)
    if precision == "codes":
        index = with_codes(index)
    with index, Router(index, precision=precision, threads=2, scrub_bytes_per_s=0) as router:
        yield router


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i") as index:
        yield index


def check_exact(index, queries, k, result, allowed):
    """The answer is that of all rows with ``allowed`` ids."""
    index, keep_max = index.rows, index.metric == "ip"
    for query, distances, ids in zip(index.transform(queries), result.distances, result.ids, strict=True):
        all_ids, exact = candidate_distances(index, query, np.arange(index.nlist))
        left = np.isin(all_ids, allowed)
        all_ids, exact = all_ids[left], exact[left]
        n = min(k, len(all_ids))
        assert (ids[n:] == -1).all()
        assert (distances[n:] == (-np.inf if keep_max else np.inf)).all()
        assert len(np.unique(ids[:n])) == n
        own = exact[[int(np.flatnonzero(all_ids == each)[0]) for each in ids[:n]]]
        margin = TOLERANCE * (1 + np.abs(own))
        assert (np.abs(distances[:n] - own) <= margin).all()
        if n:
            kth = np.sort(exact)[::-1][n - 1] if keep_max else np.sort(exact)[n - 1]
            assert ((kth - own if keep_max else own - kth) <= margin).all()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
def test_at_nlist_probes_an_answer_is_exact_over_the_rows_that_are_left(router, share):
    queries, allowed = clustered(6, seed=3), share_of_ids(share)
    for k in (1, 10, 400):
        result = router.search(queries, k, NLIST, allow_ids=allowed)
        check_exact(router._served.index, queries, k, result, allowed)
        denied = np.setdiff1d(np.arange(N), allowed)
        assert differences(router.search(queries, k, NLIST, deny_ids=denied), result) == 0
        both = router.search(queries, k, NLIST, allow_ids=np.arange(0, N, 2), deny_ids=denied)
        check_exact(router._served.index, queries, k, both, allowed[allowed % 2 == 0])


def test_few_rows_are_all_compared_at_any_nprobe(router):
    queries, allowed = clustered(6, seed=3), share_of_ids(0.01)
    result = router.search(queries, 10, 8, allow_ids=allowed)
    check_exact(router._served.index, queries, 10, result, allowed)
    lists = {int(each) for each in range(NLIST) if np.isin(router._served.index.rows.list_ids(each), allowed).any()}
    assert (result.nprobe_used <= len(lists)).all()
    assert (result.hit_rate == 0).all()


@pytest.mark.parametrize("share", [0.2, 0.9, 1.0])
def test_more_rows_are_compared_in_the_nearest_lists_that_hold_enough_of_them(router, share):
    index, queries, allowed = router._served.index.rows, clustered(5, seed=4), share_of_ids(share)
    counts = np.array([np.isin(index.list_ids(each), allowed).sum() for each in range(NLIST)])
    result = router.search(queries, 10, 4, allow_ids=allowed)
    probes, _ = index.quantize(index.transform(queries), NLIST)
    for row, lists in enumerate(probes):
        aimed = min(int(index.list_sizes[lists[:4]].sum()), int(counts.sum()))
        holding, used = lists[counts[lists] > 0], int(result.nprobe_used[row])
        assert counts[holding[:used]].sum() >= aimed > counts[holding[: used - 1]].sum()
        near = np.concatenate([index.list_ids(int(each)) for each in holding[:used]])
        assert np.isin(result.ids[row], near[np.isin(near, allowed)]).all()
    if share == 1.0:
        assert (result.nprobe_used == 4).all()


@pytest.mark.parametrize("precision", ["rows", "codes"])
def test_codes_of_faiss_are_filtered_too(tmp_path, precision):
    allowed = share_of_ids(0.1)
    with small_index(tmp_path / "i", codec="faiss:RaBitQ") as index, Router(index, precision=precision) as router:
        result = router.search(clustered(5, seed=3), 20, 4, allow_ids=allowed)
    assert np.isin(result.ids, allowed).all()
    assert (np.diff(result.distances) >= 0).all()


def test_all_ways_to_search_answer_the_same(router):
    queries, allowed = clustered(4, seed=5), share_of_ids(0.3)
    right = router.search(queries, 5, 8, allow_ids=allowed)
    one_by_one = [router.search(query, 5, 8, allow_ids=allowed) for query in queries]
    assert [differences(one, right_of(right, row)) for row, one in enumerate(one_by_one)] == [0] * 4
    prepared = router.filter(allow_ids=allowed)
    assert differences(router.search(queries, 5, 8, row_filter=prepared), right) == 0
    assert differences(router.submit(queries, 5, 8, row_filter=prepared).result(WAIT_S), right) == 0
    futures = [router.submit(queries, 5, 8, allow_ids=allowed), router.submit(queries, 5, 8)]
    assert differences(futures[0].result(WAIT_S), right) == 0
    assert differences(futures[1].result(WAIT_S), router.search(queries, 5, 8)) == 0
    assert differences(asyncio.run(router.asearch(queries, 5, 8, allow_ids=allowed)), right) == 0
    with router.session() as session:
        assert differences(session.search(queries, 5, 8, row_filter=prepared), right) == 0
        assert differences(session.submit(queries, 5, 8, allow_ids=allowed).result(WAIT_S), right) == 0
        assert differences(asyncio.run(session.asearch(queries, 5, 8, allow_ids=allowed)), right) == 0
        assert session.stats.searches == 3


def right_of(result, row):
    return replace(result, ids=result.ids[row : row + 1], distances=result.distances[row : row + 1])


def test_distances_are_those_of_a_search_without_a_filter(router):
    queries = clustered(8, seed=6)
    whole = router.search(queries, 10, NLIST)
    if router.precision.startswith("codes"):
        whole = router.search(queries, 10, NLIST, candidates=N)
    filtered = router.search(queries, 10, NLIST, deny_ids=[])
    assert differences(filtered, whole) == 0


def test_answers_do_not_depend_on_placements_or_on_other_requests(index):
    rng = np.random.default_rng(0)
    calls = [(clustered(1 + i % 3, seed=i), share_of_ids(0.02 * i + 0.001, i) if i % 2 else None) for i in range(20)]
    with Router(index) as alone:
        right = [alone.search(queries, 7, 6, allow_ids=allowed) for queries, allowed in calls]
    placed = hand_made_plan(index, rng.integers(-1, 2, NLIST), n_devices=2)
    with Router(index, plan=placed, devices=["cpu", "cpu"]) as router, ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            futures = [router.submit(queries, 7, 6, allow_ids=allowed) for queries, allowed in calls]
            others = pool.map(lambda call: router.search(call[0], 7, 6, allow_ids=call[1]), calls)
            for got in ([future.result(WAIT_S) for future in futures], list(others)):
                assert [differences(one, other) for one, other in zip(got, right, strict=True)] == [0] * len(calls)
        stats = router.stats()
    assert stats.filtered_requests == 5 * 2 * 10
    assert stats.requests == 5 * 2 * 20
    assert stats.filtered_rows > 0


def test_large_calls_are_compared_in_parts(router, monkeypatch):
    queries, allowed = clustered(30, seed=7), share_of_ids(0.5)
    whole = router.search(queries, 5, 8, allow_ids=allowed)
    monkeypatch.setattr(filtered_scanner, "_MOST_POSITIONS", 4000)
    assert differences(router.search(queries, 5, 8, allow_ids=allowed), whole) == 0


def slow(router):
    """Its host is so slow that nothing fits."""
    for _ in range(60):
        router._served.engine._filtered._pace.observe(1000, 3600.0)


def test_a_deadline_lowers_the_lists_that_are_probed(index):
    queries = clustered(3, seed=5)
    with Router(index) as router:
        generous = router.search(queries, 5, 16, allow_ids=np.arange(0, N, 2), deadline_ms=60_000)
        slow(router)
        hasty = router.search(queries, 5, 16, allow_ids=np.arange(0, N, 2), deadline_ms=50, min_nprobe=3)
        assert (generous.nprobe_used > 16).all()
        assert (hasty.nprobe_used == 3).all()
        # Of few rows, too, the nearest lists.
        slow(router)
        few = share_of_ids(0.02)
        nearest = index.quantize(queries, NLIST)[0]
        hasty = router.search(queries, 5, 16, allow_ids=few, deadline_ms=50)
        for lists, ids in zip(nearest, hasty.ids, strict=True):
            first = next(each for each in lists.tolist() if np.isin(few, index.list_ids(each)).any())
            assert set(ids[ids >= 0].tolist()) <= set(index.list_ids(first).tolist())
        assert router.stats().nprobe_lowered == 2


def test_listeners_hear_of_it(index):
    reports, probed = [], []
    with Router(index) as router:
        router.on_batch.append(reports.append)
        future = router.submit(clustered(2), 5, 4, allow_ids=share_of_ids(0.5), on_probes=probed.append)
        result = future.result(WAIT_S)
        router.submit(clustered(1)).result(WAIT_S)
    assert reports[0].n_queries == 2
    assert reports[0].candidates > 0
    assert {stage.stage for stage in reports[0].stages} == {"coarse", "rerank"}
    assert ((probed[0] >= 0).sum(axis=1) == result.nprobe_used).all()


def test_a_damaged_list_is_refused_until_it_is_good(tmp_path):
    queries = clustered(1, seed=3)
    with small_index(tmp_path / "i") as index, Router(index, scrub_bytes_per_s=0) as router:
        near = index.quantize(queries, 2)[0][0]
        mine, far = index.list_ids(int(near[0])), index.list_ids(int(index.quantize(queries, NLIST)[0][0, -1]))
        router.search(queries, 5, 4, allow_ids=mine)
        index.integrity.quarantine([int(near[0])])
        with pytest.raises(DamagedListsError, match=f"list {near[0]}"):
            router.search(queries, 5, 4, allow_ids=mine)
        # Nobody knows which ids it holds.
        with pytest.raises(DamagedListsError):
            router.search(queries, 5, 4, allow_ids=far)
        index.integrity.lift([int(near[0])])
        assert np.isin(router.search(queries, 5, 4, allow_ids=mine).ids, mine).all()


def test_damage_that_comes_meanwhile_is_noticed(tmp_path, monkeypatch):
    queries = clustered(1, seed=3)
    with small_index(tmp_path / "i") as index, Router(index, scrub_bytes_per_s=0) as router:
        near = int(index.quantize(queries, 1)[0][0, 0])
        router.search(queries, 5, 4, allow_ids=[1])
        scanner = router._served.engine._filtered._scanner
        compare = scanner.compare

        def found_meanwhile(*given):
            monkeypatch.setattr(scanner, "compare", compare)
            index.integrity.quarantine([near])
            return compare(*given)

        monkeypatch.setattr(scanner, "compare", found_meanwhile)
        with pytest.raises(DamagedListsError, match=f"list {near}"):
            router.search(queries, 5, 4, allow_ids=share_of_ids(0.5))


BAD = [
    (
        {"allow_ids": [1.5]},
        "allow_ids is a list of dtype float64 and shape \\(1,\\); expected one dimension of integers",
    ),
    ({"allow_ids": [[1]]}, "shape \\(1, 1\\)"),
    ({"allow_ids": 7}, "allow_ids is a int"),
    ({"deny_ids": ["7"]}, "deny_ids is a list of dtype <U1"),
    ({"deny_ids": np.array([True])}, "dtype bool"),
    ({"deny_ids": [1, 1 << 70]}, "deny_ids is a list of dtype object"),
    ({"allow_ids": np.array([1 << 63], np.uint64)}, "allow_ids holds 9223372036854775808; expected ids of at most"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_is_no_list_of_ids_is_refused(index, given, message):
    with Router(index) as router:
        for ask in (router.search, router.submit):
            with pytest.raises(InvalidInputError, match=message):
                ask(clustered(1), **given)


def test_conditions_choose_rows_by_their_attributes(tmp_path):
    years, langs = np.arange(N) % 40 + 1980, np.array(["en", "de", "fr"])[np.arange(N) % 3]
    queries = clustered(5, seed=3)
    with small_index(tmp_path / "i") as index, Router(index) as router:
        with pytest.raises(InvalidInputError, match="the index has no attributes: hybridindex attributes INDEX TABLE"):
            router.search(queries, 5, where="year = 1980")
        write_attributes(index, {"year": years, "lang": langs})
        where = "lang = 'en' AND year >= 2010"
        allowed = np.flatnonzero((langs == "en") & (years >= 2010))
        result = router.search(queries, 10, NLIST, where=where)
        check_exact(index, queries, 10, result, allowed)
        for other in (
            router.search(queries, 10, NLIST, allow_ids=allowed),
            router.search(queries, 10, NLIST, row_filter=router.filter(where=where)),
            router.submit(queries, 10, NLIST, where=where).result(WAIT_S),
            asyncio.run(router.asearch(queries, 10, NLIST, where=where)),
        ):
            assert differences(other, result) == 0
        both = router.search(queries, 10, NLIST, where=where, allow_ids=allowed[::2], deny_ids=allowed[::4])
        check_exact(index, queries, 10, both, allowed[2::4])
        with router.session() as session:
            assert differences(session.search(queries, 10, NLIST, where=where), result) == 0
        with pytest.raises(
            InvalidInputError, match="names 'country', which is not an attribute; expected one of lang, year"
        ):
            router.search(queries, where="country = 'de'")
        # The same condition, other attributes: filters that were made before follow.
        prepared = router.filter(where=where)
        write_attributes(index, {"year": years[::-1].copy(), "lang": langs})
        allowed = np.flatnonzero((langs == "en") & (years[::-1] >= 2010))
        for given in ({"where": where}, {"row_filter": prepared}):
            check_exact(index, queries, 10, router.search(queries, 10, NLIST, **given), allowed)


def test_a_filter_is_of_one_index_and_stands_alone(index, tmp_path):
    with Router(index) as router, Router(index) as another, small_index(tmp_path / "i", n=2000) as other:
        made = router.filter(deny_ids=[3])
        assert (
            differences(another.search(clustered(2), row_filter=made), router.search(clustered(2), deny_ids=[3])) == 0
        )
        with pytest.raises(InvalidInputError, match="row_filter is given"):
            router.search(clustered(2), row_filter=made, deny_ids=[4])
        with pytest.raises(InvalidInputError, match="row_filter is a list"):
            router.search(clustered(2), row_filter=[3])
        with Router(other) as foreign, pytest.raises(InvalidInputError, match="the filter was made for index"):
            foreign.search(clustered(2), row_filter=made)


def test_a_prepared_filter_learns_of_damage(tmp_path):
    queries = clustered(1, seed=3)
    with small_index(tmp_path / "i") as index, Router(index, scrub_bytes_per_s=0) as router:
        near = int(index.quantize(queries, 1)[0][0, 0])
        made = router.filter(allow_ids=index.list_ids(near))
        right = router.search(queries, 5, 4, row_filter=made)
        index.integrity.quarantine([near])
        with pytest.raises(DamagedListsError, match=f"list {near}"):
            router.search(queries, 5, 4, row_filter=made)
        index.integrity.lift([near])
        assert differences(router.search(queries, 5, 4, row_filter=made), right) == 0


def test_any_collection_of_integers_will_do(index):
    with Router(index) as router:
        right = router.search(clustered(2), allow_ids=np.array([5, 9, 1]))
        for given in (
            [5, 1, 9, 9],
            (9, 5, 1),
            {1, 5, 9},
            np.array([9, 5, 1], np.uint8),
            np.array([1, 0, 5, 0, 9])[::2],
        ):
            assert differences(router.search(clustered(2), allow_ids=given), right) == 0
        given = np.array([5, 9, 1])
        future = router.submit(clustered(2), allow_ids=given)
        given[:] = 0
        assert differences(future.result(WAIT_S), right) == 0


def test_a_failure_is_the_callers_and_the_next_search_works(index, monkeypatch):
    with Router(index) as router:
        right = router.search(clustered(2), allow_ids=[1, 2])
        with monkeypatch.context() as patch:
            patch.setattr(router._served.engine._filtered._scanner, "compare", lambda *_given: 1 / 0)
            for ask in (router.search, lambda *a, **o: router.submit(*a, **o).result(WAIT_S)):
                with pytest.raises(ZeroDivisionError):
                    ask(clustered(2), allow_ids=[1, 2])
        assert differences(router.search(clustered(2), allow_ids=[1, 2]), right) == 0
    with pytest.raises(RouterClosedError):
        router.search(clustered(2), allow_ids=[1, 2])
