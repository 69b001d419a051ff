"""Faults seeded into the daemon, which the machine must find. Each is applied in the process that shall have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.durability.machine.hooks import put

__all__ = ["MUTANTS"]


def _plan_not_recorded() -> None:
    import hybridindex.service.changes.served_plan as served_plan

    put(served_plan, "make_current", lambda *_, **__: None)


def _event_not_committed() -> None:
    from hybridindex.store.control import ControlStore

    put(ControlStore, "record_event", lambda *_: 1)


def _plan_not_resumed() -> None:
    from hybridindex.service import serving

    put(serving, "choose_plan", lambda *_: serving.PlanChoice(note="none"))


def _reload_keeps_the_old() -> None:
    from hybridindex.service.reload import Generations

    def open_next(self: Generations, found: Any) -> str:
        return "carried over"

    put(Generations, "_open_next", open_next)


def _keys_not_read_again() -> None:
    from hybridindex.service.auth import Keyring

    put(Keyring, "_refresh", lambda _: None)


def _drain_drops_searches() -> None:
    from hybridindex.service.daemon import Daemon

    stop = Daemon.stop

    def at_once(self: Daemon) -> None:
        stop(self)
        stop(self)

    put(Daemon, "stop", at_once)


def _session_of_the_new_generation() -> None:
    from hybridindex.service.core import Service

    search = Service._search

    async def newest(self: Service, *args: Any) -> Any:
        request, client, arrived, deadline_s, _, trace = args
        return await search(self, request, client, arrived, deadline_s, None, trace)

    put(Service, "_search", newest)


def _session_of_anybody() -> None:
    from hybridindex.service.sessions import SessionTable

    find = SessionTable._find

    def anybody(self: SessionTable, name: str, owner: str) -> Any:
        entry = self._entries.get(name)
        return find(self, name, owner if entry is None else entry.owner)

    put(SessionTable, "_find", anybody)


def _device_skips_a_list() -> None:
    from hybridindex.tiers.paged.page_scanner import PageScanner

    scan = PageScanner.scan

    def skip(self: PageScanner, queries: Any, probes: Any, *args: Any, **options: Any) -> Any:
        probes = probes.copy()
        probes[:, 0] = -1
        return scan(self, queries, probes, *args, **options)

    put(PageScanner, "scan", skip)


def _health_always_good() -> None:
    from hybridindex.service.several import indexes
    from hybridindex.service.status import Check, Health, health_of

    look = health_of

    def good(*args: Any, **options: Any) -> Health:
        found = look(*args, **options).checks
        return Health(checks=tuple(Check(name=check.name, ok=True, detail="good") for check in found))

    put(indexes, "health_of", good)


def _socket_left_behind() -> None:
    from hybridindex.errors import ServiceError
    from hybridindex.service import daemon_address

    def refuse(path: Any) -> None:
        raise ServiceError(f"{path} is there")

    put(daemon_address, "_remove_stale", refuse)


def _address_left_behind() -> None:
    from hybridindex.service.daemon_address import DaemonAddress

    put(DaemonAddress, "leave", lambda self: self._lock.release())


#: By name.
MUTANTS: dict[str, Callable[[], None]] = {
    made.__name__.strip("_"): made
    for made in (
        _plan_not_recorded,
        _event_not_committed,
        _plan_not_resumed,
        _reload_keeps_the_old,
        _keys_not_read_again,
        _drain_drops_searches,
        _session_of_the_new_generation,
        _session_of_anybody,
        _device_skips_a_list,
        _health_always_good,
        _socket_left_behind,
        _address_left_behind,
    )
}
