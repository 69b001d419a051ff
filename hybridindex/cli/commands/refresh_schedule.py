"""The command refresh-schedule: rows of the control store, times at which a daemon with --refresh updates its plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from hybridindex.cli.console import emit, require_store
from hybridindex.cli.options import IndexPath, Json, StoreUrl
from hybridindex.errors import InvalidInputError
from hybridindex.refresh.timetable import check_schedule
from hybridindex.store.control import ControlStore
from hybridindex.store.records import ScheduleEntry

__all__ = ["register"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the entry.", show_default=False)]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _open(index: IndexPath, store: str | None) -> ControlStore:
    return ControlStore.open(store or index / "control.sqlite")


def _seconds(text: str) -> str:
    """ "6h" as "21600"; anything else stays as it is, and the check of the row refuses it."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text and text[-1] in _UNITS else (text, 1)
    try:
        return f"{float(number) * unit:.15g}"
    except ValueError:
        return text


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    schedule = typer.Typer(
        name="refresh-schedule",
        help="Times at which a daemon with --refresh updates its plan; it reads them when it starts.",
        no_args_is_help=True,
        add_completion=False,
    )
    app.add_typer(schedule, name="refresh-schedule")

    @schedule.command(name="list")
    def list_(index: IndexPath, store: StoreUrl = None, json: Json = False) -> None:
        """List the entries."""
        require_store(store)
        with _open(index, store) as control:
            found = control.list_schedule()
        table = Table("name", "kind", "spec", "action", "enabled", "last run")
        for row in found:
            table.add_row(row.name, row.kind, row.spec, row.action, str(row.enabled).lower(), row.last_run_at or "")
        emit({"schedule": [asdict(row) for row in found]}, as_json=json, table=table)

    @schedule.command(name="set")
    def set_(
        index: IndexPath,
        name: Name,
        every: Annotated[
            str | None,
            typer.Option("--every", help="Interval: seconds, or a number with s, m, h or d.", show_default=False),
        ] = None,
        cron: Annotated[
            str | None, typer.Option("--cron", help="Cron expression in UTC, e.g. '0 3 * * *'.", show_default=False)
        ] = None,
        enabled: Annotated[bool, typer.Option("--enabled/--disabled", help="Whether it runs at its times.")] = True,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Add an entry, or replace the one of that name."""
        if (every is None) == (cron is None):
            raise InvalidInputError("--every and --cron: expected exactly one of them")
        entry = ScheduleEntry(
            name=name,
            kind="interval" if cron is None else "cron",
            spec=_seconds(every) if every is not None else str(cron),
            action="update",
            enabled=enabled,
        )
        check_schedule(entry)
        with _open(index, store) as control:
            control.set_schedule(entry)
        emit(asdict(entry), as_json=json, table=f"set {name}; a daemon reads it when it starts")

    @schedule.command()
    def remove(index: IndexPath, name: Name, store: StoreUrl = None, json: Json = False) -> None:
        """Remove an entry."""
        require_store(store)
        with _open(index, store) as control:
            control.remove_schedule(name)
        emit({"removed": name}, as_json=json, table=f"removed {name}")
