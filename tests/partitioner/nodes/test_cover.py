"""Which nodes are asked: what is allowed, as few as the bound says, and every equal node as often as the others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.nodes.cover import HERE, NOBODY, choose_nodes, choose_nodes_reference


def masks(*nodes: tuple[int, ...]) -> np.ndarray:
    """Holders of each list, from the nodes of each."""
    return np.array([sum(1 << node for node in one) for one in nodes], dtype=np.uint64)


@st.composite
def cases(draw):
    """Probes, lists that are here, holders, usable nodes, the own node."""
    n_nodes = draw(st.one_of(st.integers(1, 7), st.sampled_from([8, 9, 63, 64])))
    nlist, n, p = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 10))
    node = st.integers(0, n_nodes - 1)
    holders = masks(
        *draw(st.lists(st.lists(node, max_size=3).map(lambda x: tuple(set(x))), min_size=nlist, max_size=nlist))
    )
    here = np.array(draw(st.lists(st.booleans(), min_size=nlist, max_size=nlist)))
    row = st.lists(st.integers(-1, nlist - 1), min_size=p, max_size=p)
    probes = np.array(draw(st.lists(row, min_size=n, max_size=n)), dtype=np.int64)
    usable = draw(st.integers(0, (1 << n_nodes) - 1))
    own = draw(st.one_of(st.none(), node))
    load = draw(st.one_of(st.none(), st.just(np.arange(n_nodes, dtype=np.float64) % 3)))
    return probes, here, holders, usable, own, load


def fewest(lists: list[int]) -> int:
    """Nodes of the smallest cover of ``lists``, given as the masks of their holders: by trying all."""
    nodes = [node for node in range(64) if any(one >> node & 1 for one in lists)]
    for count in range(len(nodes) + 1):
        for some in itertools.combinations(nodes, count):
            if all(any(one >> node & 1 for node in some) for one in lists):
                return count
    raise AssertionError("a list without a holder")


@given(cases(), st.integers(0, 10_000))
def test_the_kernel_chooses_as_the_reference_does(case, turn):
    probes, here, holders, usable, own, load = case
    may = usable if own is None else usable & ~(1 << own)
    found = choose_nodes(probes, here=here, holders=holders, usable=usable, own=own, load=load, turn=turn)
    expected = choose_nodes_reference(probes, here=here, holders=holders, usable=may, load=load, turn=turn)
    np.testing.assert_array_equal(found, expected)


def test_without_other_nodes_nobody_is_asked():
    nodes = {"holders": np.zeros(3, dtype=np.uint64), "usable": 0, "load": np.empty(0)}
    found = choose_nodes(np.array([[0, 1, -1]]), here=np.array([True, False, False]), **nodes)
    assert found.tolist() == [[HERE, NOBODY, HERE]]


@pytest.mark.parametrize("function", [choose_nodes, choose_nodes_reference])
@pytest.mark.parametrize("wrong", [-2, 3])
def test_what_is_no_list_is_refused(function, wrong):
    nodes = {"holders": np.ones(3, dtype=np.uint64), "usable": 1, "load": None, "turn": 0}
    with pytest.raises(InvalidInputError, match="list id"):
        function(np.array([[0, wrong]]), here=np.zeros(3, dtype=bool), **nodes)


@given(cases(), st.integers(0, 10_000))
def test_probes_that_are_not_here_go_to_usable_holders_and_to_few_of_them(case, turn):
    probes, here, holders, usable, own, load = case
    found = choose_nodes(probes, here=here, holders=holders, usable=usable, own=own, load=load, turn=turn)
    assert found.shape == probes.shape
    assert found.dtype == np.int16
    may = usable if own is None else usable & ~(1 << own)
    for wanted, chosen in zip(probes.tolist(), found.tolist(), strict=True):
        asked = []
        for which, node in zip(wanted, chosen, strict=True):
            if which < 0 or here[which]:
                assert node == HERE
            elif not int(holders[which]) & may:
                assert node == NOBODY
            else:
                assert int(holders[which]) & may & 1 << node
                asked.append(int(holders[which]) & may)
        nodes = set(chosen) - {HERE, NOBODY}
        harmonic = sum(1 / i for i in range(1, len(asked) + 1))
        assert fewest(asked) <= len(nodes) <= fewest(asked) * harmonic + 1e-9
        # The first node that is asked takes most of the lists.
        if asked:
            most = max(sum(one >> node & 1 for one in asked) for node in range(64))
            assert max(chosen.count(node) for node in nodes) == most


def test_greedy_takes_the_node_with_most_lists_first():
    holders = masks((0, 2), (0, 2), (0, 3), (1, 3), (1, 2))
    probes = np.array([[0, 1, 2, 3, 4]])
    nothing = np.zeros(5, dtype=bool)
    found = choose_nodes(probes, here=nothing, holders=holders, usable=0b1111)
    assert len(set(found[0].tolist())) == 2
    without = choose_nodes(probes, here=nothing, holders=holders, usable=0b1011)
    assert set(without[0].tolist()) <= {0, 1, 3}


@pytest.mark.parametrize("n_nodes", [2, 4, 7, 16, 64])
def test_nodes_that_hold_the_same_share_the_queries_evenly(n_nodes):
    holders = np.full(8, (1 << n_nodes) - 1, dtype=np.uint64)
    probes = np.tile(np.arange(8), (10 * n_nodes, 1))
    nothing = np.zeros(8, dtype=bool)
    together = choose_nodes(probes, here=nothing, holders=holders, usable=(1 << n_nodes) - 1)[:, 0]
    assert (np.bincount(together, minlength=n_nodes) == 10).all()
    one_by_one = [
        choose_nodes(probes[:1], here=nothing, holders=holders, usable=(1 << n_nodes) - 1, turn=turn)[0, 0]
        for turn in range(len(probes))
    ]
    assert one_by_one == together.tolist()


@pytest.mark.parametrize("twins", [(0, 1), (3, 4), (0, 15), (2, 7, 8)])
def test_some_nodes_of_many_that_hold_the_same_share_the_queries_too(twins):
    holders, n = masks(twins, twins), 64 * 16
    found = choose_nodes(np.tile([0, 1], (n, 1)), here=np.zeros(2, dtype=bool), holders=holders, usable=(1 << 16) - 1)
    counts = np.bincount(found[:, 0], minlength=16)[list(twins)]
    assert counts.sum() == n
    assert counts.min() > 0.85 * n / len(twins)


def test_less_loaded_nodes_catch_up_within_a_batch():
    """As if each query went to the node with the least to do, one after the other."""
    holders, load = masks((0, 1, 2)), np.array([5.0, 1.0, 3.0])
    found = choose_nodes(
        np.zeros((9, 1), dtype=np.int64), here=np.zeros(1, dtype=bool), holders=holders, usable=0b111, load=load
    )
    assert np.bincount(found[:, 0], minlength=3).tolist() == [1, 5, 3]
    # Load decides between equals only.
    more = choose_nodes(
        np.array([[0, 1]]),
        here=np.zeros(2, dtype=bool),
        holders=masks((0,), (0, 1)),
        usable=0b11,
        load=np.array([9.0, 0]),
    )
    assert more.tolist() == [[0, 0]]


def test_a_batch_without_probes_or_with_all_here_asks_nobody():
    here = np.ones(3, dtype=bool)
    for probes in (np.empty((0, 4), np.int64), np.empty((2, 0), np.int64), np.array([[0, -1], [2, 1]])):
        found = choose_nodes(probes, here=here, holders=masks((0,), (0,), (0,)), usable=1)
        assert found.shape == probes.shape
        assert (found == HERE).all()
