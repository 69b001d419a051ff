"""Product-quantized lists as hybrids: answers are the same wherever lists lie, and as good as faiss's."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index import build, codec
from hybridindex.router import Router
from hybridindex.tiers.paged.pq.native_pq_scanner import NativePqScanner
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import random_placement

QUERIES = clustered(60, seed=8)
#: The last: residuals in a fast scan.
CODECS = ("pq8", "pq4", "pqfs12", "pqfs8", "faiss:PQ8x4fsr")


@pytest.fixture(scope="module", params=[(c, m) for c in CODECS for m in ("ip", "l2")], ids="-".join)
def index(request, tmp_path_factory):
    name, metric = request.param
    with small_index(tmp_path_factory.mktemp("idx") / "i", codec=name, metric=metric) as index:
        yield index


def test_answers_are_bit_equal_wherever_lists_lie_and_whoever_is_in_the_batch(index):
    rng = np.random.default_rng(3)
    with Router(index, threads=2) as router:
        host = router.search(QUERIES, 20, 8)
        alone = [router.search(query, 20, 8) for query in QUERIES[:5]]
    for row, found in enumerate(alone):
        np.testing.assert_array_equal(found.ids[0], host.ids[row])
        np.testing.assert_array_equal(found.distances[0], host.distances[row])
    for n_devices, fraction in ((1, 1.0), (1, 0.5), (2, 0.7)):
        plan = hand_made_plan(index, random_placement(rng, n_devices, fraction), n_devices=n_devices)
        with Router(index, plan=plan, devices=["cpu"] * n_devices) as router:
            assert router.stats().unplaced_lists == 0
            mixed = router.search(QUERIES, 20, 8)
            router.check_invariants()
        assert mixed.hit_rate.max() > 0
        np.testing.assert_array_equal(mixed.ids, host.ids)
        np.testing.assert_array_equal(mixed.distances, host.distances)


def test_the_host_scans_what_has_too_many_ties_for_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(NativePqScanner, "supports", staticmethod(lambda arena: False))  # as on a GPU, which has no ids
    rows = clustered(3000, seed=1)
    rows[:2000] = QUERIES[0]
    with build(rows, tmp_path / "i", nlist=4, metric="l2", codec="pq8", nprobe=4) as index:
        with Router(index, threads=2) as router:
            host = router.search(QUERIES[:3], 20, 4)
        with Router(index, plan=hand_made_plan(index, np.zeros(4)), devices=["cpu"]) as router:
            found = router.search(QUERIES[:3], 20, 4)
            assert router.stats().device_fallbacks == 1
            router.check_invariants()
        np.testing.assert_array_equal(found.ids, host.ids)
        np.testing.assert_array_equal(found.distances, host.distances)


def test_lookahead_brings_lists_that_the_next_search_finds_on_the_device(index):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        before = router.search(QUERIES[:4], 10, 8)
        session.lookahead(QUERIES[:4], nprobe=8).result(300)
        after = session.search(QUERIES[:4], 10, 8)
        assert before.hit_rate.max() == 0
        assert after.hit_rate.min() == 1
        np.testing.assert_array_equal(after.ids, before.ids)
        np.testing.assert_array_equal(after.distances, before.distances)


def test_they_are_those_of_faiss_or_nearer(index):
    """faiss's fast scan rounds its tables; its other scan adds in another order."""
    distances, ids = index.open_faiss().search_preassigned(QUERIES, 10, *index.quantize(QUERIES, 8))
    with Router(index) as router:
        own = router.search(QUERIES, 10, 8)
    rows = clustered(3000, seed=1).astype(np.float64)
    far = -QUERIES @ rows.T if index.metric == "ip" else ((QUERIES[:, None] - rows) ** 2).sum(axis=2)
    true = np.argsort(far, axis=1)[:, :10]
    recall = [np.mean([np.isin(a, b).mean() for a, b in zip(found, true, strict=True)]) for found in (own.ids, ids)]
    # A few of 600 neighbours change places at random.
    assert recall[0] >= recall[1] - 0.01
    if index.manifest.layout == "rows":
        np.testing.assert_allclose(own.distances, distances, rtol=1e-5, atol=1e-4)
        same = (own.ids == ids).mean()
        assert same > 0.98


def test_what_has_more_parts_than_sums_hold_is_left_to_faiss(tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 7)
    with small_index(tmp_path / "i", codec="pq8", n=600) as index:
        plan = hand_made_plan(index, np.zeros(NLIST))
        with Router(index, plan=plan, devices=["cpu"]) as router:
            assert isinstance(router.devices[0], ShardTier)
            assert router.search(QUERIES[:3], 5, 8).hit_rate.min() == 1
