"""A profile's accesses are renewed from recent queries, and the past counts for as much as it is worth."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import ProfileError, ProfileMismatchError
from hybridindex.profiler.access import access_counts, sample_access, smooth, split_halves
from hybridindex.profiler.recent import Counting, choose_counting, near_counts, renew_profile
from tests.clustered import small_index
from tests.moving_load import moving_queries
from tests.store.conftest import make_profile

NPROBE = 4


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("recent") / "i") as index:
        yield index


@pytest.fixture(scope="module")
def parent(index):
    queries = moving_queries(2000, seed=1, moved=False)
    return make_profile(
        id=17,
        index_fingerprint=index.fingerprint,
        nlist=index.nlist,
        nprobe=NPROBE,
        list_bytes=index.list_bytes,
        list_sizes=index.list_sizes,
        access=sample_access(index, queries[:1000], queries[1000:], NPROBE),
        notes={"source": "a test"},
    )


def test_accesses_are_new_and_everything_else_stays(index, parent):
    queries = moving_queries(300, seed=2, moved=True)
    renewed = renew_profile(parent, index, queries, n_hot=6, decay=0.25, notes={"span_s": 60.0})
    assert renewed.id is None
    assert renewed.stages == parent.stages
    assert renewed.transfers == parent.transfers
    probes, _ = index.quantize(queries, NPROBE)
    both = np.concatenate((renewed.access.fit_probes, renewed.access.held_probes))
    assert sorted(map(tuple, both)) == sorted(map(tuple, probes))
    fresh = access_counts(renewed.access.fit_probes, index.nlist)
    if renewed.notes["renewed"]["near"]:
        fit = index.transform(queries)[split_halves(300, 0)[0]]
        fresh = near_counts(index.quantize(fit, 2 * NPROBE)[0], NPROBE, index.nlist)
    np.testing.assert_array_equal(renewed.access.list_accesses, smooth(parent.access.list_accesses, fresh, decay=0.25))
    assert renewed.notes["source"] == "a test"
    assert renewed.notes["renewed"] == {
        "parent": 17,
        "parent_created_at": parent.created_at,
        "queries": {"given": 300, "fit": 150, "held": 150},
        "decay": 0.25,
        "decay_chosen": False,
        "near": renewed.notes["renewed"]["near"],
        "span_s": 60.0,
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_past_is_kept_on_a_steady_load_and_forgotten_after_a_move(seed):
    """500 lists by a Zipf law, 10,000 accesses counted before and 400 queries of four probes since."""
    rng = np.random.default_rng(seed)
    law = 1 / np.arange(1, 501) ** 0.8
    law /= law.sum()
    previous = np.bincount(rng.choice(500, 10_000, p=law), minlength=500).astype(np.float64)
    same = rng.choice(500, (400, 4), p=law).astype(np.int32)
    other = rng.choice(500, (400, 4), p=law[::-1]).astype(np.int32)
    list_bytes = np.full(500, 1000)
    assert choose_counting(previous, same, 4, list_bytes, 50).decay >= 0.1
    assert choose_counting(previous, other, 4, list_bytes, 50).decay <= 0.03


def test_the_chosen_weight_serves_unseen_queries_at_least_as_well_as_either_extreme(index, parent):
    """Mean work that the six hottest lists take of 2000 unseen queries."""
    caught = dict.fromkeys(("chosen", "nothing", "everything"), 0.0)
    for moved in (False, True):
        unseen = access_counts(index.quantize(moving_queries(2000, seed=5, moved=moved), NPROBE)[0], index.nlist)
        work = unseen * index.list_bytes
        for seed in range(20, 26):
            queries = moving_queries(120, seed=seed, moved=moved)
            for name, decay in (("chosen", None), ("nothing", 0.0), ("everything", 1.0)):
                access = renew_profile(parent, index, queries, n_hot=6, decay=decay).access
                hot = np.argsort(-access.list_accesses, kind="stable")[:6]
                caught[name] += work[hot].sum() / work.sum() / 12
    assert caught["chosen"] >= caught["everything"] + 0.05, caught
    assert caught["chosen"] >= caught["nothing"] - 0.01, caught


def test_where_no_weight_is_better_the_past_counts_in_full():
    probes = np.zeros((10, 1), dtype=np.int32)
    sizes = np.array([1, 1])
    assert choose_counting(np.array([5.0, 0.0]), probes, 1, sizes, 1) == Counting(decay=1.0, near=False)
    assert choose_counting(np.array([0.0, 5000.0]), probes, 1, sizes, 1) == Counting(decay=0.0, near=False)


def test_probes_that_name_no_list_are_no_work():
    probes = np.array([[0, -1], [0, -1], [1, -1], [0, -1]], dtype=np.int32)
    assert choose_counting(np.array([9.0, 0.0, 0.0]), probes, 2, np.array([1, 1, 1000]), 1).decay == 1.0
    assert near_counts(probes, 1, 3)[2] == 0.0


def on_a_line(at, nprobe):
    """(n, 2 nprobe) int32: the nearest of 400 lists that stand on a line, to queries ``at`` (n,)."""
    return np.argsort(np.abs(at[:, None] - np.arange(400)), axis=1, kind="stable")[:, : 2 * nprobe].astype(np.int32)


@pytest.mark.parametrize("again", [False, True], ids=["queries that resemble each other", "the same queries again"])
def test_near_misses_count_where_that_serves_unseen_queries(again):
    """120 queries about a third of the lists, or 20 that come six times each; 40 lists are hot."""
    rng = np.random.default_rng(7)
    kept = rng.uniform(0, 400, 20)

    def asked(n):
        return rng.choice(kept, n) if again else 200 + 60 * rng.standard_normal(n)

    ranked, unseen = on_a_line(asked(120), 2), on_a_line(asked(4000), 2)
    chosen = choose_counting(np.zeros(400), ranked, 2, np.ones(400, dtype=np.int64), 40)
    assert chosen.near is not again
    work = access_counts(unseen[:, :2], 400)
    probed, softened = access_counts(ranked[:, :2], 400), near_counts(ranked, 2, 400)
    share = [work[np.argsort(-counts, kind="stable")[:40]].sum() / work.sum() for counts in (probed, softened)]
    assert (share[1] > share[0] + 0.02) is not again, share


def test_too_few_queries_and_foreign_profiles_are_refused(index, parent):
    import dataclasses

    with pytest.raises(ProfileError, match="63 recent queries"):
        renew_profile(parent, index, moving_queries(63, seed=1, moved=False), n_hot=6)
    foreign = dataclasses.replace(parent, index_fingerprint="other")
    with pytest.raises(ProfileMismatchError, match="other"):
        renew_profile(foreign, index, moving_queries(64, seed=1, moved=False), n_hot=6)
