"""The command serve: a daemon over one index, from options and a settings file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridindex.cli.console import emit, out
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Json
from hybridindex.cli.setting_options import ConfigFile, RouterOptions, SettingOptions, options_of, settings_in
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.settings import Settings
from hybridindex.store.retention import Retention

if TYPE_CHECKING:
    from hybridindex.service.daemon import MakeRefresher

__all__ = ["register"]


@options_of(ServiceConfig, "Daemon")
class ServiceOptions(SettingOptions):
    """The daemon's own options."""


@options_of(Limits, "Limits", tables=("limits",))
class LimitOptions(SettingOptions):
    """What requests may take."""


@options_of(Retention, "Retention", tables=("retention",))
class RetentionOptions(SettingOptions):
    """What stays in the control store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOptions:
    """Whether to listen on TCP, and what follows the load."""

    tcp: Annotated[
        bool | None,
        typer.Option("--tcp/--no-tcp", help="Listen on TCP.", show_default="tcp", rich_help_panel="Daemon"),
    ] = None
    refresh: Annotated[
        bool | None,
        typer.Option(
            "--refresh/--no-refresh",
            help="Watch the load and change the plan when it drifts; resumes the last committed plan.",
            show_default="no-refresh",
            rich_help_panel="Refresh",
        ),
    ] = None
    keep_queries: Annotated[
        int | None,
        typer.Option(
            "--keep-queries",
            help="Recent queries that --refresh keeps, in memory; 0: none.",
            min=0,
            show_default="4096",
            rich_help_panel="Refresh",
        ),
    ] = None


def _refresher_of(settings: Settings, options: OtherOptions) -> MakeRefresher | None:
    """How to make a refresher, where the option or the table [refresh] asks for one; ``settings``: that table alone."""
    from hybridindex.refresh.config import RefreshConfig

    config = settings.build(RefreshConfig, {"reservoir_queries": options.keep_queries}, table="refresh")
    if not ("refresh" in settings.names() if options.refresh is None else options.refresh):
        return None
    from hybridindex.refresh.refresher import Refresher

    return lambda index, router, store: Refresher(index, router, store, config)


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""

    @app.command()
    @grouped
    def serve(
        index: Annotated[Path, typer.Argument(metavar="INDEX", help="Index directory.", show_default=False)],
        service: ServiceOptions,
        router: RouterOptions,
        limits: LimitOptions,
        retention: RetentionOptions,
        other: OtherOptions,
        config: ConfigFile = None,
        json: Json = False,
    ) -> None:
        """Serve an index over HTTP until SIGTERM, Ctrl-C or drain, by the plan that was applied last.

        --plan N applies plan N first. Where no plan was ever applied, the host scans everything, and the log says which
        command applies one.

        All settings can also stand in a file (--config), which docs/settings.md describes. Log lines go to standard
        error. With --json, one object with pid and addresses is printed once it listens.
        """
        settings = settings_in(config)
        make_refresher = _refresher_of(settings.only("refresh"), other)
        given = {**service.given(), **router.given(), **limits.given(), **retention.given()}
        if other.tcp is False:
            given["host"] = False
        whole = settings.without("refresh").build(ServiceConfig, given)
        from hybridindex.service.daemon import serve as run_daemon

        def announce(urls: tuple[str, ...]) -> None:
            emit({"pid": os.getpid(), "urls": urls}, as_json=json)
            out.file.flush()

        run_daemon(index, whole, make_refresher=make_refresher, on_listening=announce)
