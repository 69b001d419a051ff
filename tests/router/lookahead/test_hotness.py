"""Hotness follows Eq. 6 within the range of floats; eviction takes the coldest and no more than it must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.router.lookahead.hotness import HotnessPolicy, lists_to_evict, make_room, next_round, start_hotness
from tests.examples import examples


@st.composite
def caches(draw):
    nlist = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hotness = rng.choice([0.0, 0.25, 1.0, rng.random()], size=nlist)  # ties are common
    cached, protected = rng.random(nlist) < 0.7, rng.random(nlist) < 0.3
    list_bytes = rng.integers(0, 4, size=nlist) * 64
    return hotness, cached, protected, list_bytes


def is_coldest_part(evicted, hotness, candidates, list_bytes):
    """``evicted`` are the first of the candidates by (hotness, id), in that order."""
    ranked = sorted((hotness[i], i) for i in np.flatnonzero(candidates) if list_bytes[i])
    return evicted.tolist() == [i for _, i in ranked[: len(evicted)]]


@examples(300)
@given(caches(), st.integers(0, 4000))
def test_what_goes_to_fit_the_share_suffices_and_is_the_coldest(cache, share):
    hotness, cached, protected, list_bytes = cache
    candidates = cached & ~protected
    evicted = lists_to_evict(hotness, cached, protected, list_bytes, share)
    left = int(list_bytes[candidates].sum()) - int(list_bytes[evicted].sum())
    assert left <= share
    assert not protected[evicted].any()
    assert is_coldest_part(evicted, hotness, candidates, list_bytes)
    if len(evicted):
        assert left + int(list_bytes[evicted[-1]]) > share


@examples(300)
@given(caches(), st.integers(0, 4000), st.integers(0, 1000))
def test_room_is_made_from_the_coldest_and_what_lacks_is_said(cache, needed, free):
    hotness, cached, protected, list_bytes = cache
    candidates = cached & ~protected
    room = make_room(needed, free, hotness, cached, protected, list_bytes)
    gained = int(list_bytes[room.lists].sum())
    assert free + gained + room.short_bytes >= needed
    assert not protected[room.lists].any()
    assert cached[room.lists].all()
    assert is_coldest_part(room.lists, hotness, candidates, list_bytes)
    if room.short_bytes:
        assert set(room.lists.tolist()) == set(np.flatnonzero(candidates & (list_bytes > 0)).tolist())
        assert free + gained + room.short_bytes == needed
    if len(room.lists):
        assert free + gained - int(list_bytes[room.lists[-1]]) < needed


def test_room_that_is_there_already_costs_nothing():
    arrays = (np.zeros(3), np.ones(3, bool), np.zeros(3, bool), np.full(3, 64))
    room = make_room(100, 100, *arrays)
    assert room.lists.tolist() == []
    assert room.short_bytes == 0


def test_ties_go_by_list_id():
    everything, nobody = np.ones(4, bool), np.zeros(4, bool)
    evicted = lists_to_evict(np.array([1.0, 0.5, 0.5, 0.5]), everything, nobody, np.full(4, 64), 100)
    assert evicted.tolist() == [1, 2, 3]


def test_hotness_is_the_papers_equation():
    policy = HotnessPolicy(decay_factor=4.0, update_value=3.0, initial_value=2.0)
    hotness = start_hotness(np.array([0.0, 8.0, 8.0]), np.array([0, 2]), policy)
    assert hotness.tolist() == [2.0, 8.0, 2.0]
    assert next_round(hotness, np.array([True, False, False]), policy).tolist() == [3.5, 2.0, 0.5]


def test_neither_function_writes_to_its_input():
    policy = HotnessPolicy()
    hotness = np.array([1.0, 1.0])
    start_hotness(hotness, np.array([0]), HotnessPolicy(initial_value=7.0))
    next_round(hotness, np.array([True, False]), policy)
    assert hotness.tolist() == [1.0, 1.0]


@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=60), st.floats(2.0, 100.0, width=32)
)
def test_with_a_decay_of_two_or_more_the_order_is_that_of_last_use(rounds, decay):
    policy = HotnessPolicy(decay_factor=decay)
    hotness = start_hotness(np.zeros(4), np.arange(4), policy)
    last = np.full(4, -1)
    for number, used in enumerate(rounds):
        hotness = next_round(hotness, np.array(used), policy)
        last[used] = number
    for older in range(4):
        for newer in range(4):
            if last[newer] > last[older]:
                assert hotness[newer] >= hotness[older]


def test_hotness_neither_overflows_nor_lingers_below_the_normal_range():
    policy = HotnessPolicy(decay_factor=1.0000001, update_value=1e292)
    hotness = start_hotness(np.zeros(2), np.arange(2), policy)
    for _ in range(200):
        hotness = next_round(np.maximum(hotness, policy.ceiling * 0.999), np.array([True, True]), policy)
    assert (hotness <= policy.ceiling * (1 + 1e-12)).all()
    cold = start_hotness(np.zeros(1), np.array([0]), HotnessPolicy(decay_factor=1e10))
    seen = []
    for _ in range(60):
        cold = next_round(cold, np.array([False]), HotnessPolicy(decay_factor=1e10))
        seen.append(float(cold[0]))
    assert seen[-1] == 0.0
    assert all(value == 0.0 or value >= np.finfo(np.float64).tiny for value in seen)


def test_half_of_the_arena_is_the_caches_by_default():
    assert HotnessPolicy().cache_share_bytes(1001) == 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decay_factor", 1.0),
        ("decay_factor", float("inf")),
        ("update_value", -1.0),
        ("update_value", 1e308),
        ("initial_value", float("nan")),
        ("initial_value", -0.5),
        ("cache_fraction", 1.5),
        ("cache_fraction", float("nan")),
    ],
)
def test_constants_that_make_no_sense_are_refused_by_name(field, value):
    with pytest.raises(InvalidInputError, match=field):
        HotnessPolicy(**{field: value})


def test_negative_bytes_are_refused():
    arrays = (np.zeros(1), np.ones(1, bool), np.zeros(1, bool), np.full(1, 64))
    with pytest.raises(InvalidInputError, match="share_bytes is -1"):
        lists_to_evict(*arrays, -1)
    with pytest.raises(InvalidInputError, match="needed_bytes is -1"):
        make_room(-1, 0, *arrays)
    with pytest.raises(InvalidInputError, match="free_bytes is -2"):
        make_room(0, -2, *arrays)
