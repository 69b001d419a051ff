"""Small worlds of :mod:`tests.residency_model.memory`: what there is, what may happen, and which states are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.residency_model.check import Refused
from tests.residency_model.memory import (
    INVARIANTS,
    LEFT,
    LOST,
    QUEUED,
    SCANNING,
    TAKEN,
    WORKS,
    Copy,
    Memory,
    Naming,
    Pages,
    Part,
    Rules,
    device_of,
    on_device,
    page_of,
)

__all__ = ["Instance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What there is in a small world, and what happens there. Every list has one page."""

    lists: int
    #: Pages of each device.
    pages: tuple[int, ...]
    #: Most at a time.
    batches: int = 1
    copies: int = 1
    sessions: int = 0
    #: The plan at first, and one that may follow; by default no list is wanted by a plan.
    plan: tuple[int, ...] = ()
    next_plan: tuple[int, ...] = ()
    fails: bool = True
    hangs: bool = True
    resizes: bool = False
    closes: bool = False
    #: Guards that do not count.
    dropped: tuple[str, ...] = ()
    #: Actions that never happen.
    without: tuple[str, ...] = ()
    invariants: tuple[Callable[[Memory], bool], ...] = INVARIANTS

    @property
    def initial(self) -> Memory:
        there = frozenset(page_of(device, n) for device, count in enumerate(self.pages) for n in range(count))
        return Memory(
            health=(WORKS,) * len(self.pages),
            taken=(True,) * len(self.pages),
            there=there,
            free=there,
            plan=self.plan or (-1,) * self.lists,
            sessions=(frozenset(),) * self.sessions,
        )

    def settled(self, s: Memory) -> bool:
        """Nothing is leased, moving or kept out of use; what is there is there for the plan."""
        kept = any(s.taken[device_of(page)] for page in s.kept)
        busy = s.batches or s.copies or kept or s.retired or any(s.sessions)
        return not busy and all(s.plan[list_id] >= 0 for list_id, _ in s.lists) and not self._failed(s)

    def _failed(self, s: Memory) -> bool:
        return any(taken and health != WORKS for taken, health in zip(s.taken, s.health, strict=True))

    def moves(self, s: Memory) -> Iterator[tuple[str, Memory]]:
        rules = Rules(self.dropped)
        for words, action, *values in self._proposed(s):
            if action in self.without:
                continue
            try:
                yield f"{action} {words}", getattr(rules, action)(s, *values)
            except Refused:
                continue

    def _proposed(self, s: Memory) -> Iterator[tuple[Any, ...]]:
        """Words, the action, and what it is told."""
        open_ = all(s.taken)
        devices = [device for device, taken in enumerate(s.taken) if taken]
        yield from self._of_copies(s, devices if open_ else [])
        yield from self._of_batches(s, open_)
        for at, (_, pages) in enumerate(s.retired):
            yield _words(pages), "reclaim", at, pages
            yield from ((_words(other), "reclaim", at, other) for other in _one(s.there - s.free - pages))
        for device in devices:
            if on_device(s.stray, device):
                yield f"on {device}", "writes_end", device
            kept = on_device(s.kept, device)
            if kept:
                yield f"on {device}", "unkeep", kept
            for other in _one(on_device(s.there - s.free - s.kept, device)) if s.health[device] != WORKS else ():
                yield f"{_words(other)}", "unkeep", other
            if s.health[device] != WORKS and (kept or on_device(s.free, device)):
                yield f"{device}", "recover", device
            if self.resizes:
                last = page_of(device, self.pages[device] - 1)
                for action in ("shrink", "grow") if last in s.there else ("grow",):
                    yield f"{device}", action, frozenset({last})
            if self.closes:
                yield f"{device}", "close", device
        yield from self._of_wishes(s)

    def _of_copies(self, s: Memory, devices: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        named = dict(s.lists)
        coming = {(copy.list_id, device_of(min(copy.pages))) for copy in s.copies}
        for device in devices if len(s.copies) < self.copies else ():
            if s.health[device] != WORKS:
                continue
            here = sorted(page for page in s.there if device_of(page) == device)
            # Free ones are alike. One that is not shows that a guard is there.
            chosen = [next((p for p in here if (p in s.free) == free), None) for free in (True, False)]
            for list_id in range(self.lists):
                if list_id in named or (list_id, device) in coming:
                    continue
                for page in chosen:
                    if page is not None:
                        yield f"list {list_id} to {_words({page})}", "take", list_id, frozenset({page})
        for at, copy in enumerate(s.copies):
            words, ready = f"list {copy.list_id} to {_words(copy.pages)}", copy.landed == copy.pages
            yield words, "send", at, copy.pages
            if not ready:
                yield words, "land", at, copy.flying or copy.pages
            if copy.flying and self.fails:
                yield words, "keep", at
                yield words, "settle", at, copy.flying
            if (ready or "bytes_have_landed" in self.dropped) and not copy.approved and copy.list_id not in named:
                yield words, "approve", at
            if ready or copy.approved:
                yield words, "publish", (at,)
            if not copy.approved:
                yield words, "give_back", at

    def _of_batches(self, s: Memory, open_: bool) -> Iterator[tuple[Any, ...]]:
        used = tuple(sorted({device_of(min(pages)) for _, pages in s.lists}))
        if open_ and used and sum(batch.leased for batch in s.batches) < self.batches:
            yield f"version {s.version}", "lease", tuple(Part(device) for device in used)
        for at, batch in enumerate(s.batches):
            if batch.leased:
                yield f"version {batch.version}", "release", at
            for part in batch.parts:
                words, device = f"version {batch.version} on {part.device}", part.device
                if part.stage == QUEUED:
                    yield words, "scan", at, device
                if part.stage == SCANNING:
                    yield words, "answer", at, device
                    if self.fails:
                        yield words, "fail_scan", at, device
                if part.stage == SCANNING and self.hangs:
                    yield words, "take_over", at, device
                if part.stage == TAKEN:
                    yield words, "answer", at, device
                if part.stage == LOST:
                    yield words, "lose", at, device
                    yield words, "lose", at, device, dict(s.lists).keys()
                if part.stage in (LOST, LEFT):
                    yield words, "fall_back", at, device

    def _of_wishes(self, s: Memory) -> Iterator[tuple[Any, ...]]:
        for list_id, pages in s.lists:
            yield f"list {list_id}", "evict", (list_id,)
            if s.plan[list_id] != device_of(min(pages)):
                yield f"list {list_id}", "plan_drops", (list_id,)
        if self.next_plan and s.plan != self.next_plan:
            yield "the next plan", "adopt", self.next_plan
        for at, held in enumerate(s.sessions):
            if held:
                yield f"{at}", "end_session", at
            for list_id, _ in s.lists:
                if s.plan[list_id] < 0 and list_id not in held:
                    yield f"list {list_id} for {at}", "hold", at, list_id

    # Names

    def canonical(self, s: Memory) -> Memory:
        """Pages, equal batches and copies, and versions are named in the order in which they are met. Where all lists
        and devices are alike, they are sorted by what happens to them; equal ones stay as they are, so that some states
        are looked at twice, and none is left out."""
        if not self.next_plan and not self.plan:
            s = self._sorted_lists(s)
        versions = sorted({s.version, *(v for v, _ in s.retired), *(b.version for b in s.batches)})
        rank = {version: number for number, version in enumerate(versions)}
        copies = sorted(s.copies, key=_copy_key)
        batches = sorted(s.batches, key=lambda b: (b.version, b.leased, b.parts))
        if self.resizes:
            names = {page: page for page in self.initial.there}
        else:
            met: dict[int, None] = {}
            for lists in [s.lists, *(b.lists for b in batches)]:
                for _, pages in lists:
                    met.update(dict.fromkeys(sorted(pages)))
            for pages in [*(c.pages for c in copies), *(p for _, p in s.retired), s.stray, s.kept, s.there]:
                met.update(dict.fromkeys(sorted(pages)))
            count = [0] * len(self.pages)
            names = {}
            for page in met:
                device = device_of(page)
                names[page] = page_of(device, count[device])
                count[device] += 1

        def of(pages: Pages) -> Pages:
            return frozenset([names[page] for page in pages])

        def lists_of(lists: Naming) -> Naming:
            return tuple([(list_id, of(pages)) for list_id, pages in lists])

        return s._replace(
            free=of(s.free),
            kept=of(s.kept),
            stray=of(s.stray),
            holds=frozenset([(names[page], list_id) for page, list_id in s.holds]),
            version=rank[s.version],
            lists=lists_of(s.lists),
            batches=tuple(
                b._replace(
                    version=rank[b.version],
                    lists=lists_of(b.lists),
                    parts=tuple(p._replace(reads=rank.get(p.reads, -1)) for p in b.parts),
                )
                for b in batches
            ),
            retired=tuple((rank[v], of(pages)) for v, pages in s.retired),
            copies=tuple(c._replace(pages=of(c.pages), flying=of(c.flying), landed=of(c.landed)) for c in copies),
        )

    def _sorted_lists(self, s: Memory) -> Memory:
        named = [dict(s.lists), *(dict(b.lists) for b in sorted(s.batches, key=lambda b: b.version))]

        def fate(list_id: int) -> tuple[Any, ...]:
            where = tuple([device_of(min(lists[list_id])) if list_id in lists else -1 for lists in named])
            moving = sorted([_copy_key(c)[1:] for c in s.copies if c.list_id == list_id])
            return where, moving, [list_id in held for held in s.sessions]

        order = sorted(range(self.lists), key=fate)
        if order == list(range(self.lists)):
            return s
        new = {old: number for number, old in enumerate(order)}

        def lists_of(lists: Naming) -> Naming:
            return tuple(sorted([(new[list_id], pages) for list_id, pages in lists], key=lambda entry: entry[0]))

        return s._replace(
            holds=frozenset([(page, new[list_id]) for page, list_id in s.holds]),
            lists=lists_of(s.lists),
            batches=tuple(b._replace(lists=lists_of(b.lists)) for b in s.batches),
            copies=tuple(c._replace(list_id=new[c.list_id]) for c in s.copies),
            sessions=tuple(frozenset(new[i] for i in held) for held in s.sessions),
            late=frozenset(new[i] for i in s.late),
            robbed=frozenset(new[i] for i in s.robbed),
        )


def _copy_key(copy: Copy) -> tuple[Any, ...]:
    return copy.list_id, device_of(min(copy.pages)), len(copy.flying), len(copy.landed), copy.approved


def _one(pages: Pages) -> list[Pages]:
    """Of pages with which something must not happen: the guard is shown to be there."""
    return [frozenset({min(pages)})] if pages else []


def _words(pages: Iterable[int]) -> str:
    return " ".join(f"page {device_of(page)}.{page - page_of(device_of(page), 0)}" for page in sorted(pages))
