"""Arguments and options that several commands share; groups of them are for :mod:`hybridindex.cli.option_groups`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hybridindex.types import DEFAULT_HEADROOM, VectorFile

__all__ = [
    "WHAT_IF",
    "AllowIds",
    "BandwidthShare",
    "Budget",
    "DenyIds",
    "Devices",
    "Force",
    "IndexPath",
    "InputOptions",
    "Json",
    "KeepEvents",
    "KeepPlans",
    "KeepProfiles",
    "Key",
    "MachineOptions",
    "NewFolder",
    "Nprobe",
    "PlanChoice",
    "PlanOptions",
    "QueriesPath",
    "RowAttributes",
    "SearchOptions",
    "StoreUrl",
    "Threads",
    "WhatIfOptions",
    "Where",
]

IndexPath = Annotated[Path, typer.Argument(metavar="INDEX", help="Index directory.", show_default=False)]
QueriesPath = Annotated[
    Path,
    typer.Option(
        "--queries", "-q", metavar="FILE.npy", help="Query vectors, (n, d); or .fvecs, .bvecs.", show_default=False
    ),
]
AllowIds = Annotated[
    Path | None,
    typer.Option(
        "--allow-ids",
        metavar="FILE",
        help="Ids that answers may contain: a .npy file of integers, or a text file, one id per line.",
    ),
]
DenyIds = Annotated[
    Path | None, typer.Option("--deny-ids", metavar="FILE", help="Ids that answers must not contain; same formats.")
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where", help="Condition on attributes, e.g. \"lang = 'en' AND year >= 2020\"; see docs/filters.md."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")]
Nprobe = Annotated[
    int | None, typer.Option("--nprobe", help="Lists per query; default: the plan's, else the index's.", min=1)
]
Threads = Annotated[int | None, typer.Option("--threads", help="Host threads per scan; default: faiss's own.", min=1)]
Devices = Annotated[
    list[str] | None,
    typer.Option("--device", help="cuda:N, or cpu for the stand-in device in RAM. Repeat for several devices."),
]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Control store; default: control.sqlite in the index directory."),
]
Budget = Annotated[str | None, typer.Option("--budget", help="Bytes per device; default: the plan's.")]
Force = Annotated[bool, typer.Option("--force", help="Apply the plan even if it cannot meet its SLO.")]
BandwidthShare = Annotated[
    float | None, typer.Option("--bandwidth-share", help="Fraction of the time that may be spent on copying.")
]
PlanChoice = Annotated[
    str,
    typer.Option(
        "--plan",
        help="Plan id, 'latest', 'current' (applied last), or 'none' to search on the host only.",
        show_default=True,
    ),
]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="HYBRIDINDEX_KEY", help="API key; better set in the environment.", show_default=False),
]
KeepPlans = Annotated[int, typer.Option("--keep-plans", help="Newest plans to keep of each index.", min=1)]
KeepProfiles = Annotated[int, typer.Option("--keep-profiles", help="Newest profiles to keep of each index.", min=1)]
KeepEvents = Annotated[int, typer.Option("--keep-events", help="Newest events to keep.", min=1)]


NewFolder = Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory.", show_default=False)]
RowAttributes = Annotated[
    Path | None,
    typer.Option(
        "--attributes", metavar="FILE", help="Parquet, Arrow, Feather, CSV or JSON lines: one row per vector."
    ),
]


#: What is searched, profiled and planned.
Precision = Annotated[
    str,
    typer.Option(metavar="auto|codes|rows", help="What searches scan: codes or rows. auto: see docs/compressed.md."),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        help="Rows that a search by codes compares exactly, at least k; default: as compress measured.",
        min=1,
    ),
]
Rows = Annotated[
    str,
    typer.Option(
        metavar="resident|mapped",
        help="Where rows are while codes are scanned: in memory, or on disk; see docs/compressed.md.",
    ),
]
RowCache = Annotated[
    str | None,
    typer.Option(
        "--row-cache",
        metavar="BYTES|all",
        help="Host memory available for rows if they stay on disk (--rows mapped), e.g. 8GiB; all: rows are in memory. "
        "Default: as in the current plan, else all.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """What is read of the file, and which ids the vectors get."""

    column: Annotated[
        str | None, typer.Option(help="Column or dataset of the vectors; default: the only possible one.")
    ] = None
    ids_column: Annotated[str | None, typer.Option(help="Column or dataset of the ids.")] = None
    ids: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="(n,) int64 ids; default: 0..n-1.")] = None
    dtype: Annotated[str | None, typer.Option(metavar="bf16", help="Read a .npy file of uint16 as bfloat16.")] = None

    def file(self, path: Path) -> VectorFile:
        return VectorFile(path, column=self.column, ids_column=self.ids_column, dtype=self.dtype)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Options of commands that search or measure on this machine."""

    device: Devices = None
    threads: Threads = None
    store: StoreUrl = None
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What is searched for, and which plan the router follows."""

    k: Annotated[int, typer.Option("-k", help="Neighbours per query.", min=1)] = 10
    nprobe: Nprobe = None
    plan: PlanChoice = "latest"
    budget: Budget = None
    precision: Precision = "auto"
    candidates: Candidates = None
    rows: Rows = "resident"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan shall reach, with what, and by which profile."""

    slo_ms: Annotated[float, typer.Option("--slo-ms", help="Latency target, including queueing.")]
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", help="Bytes per device, e.g. 2GiB; once, or once per device. Optional with --hardware."
        ),
    ] = None
    n_devices: Annotated[int, typer.Option("--n-devices", help="Devices to place lists on.", min=1)] = 1
    rate: Annotated[float | None, typer.Option(help="Requests per second to sustain.")] = None
    llm: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json|latest|ID",
            help="LLM profile: a file, or one stored by profile llm. With --hardware, also a model's name.",
        ),
    ] = None
    epsilon: Annotated[
        float | None, typer.Option(help="Queueing factor; 1 is the worst case. Default: from the rate.")
    ] = None
    percentile: Annotated[float, typer.Option(help="Latency percentile that the SLO bounds.")] = 90.0
    coverage: Annotated[float | None, typer.Option(help="Fraction of lists on devices, instead of solving for it.")] = (
        None
    )
    slo_stage: Annotated[
        str | None,
        typer.Option(help="What the SLO bounds: search or ttft. Default: search; with --hardware and --llm: ttft."),
    ] = None
    hit_rate_model: Annotated[
        str, typer.Option(help="Hit-rate model: beta, beta-binomial, empirical, or the best of them.")
    ] = "best"
    headroom: Annotated[
        float, typer.Option(help="Fraction of the rate and of the SLO that search must have to spare.")
    ] = DEFAULT_HEADROOM
    precision: Precision = "auto"
    row_cache: RowCache = None
    profile_id: Annotated[int | None, typer.Option("--profile", help="Profile id; default: the newest.")] = None
    any_hardware: Annotated[bool, typer.Option("--any-hardware", help="Accept a profile of another machine.")] = False


#: Panel of the help.
WHAT_IF = "What if"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """How a supposed machine and index differ from the profiled ones."""

    host_speed: Annotated[
        float, typer.Option(help="Speed of host stages, as a multiple of the profiled one.", rich_help_panel=WHAT_IF)
    ] = 1.0
    index_scale: Annotated[
        float, typer.Option(help="Length of lists, as a multiple of the profiled one.", rich_help_panel=WHAT_IF)
    ] = 1.0
