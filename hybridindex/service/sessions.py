"""Sessions of remote clients: random names, owners, expiry.

Threading: any thread, one lock; router sessions are closed outside it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hybridindex.errors import OverloadedError, UnknownSessionError
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
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        #: Sessions that expired.
        self.n_expired = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, make: Callable[[], Session], owner: str) -> str:
        """Keeps a new session and returns its name.

        Raises:
            OverloadedError: too many sessions, or the table is closed.
        """
        self.sweep()
        name = secrets.token_urlsafe(24)
        # Under the lock: two calls must not pass the limit together.
        with self._lock:
            if self._closed or len(self._entries) >= self._limits.max_sessions:
                raise OverloadedError(
                    f"{len(self._entries)} sessions are open and there may be {self._limits.max_sessions}; close some",
                    retry_after_s=min(30.0, self._limits.session_ttl_s),
                )
            self._entries[name] = _Entry(make(), owner, self._clock() + self._limits.session_ttl_s)
        return name

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
                if (now := self._entries.get(name)) is not None:
                    now.expires_s = self._clock() + self._limits.session_ttl_s

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
            del self._entries[name]
        entry.session.close()

    def sweep(self) -> int:
        """Ends expired sessions; returns how many."""
        now = self._clock()
        with self._lock:
            over = [name for name, e in self._entries.items() if e.n_users == 0 and e.expires_s <= now]
            ended = [self._entries.pop(name) for name in over]
            self.n_expired += len(ended)
        for entry in ended:
            entry.session.close()
        return len(ended)

    def close_all(self) -> None:
        """Ends all sessions; none can be opened afterwards."""
        with self._lock:
            self._closed = True
            ended = list(self._entries.values())
            self._entries.clear()
        for entry in ended:
            entry.session.close()
