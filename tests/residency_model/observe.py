"""Traces of the real code: what routers, refreshes and services do, in the order in which it happened.

Classes of the product are patched while :func:`observed` lasts; the product has no hook for it. What happens under a
lock is noted under it, by putting another lock in its place that looks at its owner whenever it is let go. What happens
beside a lock is noted so that the trace errs to the side of the product: a device's failure, a search that enters and a
session that opens after the fact, a recovery, a search that leaves and a session that ends before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import hybridindex.refresh.updater as updater
import hybridindex.service.reload as reload
from hybridindex.errors import DeviceSlowError
from hybridindex.refresh.updater import PlanUpdates
from hybridindex.router.batch.batch import Batch
from hybridindex.router.devices.device_queue import DeviceQueue
from hybridindex.router.devices.placement import Placement
from hybridindex.router.lookahead.list_refs import ListRefs
from hybridindex.router.lookahead.prefetch import Lookahead
from hybridindex.service.reload import Generations
from hybridindex.service.sessions import SessionTable
from hybridindex.tiers.contract.device_health import DeviceHealth
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.arena import PageAllocator, PageArena
from hybridindex.tiers.paged.copier import Copier, Ticket
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.loading import ListLoad

__all__ = ["Event", "Trace", "observed"]


class Event(NamedTuple):
    what: str
    #: Of whom: the object itself, so that no other gets its name.
    owner: Any
    facts: dict[str, Any]
    thread: int


class Trace:
    """Events in order. Appending to a list is one step of the interpreter."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        #: What each thread is about, innermost last; the store that it made last, and its part of a batch.
        self.here = threading.local()

    def note(self, what: str, owner: object, **facts: Any) -> None:
        self.events.append(Event(what, owner, facts, threading.get_ident()))

    @property
    def reason(self) -> str:
        reasons: list[str] = getattr(self.here, "reasons", None) or [""]
        return reasons[-1]

    @contextmanager
    def because(self, reason: str) -> Iterator[None]:
        if not hasattr(self.here, "reasons"):
            self.here.reasons = []
        self.here.reasons.append(reason)
        try:
            yield
        finally:
            self.here.reasons.pop()


