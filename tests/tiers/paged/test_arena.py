"""Pages: no page has two owners, none is lost, runs are found where they exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hybridindex.paging import PageGeometry
from hybridindex.tiers.paged.arena import PageAllocator, PageArena, page_runs
from tests.examples import examples

N_PAGES = 24


class AllocatorMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(N_PAGES)
        self.owned: set[int] = set()

    @rule(target=held, n=st.integers(1, 10))
    def allocate(self, n):
        free_before = self.pages.n_free
        pages = self.pages.allocate(n)
        if pages is None:
            assert free_before < n
            return multiple()
        assert len(pages) == n
        assert self.owned.isdisjoint(pages.tolist())
        self.owned |= set(pages.tolist())
        return pages

    @rule(pages=consumes(held))
    def free(self, pages):
        self.owned -= set(pages.tolist())
        self.pages.free(pages)

    @invariant()
    def accounts_add_up(self):
        self.pages.check_invariants()
        assert self.pages.n_free == N_PAGES - len(self.owned)


AllocatorMachine.TestCase.settings = examples(60, stateful_step_count=40)
test_allocator = AllocatorMachine.TestCase


def test_freeing_twice_is_caught():
    pages = PageAllocator(4)
    taken = pages.allocate(2)
    pages.free(taken)
    with pytest.raises(AssertionError):
        pages.free(taken)


def test_a_contiguous_run_is_preferred():
    pages = PageAllocator(10)
    first, _second = pages.allocate(3), pages.allocate(2)
    pages.free(first)
    assert pages.allocate(4).tolist() == [5, 6, 7, 8]
    assert pages.allocate(4).tolist() == [0, 1, 2, 9]


def test_page_runs():
    assert page_runs(np.array([3, 4, 5, 9, 1, 2], dtype=np.int32)) == [(3, 3), (9, 1), (1, 2)]
    assert page_runs(np.array([], dtype=np.int32)) == []


@pytest.mark.parametrize("pages", [[0, 1, 2], [4, 1, 3]])
@pytest.mark.parametrize("n_rows", [1, 5, 6])
def test_rows_come_back_as_written(pages, n_rows):
    arena = PageArena(torch.device("cpu"), PageGeometry(code_size=7, rows_per_page=2), 5)
    codes = np.random.default_rng(0).integers(0, 256, size=(n_rows, 7), dtype=np.uint8)
    needed = np.array(pages[: -(-n_rows // 2)], dtype=np.int32)
    arena.write(needed, codes)
    for first in range(n_rows):
        for count in range(1, n_rows - first + 1):
            np.testing.assert_array_equal(arena.rows(needed, first, count).numpy(), codes[first : first + count])
