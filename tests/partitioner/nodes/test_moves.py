"""What changes between placements, and what is left after nodes are lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.nodes.moves import moves, repair
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest
from hybridindex.partitioner.nodes.placement import missing_bytes, place_lists
from tests.partitioner.nodes.skewed import NLIST, SAMPLE, SIZES, WORK, check, request

masks = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(masks, masks, st.integers(0, 1000)), min_size=1, max_size=20))
def test_moves_make_the_new_placement_of_the_old_one(lists):
    old, new = (np.array([one[i] for one in lists], dtype=np.uint64) for i in (0, 1))
    list_bytes = np.array([one[2] for one in lists], dtype=np.int64)
    changed = moves(old, new, list_bytes)
    made = old.tolist()
    for node, (take, drop) in enumerate(zip(changed.take, changed.drop, strict=True)):
        for which in take.tolist():
            assert not made[which] >> node & 1
            made[which] |= 1 << node
        for which in drop.tolist():
            assert made[which] >> node & 1
            made[which] &= ~(1 << node)
        assert changed.take_bytes[node] == list_bytes[take].sum()
        assert changed.drop_bytes[node] == list_bytes[drop].sum()
    assert made == new.tolist()
    assert changed.nbytes == sum(
        (b & ~a).bit_count() * size for a, b, size in zip(old.tolist(), new.tolist(), list_bytes.tolist(), strict=True)
    )


def test_moves_name_nodes_that_hold_nothing_where_they_are_told_to():
    nothing = np.zeros(2, dtype=np.uint64)
    assert len(moves(nothing, nothing, np.ones(2, np.int64), n_nodes=3).take) == 3
    assert moves(nothing, nothing, np.ones(2, np.int64)).take == ()


@st.composite
def losses(draw):
    n_nodes = draw(st.integers(2, 6))
    nlist = draw(st.integers(1, 30))
    list_bytes = np.array(draw(st.lists(st.integers(1, 1000), min_size=nlist, max_size=nlist)), dtype=np.int64)
    work = np.array(draw(st.lists(st.floats(0, 1e6), min_size=nlist, max_size=nlist)))
    replicas = draw(st.integers(1, min(3, n_nodes)))
    each = replicas * int(list_bytes.sum()) / n_nodes * draw(st.floats(1, 3)) + int(list_bytes.max())
    plan = place_lists(list_bytes, work, NodeRequest(node_bytes=(int(each) + 1,) * n_nodes, replicas=replicas))
    return plan, draw(st.sets(st.integers(0, n_nodes - 1), max_size=n_nodes - 1))


@given(losses())
def test_a_repair_leaves_lost_nodes_and_restores_what_memory_allows(case):
    plan, lost = case
    repaired = repair(plan, lost)
    check(repaired)
    living = [node for node in range(plan.request.n_nodes) if node not in lost]
    for node in lost:
        assert repaired.node_bytes[node] == 0
    most = min(plan.request.replicas, len(living))
    room = sum(min(plan.request.node_bytes[node], int(plan.list_bytes.sum())) for node in living)
    if room >= most * int(plan.list_bytes.sum()) + len(living) * int(plan.list_bytes.max()):
        assert (repaired.copies >= most).all()
    assert repaired.below.tolist() == [
        which for which in range(plan.nlist) if repaired.copies[which] < plan.request.replicas
    ]
    if not lost:
        assert (repaired.holders == plan.holders).all()
    # Room for one copy of each list, and a list more on every node: all are served.
    if room >= int(plan.list_bytes.sum()) + len(living) * int(plan.list_bytes.max()):
        assert (repaired.copies >= 1).all()


@pytest.mark.parametrize("probes", [None, SAMPLE])
def test_a_repair_copies_what_was_lost_and_no_more(probes):
    plan = place_lists(SIZES, WORK, request(6, 2, times=1.4), probes=probes)
    assert plan.spread.size
    repaired = repair(plan, [3], probes=probes)
    check(repaired)
    assert not repaired.below.size
    living = [node for node in range(6) if node != 3]
    changed = moves(plan.holders, repaired.holders, SIZES)
    assert changed.nbytes == plan.loss(3).copy_bytes + sum(
        SIZES[which] * (2 - len([n for n in living if int(plan.holders[which]) >> n & 1]))
        for which in np.flatnonzero(repaired.copies == 2)
        if plan.copies[which] == 1
    )
    # Hot lists stay hot as far as memory goes, and no list becomes so.
    assert set(repaired.spread.tolist()) <= set(plan.spread.tolist())
    assert (repaired.copies[repaired.spread] == 5).all()
    assert (repaired.fan_out is None) == (probes is None)


def test_where_memory_is_short_every_list_is_served_and_the_hottest_are_safe():
    plan = place_lists(SIZES, WORK, request(4, 2, replicate="none"))
    repaired = repair(plan, [0, 1])
    check(repaired)
    assert missing_bytes(SIZES, repaired.request)
    assert (repaired.copies >= 1).all()
    assert 0 < repaired.below.size < NLIST
    heat = WORK / SIZES
    assert heat[repaired.copies == 2].mean() > heat[repaired.below].mean()
    assert f"Memory is short: {repaired.below.size} lists" in repaired.explain()
    # Less than one copy of the index: the rest is named.
    last = repair(plan, [0, 1, 2])
    assert 0 < (last.copies == 0).sum() < NLIST
    assert last.node_bytes[3] + SIZES[last.copies == 0].min() > plan.request.node_bytes[3]


def test_lists_that_nobody_holds_take_the_place_of_second_copies():
    sizes = np.full(6, 10, dtype=np.int64)
    plan = NodePlan(
        request=NodeRequest(node_bytes=(40, 40, 40)),
        list_bytes=sizes,
        work=np.array([6.0, 5, 4, 3, 2, 1]),
        holders=np.array([0b011, 0b011, 0b011, 0b011, 0b100, 0b100], dtype=np.uint64),
    )
    repaired = repair(plan, [2])
    check(repaired)
    assert repaired.copies.tolist() == [2, 2, 1, 1, 1, 1]


def test_a_repair_is_repeated_where_more_nodes_are_lost():
    plan = place_lists(SIZES, WORK, request(5, 2, times=2))
    assert repair(repair(plan, [1]), [4]).request.node_bytes == repair(plan, [4, 1]).request.node_bytes


def test_nodes_that_are_lost_must_be_there():
    plan = place_lists(SIZES, WORK, request(3, 2))
    with pytest.raises(InvalidInputError, match=r"lost is \[3\]; give nodes from 0 to 2"):
        repair(plan, [3])
    with pytest.raises(InvalidInputError, match="no node is left that takes lists"):
        repair(plan, [0, 1, 2])