class SpyLock:
    """A lock that looks at what it guards before it is let go."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._look = look

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._look()
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@contextmanager
def observed() -> Iterator[Trace]:
    """What is made while this lasts is observed until it ends."""
    trace = Trace()
    with ExitStack() as stack:

        def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
            """``wrapper(real, self, *args)`` in the place of a method."""
            real = getattr(owner, name)
            spied = lambda *args, **options: wrapper(real, *args, **options)  # noqa: E731
            stack.enter_context(mock.patch.object(owner, name, spied))

        _observe_memory(trace, around)
        _observe_scans(trace, around)
        _observe_wishes(trace, around)
        _observe_refreshes(trace, around)
        _observe_swaps(trace, around)
        yield trace


Around = Callable[[Any, str, Callable[..., Any]], None]


def _observe_memory(trace: Trace, around: Around) -> None:
    def store_made(real: Any, store: ResidencyStore, *args: Any) -> None:
        real(store, *args)
        seen: dict[str, Any] = {"current": store.current, "readers": {}}
        trace.here.store = store
        trace.note("store", store, nlist=len(store.current.list_device))

        def look() -> None:
            before, now = seen["readers"], dict(store._readers)
            if store.current is not seen["current"]:
                trace.note("publish", store, snapshot=store.current, reason=trace.reason)
            for version in before.keys() | now.keys():
                change = now.get(version, 0) - before.get(version, 0)
                for _ in range(abs(change)):
                    trace.note("lease" if change > 0 else "release", store, version=version)
            seen["current"], seen["readers"] = store.current, now

        store._lock = SpyLock(look)  # type: ignore[assignment]
        store._reclaimed = threading.Condition(store._lock)

    def pages_made(real: Any, pages: PageAllocator, *args: Any) -> None:
        real(pages, *args)
        seen: dict[str, Any] = {"free": _free(pages), "n_pages": pages.n_pages}

        def look() -> None:
            free, change = _free(pages), pages.n_pages - seen["n_pages"]
            if taken := seen["free"] - free:
                trace.note("shrink" if change < 0 else "take", pages, pages=taken)
            if freed := free - seen["free"]:
                trace.note("grow" if change > 0 else "free", pages, pages=freed)
            seen["free"], seen["n_pages"] = free, pages.n_pages

        pages._lock = SpyLock(look)  # type: ignore[assignment]

    def opened(real: Any, tier: DeviceTier) -> None:
        if not hasattr(tier, "_seen"):
            # Before the mover starts.
            tier._seen = True  # type: ignore[attr-defined]
            facts = {"pages": tier.arena.pages, "copier": tier._copier, "arena": tier.arena, "health": tier._health}
            trace.note("tier", tier, store=trace.here.store, there=_free(tier.arena.pages), **facts)
        real(tier)

    def load_made(real: Any, load: ListLoad, *args: Any, **options: Any) -> None:
        real(load, *args, **options)
        usable = load._usable

        def looked() -> bool:
            trace.note("look", load._copier)
            return usable()

        load._usable = looked

    def filled(real: Any, load: ListLoad, sending: Any, n_pages: int) -> Any:
        trace.note("fill", load._copier, list_id=sending.list_id, pages=_set(sending.pages))
        return real(load, sending, n_pages)

    def sent(real: Any, copier: Copier, writes: Any) -> Ticket:
        pages = frozenset().union(*(_set(write.pages) for write in writes))
        trace.note("send", copier, pages=pages)
        ticket: Ticket = real(copier, writes)
        tickets[id(ticket)] = copier, pages, ticket
        return ticket

    def finished(real: Any, copier: Copier, ticket: Ticket) -> None:
        real(copier, ticket)
        # Not where the copier only says so.
        if ticket.done:
            trace.note("land", copier, pages=tickets[id(ticket)][1])

    def settled(real: Any, ticket: Ticket) -> bool:
        over: bool = real(ticket)
        if over:
            copier, pages, _ = tickets[id(ticket)]
            trace.note("settle", copier, pages=pages)
        return over

    def given_back(real: Any, copier: Copier, pages: Any, given: Any) -> None:
        n_before = len(copier._kept)
        real(copier, pages, given)
        for part in copier._kept[n_before:]:
            trace.note("keep", copier, pages=_set(part))

    def drained(real: Any, copier: Copier) -> None:
        real(copier)
        trace.note("drain", copier)

    def released(real: Any, arena: PageArena) -> None:
        trace.note("close", arena)
        real(arena)

    def taken(real: Any, arena: PageArena) -> None:
        real(arena)
        trace.note("open", arena)

    tickets: dict[int, tuple[Copier, frozenset[int], Ticket]] = {}
    around(ResidencyStore, "__init__", store_made)
    around(PageAllocator, "__init__", pages_made)
    around(DeviceTier, "_take_memory", opened)
    around(ListLoad, "__init__", load_made)
    around(ListLoad, "_writes", filled)
    around(Copier, "send", sent)
    around(Copier, "finish", finished)
    around(Copier, "give_back", given_back)
    around(Copier, "close", drained)
    around(Ticket, "settled", settled)
    around(PageArena, "release", released)
    around(PageArena, "take", taken)


def _observe_scans(trace: Trace, around: Around) -> None:
    def failed(real: Any, tier: Tier, error: BaseException) -> None:
        real(tier, error)
        if not isinstance(error, DeviceSlowError):
            trace.note("failed", tier, task=getattr(trace.here, "task", None))

    def tried(real: Any, health: DeviceHealth, *, works: bool, now_s: float) -> None:
        if works:
            trace.note("recover", health)
        real(health, works=works, now_s=now_s)

    def queued(real: Any, queue: DeviceQueue, task: Any) -> Any:
        facts = {"batch": task.batch, "version": task.residency.version}
        trace.note("queue", queue.tier, store=queue._residency, **facts)
        return real(queue, task)

    def scanned(real: Any, queue: DeviceQueue, task: Any) -> None:
        trace.here.task = task
        with trace.because("scan"):
            real(queue, task)

    def reads(real: Any, tier: DeviceTier, residency: Any) -> Any:
        trace.note("read", tier, version=residency.version, task=getattr(trace.here, "task", None))
        return real(tier, residency)

    def fell_back(real: Any, queue: DeviceQueue, task: Any) -> None:
        trace.note("fall back", queue.tier, batch=task.batch)
        real(queue, task)

    def over(real: Any, batch: Batch) -> None:
        task = getattr(trace.here, "task", None)
        if task is not None and task.batch is batch:
            trace.note("over", batch, device=task.part.device)
            trace.here.task = None
        real(batch)

    around(Tier, "fail", failed)
    around(DeviceHealth, "end_probe", tried)
    around(DeviceQueue, "put", queued)
    around(DeviceQueue, "_scan", scanned)
    around(DeviceQueue, "_fall_back", fell_back)
    around(DeviceTier, "scanner", reads)
    around(Batch, "end_scan", over)


def _observe_wishes(trace: Trace, around: Around) -> None:
    """Under the lookahead's lock."""

    def lookahead_made(real: Any, lookahead: Lookahead, *args: Any) -> None:
        real(lookahead, *args)
        trace.note("refs", lookahead._refs, store=lookahead._residency)

    def pinned(real: Any, refs: ListRefs, lists: Any) -> None:
        trace.note("pin", refs, lists=frozenset(lists))
        real(refs, lists)

    def held(real: Any, refs: ListRefs, session: Any, list_id: int) -> None:
        real(refs, session, list_id)
        trace.note("hold", refs, session=session, list_id=list_id)

    def ended(real: Any, refs: ListRefs, session: Any) -> Any:
        drops = real(refs, session)
        trace.note("end session", refs, session=session)
        return drops

    def looked(real: Any, refs: ListRefs) -> Any:
        trace.note("wanted", refs)
        return real(refs)

    def because(reason: str) -> Callable[..., Any]:
        def called(real: Any, *args: Any) -> Any:
            with trace.because(reason):
                return real(*args)

        return called

    around(Lookahead, "__init__", lookahead_made)
    around(ListRefs, "pin", pinned)
    around(ListRefs, "_hold", held)
    around(ListRefs, "release", ended)
    around(ListRefs, "wanted", looked)
    around(Lookahead, "_drop", because("evict"))
    around(Placement, "_place", because("plan"))
    around(Placement, "_resize", because("resize"))


