"""Whatever plans and sessions do in whatever order, what somebody wants stays, and nothing else does."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.router.lookahead.list_refs import Holder, Holdings
from tests.examples import examples

NLIST = 12
LISTS = st.lists(st.integers(0, NLIST - 1), max_size=6, unique=True)


class HoldingsMachine(RuleBasedStateMachine):
    """A residency is kept beside the holdings, as the lookahead keeps it: what lands comes, what is dropped goes."""

    cache: HotnessPolicy | None = HotnessPolicy(cache_fraction=0.5)

    def __init__(self):
        super().__init__()
        self.list_bytes = np.arange(NLIST, dtype=np.int64) * 10
        self.holdings = Holdings(self.list_bytes, self.cache)
        self.resident: set[int] = set()
        self.pinned: set[int] = set()
        self.open: list[Holder] = []

    def on_device(self):
        mask = np.zeros(NLIST, dtype=np.bool_)
        mask[list(self.resident)] = True
        return mask

    @rule()
    def begin(self):
        self.open.append(Holder())

    @rule(lists=LISTS, which=st.integers(0, 10), closed=st.booleans())
    def bring(self, lists, which, closed):
        """A copy ends, maybe after its session."""
        if not self.open:
            return
        holder = self.open[which % len(self.open)]
        if closed:
            self.resident -= set(self.holdings.release(holder))
            self.open.remove(holder)
        fresh = [i for i in lists if i not in self.resident]
        self.resident |= set(fresh)
        self.resident -= set(self.holdings.landed(holder, fresh))
        assert holder.brought >= set(fresh)
        if not closed:
            assert all(i in holder.lists for i in fresh if i not in self.pinned)

    @rule(lists=LISTS, which=st.integers(0, 10))
    def join(self, lists, which):
        if self.open:
            holder = self.open[which % len(self.open)]
            self.holdings.join(holder, [i for i in lists if i in self.resident])

    @rule(which=st.integers(0, 10))
    def end(self, which):
        if self.open:
            self.resident -= set(self.holdings.release(self.open.pop(which % len(self.open))))

    @rule(lists=LISTS)
    def plan(self, lists):
        """As the router places a plan: what it does not want and nobody else keeps goes, then its lists come."""
        self.holdings.pin(lists)
        self.pinned = set(lists)
        wanted = self.holdings.wanted()
        self.resident = {i for i in self.resident if i in self.pinned or wanted[i]} | self.pinned

    @rule(lists=LISTS)
    def search(self, lists):
        self.holdings.note_use(np.array(lists, dtype=np.int64))

    @rule(arena=st.integers(0, 500))
    def keep_share(self, arena):
        self.resident -= set(self.holdings.evict_beyond_share(self.on_device(), arena))
        left = self.list_bytes[self.holdings.cached & self.on_device()].sum()
        assert left <= arena // 2

    @rule(needed=st.integers(0, 300), wanted=LISTS)
    def evict(self, needed, wanted):
        before = self.resident.copy()
        gone = self.holdings.evict_for(needed, 0, self.on_device(), np.array(wanted, dtype=np.int64))
        self.resident -= set(gone)
        held = {i for holder in self.open for i in holder.lists}
        assert not set(gone) & (held | self.pinned | set(wanted))
        assert set(gone) <= before

    @rule()
    def lose_device(self):
        self.resident = set()

    @invariant()
    def everything_has_a_reason(self):
        self.holdings.check_invariants()
        held = {i for holder in self.open for i in holder.lists}
        wanted = self.holdings.wanted()
        # Nothing stays that nobody wants, and nothing that somebody wants was dropped unasked.
        assert all(i in self.pinned or wanted[i] for i in self.resident)
        assert all(wanted[i] for i in held)
        assert self.cache is not None or not self.holdings.cached.any()


class WithoutCache(HoldingsMachine):
    cache = None


TestHoldings = HoldingsMachine.TestCase
TestHoldings.settings = examples(150, stateful_step_count=40)
TestWithoutCache = WithoutCache.TestCase
TestWithoutCache.settings = examples(60, stateful_step_count=30)
