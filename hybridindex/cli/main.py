"""The command ``hybridindex``: composes the commands, and turns errors into exit statuses.

Exit statuses are in :class:`hybridindex.cli.console.ExitCode`. Every command takes ``--json``.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hybridindex import HybridIndexError, __version__
from hybridindex.cli import wait_policy  # noqa: F401
from hybridindex.cli.console import ExitCode, fail, show_json_error

__all__ = ["make_app", "run"]

#: Typer's parent of all "you called it wrong" errors: its own copy of click in newer versions, click's in older ones.
_UsageError: Any = typer.BadParameter.__mro__[1]


def command_name(registered: Any) -> str:
    """Of a command, which may take its name from its function, or of a group of commands, which has one."""
    return str(registered.name or typer.main.get_command_name(registered.callback.__name__))


class _Commands(TyperGroup):
    """Shows commands in the order of :data:`PANELS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = list(_PANEL_OF)
        return sorted(
            super().list_commands(ctx), key=lambda name: order.index(name) if name in _PANEL_OF else len(order)
        )


#: Module in :mod:`hybridindex.cli.commands` -> its commands, in the order of the help.
_COMMANDS = {
    "index": (
        "build",
        "import",
        "compress",
        "attributes",
        "add",
        "delete",
        "compact",
        "snapshot",
        "restore",
        "export",
        "verify",
        "rollback",
        "gc",
    ),
    "ingest": ("ingest",),
    "plan": ("profile", "plan", "divide", "explain", "history", "prune", "report"),
    "search": ("search",),
    "bench": ("bench",),
    "llm": ("vllm-args",),
    "serve": ("serve",),
    "daemon": ("status", "repartition", "apply", "reload", "drain", "keys"),
    "several.cluster": ("cluster",),
    "schedule": ("schedule", "hardware"),
    "chat": ("chat",),
    "refresh_schedule": ("refresh-schedule",),
    "simulate": ("simulate",),
    "doctor": ("doctor",),
    "demo": ("demo",),
}

#: Panels of --help, and their commands.
PANELS = {
    "Index": (
        "build",
        "ingest",
        "import",
        "compress",
        "attributes",
        "add",
        "delete",
        "compact",
        "snapshot",
        "restore",
        "export",
        "verify",
        "rollback",
        "gc",
    ),
    "Profile and plan": ("profile", "plan", "divide", "explain", "apply", "history", "prune", "report"),
    "Search": ("search", "bench", "chat"),
    "Daemon": ("serve", "status", "repartition", "reload", "drain", "refresh-schedule", "keys"),
    "Several machines": ("cluster",),
    "Without the hardware": ("simulate", "schedule", "hardware"),
    "This machine": ("doctor", "demo", "vllm-args"),
}
_PANEL_OF = {command: panel for panel, names in PANELS.items() for command in names}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hybridindex {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def make_app(word: str | None = None) -> typer.Typer:
    """The whole command line; where its first ``word`` says which module is meant, that module's alone.

    Importing all of them takes as long as many a command.
    """
    app = typer.Typer(
        name="hybridindex",
        cls=_Commands,
        help="SLO-aware manager of a hybrid CPU+GPU IVF index for retrieval-augmented generation.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    meant = [name for name, commands in _COMMANDS.items() if word in commands]
    for name in meant or _COMMANDS:
        import_module(f"hybridindex.cli.commands.{name}").register(app)
    _unwrap_help(app)
    every: list[Any] = [*app.registered_commands, *app.registered_groups]
    for registered in every:
        registered.rich_help_panel = _PANEL_OF.get(command_name(registered))
    return app


def _unwrap_help(app: typer.Typer) -> None:
    """Makes each paragraph of a command's docstring one line: Typer keeps the line breaks of all but the first."""
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _unwrap_help(group.typer_instance)


def run() -> None:
    """Entry point: turns deliberate errors, and those of the system, into one line and an exit status."""
    words = sys.argv[1:]
    as_json = "--json" in words
    try:
        # Standalone, Typer would turn Ctrl-C into a generic abort and print errors itself.
        status = typer.main.get_command(make_app(words[0] if words else None))(
            prog_name="hybridindex", standalone_mode=False
        )
        # Typer turns Ctrl-C into this status, and says nothing.
        if status == ExitCode.INTERRUPTED:
            status = fail(KeyboardInterrupt(), as_json=as_json)
    except _UsageError as error:
        if as_json:
            show_json_error("UsageError", error.format_message(), ExitCode.USAGE)
        error.show()
        status = ExitCode.USAGE
    except (HybridIndexError, OSError, KeyboardInterrupt, typer.Abort) as error:
        status = fail(KeyboardInterrupt() if isinstance(error, typer.Abort) else error, as_json=as_json)
    sys.exit(status)


if __name__ == "__main__":
    run()