def _observe_refreshes(trace: Trace, around: Around) -> None:
    def begun(real: Any, updates: PlanUpdates, *args: Any) -> Any:
        draft = real(updates, *args)
        trace.note("request", updates, base=draft.base)
        return draft

    def saved(real: Any, updates: PlanUpdates, draft: Any) -> None:
        real(updates, draft)
        trace.note("save", updates, plan=draft.plan, plan_id=draft.plan_id)

    def moved(real: Any, updates: PlanUpdates, draft: Any) -> None:
        trace.note("move", updates)
        real(updates, draft)
        trace.note("moved", updates)

    def noted(real: Any, updates: PlanUpdates, transition: Any) -> None:
        trace.note("stage", updates, source=str(transition.source), target=str(transition.target))
        real(updates, transition)

    def made(real: Any, updates: PlanUpdates, *args: Any, **options: Any) -> None:
        real(updates, *args, **options)
        trace.note("updates", updates, plan=updates._known)

    def performed(real: Any, updates: PlanUpdates, action: Any) -> Any:
        with trace.because(type(action).__name__):
            return real(updates, action)

    def served(real: Any, updates: PlanUpdates, plan: Any) -> Any:
        if trace.reason == "RollBack":
            trace.note("go back", updates)
        return real(updates, plan)

    def ended(real: Any, updates: PlanUpdates, ended: Any) -> None:
        trace.note("ended", updates, outcome=str(ended.outcome))
        real(updates, ended)

    def made_current(real: Any, store: Any, plan: Any, plan_id: int, **options: Any) -> None:
        real(store, plan, plan_id, **options)
        trace.note("make current", store, plan=plan, plan_id=plan_id)

    around(PlanUpdates, "__init__", made)
    around(PlanUpdates, "_begin", begun)
    around(PlanUpdates, "_save", saved)
    around(PlanUpdates, "_move", moved)
    around(PlanUpdates, "_note", noted)
    around(PlanUpdates, "_perform", performed)
    around(PlanUpdates, "_serve_now", served)
    around(PlanUpdates, "_end", ended)
    around(updater, "make_current", made_current)


def _observe_swaps(trace: Trace, around: Around) -> None:
    def made(real: Any, generations: Generations, first: Any, *args: Any, **options: Any) -> None:
        trace.note("opened", first, generation=first.generation, memory=bool(first.router.devices))
        trace.note("serves", first)
        real(generations, first, *args, **options)

    def opened(real: Any, *args: Any, **options: Any) -> Any:
        serving = real(*args, **options)
        trace.note("opened", serving, generation=serving.generation, memory=bool(serving.router.devices))
        return serving

    def swapped(real: Any, generations: Generations, serving: Any) -> None:
        real(generations, serving)
        trace.note("serves", serving)

    def entered(real: Any, generations: Generations) -> Any:
        serving = real(generations)
        trace.note("enter", serving)
        return serving

    def left(real: Any, generations: Generations, serving: Any) -> None:
        trace.note("leave", serving)
        real(generations, serving)

    def session_made(real: Any, generations: Generations, serving: Any, options: Any) -> Any:
        session = real(generations, serving, options)
        trace.note("open session", serving, session=session)
        return session

    def moved(real: Any, generations: Generations, session: Any, old: Any, heir: Any) -> Any:
        found = real(generations, session, old, heir)
        if found is not None:
            trace.note("close session", old, session=session)
        return found

    def ended(real: Any, table: SessionTable, name: str, owner: str) -> None:
        entry = table._entries.get(name)
        if entry is not None:
            trace.note("close session", table, session=entry.session)
        real(table, name, owner)

    @contextmanager
    def used(real: Any, table: SessionTable, name: str, owner: str) -> Iterator[Any]:
        with real(table, name, owner) as session:
            trace.note("use", table, session=session)
            try:
                yield session
            finally:
                trace.note("unuse", table, session=session)

    def closed(real: Any, serving: Any, *, index: bool = True) -> None:
        trace.note("close serving", serving, files=index, reason=trace.reason)
        real(serving, index=index)

    def ends(real: Any, generations: Generations) -> None:
        with trace.because("the end"):
            real(generations)

    around(Generations, "__init__", made)
    around(Generations, "_swap", swapped)
    around(Generations, "enter", entered)
    around(Generations, "leave", left)
    around(Generations, "_session", session_made)
    around(Generations, "_moved", moved)
    around(Generations, "close", ends)
    around(SessionTable, "close", ended)
    around(SessionTable, "use", used)
    around(reload, "open_serving", opened)
    around(reload, "close_serving", closed)


def _free(pages: PageAllocator) -> set[int]:
    # Within its lock.
    return set(pages._runs.pages().tolist())


def _set(pages: Any) -> frozenset[int]:
    return frozenset(pages.tolist())
