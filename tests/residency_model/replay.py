"""Runs a trace of the product through the model: each event must be an action that the model allows.

An event says what happened to whom, not which action it is: pages that come free may be those of the last reader, of a
load that gives up, or of a trial. The replay finds out by whose they are in the model. What it finds to be nobody's is
refused by the guard of the action that is most like it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from tests.residency_model import memory
from tests.residency_model.check import Refused
from tests.residency_model.memory import Copy, Memory, Pages, device_of, page_of
from tests.residency_model.observe import Event, Trace
from tests.residency_model.replay_control import Refresh, Swaps

__all__ = ["Rejected", "Replay", "replay"]

#: A copy whose list is not known yet; a trial's, for good.
NO_LIST = -2


class Rejected(AssertionError):  # noqa: N818 - what the replay says of a trace
    """An event that the model does not allow, and the guard or invariant that says so."""

    def __init__(self, what: str, number: int, events: Sequence[Event]) -> None:
        self.what = what
        lines = [f"  {n} {event.what} {_brief(event.facts)}" for n, event in enumerate(events[: number + 1])]
        super().__init__("\n".join([f"{what}, after event {number}:", *lines[-12:]]))


def _brief(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items() if isinstance(fact, int | str | set | frozenset))


#: How long the last events may come after what they tell of.
_LATE_S = 5.0


def replay(trace: Trace) -> Replay:
    """Raises Rejected where the product did what the model does not allow, or ended elsewhere."""
    replayed, followed = Replay(), 0
    ends = time.monotonic() + _LATE_S
    while True:
        for number, event in enumerate(trace.events[followed:], followed):
            try:
                replayed.follow(event)
            except Refused as refused:
                raise Rejected(str(refused), number, trace.events) from refused
            followed = number + 1
        found = replayed.differences()
        if not found:
            return replayed
        # A thread that still searches or scrubs has done something, and is about to say so.
        if time.monotonic() > ends:
            raise Rejected(found[0], len(trace.events) - 1, trace.events)
        time.sleep(1e-3)


@dataclass(slots=True, eq=False)
class _Device:
    """A tier of the trace."""

    router: Router
    number: int
    tier: Any


class Replay:
    def __init__(self) -> None:
        #: Events, and why where that is known.
        self.happened: set[str] = set()
        self.routers: dict[int, Router] = {}
        self.refreshes: dict[int, Refresh] = {}
        self.swaps = Swaps()
        self._devices: dict[int, _Device] = {}

    def follow(self, event: Event) -> None:
        handler: Callable[[Event], None] | None = getattr(self, "_" + event.what.replace(" ", "_"), None)
        if handler is not None:
            handler(event)
        elif event.what in Swaps.EVENTS:
            self.swaps.follow(event)
        elif event.what in Refresh.EVENTS:
            self._follow_in_refresh(event)
        elif event.what in Router.EVENTS:
            self._follow_in_router(event)
        else:
            raise AssertionError(f"unknown event {event.what}")
        self.happened.add(f"{event.what} {event.facts.get('reason', '')}".strip())

    def _store(self, event: Event) -> None:
        self.routers[id(event.owner)] = Router(event.owner, event.facts["nlist"])

    def _tier(self, event: Event) -> None:
        router = self.routers[id(event.facts["store"])]
        device = _Device(router, event.owner.ordinal, event.owner)
        for part in ("pages", "copier", "arena", "health"):
            self._devices[id(event.facts[part])] = device
        self._devices[id(event.owner)] = device
        router.open(device, event.facts["there"])

    def _refs(self, event: Event) -> None:
        self.routers[id(event.owner)] = self.routers[id(event.facts["store"])]

    def _over(self, event: Event) -> None:
        for router in self.routers.values():
            if id(event.owner) in router.batches:
                router.follow(event, None)
                return

    def _follow_in_refresh(self, event: Event) -> None:
        if event.what == "make current":
            for refresh in self.refreshes.values():
                refresh.follow(event)
            return
        store = event.owner._store
        key = id(event.owner if store is None else store)
        if key not in self.refreshes:
            self.refreshes[key] = Refresh(event)
        self.refreshes[key].follow(event)

    def _follow_in_router(self, event: Event) -> None:
        device = self._devices.get(id(event.owner))
        router = device.router if device is not None else self.routers[id(event.owner)]
        router.follow(event, device)

    def differences(self) -> list[str]:
        routers = {id(router): router for router in self.routers.values()}
        found = [what for router in routers.values() for what in router.differences()]
        return found + [what for refresh in self.refreshes.values() for what in refresh.differences()]


class Router:
    """One store's state in the model."""

    EVENTS = frozenset(
        (
            *("publish", "lease", "release", "take", "free", "grow", "shrink", "look", "fill", "send", "land"),
            *("settle", "keep", "drain", "open", "close", "failed", "recover", "queue", "read", "fall back", "over"),
            *("pin", "hold", "end session", "wanted"),
        )
    )

    def __init__(self, store: ResidencyStore, nlist: int) -> None:
        self.store = store
        self.rules = memory.Rules()
        self.s = Memory(health=(), taken=(), there=frozenset(), free=frozenset(), plan=(-1,) * nlist)
        self.devices: list[_Device] = []
        #: Number of each batch and each session in the model, by the product's objects.
        self.batches: dict[int, int] = {}
        self.sessions: dict[int, int] = {}
        #: What sessions held when a thread looked, before it dropped lists for a plan.
        self._looked: dict[int, frozenset[int]] = {}

    def open(self, device: _Device, there: set[int]) -> None:
        assert device.number == len(self.devices)
        self.devices.append(device)
        pages = _pages(device, there)
        self.s = self.s._replace(
            health=(*self.s.health, memory.WORKS),
            taken=(*self.s.taken, False),
            there=self.s.there | pages,
            free=self.s.free | pages,
        )

    def follow(self, event: Event, device: _Device | None) -> None:
        getattr(self, "_" + event.what.replace(" ", "_"))(event, device)
        for holds in memory.INVARIANTS:
            if not holds(self.s):
                raise Refused(holds.__name__)

    # Snapshots and leases

    def _publish(self, event: Event, device: _Device | None) -> None:
        snapshot, reason, s = event.facts["snapshot"], event.facts["reason"], self.s
        now = self._naming(snapshot)
        before = dict(s.lists)
        brought = {list_id: pages for list_id, pages in now.items() if before.get(list_id) != pages}
        drops = frozenset(list_id for list_id, pages in before.items() if now.get(list_id) != pages)
        ats = [self._copy_of(pages, list_id) for list_id, pages in brought.items()]
        if reason == "evict":
            self.s = self.rules.evict(s, drops)
        elif reason == "plan" and not brought:
            self.s = self.rules.plan_drops(s, drops, self._looked.get(event.thread))
        elif reason == "scan":
            self.s = self.rules.lose(s, *self._met_failure(event.thread), drops)
        else:
            on = {device_of(min(before[list_id])) for list_id in drops}
            self.rules.need(len(on) <= (reason == "resize"), "lists_leave_for_a_reason")
            self.s = self.rules.publish(s, ats, drops)
        if dict(self.s.lists) != now:
            raise Refused("a snapshot says what was published")

    def _met_failure(self, thread: int) -> tuple[int, int]:
        """The batch and device of a scan that failed in this thread, whose lists have not left."""
        for at, batch in enumerate(self.s.batches):
            for part in batch.parts:
                if part.stage == memory.LOST and part.reads == thread:
                    return at, part.device
        raise Refused("a_scan_failed")

    def _naming(self, snapshot: Residency) -> dict[int, Pages]:
        return {
            int(i): _pages(self.devices[snapshot.list_device[i]], snapshot.pages_of(np.array([i])).tolist())
            for i in snapshot.resident_lists()
        }

    def _lease(self, event: Event, device: _Device | None) -> None:
        self.rules.need(event.facts["version"] == self.s.version, "the current snapshot is leased")
        self.s = self.rules.lease(self.s)

    def _release(self, event: Event, device: _Device | None) -> None:
        of_version = [at for at, batch in enumerate(self.s.batches) if batch.version == event.facts["version"]]
        self.rules.need(bool(of_version), "what_is_released_was_leased")
        at = next((at for at in of_version if not self.s.batches[at].parts), of_version[0])
        self.s = self.rules.release(self.s, at)

    # Pages

    def _take(self, event: Event, device: _Device) -> None:
        self.s = self.rules.take(self.s, NO_LIST, _pages(device, event.facts["pages"]))

    def _free(self, event: Event, device: _Device) -> None:
        pages = _pages(device, event.facts["pages"])
        for part in self._by_owner(pages):
            self._free_part(part)

    def _by_owner(self, pages: Pages) -> list[Pages]:
        s, parts = self.s, []
        owned = [*(c.pages for c in s.copies), s.kept, *(p for _, p in s.lists), *(p for _, p in s.retired), s.free]
        for own in owned:
            if part := pages & own:
                parts.append(part)
                pages -= part
        return parts + [pages] * bool(pages)

    def _free_part(self, pages: Pages) -> None:
        if any(pages & copy.pages for copy in self.s.copies):
            at = self._list_of(pages)
            self.rules.need(pages == self.s.copies[at].pages, "a_load_gives_back_whole_lists")
            self.s = self.rules.give_back(self.s, at)
            return
        if pages & self.s.kept:
            self.s = self.rules.unkeep(self.s, pages)
            return
        for at, (_, waiting) in enumerate(self.s.retired):
            if pages & waiting:
                self.s = self.rules.reclaim(self.s, at, pages)
                return
        raise Refused("pages_were_given_up")

    def _grow(self, event: Event, device: _Device) -> None:
        self.s = self.rules.grow(self.s, _pages(device, event.facts["pages"]))

    def _shrink(self, event: Event, device: _Device) -> None:
        self.s = self.rules.shrink(self.s, _pages(device, event.facts["pages"]))

    # Copies

    def _copy_of(self, pages: Pages, list_id: int | None = None) -> int:
        for at, copy in enumerate(self.s.copies):
            if pages <= copy.pages and list_id in (None, copy.list_id):
                return at
        raise Refused("only_what_a_load_has_is_written_and_published")

    def _list_of(self, pages: Pages) -> int:
        """As :meth:`_copy_of`; a load takes the pages of several lists at once, and says later which has which."""
        at = self._copy_of(pages)
        copy = self.s.copies[at]
        if copy.list_id == NO_LIST and pages < copy.pages and not copy.flying | copy.landed:
            others = copy._replace(pages=copy.pages - pages)
            self.s = _copy(self.s, at, copy._replace(pages=pages))
            self.s = self.s._replace(copies=(*self.s.copies, others))
        return at

    def _fill(self, event: Event, device: _Device) -> None:
        at = self._list_of(_pages(device, event.facts["pages"]))
        copy = self.s.copies[at]
        self.rules.need(copy.list_id in (NO_LIST, event.facts["list_id"]), "pages_are_of_one_list")
        self.s = _copy(self.s, at, copy._replace(list_id=event.facts["list_id"]))

    def _send(self, event: Event, device: _Device) -> None:
        pages = _pages(device, event.facts["pages"])
        if pages <= self.s.kept:
            return  # a trial: what it writes may be written by others, too
        for part in self._by_owner(pages):
            self.s = self.rules.send(self.s, self._copy_of(part), part)

    def _land(self, event: Event, device: _Device) -> None:
        pages = _pages(device, event.facts["pages"])
        trial = pages <= self.s.kept
        for at, copy in enumerate(self.s.copies):
            if part := pages & copy.flying:
                trial = trial or copy.list_id == NO_LIST
                self.s = self.rules.land(self.s, at, part)
        if trial:  # the stream keeps its order
            self.s = self.rules.writes_end(self.s, device.number)

    def _settle(self, event: Event, device: _Device) -> None:
        pages = _pages(device, event.facts["pages"])
        for at, copy in enumerate(self.s.copies):
            if part := pages & copy.flying:
                self.s = self.rules.settle(self.s, at, part)

    def _drain(self, event: Event, device: _Device) -> None:
        self.s = self.rules.writes_end(self.s, device.number)

    def _keep(self, event: Event, device: _Device) -> None:
        at = self._list_of(_pages(device, event.facts["pages"]))
        health = self.s.health
        # The failure is an event of its own, and came before.
        self.s = self.rules.keep(self.s, at)._replace(health=health)

    def _look(self, event: Event, device: _Device) -> None:
        for at, copy in enumerate(self.s.copies):
            ready = copy.landed == copy.pages and copy.list_id != NO_LIST
            if ready and _device(copy) == device.number and self.s.health[device.number] == memory.WORKS:
                self.s = self.rules.approve(self.s, at)

    # Scans

    def _queue(self, event: Event, device: _Device) -> None:
        batch, version = id(event.facts["batch"]), event.facts["version"]
        if batch not in self.batches:
            self.batches[batch] = len(self.batches) + 1
        name = self.batches[batch]
        mine = [at for at, b in enumerate(self.s.batches) if b.version == version and b.leased and b.name in (0, name)]
        self.rules.need(bool(mine), "lease_is_read")
        at = max(mine, key=lambda at: self.s.batches[at].name)
        leased = self.s.batches[at]
        parts = (*leased.parts, memory.Part(device.number))
        self.s = _batch(self.s, at, leased._replace(name=name, parts=parts))

    def _at(self, batch: object) -> int:
        name = self.batches.get(id(batch), -1)
        return next((at for at, b in enumerate(self.s.batches) if b.name == name), -1)

    def _read(self, event: Event, device: _Device) -> None:
        task, version = event.facts["task"], event.facts["version"]
        if task is None:  # a trial of a slow device, under a lease of its own
            self.rules.need(any(b.version == version for b in self.s.batches), "lease_is_read")
        else:
            self.s = self.rules.scan(self.s, self._at(task.batch), device.number, version)

    def _failed(self, event: Event, device: _Device) -> None:
        task, at = event.facts.get("task"), -1
        if task is not None:
            at = self._at(task.batch)
        if at < 0:
            self.s = self.rules.fail(self.s, device.number, memory.FAILED_COPY)
            return
        self.s = self.rules.fail_scan(self.s, at, device.number)
        # Who has to drop the lists.
        self.s = _part(self.s, at, device.number, memory.Part(device.number, memory.LOST, event.thread))

    def _fall_back(self, event: Event, device: _Device) -> None:
        at = self._at(event.facts["batch"])
        for part in self.s.batches[at].parts:
            if part.device == device.number and part.stage == memory.LOST:
                raise Refused("lists_leave_first")

    def _over(self, event: Event, device: _Device | None) -> None:
        at = self._at(event.owner)
        for part in self.s.batches[at].parts:
            if self.devices[part.device].tier is not None and event.facts.get("device") in (None, part.device):
                self.s = self.rules.answer(self.s, at, part.device)
                return

    # Devices

    def _recover(self, event: Event, device: _Device) -> None:
        self.s = self.rules.recover(self.s, device.number)

    def _open(self, event: Event, device: _Device) -> None:
        self.s = self.s._replace(taken=memory.put(self.s.taken, device.number, True))

    def _close(self, event: Event, device: _Device) -> None:
        self.s = self.rules.close(self.s, device.number)

    # Wishes

    def _pin(self, event: Event, device: _Device | None) -> None:
        lists = event.facts["lists"]
        self.s = self.rules.adopt(self.s, tuple(0 if i in lists else -1 for i in range(len(self.s.plan))))

    def _session(self, session: object) -> int:
        if id(session) not in self.sessions:
            self.sessions[id(session)] = len(self.sessions)
            self.s = self.s._replace(sessions=(*self.s.sessions, frozenset()))
        return self.sessions[id(session)]

    def _hold(self, event: Event, device: _Device | None) -> None:
        list_id, at = event.facts["list_id"], self._session(event.facts["session"])
        if list_id in dict(self.s.lists):  # else it went with its device meanwhile
            self.s = self.rules.hold(self.s, at, list_id)

    def _end_session(self, event: Event, device: _Device | None) -> None:
        self.s = self.rules.end_session(self.s, self._session(event.facts["session"]))

    def _wanted(self, event: Event, device: _Device | None) -> None:
        self._looked[event.thread] = memory.held_by_sessions(self.s)

    def differences(self) -> list[str]:
        """Where the model ended otherwise than the product."""
        found = []
        if dict(self.s.lists) != self._naming(self.store.current):
            found.append("other lists are resident")
        if len(self.s.batches) != self.store.n_leases:
            found.append(f"{len(self.s.batches)} leases in the model, {self.store.n_leases} in the product")
        for device in self.devices:
            free = _pages(device, device.tier.arena.pages.free_pages().tolist())
            if free != frozenset(page for page in self.s.free if device_of(page) == device.number):
                found.append(f"other pages of device {device.number} are free")
        # A device that was left behind keeps its memory.
        if self.devices and not any(self.s.taken):
            left = {"leases": self.s.batches, "copies": self.s.copies, "retired_pages": self.s.retired}
            found += [f"{what}_are_left_at_the_end" for what, values in left.items() if values]
        return found


def _device(copy: Copy) -> int:
    return device_of(min(copy.pages))


def _pages(device: _Device, numbers: Any) -> Pages:
    return frozenset([page_of(device.number, number) for number in numbers])


def _copy(s: Memory, at: int, copy: Copy) -> Memory:
    return s._replace(copies=memory.put(s.copies, at, copy))


def _batch(s: Memory, at: int, batch: memory.Batch) -> Memory:
    return s._replace(batches=memory.put(s.batches, at, batch))


def _part(s: Memory, at: int, device: int, part: memory.Part) -> Memory:
    batch = s.batches[at]
    return _batch(s, at, batch._replace(parts=tuple(part if p.device == device else p for p in batch.parts)))
