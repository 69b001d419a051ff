"""Searches by codes of a node: it scans the codes of all lists, and others compare the candidates whose rows it lacks.
Answers are those of one machine to the bit, wherever rows are and whoever is away.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybridindex.errors import IncompleteAnswerError, InvalidInputError, NotHeldError, RouterClosedError
from hybridindex.router import Router
from hybridindex.router.direct import DirectSearch
from hybridindex.router.remote import remote_lists
from hybridindex.router.remote.scan_codec import decode_comparison, encode_comparison
from hybridindex.tiers.host.reranker import Reranker
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.coded import with_codes
from tests.router.code_searches import BUDGET, differences
from tests.router.remote.nodes import cluster, map_of
from tests.router.remote.test_remote_lists import spread
from tests.router.slow_copies import until

K, NPROBE = 10, 12


@pytest.fixture(scope="module", params=["flat-l2-1", "sq8-ip-4"])
def index(request, tmp_path_factory):
    codec, metric, bits = request.param.split("-")
    made = small_index(tmp_path_factory.mktemp("codes") / "idx", codec=codec, metric=metric)
    with with_codes(made, bits=int(bits)) as found:
        yield found


@pytest.fixture(scope="module")
def whole(index):
    """What one machine answers."""
    with Router(index, precision="codes") as router:
        yield lambda queries, k=K, nprobe=NPROBE, **asked: router.search(queries, k, nprobe, **asked)


def codes(path, holders, **settings):
    return cluster(path, holders, precision="codes", **settings)


def same(found, wanted):
    assert differences(found, wanted) == 0
    np.testing.assert_array_equal(found.nprobe_used, wanted.nprobe_used)
    assert found.coverage is None


@pytest.mark.parametrize(("n_nodes", "replicas"), [(2, 1), (4, 2), (3, 3)])
def test_any_node_answers_as_one_machine_does(index, whole, n_nodes, replicas):
    with codes(index.path, spread(n_nodes, replicas)) as nodes:
        for seed, n in enumerate((1, 7, 64)):
            queries = clustered(n, seed=seed)
            for node in nodes:
                assert node.router.precision.startswith("codes")
                same(node.router.search(queries, K, NPROBE), whole(queries))
                same(node.router.search(queries, 3, NLIST), whole(queries, 3, NLIST))
                same(node.router.search(queries, 40, NLIST, candidates=40), whole(queries, 40, NLIST, candidates=40))
        asked = sum(node.comparisons for node in nodes)
        assert asked == sum(node.scans for node in nodes), "lists were scanned elsewhere"
        assert asked == 0 if replicas == n_nodes else asked > 0


@pytest.fixture
def direct(monkeypatch):
    """Whether each call that could be was answered on its own thread, in their order."""
    seen, search = [], DirectSearch.search

    def noted(self, *given):
        found = search(self, *given)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(DirectSearch, "search", noted)
    return seen


@pytest.mark.parametrize("absent", [3, 0], ids=["away", "all here"])
def test_searches_whose_rows_are_all_here_need_no_batch(index, whole, direct, monkeypatch, absent):
    monkeypatch.setattr("hybridindex.router.direct._SAVED_S", 1e9)  # however slow the machine is
    holders = np.ones((2, NLIST), dtype=np.bool_)
    holders[0, :absent] = False
    with codes(index.path, holders) as (first, second):
        for seed in range(60):
            queries, before, n_calls = clustered(1, seed=seed), second.comparisons, len(direct)
            same(first.router.search(queries, K, NPROBE), whole(queries))
            # The first of these calls is the node's, whose batch follows where it was in vain.
            assert direct[n_calls] == (second.comparisons == before)
        assert (0 < second.comparisons < 30) == (absent > 0)


def test_few_codes_are_scanned_in_vain(index, whole, direct, monkeypatch):
    monkeypatch.setattr("hybridindex.router.direct._SAVED_S", 0.0)
    with codes(index.path, spread(2, 1)) as (first, _):
        for seed in range(20):
            queries = clustered(1, seed=seed)
            same(first.router.search(queries, K, NLIST), whole(queries, K, NLIST))
        in_vain = first.router._served.engine._direct._in_vain
        first.router.search(clustered(1), K, NLIST)
        assert first.router._served.engine._direct._in_vain < in_vain, "it was tried again"


def test_a_node_without_codes_and_one_with_codes_answer_each_other(index, whole):
    with Router(index, precision="rows") as rows, cluster(index.path, spread(2, 1), precision="rows") as nodes:
        first, second = nodes
        second.router.close()
        second.router = Router(second.index, remote=second.remote, scrub_bytes_per_s=0, precision="codes")
        for seed in range(4):
            queries = clustered(9, seed=seed)
            found, wanted = first.router.search(queries, K, NPROBE), rows.search(queries, K, NPROBE)
            np.testing.assert_array_equal(found.ids, wanted.ids)
            same(second.router.search(queries, K, NPROBE), whole(queries))
        assert first.comparisons > 0
        assert second.scans > second.comparisons == 0


def test_devices_hold_codes_of_all_lists_and_rows_of_those_that_are_here(index, whole):
    holders = spread(3, 1)
    with index.by_codes() as view:
        plan = hand_made_plan(view, np.where(np.arange(NLIST) % 2, 0, -1).astype(np.int16))
    settings = {"plan": plan, "devices": ["cpu"], "device_budget_bytes": BUDGET}
    with codes(index.path, holders, **settings) as nodes:
        for seed in range(3):
            queries = clustered(9, seed=seed)
            for node in nodes:
                same(node.router.search(queries, K, NPROBE), whole(queries))
        for node, held in zip(nodes, holders, strict=True):
            assert node.router.stats().device_work_bytes > 0
            # Also of lists whose rows are elsewhere.
            np.testing.assert_array_equal(node.router.residency.list_device >= 0, np.arange(NLIST) % 2 == 1)
            assert not held.all()


def test_requests_that_share_a_batch_are_answered_as_alone(index, whole):
    with codes(index.path, spread(3, 1)) as nodes, ThreadPoolExecutor(8) as pool:
        asked = [(clustered(1 + seed % 3, seed=seed), 1 + seed % 7, 4 + seed % 9) for seed in range(60)]

        def search(number):
            queries, k, nprobe = asked[number]
            return nodes[number % 3].router.search(queries, k, nprobe)

        for number, found in enumerate(pool.map(search, range(len(asked)))):
            same(found, whole(*asked[number]))


def test_filters_compare_rows_wherever_they_are(index, whole):
    allowed = np.arange(0, 3000, 7)
    with codes(index.path, spread(3, 1)) as nodes:
        for seed in range(3):
            queries = clustered(5, seed=seed)
            for node in nodes:
                found = node.router.search(queries, K, NPROBE, allow_ids=allowed)
                np.testing.assert_array_equal(found.ids, whole(queries, allow_ids=allowed).ids)


def test_a_node_that_goes_away_hangs_or_fails_is_replaced_by_those_that_have_its_rows(index, whole):
    with codes(index.path, spread(3, 2)) as nodes:
        first = nodes[0]
        nodes[2].fails = True
        for seed in range(5):
            queries = clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE), whole(queries))
        nodes[2].fails = False
        for seed in range(40):
            first.router.search(clustered(3, seed=seed), K, NPROBE)
        nodes[1].hangs = True
        for seed in range(10):
            queries = clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE), whole(queries))
        told = first.remote.status()[0]
        assert told["hedged"] + told["failed"] >= 1  # what the busiest machine takes for late is nearly down
        nodes[1].hangs = False
        nodes[1].go_away()
        for seed in range(10):
            queries = clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE), whole(queries))
        until(lambda: [peer["state"] for peer in first.remote.status()] == ["down", "up"])
        nodes[1].arrive()


def test_without_a_replica_it_is_an_error_or_says_its_share(index, whole):
    holders = spread(3, 1)
    with codes(index.path, holders) as nodes:
        first = nodes[0]
        nodes[2].go_away()
        until(lambda: first.remote.status()[1]["state"] == "down")
        queries = clustered(6)
        with pytest.raises(IncompleteAnswerError, match="expected all of it, or allow_partial"):
            first.router.search(queries, K, NLIST)
        found = first.router.search(queries, K, NLIST, allow_partial=0.01)
        sizes = index.rabitq.list_bytes
        np.testing.assert_allclose(found.coverage, sizes[~holders[2]].sum() / sizes.sum(), rtol=1e-5)
        # Its candidates are those of the lists that somebody has.
        lost = np.concatenate([index.list_ids(each) for each in np.flatnonzero(holders[2])])
        assert not np.isin(found.ids, lost).any()
        everything = whole(queries, 600, NLIST, candidates=2500).ids
        for own, full in zip(
            first.router.search(queries, K, NLIST, allow_partial=0.01, candidates=1500).ids, everything, strict=True
        ):
            np.testing.assert_array_equal(own, full[~np.isin(full, lost)][:K])


def test_what_nobody_compares_after_all_is_an_error_or_says_its_share(index, whole):
    with codes(index.path, spread(2, 1)) as nodes:
        first = nodes[0]
        queries = clustered(6)
        nodes[1].fails = True  # it is up, and answers nothing of use
        with pytest.raises(IncompleteAnswerError, match="expected all of it, or allow_partial"):
            first.router.search(queries, K, NLIST, candidates=2000)
        found = first.router.search(queries, K, NLIST, candidates=2000, allow_partial=0.01)
        assert 0 < found.coverage.min() < found.coverage.max() < 1
        nodes[1].fails = False
        same(first.router.search(queries, K, NLIST, candidates=2000), whole(queries, K, NLIST, candidates=2000))


def test_each_request_gives_up_at_its_own_deadline(index, whole):
    with codes(index.path, spread(2, 1)) as nodes, ThreadPoolExecutor(4) as pool:
        first, second = nodes
        queries = clustered(4)
        first.router.search(queries, K, NLIST)
        second.delay_s = 1.5
        began = time.monotonic()
        asked = {"deadline_ms": 300, "min_nprobe": NLIST, "allow_partial": 0.01, "candidates": 2000}
        soon = [pool.submit(first.router.search, queries, K, NLIST, **asked) for _ in range(2)]
        late = pool.submit(first.router.search, queries, K, NLIST)
        for future in soon:
            found = future.result()
            assert found.coverage is not None
            assert found.coverage.max() < 1
        assert time.monotonic() - began < 1.2
        same(late.result(), whole(queries, K, NLIST))


def test_rows_that_are_dropped_while_they_are_compared_are_asked_for_again(index, whole):
    holders = spread(2, 2)
    with codes(index.path, holders) as nodes, ThreadPoolExecutor(2) as pool:
        first = nodes[0]
        assert first.index.share is not None
        rng = np.random.default_rng(3)

        def search():
            for seed in range(60):
                queries = clustered(5, seed=seed)
                same(first.router.search(queries, K, NPROBE), whole(queries))

        going = [pool.submit(search) for _ in range(2)]
        left = np.ones(NLIST, dtype=np.bool_)
        for version, gone in enumerate(rng.permutation(NLIST)[:20].reshape(5, 4), 2):
            left[gone] = False
            first.remote.apply(map_of(nodes, np.stack([left, holders[1]]), version=version))
            nodes[1].remote.apply(map_of(nodes, np.stack([left, holders[1]]), version=version))
            first.index.share.drop(gone.tolist())
            time.sleep(0.05)
        for future in going:
            future.result()
        search()  # those may have ended before a list was dropped
        assert nodes[1].comparisons > 0


def test_what_cannot_be_compared_is_refused(index):
    holders = spread(2, 1)
    with codes(index.path, holders) as nodes:
        router = nodes[0].router
        queries = np.zeros((1, index.scan_dim), dtype=np.float32)
        absent = int(np.flatnonzero(~holders[0])[0])
        with pytest.raises(NotHeldError):
            router.compare(queries, np.array([[absent << 32]]), 3)
        there = int(np.flatnonzero(holders[0])[0])
        distances, ids = router.compare(queries, np.array([[there << 32, -1]]), 3)
        assert ids[0].tolist() == [int(index.list_ids(there)[0]), -1, -1]
        assert distances.shape == (1, 3)
        assert router.compare(queries, np.array([[there << 32, -1]]), 3, 0) is None
    with pytest.raises(RouterClosedError):
        router.compare(queries, np.array([[there << 32]]), 3)


def test_the_arrays_of_a_comparison_come_as_they_went_and_wrong_ones_are_refused():
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((3, 4), dtype=np.float32)
    sizes = np.array([5, 0, 7])
    lists, rows = np.array([[0, 2], [2, -1], [-1, 0]]), np.array([[4, 6], [0, 0], [0, 1]])
    body = encode_comparison(queries, lists, rows)
    found, positions = decode_comparison(body, n=3, d=4, r=2, list_sizes=sizes)
    np.testing.assert_array_equal(found, queries)
    np.testing.assert_array_equal(positions, np.where(lists < 0, -1, (lists << 32) | rows))
    for wrong, words in (
        (body[:-1], "bytes; expected"),
        (encode_comparison(queries * np.nan, lists, rows), "not finite"),
        (encode_comparison(queries, lists + 1, rows), "lists outside"),
        (encode_comparison(queries, lists, rows + 1), "rows that their lists have not"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            decode_comparison(wrong, n=3, d=4, r=2, list_sizes=sizes)


def test_a_large_comparison_is_asked_in_parts(index, whole, monkeypatch):
    with codes(index.path, spread(2, 1)) as nodes:
        queries = clustered(40, seed=1)
        same(nodes[0].router.search(queries, K, NPROBE), whole(queries))
        before = nodes[1].comparisons
        monkeypatch.setattr(remote_lists, "_MOST_COMPARED", 4 * 7 * (index.scan_dim + 2 * 60))
        same(nodes[0].router.search(queries, K, NPROBE), whole(queries))
        assert nodes[1].comparisons - before >= 4


def test_an_event_loop_does_not_compare_without_the_extension(index, monkeypatch):
    with Router(index, precision="codes") as router:
        queries, positions = clustered(1), np.array([[0, 1, 2]])
        found = router.compare(index.transform(queries), positions, 3, 1 << 20)
        assert found is not None
        monkeypatch.setattr(Reranker, "is_fast", False)
        assert router.compare(index.transform(queries), positions, 3, 1 << 20) is None
        again = router.compare(index.transform(queries), positions, 3)
        np.testing.assert_array_equal(again[1], found[1])


def test_lookahead_brings_codes_of_all_lists_and_rows_of_those_that_are_here(index, whole):
    holders = spread(3, 1)
    settings = {"devices": ["cpu"], "device_budget_bytes": BUDGET, "lookahead_bytes": BUDGET // 2}
    with codes(index.path, holders, **settings) as nodes:
        node, held = nodes[0], holders[0]
        with node.router.session() as session:
            queries = clustered(12, seed=2)
            session.lookahead(queries, nprobe=NPROBE).result(20)
            same(session.search(queries, K, NPROBE), whole(queries))
            probed = np.unique(index.quantize(index.transform(queries), NPROBE)[0])
            assert (node.router.residency.list_device[probed] >= 0).all()
            rows = node.router.row_residency.list_device[probed] >= 0
            np.testing.assert_array_equal(rows, held[probed])
            assert node.router.stats().lookahead_skipped_lists == 0


def test_a_router_ends_when_others_have_compared(index, whole):
    with codes(index.path, spread(2, 1)) as nodes:
        nodes[1].delay_s = 0.5
        queries = clustered(4)
        found = nodes[0].router.submit(queries, K, NPROBE)
        until(lambda: nodes[0].remote._n_open > 0)
        nodes[0].router.close()
        assert found.done()
        same(found.result(), whole(queries))
