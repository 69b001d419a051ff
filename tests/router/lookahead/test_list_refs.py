"""Whatever plans and sessions do in whatever order, what somebody wants stays, and nothing else does."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.router.lookahead.list_refs import ListRefs, SessionLists
from tests.examples import examples

NLIST = 12
LISTS = st.lists(st.integers(0, NLIST - 1), max_size=6, unique=True)


class ListRefsMachine(RuleBasedStateMachine):
    """A residency is kept beside the refs, as the lookahead keeps it: what lands comes, what is dropped goes."""

    cache: HotnessPolicy | None = HotnessPolicy(cache_fraction=0.5)

    def __init__(self):
        super().__init__()
        self.list_bytes = np.arange(NLIST, dtype=np.int64) * 10
        self.refs = ListRefs(self.list_bytes, self.cache)
        self.resident: set[int] = set()
        self.pinned: set[int] = set()
        self.open: list[SessionLists] = []

    def on_device(self):
        mask = np.zeros(NLIST, dtype=np.bool_)
        mask[list(self.resident)] = True
        return mask

    @rule()
    def begin(self):
        self.open.append(SessionLists())

    @rule(lists=LISTS, which=st.integers(0, 10), closed=st.booleans())
    def bring(self, lists, which, closed):
        """A copy ends, maybe after its session."""
        if not self.open:
            return
        session = self.open[which % len(self.open)]
        if closed:
            self.resident -= set(self.refs.release(session))
            self.open.remove(session)
        fresh = [i for i in lists if i not in self.resident]
        self.resident |= set(fresh)
        self.resident -= set(self.refs.landed(session, fresh))
        assert session.brought >= set(fresh)
        if not closed:
            assert all(i in session.lists for i in fresh if i not in self.pinned)

    @rule(lists=LISTS, which=st.integers(0, 10))
    def join(self, lists, which):
        if self.open:
            session = self.open[which % len(self.open)]
            before = session.lists.copy()
            self.refs.join(session, [i for i in lists if i in self.resident])
            assert not (session.lists - before) & self.pinned
            assert session.lists >= (set(lists) & self.resident) - self.pinned

    @rule(which=st.integers(0, 10))
    def end(self, which):
        if self.open:
            self.resident -= set(self.refs.release(self.open.pop(which % len(self.open))))

    @rule(lists=LISTS)
    def plan(self, lists):
        """As the router places a plan: what it does not want and nobody else keeps goes, then its lists come."""
        self.refs.pin(lists)
        self.pinned = set(lists)
        wanted = self.refs.wanted()
        self.resident = {i for i in self.resident if i in self.pinned or wanted[i]} | self.pinned

    @rule(lists=LISTS)
    def search(self, lists):
        self.refs.note_use(np.array(lists, dtype=np.int64))

    @rule(arena=st.integers(0, 500))
    def keep_share(self, arena):
        self.resident -= set(self.refs.evict_beyond_share(self.on_device(), arena))
        left = self.list_bytes[self.refs.cached & self.on_device()].sum()
        assert left <= arena // 2

    @rule(needed=st.integers(0, 300), wanted=LISTS)
    def evict(self, needed, wanted):
        before = self.resident.copy()
        gone = self.refs.evict_for(needed, 0, self.on_device(), np.array(wanted, dtype=np.int64))
        self.resident -= set(gone)
        held = {i for session in self.open for i in session.lists}
        assert not set(gone) & (held | self.pinned | set(wanted))
        assert set(gone) <= before

    @rule()
    def lose_device(self):
        self.resident = set()

    @invariant()
    def everything_has_a_reason(self):
        self.refs.check_invariants()
        held = {i for session in self.open for i in session.lists}
        wanted = self.refs.wanted()
        # Nothing stays that nobody wants, and nothing that somebody wants was dropped unasked.
        assert all(i in self.pinned or wanted[i] for i in self.resident)
        assert all(wanted[i] for i in held)
        assert self.cache is not None or not self.refs.cached.any()


class WithoutCache(ListRefsMachine):
    cache = None


TestListRefs = ListRefsMachine.TestCase
TestListRefs.settings = examples(150, stateful_step_count=40)
TestWithoutCache = WithoutCache.TestCase
TestWithoutCache.settings = examples(60, stateful_step_count=30)


def test_a_session_joins_what_another_holds_but_not_what_the_plan_wants():
    refs = ListRefs(np.full(NLIST, 10), HotnessPolicy())
    first, second = SessionLists(), SessionLists()
    assert refs.landed(first, [1, 2]) == []
    refs.pin([1])
    refs.join(second, [1, 2, 3])
    assert (first.lists, second.lists) == ({1, 2}, {2})
    # The plan gives list 1 up: its first holder still wants it, list 2 is both sessions'.
    refs.pin([])
    assert refs.release(first) == []
    assert np.flatnonzero(refs.cached).tolist() == [1]
    assert np.flatnonzero(refs.wanted()).tolist() == [1, 2]
