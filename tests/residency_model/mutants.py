"""The product with one fault each: what a hasty change could do to it. Patched for as long as a scene lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridindex.refresh import updater
from hybridindex.refresh.update_cycle import RolledBack
from hybridindex.refresh.updater import PlanUpdates
from hybridindex.router.batch.batch import Batch
from hybridindex.router.devices.device_queue import DeviceQueue
from hybridindex.router.lookahead.list_refs import ListRefs
from hybridindex.service.reload import Generations
from hybridindex.tiers.contract.residency import Lease, ResidencyStore
from hybridindex.tiers.paged.copier import Copier, Ticket
from hybridindex.tiers.paged.loading import ListLoad

__all__ = ["REFRESHES", "ROUTERS", "SWAPS"]

Patch = Callable[[Any], None]


def frees_without_waiting(patch: Any) -> None:
    def take_unread(store: Any) -> Any:
        store._giving_back += 1
        freed = [pages for _, gone in store._retired for pages in gone]
        store._retired.clear()
        return freed

    patch.setattr(ResidencyStore, "_take_unread", take_unread)


def frees_one_version_too_early(patch: Any) -> None:
    real = ResidencyStore._take_unread

    def take_unread(store: Any) -> Any:
        readers = store._readers
        store._readers = {version + 1: count for version, count in readers.items()}
        try:
            return real(store)
        finally:
            store._readers = readers

    patch.setattr(ResidencyStore, "_take_unread", take_unread)


def publishes_before_the_copy_is_done(patch: Any) -> None:
    def finish(copier: Any, ticket: Any) -> None:
        if ticket.error is not None:
            raise ticket.error

    patch.setattr(Copier, "finish", finish)


def forgets_a_lease(patch: Any) -> None:
    real, calls = Lease.release, []

    def release(lease: Any) -> None:
        calls.append(lease)
        if len(calls) != 2:
            real(lease)

    patch.setattr(Lease, "release", release)


def gives_the_lease_back_before_the_scans_end(patch: Any) -> None:
    real = Batch.begin

    def begin(batch: Any, split: Any, on_finished: Any) -> None:
        real(batch, split, lambda batch: None)
        on_finished(batch)

    patch.setattr(Batch, "begin", begin)


def scans_what_is_current(patch: Any) -> None:
    real = DeviceQueue._scan_on_device

    def scan(queue: Any, task: Any) -> Any:
        task.residency = queue._residency.current
        return real(queue, task)

    patch.setattr(DeviceQueue, "_scan_on_device", scan)


def _scan_with(patch: Any, store_of: Any) -> None:
    """Scans of devices see ``store_of(store)`` in the place of the residency store."""
    real = DeviceQueue._scan

    def scan(queue: Any, task: Any) -> None:
        store, queue._residency = queue._residency, store_of(queue._residency)
        try:
            real(queue, task)
        finally:
            queue._residency = store

    patch.setattr(DeviceQueue, "_scan", scan)


def keeps_lists_on_a_failed_device(patch: Any) -> None:
    class Deaf:
        def __init__(self, store: Any) -> None:
            self.current = store.current

        def publish(self, *_: Any, **__: Any) -> None:
            return None

    _scan_with(patch, Deaf)


def drops_lists_of_all_devices(patch: Any) -> None:
    class Eager:
        def __init__(self, store: Any) -> None:
            self.current, self._store = store.current, store

        def publish(self, *_: Any, **__: Any) -> None:
            self._store.publish({}, drops=self.current.resident_lists().tolist())

    _scan_with(patch, Eager)


def drops_a_list_for_one_that_came(patch: Any) -> None:
    real = ListLoad._publish

    def publish(load: Any, landed: Any) -> None:
        before = load._store.current.resident_lists().tolist()
        real(load, landed)
        load._store.publish({}, drops=before[:1])

    patch.setattr(ListLoad, "_publish", publish)


def publishes_on_a_failed_device(patch: Any) -> None:
    real = ListLoad._land

    def land(load: Any, limit: int) -> None:
        usable = load._usable
        load._usable = lambda: usable() or True
        try:
            real(load, limit)
        finally:
            load._usable = usable

    patch.setattr(ListLoad, "_land", land)


def frees_pages_that_a_failed_copy_may_write(patch: Any) -> None:
    def give_back(copier: Any, pages: Any, tickets: Any) -> None:
        for part in pages:
            copier._arena.pages.free(part)

    patch.setattr(Copier, "give_back", give_back)


def frees_kept_pages_before_the_trial(patch: Any) -> None:
    real = Copier.probe

    def probe(copier: Any) -> None:
        kept, copier._kept = copier._kept, []
        for part in kept:
            copier._arena.pages.free(part)
        real(copier)

    patch.setattr(Copier, "probe", probe)


def frees_half_a_list_while_it_is_copied(patch: Any) -> None:
    real = ListLoad._stop_half_way

    def stop(load: Any) -> None:
        real(load)
        for pages in load._dropped:
            load._arena.pages.free(pages)
        load._dropped = []

    patch.setattr(ListLoad, "_stop_half_way", stop)
    patch.setattr(Ticket, "settled", lambda ticket: True)


def loses_the_pages_of_a_second_copy(patch: Any) -> None:
    real = ResidencyStore._next

    def following(store: Any, *given: Any) -> Any:
        snapshot, retired, _ = real(store, *given)
        return snapshot, retired, []

    patch.setattr(ResidencyStore, "_next", following)


def drops_what_another_session_holds(patch: Any) -> None:
    real = ListRefs.release

    def release(refs: Any, session: Any) -> Any:
        # Lists that a plan alone wants stay: dropping those is another fault.
        held_elsewhere = {list_id for list_id in session.lists if len(refs._sessions[list_id]) > 1}
        return list(held_elsewhere | set(real(refs, session)))

    patch.setattr(ListRefs, "release", release)


def caches_what_the_plan_wants(patch: Any) -> None:
    real = ListRefs.evict_beyond_share

    def evict(refs: Any, on_device: Any, arena_bytes: int) -> Any:
        planned = (refs.pinned & on_device).nonzero()[0][:1].tolist()
        return real(refs, on_device, arena_bytes) + planned

    patch.setattr(ListRefs, "evict_beyond_share", evict)


def lets_memory_go_under_scans(patch: Any) -> None:
    real = DeviceQueue._scan_on_device

    def scan(queue: Any, task: Any) -> Any:
        arena = queue.tier.arena
        data, held = arena.data, arena._range
        arena.release()
        arena.data, arena._range = data, held
        return real(queue, task)

    patch.setattr(DeviceQueue, "_scan_on_device", scan)


#: By name: the fault, and the guards and invariants that find it.
ROUTERS: dict[str, tuple[Patch, set[str]]] = {
    patch.__name__: (patch, set(found.split()))
    for patch, found in [
        (frees_without_waiting, "readers_are_gone"),
        (frees_one_version_too_early, "readers_are_gone"),
        (forgets_a_lease, "leases_are_left_at_the_end"),
        (gives_the_lease_back_before_the_scans_end, "lease_is_read scans_have_ended"),
        (scans_what_is_current, "lease_is_read"),
        (keeps_lists_on_a_failed_device, "lists_leave_first"),
        (drops_lists_of_all_devices, "only_lists_of_the_failed_device_leave"),
        (drops_a_list_for_one_that_came, "lists_leave_for_a_reason"),
        (publishes_on_a_failed_device, "device_works"),
        (loses_the_pages_of_a_second_copy, "copies_have_ended_at_the_end"),
        (drops_what_another_session_holds, "no_session_holds_it"),
        (caches_what_the_plan_wants, "no_plan_wants_it"),
        (lets_memory_go_under_scans, "scans_have_ended_at_the_end"),
        (publishes_before_the_copy_is_done, "bytes_have_landed device_works"),
        (frees_pages_that_a_failed_copy_may_write, "copies_are_over"),
        (frees_kept_pages_before_the_trial, "trial_comes_last"),
        (frees_half_a_list_while_it_is_copied, "copies_are_over"),
    ]
}


# Refreshes


def tells_before_it_writes(patch: Any) -> None:
    def commit(updates: Any, draft: Any, *, verified: bool) -> None:
        draft.verified = verified

    patch.setattr(PlanUpdates, "_commit", commit)


def makes_a_trial_current(patch: Any) -> None:
    real = PlanUpdates._save

    def save(updates: Any, draft: Any) -> None:
        real(updates, draft)
        vars(updater)["make_current"](updates._store, draft.plan, draft.plan_id, verified=False, why="a mutant")

    patch.setattr(PlanUpdates, "_save", save)


def says_that_it_went_back(patch: Any) -> None:
    real = PlanUpdates._perform

    def perform(updates: Any, action: Any) -> Any:
        if type(action).__name__ == "RollBack":
            return RolledBack(now_s=updates._clock())
        return real(updates, action)

    patch.setattr(PlanUpdates, "_perform", perform)


REFRESHES: dict[str, tuple[Patch, set[str]]] = {
    "tells_before_it_writes": (tells_before_it_writes, {"durable_before_it_is_told"}),
    "makes_a_trial_current": (makes_a_trial_current, {"only_what_serves_or_was_verified_is_written"}),
    "says_that_it_went_back": (says_that_it_went_back, {"back_before_it_is_told"}),
}


# Swaps


def does_not_wait_for_searches(patch: Any) -> None:
    real = Generations._retire

    def retire(generations: Any, old: Any) -> None:
        users, old.users = old.users, 0
        try:
            real(generations, old)
        finally:
            old.users += users

    patch.setattr(Generations, "_retire", retire)


def forgets_sessions(patch: Any) -> None:
    patch.setattr(Generations, "_n_sessions", lambda generations, serving: 0)


SWAPS: dict[str, tuple[Patch, set[str]]] = {
    "does_not_wait_for_searches": (does_not_wait_for_searches, {"users_have_left"}),
    "forgets_sessions": (forgets_sessions, {"sessions_have_moved"}),
}
