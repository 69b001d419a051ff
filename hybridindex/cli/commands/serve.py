"""The command serve: a daemon over one index or several, from options and a settings file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from hybridindex.cli.console import emit, out
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Json
from hybridindex.cli.setting_options import ConfigFile, RouterOptions, SettingOptions, options_of, settings_in
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.drift import DriftPolicy
from hybridindex.refresh.update_cycle import UpdatePolicy
from hybridindex.service.config import DocumentConfig, Limits, NodeConfig, ServiceConfig
from hybridindex.store.retention import Retention

__all__ = ["register"]


@options_of(ServiceConfig, "Daemon")
class ServiceOptions(SettingOptions):
    """The daemon's own options."""


@options_of(Limits, "Limits", tables=("limits",))
class LimitOptions(SettingOptions):
    """What requests may take."""


@options_of(DocumentConfig, "Documents", tables=("documents",))
class DocumentOptions(SettingOptions):
    """What embeds documents that come."""


@options_of(NodeConfig, "Node of a cluster", tables=("node",))
class NodeOptions(SettingOptions):
    """What makes it a node of a cluster."""


@options_of(Retention, "Retention", tables=("retention",))
class RetentionOptions(SettingOptions):
    """What stays in the control store."""


@options_of(RefreshConfig, "Refresh", tables=("refresh",), prefix="refresh_")
class RefreshOptions(SettingOptions):
    """How the load is watched."""


@options_of(DriftPolicy, "Refresh", tables=("refresh", "drift"), prefix="drift_")
class DriftOptions(SettingOptions):
    """What begins an update."""


@options_of(UpdatePolicy, "Refresh", tables=("refresh", "update"), prefix="update_")
class UpdateOptions(SettingOptions):
    """What a new plan must bring."""


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


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""

    @app.command()
    @grouped
    def serve(
        service: ServiceOptions,
        router: RouterOptions,
        limits: LimitOptions,
        documents: DocumentOptions,
        node: NodeOptions,
        retention: RetentionOptions,
        watching: RefreshOptions,
        drift: DriftOptions,
        update: UpdateOptions,
        other: OtherOptions,
        index: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="INDEX | NAME=INDEX ...",
                help="Index directories; NAME defaults to the folder's name.",
                show_default=False,
            ),
        ] = None,
        config: ConfigFile = None,
        json: Json = False,
    ) -> None:
        """Serve an index over HTTP until SIGTERM, Ctrl-C or drain, with the plan that was applied last.

        Several indexes, given here or in tables indexes.NAME of the settings file, share --budget, which is divided by
        what bytes bring to each. Routes below /v1/indexes/NAME address one; other routes address the first.

        --plan N applies plan N first. If no plan was ever applied, the host scans everything, and the log names the
        command that applies one.

        All settings can also be set in a file (--config); see docs/settings.md. Log lines go to standard error. With
        --json, one object with pid and addresses is printed once the daemon listens.
        """
        from hybridindex.service.serving import refresh_config, refresher_of
        from hybridindex.service.several.config import indexes_of

        settings = settings_in(config)
        indexes = indexes_of(index or (), settings)
        follows = watching.given().get("refresh", {}) | drift.given().get("refresh", {})
        follows |= update.given().get("refresh", {})
        planning = refresh_config(settings, {"refresh": follows})
        make_refresher = refresher_of(settings, planning, asked=other.refresh)
        given = {
            **service.given(),
            **router.given(),
            **limits.given(),
            **documents.given(),
            **node.given(),
            **retention.given(),
        }
        if other.tcp is False:
            given["host"] = False
        whole = settings.without("refresh", "indexes").build(ServiceConfig, given)
        from hybridindex.service.daemon import serve as run_daemon

        def announce(urls: tuple[str, ...]) -> None:
            emit({"pid": os.getpid(), "urls": urls}, as_json=json)
            out.file.flush()

        run_daemon(indexes, whole, make_refresher=make_refresher, planning=planning, on_listening=announce)
