from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner import placement
from hybridindex.partitioner.placement import choose_hottest, place_lpt, place_round_robin
from tests.examples import examples

LISTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), max_size=60)
CAPACITY = st.lists(st.integers(0, 60), min_size=1, max_size=5)


@examples(150)
@given(LISTS, CAPACITY, st.sampled_from([place_lpt, place_round_robin]))
def test_no_device_exceeds_its_pages_and_no_room_is_refused(lists, capacity, place) -> None:  # type: ignore[no-untyped-def]
    work = np.array([w for w, _ in lists], dtype=np.float64)
    pages = np.array([p for _, p in lists], dtype=np.int64)
    result = place(work, pages, capacity)
    assert result.device.size == len(lists)
    used = [int(pages[result.device == d].sum()) for d in range(len(capacity))]
    assert used == result.pages_used.tolist()
    assert all(u <= c for u, c in zip(used, capacity, strict=True))
    assert result.work.sum() == work[result.device >= 0].sum()
    left = max(c - u for u, c in zip(used, capacity, strict=True))
    assert all(p > left for p in pages[result.device < 0])


def test_lpt_balances_work_within_the_classic_bound() -> None:
    rng = np.random.default_rng(0)
    work = rng.integers(1, 50, size=10).astype(np.float64)
    result = place_lpt(work, np.ones(10, dtype=np.int64), [10, 10, 10])
    best = min(
        max(work[np.array(choice) == d].sum() for d in range(3)) for choice in itertools.product(range(3), repeat=10)
    )
    assert result.work.max() <= best * (4 / 3 - 1 / 9) + 1e-9


def test_lpt_balances_work_where_round_robin_balances_bytes() -> None:
    rng = np.random.default_rng(1)
    pages = rng.integers(1, 20, size=64)
    work = 1e6 / np.arange(1, 65) ** 1.5
    lpt = place_lpt(work, pages, [10_000] * 4)
    paper = place_round_robin(work, pages, [10_000] * 4)
    assert lpt.work.max() <= paper.work.max()
    assert np.ptp(paper.pages_used) <= 20


def test_many_lists_are_as_balanced_as_one_by_one() -> None:
    rng = np.random.default_rng(2)
    work = rng.permutation(1e9 / np.arange(1, 20_001))
    pages = rng.integers(0, 6, size=20_000)
    result = place_lpt(work, pages, [100_000] * 7)
    assert result.n_unplaced == 0
    assert np.ptp(result.work) <= 2 * np.sort(work)[::-1][4096]
    tight = place_lpt(work, pages, [int(pages.sum()) // 7 + 6] * 7)
    assert tight.pages_used.max() <= int(pages.sum()) // 7 + 6
    assert tight.n_unplaced <= 7


def test_a_list_that_finds_no_room_beside_lighter_ones_comes_first() -> None:
    """Balanced by work, ten small lists leave neither device room for the large one."""
    work, pages = np.array([10.0] * 10 + [1.0]), np.array([1] * 10 + [10])
    result = place_lpt(work, pages, [10, 10])
    assert result.n_unplaced == 0
    assert result.pages_used.tolist() == [10, 10]


@examples(150)
@given(LISTS, CAPACITY)
def test_another_try_never_places_less_work(lists, capacity) -> None:  # type: ignore[no-untyped-def]
    work = np.array([w for w, _ in lists], dtype=np.float64)
    pages = np.array([p for _, p in lists], dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_TRIES", 1)
        once = place_lpt(work, pages, capacity)
    result = place_lpt(work, pages, capacity)
    assert result.work.sum() >= once.work.sum()
    if not once.n_unplaced:
        assert result.device.tolist() == once.device.tolist()


def test_devices_may_differ() -> None:
    result = place_lpt(np.ones(12), np.ones(12, dtype=np.int64), [2, 10])
    assert result.pages_used.tolist() == [2, 10]
    assert result.n_unplaced == 0


def test_choose_hottest_skips_what_does_not_fit_and_goes_on() -> None:
    pages = np.array([4, 9, 3, 5, 1, 0])
    assert choose_hottest(pages, 8, 8).tolist() == [0, 2, 4, 5]
    assert choose_hottest(pages, 100, 4).tolist() == [0, 2, 4, 5]
    assert choose_hottest(pages, 0, 8).tolist() == [5]
    assert choose_hottest(np.array([], dtype=np.int64), 8, 8).tolist() == []


@given(st.lists(st.integers(0, 9), max_size=50), st.integers(0, 100), st.integers(0, 9))
def test_choose_hottest_equals_the_greedy_loop(pages: list[int], limit: int, largest: int) -> None:
    left, expected = limit, []
    for place, p in enumerate(pages):
        if p <= min(left, largest):
            expected.append(place)
            left -= p
    assert choose_hottest(np.array(pages, dtype=np.int64), limit, largest).tolist() == expected


@pytest.mark.parametrize("capacity", [[], [-1]])
def test_bad_capacities_are_refused(capacity: list[int]) -> None:
    with pytest.raises(InvalidInputError):
        place_lpt(np.ones(1), np.ones(1, dtype=np.int64), capacity)
