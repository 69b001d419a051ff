"""Whether recent queries make it worth to move lists: by queries that the new placement did not see."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.nodes.drift import judge_drift
from hybridindex.partitioner.nodes.placement import place_lists
from tests.partitioner.nodes.skewed import NLIST, SIZES, WORK, log, request


def placed(probes):
    return place_lists(SIZES, WORK, request(4, 2), probes=probes).holders


def test_queries_that_ask_as_before_move_nothing():
    before, now = log(3000, seed=1), log(2000, seed=2)
    drift = judge_drift(SIZES, SIZES, placed(before), request(4, 2), now)
    assert drift.n_queries == 2000
    assert drift.plan is not None
    assert drift.local_share is not None
    assert not drift.pays


def test_queries_that_ask_for_other_lists_move_them():
    moved = np.random.default_rng(0).permutation(NLIST)
    now = moved[log(2000, seed=2)]
    drift = judge_drift(SIZES, SIZES, placed(log(3000, seed=1)), request(4, 2), now)
    assert drift.pays
    assert drift.plan.local_share > drift.local_share + 0.05
    again = judge_drift(SIZES, SIZES, drift.plan.holders, request(4, 2), now)
    assert not again.pays
    np.testing.assert_allclose(drift.work, np.bincount(now.ravel(), minlength=NLIST) * SIZES / len(now))


def test_a_few_queries_say_nothing():
    drift = judge_drift(SIZES, SIZES, placed(log(3000, seed=1)), request(4, 2), log(199, seed=3))
    assert (drift.plan, drift.local_share, drift.pays) == (None, None, False)
    none = judge_drift(SIZES, SIZES, placed(None), request(4, 2), np.empty((0, 5), dtype=np.int64))
    assert (none.n_queries, none.pays) == (0, False)


def test_what_cannot_be_placed_is_refused():
    holders = placed(log(3000, seed=1))
    with pytest.raises(InvalidInputError, match="missing"):
        judge_drift(SIZES, SIZES, holders, request(4, 2, times=0.5), log(500, seed=1))
