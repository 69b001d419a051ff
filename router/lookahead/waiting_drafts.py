"""Drafts that wait for the lookahead thread: bounded in bytes, fair between keys, the oldest dropped first.

An old draft is worth little: its search may be over. So a new one is taken, and the oldest of the key that has the most
makes way for it. The thread takes rounds of bounded work, from the key that it did the least for.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.fair_shares import FairShares
from hybridindex.router.lookahead.list_refs import SessionLists
from hybridindex.types import F32

__all__ = ["ROUND_PROBES", "Draft", "WaitingDrafts"]

#: Probes (queries x nprobe) that are looked up at a time: 8 MiB of arrays.
ROUND_PROBES = 1 << 19
#: Grouping drafts takes time with the square of their number.
_ROUND_DRAFTS = 256
#: What a draft takes beside its queries.
_FIXED_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """One lookahead that waits for its turn."""

    session: SessionLists
    #: (n, scan_dim) float32.
    queries: F32
    nprobe: int
    #: Over all rounds of its session, and of this one.
    budget_bytes: int
    round_bytes: int
    future: Future[None]

    @property
    def n_probes(self) -> int:
        return len(self.queries) * self.nprobe

    @property
    def nbytes(self) -> int:
        """What it takes while it waits."""
        return self.queries.nbytes + _FIXED_BYTES


class WaitingDrafts:
    """The queue. Not thread-safe: its owner locks."""

    def __init__(self, capacity_bytes: int) -> None:
        self._shares = FairShares(capacity_bytes)
        #: By key, oldest first; no empty ones.
        self._waiting: dict[str, deque[Draft]] = {}
        #: Virtual time at which each key's next draft is taken, and that of the draft that was taken last: the probes
        #: that a key was served, but no less than what others were while it was idle.
        self._due: dict[str, int] = {}
        self._now = 0

    @property
    def nbytes(self) -> int:
        return self._shares.used

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, draft: Draft) -> list[Draft]:
        """Adds ``draft``; returns those that make way for it.

        Raises:
            InvalidInputError: it is larger than the queue.
        """
        key, nbytes = draft.session.owner, draft.nbytes
        if nbytes > self._shares.capacity:
            raise InvalidInputError(
                f"draft_queries take {nbytes} bytes; expected at most lookahead_queue_bytes, {self._shares.capacity}"
            )
        dropped = []
        while self._shares.lack(key, nbytes) is not None:
            loser = self._shares.who_gives_way(key, nbytes)
            if loser is None:
                loser = key if key in self._waiting else self._shares.heaviest()
            assert loser is not None
            dropped.append(self._pop(loser))
        self._shares.take(key, nbytes)
        if key not in self._waiting:
            self._waiting[key] = deque()
            self._due[key] = max(self._due.get(key, 0), self._now)
        self._waiting[key].append(draft)
        return dropped

    def take(self) -> list[Draft]:
        """The next round: at most :data:`ROUND_PROBES`, but one draft at least where any waits."""
        taken: list[Draft] = []
        n_probes = 0
        while self._waiting and len(taken) < _ROUND_DRAFTS:
            key = min(self._waiting, key=self._due.__getitem__)
            more = self._waiting[key][0].n_probes
            if taken and n_probes + more > ROUND_PROBES:
                break
            n_probes += more
            self._now = self._due[key]
            self._due[key] += more
            taken.append(self._pop(key))
        # Who waits for nothing and is not ahead is as good as new.
        self._due = {key: due for key, due in self._due.items() if key in self._waiting or due > self._now}
        return taken

    def end(self, session: SessionLists) -> list[Draft]:
        """Those of one session, which then wait no more."""
        key = session.owner
        waiting = self._waiting.get(key, ())
        ended = [draft for draft in waiting if draft.session is session]
        left = deque(draft for draft in waiting if draft.session is not session)
        for draft in ended:
            self._shares.give_back(key, draft.nbytes)
        if left:
            self._waiting[key] = left
        else:
            self._waiting.pop(key, None)
        return ended

    def clear(self) -> list[Draft]:
        """All that waits, which then waits no more."""
        left = [draft for waiting in self._waiting.values() for draft in waiting]
        for key in list(self._waiting):
            while key in self._waiting:
                self._pop(key)
        return left

    def _pop(self, key: str) -> Draft:
        draft = self._waiting[key].popleft()
        self._shares.give_back(key, draft.nbytes)
        if not self._waiting[key]:
            del self._waiting[key]
        return draft

    def check_invariants(self) -> None:
        """Asserts that the account is that of what waits."""
        self._shares.check_invariants()
        for key, waiting in self._waiting.items():
            assert waiting
            assert self._shares.of(key) == sum(draft.nbytes for draft in waiting)
        assert self._waiting.keys() <= self._due.keys()
        assert self._shares.used <= self._shares.capacity
