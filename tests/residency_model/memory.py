"""The model of residency: pages, copies, snapshots, leases, failures, sessions, of one router. Pure.

A state is a value, an action a function from one state to the next. What an action needs is a named guard; what must
hold in every state is a named invariant. ``check.py`` looks at all states of the small worlds of ``memory_world.py``,
and again without one of the guards, to see that each is needed. ``replay.py`` runs traces of the product through the
same actions.

**Why Python and not TLA+ or P.** The replay needs the model in the language of the traces: one text, which is checked
and which the product is compared with. A second one in TLA+ could say something else, and CI has no Java to check it
with. The price is speed: a million states take minutes here.

Not modelled: bytes of less than a page, the order in which lists are wanted, times and back-off (both failures and
their ends happen at any time), shards, lists in page-locked host memory, what a scan computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from tests.residency_model.check import need_of

__all__ = [
    "INVARIANTS",
    "Batch",
    "Copy",
    "Memory",
    "Part",
    "Rules",
    "device_of",
    "held_by_sessions",
    "on_device",
    "page_of",
    "put",
]

T = TypeVar("T")
Pages = frozenset[int]
#: Which pages each list has, by list.
Naming = tuple[tuple[int, Pages], ...]
NO_PAGES: Pages = frozenset()

#: Health of a device, and by what it failed.
WORKS, FAILED_COPY, FAILED_SCAN = "works", "failed by a copy", "failed by a scan"
#: A batch's part on one device: waits; is scanned; failed, and its lists have not left; they have; the host answered,
#: and the device scans on.
QUEUED, SCANNING, LOST, LEFT, TAKEN = "queued", "scanning", "lost", "left", "taken over"

_DEVICE_BITS = 20


def page_of(device: int, number: int) -> int:
    """A page's name: unlike those of other devices."""
    return device << _DEVICE_BITS | number


def device_of(page: int) -> int:
    return page >> _DEVICE_BITS


class Copy(NamedTuple):
    """A list on its way to a device: the load's until it is published or given back."""

    list_id: int
    pages: Pages
    #: Pages that a copy may be writing now, and those whose bytes are there.
    flying: Pages = NO_PAGES
    landed: Pages = NO_PAGES
    #: The device worked after all of it had landed.
    approved: bool = False


class Part(NamedTuple):
    device: int
    stage: str = QUEUED
    #: Version of the snapshot that is scanned, while it is.
    reads: int = -1


class Batch(NamedTuple):
    """A lease, and who scans under it."""

    version: int
    lists: Naming
    parts: tuple[Part, ...] = ()
    #: False: the lease was given back, which must not be while somebody scans.
    leased: bool = True
    #: Tells batches of a trace apart.
    name: int = 0


class Memory(NamedTuple):
    """Devices of one router and what lies there."""

    health: tuple[str, ...]
    #: Whether the device's memory is the router's.
    taken: tuple[bool, ...]
    #: Pages that there are.
    there: Pages
    free: Pages
    #: Pages of failed copies, which are out of use; and pages that a copy nobody waits for may still write.
    kept: Pages = NO_PAGES
    stray: Pages = NO_PAGES
    #: (page, list): whose bytes are where.
    holds: frozenset[tuple[int, int]] = frozenset()
    version: int = 0
    lists: Naming = ()
    batches: tuple[Batch, ...] = ()
    #: (first version that does not name them, pages).
    retired: tuple[tuple[int, Pages], ...] = ()
    copies: tuple[Copy, ...] = ()
    #: Device that the plan wants each list on; -1: host.
    plan: tuple[int, ...] = ()
    #: What each session holds.
    sessions: tuple[frozenset[int], ...] = ()
    #: Lists that came to a failed device because it worked when they were looked at last.
    late: frozenset[int] = frozenset()
    #: Lists that left although a session held them, or the plan wanted them there.
    robbed: frozenset[int] = frozenset()

    @property
    def oldest_read(self) -> int:
        return min((batch.version for batch in self.batches if batch.leased), default=self.version)

    def on(self, device: int) -> frozenset[int]:
        """Lists of the current snapshot that one device has."""
        return frozenset(list_id for list_id, pages in self.lists if device_of(min(pages)) == device)


