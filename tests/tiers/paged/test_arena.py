"""Pages: no page has two owners, none is lost, runs are found where they exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.address_range import HostRange
from hybridindex.tiers.paged.arena import FreeRuns, PageAllocator, PageArena, page_runs
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


class RunsMachine(RuleBasedStateMachine):
    """The extension finds the same pages as Python."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.both = native.FreeRuns(), FreeRuns()
        self.ask(lambda runs: runs.add(0, N_PAGES))

    def ask(self, question):
        """What both say."""
        ours, theirs = (question(runs) for runs in self.both)
        np.testing.assert_equal(ours, theirs)
        return ours

    @rule(target=held, n=st.integers(1, 10), whole=st.booleans())
    def allocate(self, n, whole):
        pages = self.ask(lambda runs: runs.allocate(n, whole))
        return multiple() if pages is None else pages

    @rule(target=held, counts=st.lists(st.integers(1, 6), min_size=1, max_size=5))
    def allocate_each(self, counts):
        pages, found = self.ask(lambda runs: runs.allocate_each(np.array(counts, dtype=np.int64)))
        assert len(pages) == sum(n for n, got in zip(counts, found, strict=True) if got)
        return pages

    @rule(pages=consumes(held))
    def free(self, pages):
        self.ask(lambda runs: runs.free(pages))

    @rule(start=st.integers(0, N_PAGES), n=st.integers(1, 4))
    def withdraw_and_add(self, start, n):
        if self.ask(lambda runs: runs.withdraw(start, n)):
            self.ask(lambda runs: runs.pages())
            self.ask(lambda runs: runs.add(start, n))

    @rule(start=st.integers(-1, N_PAGES), n=st.integers(1, 4))
    def free_what_is_free(self, start, n):
        free = set(self.both[1].pages().tolist())
        if start < 0 or free & set(range(start, start + n)):
            for runs in self.both:
                with pytest.raises(ValueError, match=r"freed twice|outside"):
                    runs.add(start, n)

    @invariant()
    def both_know_the_same(self):
        self.ask(lambda runs: (runs.n_free, runs.end, runs.pages().tolist()))


RunsMachine.TestCase.settings = examples(60, stateful_step_count=40)
# Of the test, not of the machine: hypothesis does not hand marks on.
test_runs = pytest.mark.skipif(
    native is None, reason="without the extension, Python alone finds pages: nothing to compare"
)(RunsMachine.TestCase)


def test_scattered_pages_come_in_as_few_pieces_as_there_are():
    pages = PageAllocator(20)
    every = pages.allocate(20)
    for run in (every[1:2], every[4:5], every[7:11], every[13:16]):
        pages.free(run)
    assert pages.allocate(5, whole=True) is None
    assert pages.allocate(5).tolist() == [7, 8, 9, 10, 13]
    # The shortest run that has room, so that long ones stay.
    assert pages.allocate(1).tolist() == [1]
    assert pages.allocate_each(np.array([2, 9, 1], dtype=np.int64))[1] == [True, False, True]
    assert pages.n_free == 0


def test_a_page_of_no_arena_is_not_freed():
    for page in (9, (1 << 31) - 1):
        with pytest.raises(ValueError, match="outside"):
            PageAllocator(4).free(np.array([page], dtype=np.int32))


#: 3,000 bytes a page, four pages a block: blocks and the system's pages do not line up.
GEOMETRY, BLOCK_PAGES, LIMIT = PageGeometry(code_size=1000, rows_per_page=3), 4, 26


class ArenaMachine(RuleBasedStateMachine):
    """Pages come and go while others hold bytes."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        block_bytes = BLOCK_PAGES * GEOMETRY.page_bytes
        self.arena = PageArena(torch.device("cpu"), GEOMETRY, 6, limit_pages=LIMIT, block_bytes=block_bytes)
        self.owned: dict[int, int] = {}
        self.written = 0

    @rule(target=held, n=st.integers(1, 6))
    def allocate(self, n):
        pages = self.arena.pages.allocate(n)
        if pages is None:
            return multiple()
        for page in pages.tolist():
            self.written += 1
            assert page not in self.owned
            self.owned[page] = self.written % 251
            self.arena.data[page] = self.owned[page]
        return pages

    @rule(pages=consumes(held))
    def free(self, pages):
        for page in pages.tolist():
            del self.owned[page]
        self.arena.pages.free(pages)

    @rule(n=st.integers(0, LIMIT + 3))
    def grow(self, n):
        before = self.arena.pages.n_pages
        self.arena.grow(n)
        assert self.arena.pages.n_pages == max(before, min(n, LIMIT))

    @rule(n=st.integers(0, LIMIT), whole=st.booleans())
    def shrink(self, n, whole):
        before, used = self.arena.pages.n_pages, self.arena.used_beyond(n)
        self.arena.shrink(n, whole_blocks=whole)
        left = self.arena.pages.n_pages
        assert min(before, n) <= left <= before
        if not whole and not len(used):
            assert left == min(before, n)
        if n == 0 and whole and not self.owned:
            assert left == 0

    @invariant()
    def what_is_held_stays(self):
        self.arena.pages.check_invariants()
        assert self.arena.pages.n_free == self.arena.pages.n_pages - len(self.owned)
        for page, value in self.owned.items():
            assert (self.arena.data[page] == value).all()

    @invariant()
    def memory_is_there_for_pages_that_are_and_for_no_others(self):
        arena = self.arena
        there = np.concatenate([arena.pages.free_pages(), np.array(list(self.owned), dtype=np.int32)]).astype(np.int64)
        starts = there * GEOMETRY.page_bytes
        part = arena._range.part_bytes
        needed = {p for a in starts.tolist() for p in range(a // part, -(-(a + GEOMETRY.page_bytes) // part))}
        assert np.flatnonzero(arena._filled).tolist() == sorted(needed)


ArenaMachine.TestCase.settings = examples(60, stateful_step_count=40)
test_arena = ArenaMachine.TestCase


def test_an_arena_that_cannot_grow_keeps_what_it_had(monkeypatch):
    arena = PageArena(torch.device("cpu"), GEOMETRY, 2, limit_pages=LIMIT, block_bytes=GEOMETRY.page_bytes)
    arena.data[:2] = 9

    def refused(*_):
        raise OutOfBudgetError("full")

    monkeypatch.setattr(HostRange, "commit", refused)
    with pytest.raises(OutOfBudgetError):
        arena.grow(9)
    assert (arena.pages.n_pages, arena.pages.n_free) == (2, 2)
    assert (arena.data[:2] == 9).all()
    monkeypatch.undo()
    arena.grow(9)
    assert arena.pages.n_pages == 9


def test_freeing_twice_is_caught():
    pages = PageAllocator(4)
    taken = pages.allocate(2)
    pages.free(taken)
    with pytest.raises(ValueError, match="freed twice"):
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
