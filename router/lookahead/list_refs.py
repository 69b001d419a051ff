"""Why each list is on a device: a plan wants it, sessions hold it, or it is cached because it was used (TeleRAG, §4.2).

One account over the arenas of all devices. It says which lists may be evicted, and in which order;
:mod:`hybridindex.router.lookahead.prefetch` moves bytes and publishes. Not thread-safe: its owner locks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybridindex.router.lookahead.hotness import (
    HotnessPolicy,
    Room,
    lists_to_evict,
    make_room,
    next_round,
    start_hotness,
)
from hybridindex.types import I64

__all__ = ["ListRefs", "SessionLists"]

Mask = npt.NDArray[np.bool_]


@dataclass(eq=False, slots=True)
class SessionLists:
    """What one session holds and what it cost. Owned by :class:`ListRefs`; sessions only keep the handle."""

    #: Whose session it is: queues are shared fairly between owners.
    owner: str = ""
    lists: set[int] = field(default_factory=set)
    #: Lists that its own lookaheads brought; held or not.
    brought: set[int] = field(default_factory=set)
    #: Of those: what counts against its budget. Not what went with a device.
    charged: set[int] = field(default_factory=set)
    closed: bool = False
    #: Landed, and on their way.
    bytes_moved: int = 0
    bytes_coming: int = 0
    lists_moved: int = 0
    lists_skipped: int = 0


class ListRefs:
    """Pinned, held and cached lists; a cached one is neither of the others. A resident list that is none is dropped."""

    def __init__(self, list_bytes: I64, cache: HotnessPolicy | None) -> None:
        """
        Args:
            list_bytes: (nlist,) int64 device bytes of each list, page rounding included.
            cache: None: nothing stays because it was used.
        """
        self.list_bytes = list_bytes
        self._cache = cache
        self._pinned: Mask = np.zeros(len(list_bytes), dtype=np.bool_)
        self._cached: Mask = np.zeros(len(list_bytes), dtype=np.bool_)
        self._hotness = np.zeros(len(list_bytes), dtype=np.float64)
        #: list -> sessions that hold it: brought for one, or joined by one, while no plan wanted it.
        self._sessions: dict[int, set[SessionLists]] = {}

    # Sessions

    def join(self, session: SessionLists, lists: Iterable[int]) -> None:
        """``session`` keeps those of the resident ``lists`` that are there for sessions or because they were used."""
        if session.closed:
            return
        for list_id in lists:
            if not self._pinned[list_id] and (list_id in self._sessions or self._cached[list_id]):
                self._hold(session, list_id)

    def landed(self, session: SessionLists, lists: Iterable[int]) -> list[int]:
        """``lists`` have landed for ``session``. Returns those to drop: no plan, session or cache wants them."""
        lists = list(lists)
        if self._cache is not None:
            self._hotness = start_hotness(self._hotness, np.array(lists, dtype=np.int64), self._cache)
        drops = []
        for list_id in lists:
            session.brought.add(list_id)
            session.charged.add(list_id)
            if self._pinned[list_id]:
                continue
            if not session.closed:
                self._hold(session, list_id)
            elif list_id not in self._sessions and not self._keep(list_id):
                drops.append(list_id)
        return drops

    def release(self, session: SessionLists) -> list[int]:
        """Ends a session. Returns the lists to drop: no plan, session or cache wants them."""
        session.closed = True
        drops = []
        for list_id in session.lists:
            sessions = self._sessions[list_id]
            sessions.discard(session)
            if not sessions:
                del self._sessions[list_id]
                if not self._keep(list_id):
                    drops.append(list_id)
        session.lists = set()
        return drops

    def note_lost(self, session: SessionLists, resident: Mask) -> None:
        """Lists of ``session`` that are not resident went with a device, and count against it no more."""
        for list_id in [list_id for list_id in session.lists if not resident[list_id]]:
            session.lists.discard(list_id)
            session.charged.discard(list_id)
            self._sessions[list_id].discard(session)
            if not self._sessions[list_id]:
                del self._sessions[list_id]

    def _hold(self, session: SessionLists, list_id: int) -> None:
        self._cached[list_id] = False
        self._sessions.setdefault(list_id, set()).add(session)
        session.lists.add(list_id)

    def _keep(self, list_id: int) -> bool:
        """Caches a list that no session holds, if there is a cache and no plan wants it. False: it may be dropped."""
        if self._pinned[list_id]:
            return True
        self._cached[list_id] = self._cache is not None
        return self._cache is not None

    # The plan

    def pin(self, lists: Iterable[int]) -> None:
        """A plan owns exactly these lists from now on, also those that a session's copy is still bringing.

        Sessions that held one of them still do when a later plan gives it up.
        """
        pinned = np.fromiter(lists, dtype=np.int64)
        self._pinned[:] = False
        self._pinned[pinned] = True
        self._cached[pinned] = False

    # The cache

    def note_use(self, probed: I64) -> None:
        """A search of a session probed these lists: one round of Eq. 6."""
        if self._cache is not None:
            used = np.zeros(len(self._hotness), dtype=np.bool_)
            used[probed] = True
            self._hotness = next_round(self._hotness, used, self._cache)

    def evict_beyond_share(self, on_device: Mask, arena_bytes: int) -> list[int]:
        """The coldest cached lists of one device that exceed the cache's share of its arena; they are given up."""
        if self._cache is None:
            return []
        share = self._cache.cache_share_bytes(arena_bytes)
        lists = lists_to_evict(self._hotness, self._cached & on_device, self._kept(), self.list_bytes, share)
        return self._give_up(lists)

    def evict_for(self, needed_bytes: int, free_bytes: int, on_device: Mask, wanted: I64) -> list[int]:
        """The coldest cached lists of one device whose pages are needed; they are given up. ``wanted`` ones stay."""
        spared = self._kept()
        spared[wanted] = True
        room: Room = make_room(
            needed_bytes, free_bytes, self._hotness, self._cached & on_device, spared, self.list_bytes
        )
        return self._give_up(room.lists)

    def evict(self, lists: I64) -> list[int]:
        """``lists``, which are cached; they are given up."""
        return self._give_up(lists)

    def _kept(self) -> Mask:
        kept = self._pinned.copy()
        kept[list(self._sessions)] = True
        return kept

    def _give_up(self, lists: I64) -> list[int]:
        self._cached[lists] = False
        given_up: list[int] = lists.tolist()
        return given_up

    # Reading

    def wanted(self) -> Mask:
        """(nlist,) bool: held or cached, so that a plan that does not want them leaves them alone."""
        wanted = self._cached.copy()
        wanted[list(self._sessions)] = True
        return wanted

    @property
    def pinned(self) -> Mask:
        """(nlist,) bool: the plan's."""
        return self._pinned

    @property
    def n_held(self) -> int:
        """Lists that sessions hold."""
        return len(self._sessions)

    @property
    def cached(self) -> Mask:
        """(nlist,) bool: kept because they were used. A failed device may have lost some of them."""
        return self._cached

    def check_invariants(self) -> None:
        """Asserts that cached lists have no other reason to stay, and that sessions and lists agree."""
        held = np.zeros_like(self._pinned)
        held[list(self._sessions)] = True
        assert not (held & self._cached).any(), "a held list is cached"
        assert not (self._pinned & self._cached).any(), "a list of the plan is cached"
        assert all(self._sessions.values()), "a list is held by no session"
        for list_id, sessions in self._sessions.items():
            assert all(list_id in session.lists for session in sessions)
