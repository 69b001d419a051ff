"""Which node a client asks: one that holds most, and of those that hold nearly as much each in its turn."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.partitioner.nodes.nearest import LOCAL_WORTH, nearest_nodes, remote_costs
from hybridindex.partitioner.nodes.placement import place_lists
from tests.partitioner.nodes.test_placement import SAMPLE, SIZES, WORK, answered_by, check, log, request


def test_the_cost_of_what_is_elsewhere_grows_in_steps():
    assert remote_costs(np.array([1.0, 0.95, 0.5, 0.0])).tolist() == [0, 0, LOCAL_WORTH // 2, LOCAL_WORTH]


def test_the_node_that_holds_most_is_asked_and_equal_ones_in_turn():
    local = np.tile([0.2, 0.98, 0.0, 1.0], (400, 1))
    counts = np.bincount(nearest_nodes(local), minlength=4)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert counts[1] > 50
    assert counts[3] > 50


@pytest.mark.parametrize(("n_nodes", "replicas"), [(4, 1), (4, 2), (16, 2)])
def test_what_a_plan_foretells_of_clients_that_choose(n_nodes, replicas):
    plan = place_lists(SIZES, WORK, request(n_nodes, replicas), probes=SAMPLE)
    check(plan)
    new = log(300, seed=1)
    on = (plan.holders[:, None] >> np.arange(n_nodes, dtype=np.uint64) & np.uint64(1)).astype(bool)
    nbytes = np.where(new >= 0, SIZES[new], 0)
    local = (nbytes[:, :, None] * on[new]).sum(axis=1) / nbytes.sum(axis=1, keepdims=True)
    asked, found = zip(
        *(answered_by(plan, new[[i]], own) for i, own in enumerate(nearest_nodes(local).tolist())), strict=True
    )
    assert plan.nearest_fan_out == pytest.approx(np.mean(asked), rel=0.2, abs=0.1)
    assert plan.nearest_local_share == pytest.approx(np.mean(found), rel=0.1)
    assert plan.nearest_local_share > plan.local_share
    assert plan.nearest_fan_out < plan.fan_out
    assert f"{plan.nearest_fan_out:.2f}" in plan.explain()