class Rules:
    """The actions. Each raises Refused with the guard's name where it may not happen."""

    def __init__(self, dropped: Sequence[str] = ()) -> None:
        """``dropped``: guards that do not count."""
        self._dropped = frozenset(dropped)
        self.need = need_of(dropped)

    # Copies

    def take(self, s: Memory, list_id: int, pages: Pages) -> Memory:
        """A load takes pages for a list."""
        self.need(pages <= s.free, "pages_are_free")
        return s._replace(free=s.free - pages, copies=(*s.copies, Copy(list_id, pages)))

    def send(self, s: Memory, at: int, pages: Pages) -> Memory:
        """A copy begins to write pages of a load."""
        copy = s.copies[at]
        self.need(pages <= copy.pages - copy.flying - copy.landed, "pages_are_sent_once")
        return _with_copy(s, at, copy._replace(flying=copy.flying | pages))

    def land(self, s: Memory, at: int, pages: Pages) -> Memory:
        """It is known that this copy is done."""
        copy = s.copies[at]
        self.need(pages <= copy.flying, "what_lands_was_sent")
        written = pages & copy.flying
        copy = copy._replace(flying=copy.flying - pages, landed=copy.landed | pages)
        holds = frozenset((page, list_id) for page, list_id in s.holds if page not in written)
        return _with_copy(s, at, copy)._replace(holds=holds | {(page, copy.list_id) for page in written})

    def settle(self, s: Memory, at: int, pages: Pages) -> Memory:
        """It is known that a copy that failed writes no more."""
        copy = s.copies[at]
        return _with_copy(s, at, copy._replace(flying=copy.flying - pages))

    def approve(self, s: Memory, at: int) -> Memory:
        """The mover sees that the device works, and is going to publish."""
        copy = s.copies[at]
        works = s.health[device_of(min(copy.pages))] == WORKS
        self.need(works, "device_works")
        return _with_copy(s, at, copy._replace(approved=works))

    def give_back(self, s: Memory, at: int) -> Memory:
        """Pages of a list that is wanted no more, came second, or came to a device that failed."""
        copy = s.copies[at]
        self.need(not copy.flying, "copies_are_over")
        return _freed(_without_copy(s, at), copy.pages)._replace(stray=s.stray | copy.flying)

    def keep(self, s: Memory, at: int) -> Memory:
        """A copy failed: the device may still write its pages."""
        copy = s.copies[at]
        s = self.fail(_without_copy(s, at), device_of(min(copy.pages)), FAILED_COPY)
        return s._replace(kept=s.kept | copy.pages, stray=s.stray | copy.flying)

    def writes_end(self, s: Memory, device: int) -> Memory:
        """Copies that nobody waits for are over."""
        return s._replace(stray=s.stray - on_device(s.stray, device))

    # Snapshots

    def publish(self, s: Memory, brought: Iterable[int], drops: Iterable[int] = ()) -> Memory:
        """The next snapshot. Of two copies of one list, the one that was first stays, and the other is given back."""
        named, version = dict(s.lists), s.version + 1
        gone = [named.pop(list_id) for list_id in set(drops) if list_id in named]
        left, late, stray = list(s.copies), set(s.late & named.keys()), s.stray
        for at in brought:
            copy = s.copies[at]
            self.need(copy.landed == copy.pages, "bytes_have_landed")
            self.need(copy.approved, "device_works")
            if copy.list_id in named and "first_copy_stays" not in self._dropped:
                left[left.index(copy)] = copy._replace(approved=False)
                continue
            left.remove(copy)
            stray |= copy.flying
            named[copy.list_id] = copy.pages
            if copy.approved and s.health[device_of(min(copy.pages))] != WORKS:
                late.add(copy.list_id)
        retired = ((version, frozenset().union(*gone)),) if gone else ()
        return s._replace(
            version=version,
            lists=tuple(sorted(named.items())),
            copies=tuple(left),
            stray=stray,
            retired=s.retired + retired,
            sessions=tuple(held.intersection(named) for held in s.sessions),
            late=frozenset(late),
        )

    def reclaim(self, s: Memory, at: int, pages: Pages) -> Memory:
        """Pages that no snapshot names any more come free."""
        version, waiting = s.retired[at]
        self.need(version <= s.oldest_read, "readers_are_gone")
        self.need(pages <= waiting, "pages_were_given_up")
        rest = ((version, waiting - pages),) if waiting - pages else ()
        return _freed(s, pages)._replace(retired=(*s.retired[:at], *rest, *s.retired[at + 1 :]))

    # Batches

    def lease(self, s: Memory, parts: tuple[Part, ...] = ()) -> Memory:
        return s._replace(batches=(*s.batches, Batch(s.version, s.lists, parts)))

    def scan(self, s: Memory, at: int, device: int, version: int | None = None) -> Memory:
        """A device begins to scan a part, of the snapshot ``version``; default the right one."""
        batch = s.batches[at]
        if version is None:
            version = s.version if "lease_is_read" in self._dropped else batch.version
        self.need(version == batch.version, "lease_is_read")
        return _with_part(s, at, device, lambda part: part._replace(stage=SCANNING, reads=version))

    def answer(self, s: Memory, at: int, device: int) -> Memory:
        """The scan ends: with an answer, or after the host has given one."""
        return _with_part(s, at, device, lambda part: None)

    def take_over(self, s: Memory, at: int, device: int) -> Memory:
        """The host answers what a device does not; the device scans on, or still has the part in its queue."""
        return _with_part(s, at, device, lambda part: part._replace(stage=TAKEN))

    def fail_scan(self, s: Memory, at: int, device: int) -> Memory:
        """The scan raises, or the device had failed before: its lists have to leave."""
        s = self.fail(s, device, FAILED_SCAN)
        return _with_part(s, at, device, lambda part: Part(device, LOST))

    def lose(self, s: Memory, at: int, device: int, drops: Iterable[int] | None = None) -> Memory:
        """Lists of a device whose scan failed leave the residency."""
        lists = s.on(device)
        drops = lists if drops is None else frozenset(drops)
        self.need(drops <= lists, "only_lists_of_the_failed_device_leave")
        wanted = held_by_sessions(s) | frozenset(range(len(s.plan))) - _without(s.plan)
        s = self.publish(s, (), drops)._replace(robbed=s.robbed | ((drops - lists) & wanted))
        return _with_part(s, at, device, lambda part: Part(device, LEFT))

    def fall_back(self, s: Memory, at: int, device: int) -> Memory:
        """The host answers the part of a scan that failed."""
        stage = next(part.stage for part in s.batches[at].parts if part.device == device)
        self.need(stage == LEFT, "lists_leave_first")
        return _with_part(s, at, device, lambda part: None)

    def release(self, s: Memory, at: int) -> Memory:
        batch = s.batches[at]
        self.need(not batch.parts, "scans_have_ended")
        # What is still scanned stays in sight.
        rest = (batch._replace(leased=False),) if batch.parts else ()
        return s._replace(batches=(*s.batches[:at], *rest, *s.batches[at + 1 :]))

    # Devices

    def fail(self, s: Memory, device: int, why: str) -> Memory:
        return s._replace(health=put(s.health, device, why))

    def unkeep(self, s: Memory, pages: Pages) -> Memory:
        """A page was written and read back: what was written before is done, too."""
        self.need(pages <= s.kept, "pages_were_kept")
        self.need(not any(pages & on_device(s.stray, device) for device in map(device_of, pages)), "trial_comes_last")
        return _freed(s, pages)._replace(kept=s.kept - pages)

    def recover(self, s: Memory, device: int) -> Memory:
        """The trial is over, and the device works."""
        self.need(not on_device(s.kept, device), "kept_pages_come_free_first")
        return s._replace(health=put(s.health, device, WORKS))

    def grow(self, s: Memory, pages: Pages) -> Memory:
        self.need(not pages & s.there, "pages_are_new")
        return s._replace(there=s.there | pages, free=s.free | pages)

    def shrink(self, s: Memory, pages: Pages) -> Memory:
        self.need(pages <= s.free, "only_free_pages_go")
        return s._replace(there=s.there - pages, free=s.free - pages)

    def close(self, s: Memory, device: int) -> Memory:
        """The router ends and lets a device's memory go."""
        scanned = any(part.device == device for batch in s.batches for part in batch.parts)
        moving = [copy.pages for copy in s.copies] + [s.stray]
        written = any(device_of(page) == device for pages in moving for page in pages)
        self.need(not scanned, "scans_have_ended_at_the_end")
        self.need(not written, "copies_have_ended_at_the_end")
        return s._replace(taken=put(s.taken, device, False))

    # Why a list stays

    def adopt(self, s: Memory, plan: tuple[int, ...]) -> Memory:
        """Another plan is going to be placed."""
        return s._replace(plan=plan)

    def plan_drops(self, s: Memory, drops: Iterable[int], held: frozenset[int] | None = None) -> Memory:
        """Lists leave that the plan wants elsewhere, or does not want and no session held when it looked."""
        drops = frozenset(drops)
        spared = drops & _without(s.plan) & (held_by_sessions(s) if held is None else held)
        self.need(not spared, "plan_spares_sessions")
        return self.publish(s, (), drops)._replace(robbed=s.robbed | spared)

    def evict(self, s: Memory, drops: Iterable[int]) -> Memory:
        """Lists leave that were cached, or whose last session ended."""
        drops = frozenset(drops)
        held, wanted = drops & held_by_sessions(s), drops - _without(s.plan)
        self.need(not held, "no_session_holds_it")
        self.need(not wanted, "no_plan_wants_it")
        return self.publish(s, (), drops)._replace(robbed=s.robbed | held | wanted)

    def hold(self, s: Memory, at: int, list_id: int) -> Memory:
        """A session keeps a list that is there."""
        return s._replace(sessions=put(s.sessions, at, s.sessions[at] | {list_id}))

    def end_session(self, s: Memory, at: int) -> Memory:
        return s._replace(sessions=put(s.sessions, at, frozenset()))


