"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridindex.store.retention import Retention

__all__ = [
    "KEPT",
    "Devices",
    "IndexPath",
    "Json",
    "KeepEvents",
    "KeepPlans",
    "KeepProfiles",
    "Key",
    "Nprobe",
    "PlanChoice",
    "QueriesPath",
    "StoreUrl",
    "Threads",
]

IndexPath = Annotated[Path, typer.Argument(metavar="INDEX", help="Index directory.", show_default=False)]
QueriesPath = Annotated[
    Path, typer.Option("--queries", "-q", metavar="FILE.npy", help="Queries, (n, d) float32.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")]
Nprobe = Annotated[
    int | None, typer.Option("--nprobe", help="Lists per query; default the plan's, then the index's.", min=1)
]
Threads = Annotated[int | None, typer.Option("--threads", help="Host threads per scan; default faiss's own.", min=1)]
Devices = Annotated[
    list[str] | None,
    typer.Option("--device", help="cuda:N, or cpu for the stand-in device in RAM. Repeat for several devices."),
]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Control store; default control.sqlite in the index directory."),
]
PlanChoice = Annotated[
    str, typer.Option("--plan", help="Plan id, 'latest', or 'none' to search on the host alone.", show_default=True)
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="HYBRIDINDEX_KEY", help="API key; better given by the environment.", show_default=False
    ),
]
#: Defaults of the next three.
KEPT = Retention()
KeepPlans = Annotated[int, typer.Option("--keep-plans", help="Newest plans of each index that stay.", min=1)]
KeepProfiles = Annotated[int, typer.Option("--keep-profiles", help="Newest profiles of each index that stay.", min=1)]
KeepEvents = Annotated[int, typer.Option("--keep-events", help="Newest events that stay.", min=1)]
