"""The command search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.cli.console import emit, err, load_ids, load_npy
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import AllowIds, DenyIds, IndexPath, MachineOptions, QueriesPath, SearchOptions, Where
from hybridindex.cli.routers import choose_plan, open_router

__all__ = ["register"]


def _write_arrays(output: Path, **arrays: np.ndarray[Any, Any]) -> None:
    """A file that was there is written anew, or stays as it was; of a new one nothing half written stays."""
    if filesystem.is_file(output):
        with filesystem.replacing(output.resolve()) as beside:
            filesystem.write_arrays(beside, **arrays)
        return
    is_new = not filesystem.exists(output)
    try:
        filesystem.write_arrays(output, **arrays)
    except BaseException:
        if is_new:
            filesystem.discard(output)
        raise


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    @grouped
    def search(
        index: IndexPath,
        queries: QueriesPath,
        *,
        asked: SearchOptions,
        allow_ids: AllowIds = None,
        deny_ids: DenyIds = None,
        where: Where = None,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Write ids and distances here.")
        ] = None,
        machine: MachineOptions,
    ) -> None:
        """Search with the stored plan, or on the host only."""
        x = load_npy(queries, "--queries")
        allowed = None if allow_ids is None else load_ids(allow_ids, "--allow-ids")
        denied = None if deny_ids is None else load_ids(deny_ids, "--deny-ids")
        with hx.open(index) as opened:
            _, plan = choose_plan(opened, asked.plan, machine.device or (), machine.store, asked.precision)  # type: ignore[arg-type]
            with open_router(opened, plan, asked, machine) as router:
                result = router.search(
                    np.asarray(x), asked.k, asked.nprobe, allow_ids=allowed, deny_ids=denied, where=where
                )
                labels, scanned = [tier.label for tier in router.devices], router.precision
        if output is not None:
            _write_arrays(output, ids=result.ids, distances=result.distances, nprobe_used=result.nprobe_used)
        table = Table(
            "query", "ids", "distances", title=f"devices: {', '.join(labels) or 'none (host only)'}; {scanned}"
        )
        for row in range(min(len(result.ids), 20)):
            ids = " ".join(str(i) for i in result.ids[row][:10])
            table.add_row(str(row), ids, " ".join(f"{d:.4g}" for d in result.distances[row][:10]))
        if len(result.ids) > 20 and not machine.json:
            err.print(f"showing 20 of {len(result.ids)} queries; use --json or --output for all")
        payload = {
            "devices": labels,
            "precision": scanned,
            "k": asked.k,
            "ids": result.ids if output is None else None,
            "distances": result.distances if output is None else None,
            "nprobe_used": result.nprobe_used,
            "hit_rate": float(result.hit_rate.mean()),
            "output": output,
        }
        emit(payload, as_json=machine.json, table=table)
