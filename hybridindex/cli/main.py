"""The command ``hybridindex``: a thin second client of the library.

Exit statuses are in :class:`hybridindex.cli.console.ExitCode`. Every command takes ``--json``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

# Before anything loads faiss: spinning OpenMP threads on a busy machine make every timing meaningless. An entry point
# may decide this; the library only warns.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hybridindex import HybridIndexError, __version__
from hybridindex import open as open_index
from hybridindex.cli.commands import chat, daemon, index, llm, plan, refresh_schedule, schedule, search, serve, simulate
from hybridindex.cli.commands.doctor import examine, findings_table
from hybridindex.cli.console import ExitCode, emit, fail, show_json_error
from hybridindex.cli.options import Json, StoreUrl

__all__ = ["app", "run"]

#: Typer's parent of all "you called it wrong" errors: its own copy of click in newer versions, click's in older ones.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="hybridindex",
    help="SLO-aware manager of a hybrid CPU+GPU IVF index for retrieval-augmented generation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for commands in (index, plan, search, llm, serve, daemon, schedule, chat, refresh_schedule, simulate):
    commands.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hybridindex {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="The devices: memory, versions, scanners, measurements.")] = False,
    index: Annotated[
        Path | None, typer.Option("--index", metavar="INDEX", help="With --gpu: what its newest profile measured.")
    ] = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Say what hardware and libraries are here, what is missing and how to get it."""
    if gpu:
        _examine_devices(index, store, as_json=json)
        return
    if index is not None:
        raise typer.BadParameter("--index needs --gpu: without it nothing is asked of an index")
    findings = examine()
    emit({"version": __version__, "findings": findings}, as_json=json, table=findings_table(findings))
    if any(f.required and f.state == "missing" for f in findings):
        raise typer.Exit(ExitCode.UNHEALTHY)


def _examine_devices(index: Path | None, store: str | None, *, as_json: bool) -> None:
    from hybridindex.cli.commands.doctor_gpu import examine_devices, report_of_devices

    if index is None:
        report = examine_devices()
    else:
        with open_index(index, verify="quick") as opened:
            report = examine_devices(opened, store)
    emit({"version": __version__, "gpu": report}, as_json=as_json, table=report_of_devices(report))


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write.")] = Path("build/demo"),
    device: Annotated[str, typer.Option(help="auto, cuda:N, or cpu for the stand-in device.")] = "auto",
    json: Json = False,
) -> None:
    """Real text, real queries, from nothing: build, profile, plan, serve with and without the plan, report."""
    from hybridindex.demo.run import run_demo

    run_demo(output, device=device, as_json=json)


def run() -> None:
    """Entry point: turns deliberate errors, and those of the system, into one line and an exit status."""
    as_json = "--json" in sys.argv[1:]
    try:
        # Not standalone: there, Ctrl-C would become a generic abort.
        # Not standalone: there, errors would be shown by Typer.
        status = typer.main.get_command(app)(standalone_mode=False)
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
