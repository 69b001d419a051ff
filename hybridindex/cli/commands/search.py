"""The command search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

import hybridindex as hx
from hybridindex.cli.console import emit, err, load_npy
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import IndexPath, MachineOptions, QueriesPath, SearchOptions
from hybridindex.cli.routers import choose_plan, open_router
from hybridindex.errors import InvalidInputError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    @grouped
    def search(
        index: IndexPath,
        queries: QueriesPath,
        *,
        asked: SearchOptions,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Write ids and distances here.")
        ] = None,
        machine: MachineOptions,
    ) -> None:
        """Search with the stored plan, or on the host alone."""
        x = load_npy(queries, "--queries")
        with (
            hx.open(index) as opened,
            open_router(
                opened, choose_plan(opened, asked.plan, machine.device, machine.store), asked.budget, machine
            ) as router,
        ):
            result = router.search(np.asarray(x), asked.k, asked.nprobe)
            labels = [tier.label for tier in router.devices]
        if output is not None:
            try:
                with output.open("wb") as file:
                    np.savez(file, ids=result.ids, distances=result.distances, nprobe_used=result.nprobe_used)
            except OSError as error:
                raise InvalidInputError(f"--output: cannot write {output} ({error.strerror})") from error
        table = Table("query", "ids", "distances", title=f"devices: {', '.join(labels) or 'none (host only)'}")
        for row in range(min(len(result.ids), 20)):
            ids = " ".join(str(i) for i in result.ids[row][:10])
            table.add_row(str(row), ids, " ".join(f"{d:.4g}" for d in result.distances[row][:10]))
        if len(result.ids) > 20 and not machine.json:
            err.print(f"showing 20 of {len(result.ids)} queries; --json or --output gives all")
        payload = {
            "devices": labels,
            "k": asked.k,
            "ids": result.ids if output is None else None,
            "distances": result.distances if output is None else None,
            "nprobe_used": result.nprobe_used,
            "hit_rate": float(result.hit_rate.mean()),
            "output": output,
        }
        emit(payload, as_json=machine.json, table=table)
