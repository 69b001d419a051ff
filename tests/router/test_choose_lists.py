"""Which lists a batch of drafts moves: order, budget, what is there already."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybridindex.router.lookahead.prefetch import choose_lists

NOTHING = np.zeros(8, dtype=np.bool_)


def test_queries_take_turns_rank_by_rank():
    probes = np.array([[0, 1, 2], [3, 4, 5]])
    ones = np.ones(8, dtype=np.int64)
    assert choose_lists(probes, ones, NOTHING, 8) == ([0, 3, 1, 4, 2, 5], [])
    assert choose_lists(probes, ones, NOTHING, 3) == ([0, 3, 1], [4, 2, 5])


def test_a_list_of_two_queries_comes_once_at_its_nearest_rank():
    probes = np.array([[0, 1, 2], [2, 1, 3]])
    assert choose_lists(probes, np.ones(8, dtype=np.int64), NOTHING, 8) == ([0, 2, 1, 3], [])


def test_a_list_that_does_not_fit_makes_way_for_the_next_one():
    sizes = np.array([3, 5, 0, 2, 1, 1, 1, 1])
    assert choose_lists(np.array([[0, 1, 2, 3, -1]]), sizes, NOTHING, 5) == ([0, 3], [1])


def test_what_is_there_costs_nothing():
    present = NOTHING.copy()
    present[[0, 3]] = True
    assert choose_lists(np.array([[0, 1, 3, 2]]), np.ones(8, dtype=np.int64), present, 1) == ([1], [2])


@given(
    hnp.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.integers(-1, 7)),
    hnp.arrays(np.int64, 8, elements=st.integers(0, 9)),
    hnp.arrays(np.bool_, 8),
    st.integers(0, 30),
)
def test_chosen_and_left_out_are_what_is_wanted_within_the_budget(probes, sizes, present, budget):
    chosen, left_out = choose_lists(probes, sizes, present, budget)
    wanted = {i for i in probes.ravel().tolist() if i >= 0 and not present[i] and sizes[i]}
    assert sorted(chosen + left_out) == sorted(wanted)
    assert sizes[chosen].sum() <= budget
    rank = {i: int(np.flatnonzero((probes == i).any(axis=0))[0]) for i in wanted}
    for lists in (chosen, left_out):
        assert [rank[i] for i in lists] == sorted(rank[i] for i in lists)
    # The first that is left out did not fit beside what came before it.
    for missed in left_out[:1]:
        before = [i for i in chosen if rank[i] <= rank[missed]]
        assert sizes[missed] > budget - sizes[before].sum()
