"""Sessions of remote clients: random names, owners, expiry, fair shares.

Threading: any thread, one lock; router sessions are closed outside it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hybridindex.errors import OverloadedError, UnknownSessionError
from hybridindex.partitioner.fair_shares import FairShares
from hybridindex.router.session import Session
from hybridindex.service.config import Limits

__all__ = ["SessionTable"]


@dataclass(slots=True, eq=False)
class _Entry:
    session: Session
    owner: str
    expires_s: float
    n_users: int = 0


class SessionTable:
    """The open sessions."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        #: Somebody has ended using a session.
        self._unused = threading.Condition(self._lock)
        #: In the order of their last use.
        self._entries: dict[str, _Entry] = {}
        self._shares = FairShares(limits.max_sessions)
        self._closed = False
        #: Sessions that expired, and those that made way for another client's.
        self.n_expired = 0
        self.n_displaced = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, make: Callable[[], Session], owner: str) -> str:
        """Keeps a new session and returns its name. Where there is no room, the client that has the most loses the
        session that it has not used for the longest time, if it has more than ``owner`` then has.

        Raises:
            OverloadedError: too many sessions, or the table is closed.
        """
        self.sweep()
        name = secrets.token_urlsafe(24)
        displaced = None
        # Under the lock: two calls must not pass the limit together.
        with self._lock:
            if self._closed:
                raise OverloadedError("the daemon is about to stop; ask another one", retry_after_s=1)
            if self._shares.lack(owner, 1) is not None:
                displaced = self._who_makes_way(owner)
                if displaced is None:
                    own, most = self._shares.of(owner), self._limits.max_sessions
                    raise OverloadedError(
                        f"{len(self._entries)} sessions are open and there may be {most}, of which you have {own}; "
                        "close some",
                        retry_after_s=min(30.0, self._limits.session_ttl_s),
                        own_share=0 < own < len(self._entries),
                    )
            session = make()
            if displaced is not None:
                ended = self._remove(displaced)
                self.n_displaced += 1
            self._entries[name] = _Entry(session, owner, self._clock() + self._limits.session_ttl_s)
            self._shares.take(owner, 1)
        if displaced is not None:
            ended.session.close()
        return name

    def _who_makes_way(self, owner: str) -> str | None:
        loser = self._shares.who_gives_way(owner, 1)
        unused = (name for name, e in self._entries.items() if e.owner == loser and e.n_users == 0)
        return None if loser is None else next(unused, None)

    def _remove(self, name: str) -> _Entry:
        entry = self._entries.pop(name)
        self._shares.give_back(entry.owner, 1)
        return entry

    def sessions(self) -> list[Session]:
        """The open ones."""
        with self._lock:
            return [entry.session for entry in self._entries.values()]

    def move(self, again: Callable[[Session], Session | None]) -> list[Session]:
        """Puts another session in the place of each that ``again`` gives one for; the names stay.

        Returns the sessions that were replaced, when nobody uses them any more; the caller closes them.
        """
        moved = []
        with self._lock:
            for name, entry in self._entries.items():
                session = again(entry.session)
                if session is not None:
                    self._entries[name] = replace(entry, session=session, n_users=0)
                    moved.append(entry)
            self._unused.wait_for(lambda: not any(entry.n_users for entry in moved))
        return [entry.session for entry in moved]

    @contextmanager
    def use(self, name: str, owner: str) -> Iterator[Session]:
        """The session; it does not expire while in use.

        Raises:
            UnknownSessionError: the same words for a session that never was, has ended, or is another client's.
        """
        with self._lock:
            entry = self._find(name, owner)
            entry.n_users += 1
        try:
            yield entry.session
        finally:
            with self._lock:
                entry.n_users -= 1
                if not entry.n_users:
                    self._unused.notify_all()
                if (now := self._entries.pop(name, None)) is not None:
                    now.expires_s = self._clock() + self._limits.session_ttl_s
                    self._entries[name] = now

    def _find(self, name: str, owner: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner or (entry.n_users == 0 and entry.expires_s <= self._clock()):
            raise UnknownSessionError("session is not known; open one with POST /v1/sessions")
        return entry

    def close(self, name: str, owner: str) -> None:
        """Ends a session.

        Raises:
            UnknownSessionError: as :meth:`use`.
        """
        with self._lock:
            entry = self._find(name, owner)
            self._remove(name)
        entry.session.close()

    def sweep(self) -> int:
        """Ends expired sessions; returns how many."""
        now = self._clock()
        with self._lock:
            over = [name for name, e in self._entries.items() if e.n_users == 0 and e.expires_s <= now]
            ended = [self._remove(name) for name in over]
            self.n_expired += len(ended)
        for entry in ended:
            entry.session.close()
        return len(ended)

    def close_all(self) -> None:
        """Ends all sessions; none can be opened afterwards."""
        with self._lock:
            self._closed = True
            ended = [self._remove(name) for name in list(self._entries)]
        for entry in ended:
            entry.session.close()
