"""The model of a swap: another generation of the index takes the place of the one that serves. Pure.

Routers with their users, sessions and device memory; the thread that replaces them, step by step; callers, and the
housekeeping that closes what nobody uses. :mod:`tests.residency_model.memory` says what one router does with its
memory; here it is taken or not.

Not modelled: searches that do not end within ten minutes, devices that leave memory behind, failures to open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.residency_model.check import Refused, need_of

__all__ = ["INVARIANTS", "Instance", "Routed", "Rules", "Service", "with_router"]


class Routed(NamedTuple):
    """One router."""

    generation: int
    memory: bool
    open: bool = True
    #: Searches and openings of sessions under way.
    users: int = 0
    sessions: int = 0
    #: Sessions that a search is in.
    used: int = 0
    #: Housekeeping closes it with its last session.
    retired: bool = False


class Service(NamedTuple):
    routers: tuple[Routed, ...]
    #: Generations whose files are open.
    files: frozenset[int]
    current: int = 0
    #: What the reload does next, and the router that it is closing.
    stage: str = "idle"
    old: int = -1
    heir: int = -1


class Rules:
    def __init__(self, dropped: tuple[str, ...] = ()) -> None:
        self.need = need_of(dropped)

    # Callers

    def enter(self, s: Service) -> Service:
        return with_router(s, s.current, users=s.routers[s.current].users + 1)

    def leave(self, s: Service, at: int) -> Service:
        return with_router(s, at, users=s.routers[at].users - 1)

    def open_session(self, s: Service, at: int) -> Service:
        """By somebody who has entered, and stays entered until it is open."""
        self.need(s.routers[at].users > 0, "a_session_is_opened_by_a_user")
        return with_router(s, at, sessions=s.routers[at].sessions + 1)

    def use(self, s: Service, at: int) -> Service:
        return with_router(s, at, used=s.routers[at].used + 1)

    def unuse(self, s: Service, at: int) -> Service:
        return with_router(s, at, used=s.routers[at].used - 1)

    def end_session(self, s: Service, at: int) -> Service:
        return with_router(s, at, sessions=s.routers[at].sessions - 1)

    def close_unused(self, s: Service, at: int) -> Service:
        """Housekeeping, with the index."""
        router = s.routers[at]
        self.need(router.retired and not router.users and not router.sessions, "nobody_uses_it")
        return self.close(s, at, files=True)

    def close(self, s: Service, at: int, *, files: bool) -> Service:
        """A router ends; ``files``: its generation's are closed, too."""
        router = s.routers[at]
        self.need(not router.users, "users_have_left")
        self.need(not router.sessions, "sessions_have_moved")
        self.need(not router.used, "sessions_are_used_no_more")
        left = s.files - {router.generation} if files else s.files
        return with_router(s, at, open=False, memory=False, retired=False)._replace(files=left)

    # The thread that reloads

    def open_next(self, s: Service) -> Service:
        """The next generation, on the host."""
        _in(s, "idle")
        return self.open(s, s.routers[s.current].generation + 1, memory=False)._replace(stage="swap")

    def open(self, s: Service, generation: int, *, memory: bool) -> Service:
        """Another router."""
        self.need(not (memory and any(router.memory for router in s.routers)), "old_memory_goes_first")
        made = Routed(generation=generation, memory=memory)
        return s._replace(routers=(*s.routers, made), files=s.files | {generation})

    def swap(self, s: Service) -> Service:
        _in(s, "swap")
        return s._replace(stage="drain", old=s.current, current=len(s.routers) - 1)

    def drained(self, s: Service) -> Service:
        """Who searches in the old one has left it; what becomes of its sessions."""
        _in(s, "drain")
        old = s.routers[s.old]
        self.need(not old.users, "users_have_left")
        if not old.sessions:
            return s._replace(stage="close")
        if old.generation == s.routers[s.current].generation:
            return s._replace(stage="move", heir=s.current)
        return s._replace(stage="open heir")

    def open_heir(self, s: Service) -> Service:
        """The old generation's sessions go on, on the host."""
        _in(s, "open heir")
        return self.open(s, s.routers[s.old].generation, memory=False)._replace(stage="move", heir=len(s.routers))

    def move_sessions(self, s: Service) -> Service:
        _in(s, "move")
        old, heir = s.routers[s.old], s.routers[s.heir]
        s = with_router(s, s.heir, sessions=heir.sessions + old.sessions)
        return with_router(s, s.old, sessions=0)._replace(stage="close")

    def close_old(self, s: Service) -> Service:
        _in(s, "close")
        old = s.routers[s.old]
        others = [router for at, router in enumerate(s.routers) if router.open and at != s.old]
        files = all(router.generation != old.generation for router in others)
        after = "devices" if old.memory else "idle"
        known = s.heir in (-1, s.current) or s.routers[s.heir].retired
        return self.close(s, s.old, files=files)._replace(stage=after if known else "retire heir", old=-1)

    def retire_heir(self, s: Service) -> Service:
        """Housekeeping knows the heir, and closes it with its files when it has no session."""
        _in(s, "move", "close", "retire heir")
        self.need(s.stage == "retire heir", "housekeeping_comes_last")
        if s.heir in (-1, s.current) or s.routers[s.heir].retired:
            raise Refused("there is none")
        return with_router(s, s.heir, retired=True)._replace(stage="devices" if s.old < 0 else s.stage)

    def open_devices(self, s: Service) -> Service:
        """The generation that serves, with devices."""
        _in(s, "devices", "close")
        return self.open(s, s.routers[s.current].generation, memory=True)._replace(stage="swap", heir=-1)