def put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def held_by_sessions(s: Memory) -> frozenset[int]:
    return frozenset().union(*s.sessions)


def _without(plan: tuple[int, ...]) -> frozenset[int]:
    """Lists that the plan leaves on the host."""
    return frozenset(list_id for list_id, device in enumerate(plan) if device < 0)


def on_device(pages: Pages, device: int) -> Pages:
    return frozenset(page for page in pages if device_of(page) == device)


def _with_copy(s: Memory, at: int, copy: Copy) -> Memory:
    return s._replace(copies=put(s.copies, at, copy))


def _without_copy(s: Memory, at: int) -> Memory:
    return s._replace(copies=(*s.copies[:at], *s.copies[at + 1 :]))


def _freed(s: Memory, pages: Pages) -> Memory:
    holds = frozenset((page, list_id) for page, list_id in s.holds if page not in pages)
    return s._replace(free=s.free | pages, holds=holds)


def _with_part(s: Memory, at: int, device: int, change: Callable[[Part], Part | None]) -> Memory:
    batch = s.batches[at]
    changed = [change(part) if part.device == device else part for part in batch.parts]
    batch = batch._replace(parts=tuple(part for part in changed if part is not None))
    if not batch.parts and not batch.leased:
        return s._replace(batches=(*s.batches[:at], *s.batches[at + 1 :]))
    return s._replace(batches=put(s.batches, at, batch))


