"""Lists on nodes: copies, memory, even work, lists that are probed together, errors that say what is missing."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.nodes.cover import choose_nodes
from hybridindex.partitioner.nodes.moves import moves
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest
from hybridindex.partitioner.nodes.placement import missing_bytes, place_lists
from tests.partitioner.nodes.skewed import NLIST, SAMPLE, SIZES, WORK, check, log, request


@st.composite
def clusters(draw):
    nlist = draw(st.integers(1, 40))
    list_bytes = np.array(draw(st.lists(st.integers(0, 1000), min_size=nlist, max_size=nlist)), dtype=np.int64)
    work = np.array(draw(st.lists(st.floats(0, 1e6), min_size=nlist, max_size=nlist)))
    node_bytes = tuple(draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=7)))
    probes = draw(
        st.one_of(
            st.none(),
            st.lists(st.lists(st.integers(-1, nlist - 1), min_size=3, max_size=3), max_size=8).map(
                lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 3)
            ),
        )
    )
    replicate = draw(st.sampled_from(["hot", "none"]))
    wanted = NodeRequest(node_bytes=node_bytes, replicas=draw(st.integers(1, 3)), replicate=replicate)
    current = draw(
        st.one_of(
            st.none(),
            st.lists(st.integers(0, 255), min_size=nlist, max_size=nlist).map(lambda x: np.array(x, np.uint64)),
        )
    )
    return list_bytes, work, wanted, probes, current


@given(clusters())
def test_every_list_is_on_enough_nodes_and_memory_is_kept(case):
    list_bytes, work, wanted, probes, current = case
    taking, index = wanted.taking.size, int(list_bytes.sum())
    if wanted.replicas > taking:
        with pytest.raises(InvalidInputError, match="replicas is"):
            place_lists(list_bytes, work, wanted, probes=probes, current=current)
        return
    # Where every node has room for a list more, there is a way; where copies lack bytes, there is none.
    room = sum(min(nbytes, index) for nbytes in wanted.node_bytes)
    if missing_bytes(list_bytes, wanted):
        with pytest.raises(InvalidInputError, match="bytes of memory are missing"):
            place_lists(list_bytes, work, wanted, probes=probes, current=current)
        return
    tight = room < wanted.replicas * index + int(list_bytes.max()) * taking
    try:
        plan = place_lists(list_bytes, work, wanted, probes=probes, current=current)
    except InvalidInputError:
        if not tight:
            raise
        return
    check(plan)
    assert (plan.copies >= wanted.replicas).all()
    assert not plan.below.size
    assert set(plan.copies.tolist()) <= {wanted.replicas, taking}
    if wanted.replicate == "none":
        assert not plan.spread.size
    told = json.loads(json.dumps(plan.to_json()))
    for node, lists in enumerate(told["lists_of_node"]):
        assert lists == np.flatnonzero(plan.holders >> np.uint64(node) & np.uint64(1)).tolist()
    assert told["hot_lists"] == plan.spread.tolist()
    assert len(plan.explain().splitlines()) >= wanted.n_nodes + 1


@pytest.mark.parametrize(("n_nodes", "replicas"), [(4, 1), (4, 2), (16, 1), (16, 2)])
def test_hot_lists_and_neighbours_together_halve_what_striping_asks(n_nodes, replicas):
    striped = place_lists(SIZES, WORK, request(n_nodes, replicas, replicate="none"))
    together = place_lists(SIZES, WORK, request(n_nodes, replicas), probes=SAMPLE)
    check(striped)
    check(together)
    assert striped.fan_out is None
    new = log(300, seed=1)
    asked, local = answered(striped, new)
    asked_together, local_together = answered(together, new)
    assert asked_together < asked / 2
    assert local_together > local
    # What it foretold, of queries that it did not know.
    assert together.fan_out == pytest.approx(asked_together, rel=0.15)
    assert together.local_share == pytest.approx(local_together, rel=0.15)


def answered(plan: NodePlan, probes: np.ndarray) -> tuple[float, float]:
    """Nodes beside the answering one that a query asks, and its bytes there: each query answered by each node."""
    each = [answered_by(plan, probes, own) for own in range(plan.request.n_nodes)]
    asked, local = np.mean(each, axis=0)
    return float(asked), float(local)


def answered_by(plan: NodePlan, probes: np.ndarray, own: int) -> tuple[float, float]:
    """The same, each query answered by one node."""
    here = (plan.holders >> np.uint64(own) & np.uint64(1)).astype(bool)
    found = choose_nodes(probes, here=here, holders=plan.holders, usable=(1 << plan.request.n_nodes) - 1, own=own)
    asked = [len(set(row) - {-1}) for row in found.tolist()]
    local = [plan.list_bytes[row[here[row]]].sum() / plan.list_bytes[row].sum() for row in probes]
    return float(np.mean(asked)), float(np.mean(local))


def test_hot_lists_are_the_most_probed_and_on_every_node():
    plan = place_lists(SIZES, WORK, request(8, 2))
    heat = WORK / SIZES
    assert plan.spread.size > 10
    assert (plan.copies[plan.spread] == 8).all()
    cold = np.setdiff1d(np.arange(NLIST), plan.spread)
    assert heat[plan.spread].min() >= heat[cold].max()
    few = place_lists(SIZES, WORK, request(8, 2, spread_bytes=int(SIZES[plan.spread].sum())))
    assert 0 < SIZES[few.spread].sum() * 6 <= SIZES[plan.spread].sum()
    assert not place_lists(SIZES, WORK, request(8, 2, replicate="none")).spread.size


@pytest.mark.parametrize("probes", [None, SAMPLE])
def test_work_and_bytes_are_even(probes):
    plan = place_lists(SIZES, WORK, request(8, 2), probes=probes)
    assert plan.work_share.max() < 1.35 / 8
    assert plan.node_bytes.max() < 1.3 * plan.node_bytes.mean()


def test_the_work_of_a_lost_node_falls_to_several():
    plan = place_lists(SIZES, WORK, request(8, 2), probes=SAMPLE)
    for lost in range(8):
        left = NodePlan(
            request=plan.request,
            list_bytes=SIZES,
            work=WORK,
            holders=plan.holders & ~np.uint64(1 << lost),
        )
        more = left.work_share - plan.work_share
        assert more.max() < 0.75 * plan.work_share[lost]


def test_a_small_node_holds_what_it_can():
    whole = int(SIZES.sum())
    plan = place_lists(SIZES, WORK, NodeRequest(node_bytes=(whole, whole, whole // 10, 0), replicas=2))
    check(plan)
    assert plan.node_bytes[2] > 0
    assert plan.node_bytes[3] == 0
    assert "Node 3 takes no lists" in plan.explain()


def test_where_only_one_way_is_left_it_is_found():
    """The first node must hold every list: the others have room for half of them each."""
    sizes = np.full(40, 10, dtype=np.int64)
    plan = place_lists(sizes, np.ones(40), NodeRequest(node_bytes=(400, 200, 200), replicas=2))
    assert plan.node_bytes.tolist() == [400, 200, 200]


def test_nothing_moves_where_nothing_changed():
    for probes in (None, SAMPLE):
        plan = place_lists(SIZES, WORK, request(4, 2), probes=probes)
        again = place_lists(SIZES, WORK, request(4, 2), probes=probes, current=plan.holders)
        assert moves(plan.holders, again.holders, SIZES).nbytes == 0


def test_a_new_node_takes_its_part_and_others_take_nothing():
    plan = place_lists(SIZES, WORK, request(4, 2, replicate="none"))
    more = NodeRequest(node_bytes=(*plan.request.node_bytes, plan.request.node_bytes[0]), replicate="none")
    wider = place_lists(SIZES, WORK, more, current=plan.holders)
    check(wider)
    changed = moves(plan.holders, wider.holders, SIZES)
    assert changed.take_bytes[:4].sum() == 0
    assert wider.work_share[4] > 0.15
    assert wider.work_share.max() < 0.25
    assert 0 < changed.nbytes <= SIZES.sum() * 2 / 5


def test_a_node_that_takes_no_more_lists_gives_its_own_to_others():
    plan = place_lists(SIZES, WORK, request(4, 2, times=1.6, replicate="none"))
    left = place_lists(SIZES, WORK, plan.request.without(np.array([2])), current=plan.holders)
    check(left)
    # And a few more, so that no node has much more work than others.
    assert plan.loss(2).copy_bytes <= moves(plan.holders, left.holders, SIZES).nbytes < plan.loss(2).copy_bytes * 1.1
    assert left.work_share.max() < 1.3 / 3


def test_a_plan_says_what_the_loss_of_a_node_means():
    plan = NodePlan(
        request=NodeRequest(node_bytes=(100, 100, 100)),
        list_bytes=np.array([1, 2, 4, 8]),
        work=np.ones(4),
        holders=np.array([0b001, 0b011, 0b111, 0b110], dtype=np.uint64),
    )
    lost = plan.loss(0)
    assert (lost.n_none, lost.n_one, lost.copy_bytes) == (1, 1, 3)
    assert plan.below.tolist() == [0]
    assert plan.spread.tolist() == [2]
    assert plan.work_share.tolist() == pytest.approx(
        [(1 + 1 / 2 + 1 / 3) / 4, (1 / 2 + 1 / 3 + 1 / 2) / 4, (5 / 6) / 4]
    )
    assert "Memory is short: 1 lists (1 B) are on fewer than 2 nodes" in plan.explain()


def test_errors_say_what_is_missing_and_what_would_do():
    whole = int(SIZES.sum())
    with pytest.raises(InvalidInputError, match=f"^{whole // 2 + whole % 2} bytes of memory are missing") as error:
        place_lists(SIZES, WORK, NodeRequest(node_bytes=(whole // 2, whole // 2, whole // 2), replicas=2))
    each = int(re.search(r"(\d+) bytes \([^)]*\) on each node would do", str(error.value))[1])
    check(place_lists(SIZES, WORK, NodeRequest(node_bytes=(each,) * 3, replicas=2)))
    with pytest.raises(InvalidInputError, match="replicas is 3 and 2 nodes take lists"):
        place_lists(SIZES, WORK, NodeRequest(node_bytes=(whole, whole, 0), replicas=3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"node_bytes": ()}, "names 0 nodes"),
        ({"node_bytes": (1,) * 65}, "names 65 nodes"),
        ({"node_bytes": (1, -1)}, r"node_bytes\[1\] is -1"),
        ({"replicas": 0}, "replicas is 0"),
        ({"replicate": "all"}, "replicate is 'all'"),
        ({"spread_bytes": -1}, "spread_bytes is -1"),
    ],
)
def test_requests_are_checked(change, said):
    with pytest.raises(InvalidInputError, match=said):
        NodeRequest(**{"node_bytes": (1, 2), **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"work": np.ones(2)}, "work has 2 entries; list_bytes has 3"),
        ({"current": np.ones(4, np.uint64)}, "current has 4 entries"),
        ({"list_bytes": np.array([1, -1, 1])}, "list_bytes is empty or holds a negative number"),
        ({"work": np.array([1, np.nan, 1])}, "work holds a negative number"),
        ({"probes": np.array([[3]])}, "probes hold 3 to 3; give list ids below 3"),
    ],
)
def test_arrays_are_checked(change, said):
    values = {"list_bytes": np.ones(3, np.int64), "work": np.ones(3), **change}
    with pytest.raises(InvalidInputError, match=said):
        place_lists(request=NodeRequest(node_bytes=(9, 9)), **values)