def _in(s: Service, *stages: str) -> None:
    if s.stage not in stages:
        raise Refused(f"in stage {s.stage}")


def with_router(s: Service, at: int, **changes: Any) -> Service:
    router = s.routers[at]._replace(**changes)
    return s._replace(routers=(*s.routers[:at], router, *s.routers[at + 1 :]))


def what_serves_is_open(s: Service) -> bool:
    return s.routers[s.current].open


def who_is_used_is_open(s: Service) -> bool:
    return all(router.open for router in s.routers if router.users or router.sessions or router.used)


def device_memory_is_of_one_router(s: Service) -> bool:
    return sum(router.memory for router in s.routers) <= 1


def open_routers_have_their_files(s: Service) -> bool:
    return all(router.generation in s.files for router in s.routers if router.open)


INVARIANTS: tuple[Callable[[Service], bool], ...] = (
    what_serves_is_open,
    who_is_used_is_open,
    device_memory_is_of_one_router,
    open_routers_have_their_files,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    reloads: int = 1
    users: int = 2
    sessions: int = 2
    dropped: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    invariants: tuple[Callable[[Service], bool], ...] = INVARIANTS

    @property
    def initial(self) -> Service:
        return Service((Routed(generation=0, memory=True),), frozenset({0}))

    def settled(self, s: Service) -> bool:
        rest = [router for at, router in enumerate(s.routers) if at != s.current]
        serving = s.routers[s.current]
        return s.stage == "idle" and serving.memory and not any(router.open for router in rest)

    def canonical(self, s: Service) -> Service:
        """Closed routers are all alike, and forgotten, but for those before an open one."""
        kept = [
            at for at, router in enumerate(s.routers) if router.open or at in (s.current, s.old, s.heir) or router.users
        ]
        kept = [at for at in range(len(s.routers)) if at in kept or s.routers[at].sessions or s.routers[at].used]
        number = {at: n for n, at in enumerate(kept)} | {-1: -1}
        return s._replace(
            routers=tuple(s.routers[at] for at in kept),
            current=number[s.current],
            old=number[s.old],
            heir=number[s.heir],
        )

    def moves(self, s: Service) -> Iterator[tuple[str, Service]]:
        rules = Rules(self.dropped)
        for name, *values in self._proposed(s):
            if name in self.without:
                continue
            try:
                reached = getattr(rules, name)(s, *values)
            except Refused:
                continue
            yield f"{name} {' '.join(map(str, values))}", reached

    def _proposed(self, s: Service) -> Iterator[tuple[Any, ...]]:
        if sum(router.users for router in s.routers) < self.users:
            yield ("enter",)
        n_sessions = sum(router.sessions for router in s.routers)
        for at, router in enumerate(s.routers):
            if router.users:
                yield "leave", at
            if n_sessions < self.sessions:
                yield "open_session", at
            if router.used < router.sessions:
                yield "use", at
            if router.used:
                yield "unuse", at
            if router.sessions > router.used:
                yield "end_session", at
            if router.open:
                yield "close_unused", at
        if s.stage != "idle" or s.routers[s.current].generation < self.reloads:
            yield ("open_next",)
        for name in ("swap", "drained", "open_heir", "retire_heir", "move_sessions", "close_old", "open_devices"):
            yield (name,)
