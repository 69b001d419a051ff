"""The command doctor: what hardware and libraries are here, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from hybridindex import __version__
from hybridindex import open as open_index
from hybridindex.cli import wait_policy
from hybridindex.cli.console import ExitCode, emit
from hybridindex.cli.options import Json, StoreUrl
from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.extension import import_error, native
from hybridindex.index.faiss_model import require_faiss

__all__ = ["Finding", "examine", "findings_table", "register"]

State = Literal["ok", "note", "missing"]

#: What an import of torch raises where it, or a library that it needs, is not there or is another one.
_BROKEN = (ImportError, OSError, RuntimeError, ValueError)
_LOAD_REMEDY = "install the library that the error names, or reinstall the package"
#: Use and packages of an extra.
_EXTRAS = {
    "client": ("requests to a daemon or a server, from Python and on the command line", ("httpx",)),
    "service": (
        "hybridindex serve",
        ("apscheduler", "fastapi", "httpx", "prometheus-client", "pydantic", "typing-extensions", "uvicorn"),
    ),
    "refresh": ("refreshes on a schedule", ("apscheduler",)),
    "filters": ("attributes of rows, and conditions on them", ("pyarrow", "sqlglot")),
    "ingest": ("texts of PDF files", ("pypdf",)),
    "cluster": (
        "hybridindex cluster",
        ("fastapi", "httptools", "httpx", "prometheus-client", "pydantic", "ray", "typing-extensions", "uvicorn"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str
    #: What to do about it; empty when nothing.
    remedy: str = ""
    #: Nothing works without it.
    required: bool = False


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> list[Finding]:
    """Looks at the machine and the installed packages; imports only what it reports on."""
    return [*_hardware(), _extension(), _faiss(), *_torch(), *_packages(), *_extras(), _wait_policy()]


def _hardware() -> list[Finding]:
    from hybridindex.profiler.hardware import hardware_info

    try:
        info = hardware_info()
    except _BROKEN as error:  # it asks torch for devices
        return [Finding(what="hardware", state="note", detail=f"cannot be examined: {error}")]
    flags = " ".join(f for f in info.cpu_flags if f.startswith(("avx", "amx", "asimd", "sve"))) or "none known"
    cpu = f"{info.cpu_model}, {info.cores} usable cores, vector units: {flags}"
    return [
        Finding(what="processor", state="ok", detail=cpu),
        Finding(what="memory", state="ok", detail=f"{info.memory_bytes / 2**30:.1f} GiB"),
        Finding(what="hardware fingerprint", state="ok", detail=info.fingerprint),
    ]


def _extension() -> Finding:
    if native is None:
        return Finding(
            what="native extension",
            state="note",
            detail=f"not built ({import_error}): faiss scans on the host, numpy splits and merges, both slower",
            remedy="install a wheel, or the source with a C++ compiler: pip install --force-reinstall --no-deps .",
        )
    kernels = ", ".join(native.kernels_here())
    return Finding(what="native extension", state="ok", detail=f"usable host scan kernels, best first: {kernels}")


def _faiss() -> Finding:
    try:
        faiss = require_faiss()
    except MissingDependencyError as error:
        detail = "not installed: needed to train, quantize and scan"
        remedy = f"{how_to_install('cpu')}; beside a GPU: {how_to_install('gpu')}"
        if error.name != "faiss":
            detail, remedy = f"installed, but does not load: {error.__cause__}", _LOAD_REMEDY
        return Finding(what="faiss", state="missing", detail=detail, remedy=remedy, required=True)
    kind = "faiss-gpu" if hasattr(faiss, "StandardGpuResources") else "faiss-cpu"
    both = _package("faiss-cpu") and _package("faiss-gpu")
    return Finding(
        what="faiss",
        state="note" if both else "ok",
        detail=f"{kind} {faiss.__version__} ({faiss.get_compile_options().strip()})",
        remedy="both faiss-cpu and faiss-gpu are installed and own the same module; uninstall one" if both else "",
    )


def _torch() -> list[Finding]:
    try:
        import torch
    except _BROKEN as error:
        detail, remedy = "not installed: no device tier", how_to_install("device")
        if not isinstance(error, ModuleNotFoundError) or error.name != "torch":
            detail, remedy = f"installed, but does not load: {error}", _LOAD_REMEDY
        return [Finding(what="torch", state="note", detail=detail, remedy=remedy)]
    found = [Finding(what="torch", state="ok", detail=torch.__version__)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        state: State = "ok"
        try:
            free, total = torch.cuda.mem_get_info(number)
            detail = f"{torch.cuda.get_device_name(number)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        except RuntimeError as error:
            state, detail = "note", f"does not answer: {error}"
        remedy = "" if state == "ok" else "see nvidia-smi and the kernel log"
        found.append(Finding(what=f"cuda:{number}", state=state, detail=detail, remedy=remedy))
    if not count:
        detail = "no CUDA device: the device tier runs on the stand-in device in RAM ('cpu')"
        found.append(
            Finding(what="GPU", state="note", detail=detail, remedy="timings of a stand-in say nothing about GPUs")
        )
    return found


def _packages() -> list[Finding]:
    extras = [
        ("pyarrow", "formats", "Parquet and Arrow files"),
        ("h5py", "formats", "HDF5 files"),
        ("matplotlib", "report", "pictures and reports"),
        ("psycopg", "postgres", "control store in PostgreSQL"),
        ("vllm", "vllm", "serving beside vLLM"),
    ]
    found = []
    for package, extra, use in extras:
        version = _package(package)
        remedy = "" if version else how_to_install(extra)
        state: State = "ok" if version else "note"
        found.append(Finding(what=package, state=state, detail=version or f"not installed: {use}", remedy=remedy))
    return found


def _extras() -> list[Finding]:
    """Extras whose parts are of use together alone."""
    found = []
    for extra, (use, packages) in _EXTRAS.items():
        missing = next((package for package in packages if _package(package) is None), None)
        detail = f"completely installed: {use}" if missing is None else f"{missing} is not installed: {use}"
        state: State = "ok" if missing is None else "note"
        remedy = "" if missing is None else how_to_install(extra)
        found.append(Finding(what=f"extra {extra}", state=state, detail=detail, remedy=remedy))
    return found


def _wait_policy() -> Finding:
    policy = wait_policy.GIVEN
    if policy.strip().upper() == "PASSIVE":
        return Finding(what="OMP_WAIT_POLICY", state="ok", detail=policy)
    return Finding(
        what="OMP_WAIT_POLICY",
        state="note",
        detail=f"{policy or 'unset'}: spinning threads of programs that load the library distort timings on busy "
        "machines; the command hybridindex uses PASSIVE if it is unset",
        remedy="export OMP_WAIT_POLICY=PASSIVE before Python starts",
    )


def findings_table(findings: list[Finding]) -> Table:
    """The findings, for people."""
    colours = {"ok": "green", "note": "yellow", "missing": "red"}
    table = Table("", "what", "found", "what to do")
    for finding in findings:
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(state, finding.what, finding.detail, finding.remedy)
    return table


def _emit_gpu_report(index: Path | None, store: str | None, *, as_json: bool) -> None:
    from hybridindex.cli.doctor_gpu import examine_devices, report_of_devices

    if index is None:
        report = examine_devices()
    else:
        with open_index(index, verify="quick") as opened:
            report = examine_devices(opened, store)
    emit({"version": __version__, "gpu": report}, as_json=as_json, table=report_of_devices(report))


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""

    @app.command()
    def doctor(
        gpu: Annotated[
            bool, typer.Option("--gpu", help="Examine the devices: memory, versions, scanners, measurements.")
        ] = False,
        index: Annotated[
            Path | None,
            typer.Option("--index", metavar="INDEX", help="With --gpu: show what its newest profile measured."),
        ] = None,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Show the hardware and libraries found, what is missing and how to install it."""
        if gpu:
            _emit_gpu_report(index, store, as_json=json)
            return
        if index is not None:
            raise typer.BadParameter("--index requires --gpu")
        findings = examine()
        emit({"version": __version__, "findings": findings}, as_json=json, table=findings_table(findings))
        if any(f.required and f.state == "missing" for f in findings):
            raise typer.Exit(ExitCode.UNHEALTHY)