# What must hold


def every_page_has_one_owner(s: Memory) -> bool:
    owned = [s.free, s.kept, *(pages for _, pages in s.lists), *(pages for _, pages in s.retired)]
    owned += [copy.pages for copy in s.copies]
    return sum(map(len, owned)) == len(s.there) and frozenset().union(*owned) == s.there


def leased_pages_hold_their_lists(s: Memory) -> bool:
    """Also those of the snapshot that the next batch leases."""
    written = s.stray.union(*(copy.flying for copy in s.copies))
    for lists in [s.lists, *(batch.lists for batch in s.batches)]:
        for list_id, pages in lists:
            if pages & written or any((page, list_id) not in s.holds for page in pages):
                return False
    return True


def nothing_writes_a_page_of_somebody_else(s: Memory) -> bool:
    return s.stray <= s.kept and all(copy.flying <= copy.pages for copy in s.copies)


def a_batch_reads_what_it_leased(s: Memory) -> bool:
    return all(part.reads == batch.version for batch in s.batches for part in batch.parts if part.stage == SCANNING)


def who_scans_has_a_lease(s: Memory) -> bool:
    return all(batch.leased for batch in s.batches)


def lists_of_a_failed_device_go_to_the_host(s: Memory) -> bool:
    """Once the batch whose scan failed is answered. A copy that fails leaves that to the next scan."""
    failing = {part.device for batch in s.batches for part in batch.parts if part.stage == LOST}
    return all(
        s.on(device) <= s.late
        for device, health in enumerate(s.health)
        if health == FAILED_SCAN and device not in failing
    )


def a_device_that_works_has_all_its_pages(s: Memory) -> bool:
    """None is out of use for a copy that failed."""
    return all(s.health[device_of(page)] != WORKS for page in s.kept)


def nothing_uses_memory_that_is_gone(s: Memory) -> bool:
    gone = {device for device, taken in enumerate(s.taken) if not taken}
    used = {part.device for batch in s.batches for part in batch.parts}
    used |= {device_of(page) for copy in s.copies for page in copy.flying} | {device_of(page) for page in s.stray}
    return not gone & used


def what_somebody_wants_stays(s: Memory) -> bool:
    """Unless its device fails, or the plan moves it."""
    return not s.robbed


INVARIANTS: tuple[Callable[[Memory], bool], ...] = (
    every_page_has_one_owner,
    leased_pages_hold_their_lists,
    nothing_writes_a_page_of_somebody_else,
    a_batch_reads_what_it_leased,
    who_scans_has_a_lease,
    lists_of_a_failed_device_go_to_the_host,
    a_device_that_works_has_all_its_pages,
    nothing_uses_memory_that_is_gone,
    what_somebody_wants_stays,
)
