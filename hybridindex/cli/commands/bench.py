"""The command bench: open-loop load on a router."""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

import hybridindex as hx
from hybridindex.cli.console import CliProgress, ExitCode, emit, err, load_npy, readable_bytes
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import IndexPath, MachineOptions, QueriesPath, SearchOptions
from hybridindex.cli.routers import choose_plan, open_router
from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.plans.benches import keep_bench
from hybridindex.profiler.open_loop import LoadResult, PoissonLoad, run_open_loop

__all__ = ["register"]


def _one_bar(progress: CliProgress, name: str, _stage: str, done: int, total: int | None) -> None:
    progress(name, done, total)


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""

    @app.command()
    @grouped
    def bench(
        index: IndexPath,
        queries: QueriesPath,
        *,
        rate: Annotated[list[float], typer.Option("--rate", help="Requests per second; repeat for several.")],
        duration: Annotated[float, typer.Option(help="Seconds per rate.")] = 10.0,
        slo_ms: Annotated[
            float | None, typer.Option("--slo-ms", help="SLO that attainment is measured against; default: the plan's.")
        ] = None,
        asked: SearchOptions,
        seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0,
        machine: MachineOptions,
    ) -> None:
        """Run an open-loop Poisson load of single queries: latencies, attainment, hit rate. A report shows the last."""
        given = np.asarray(load_npy(queries, "--queries"))
        if given.shape[:1] == (0,):
            raise InvalidInputError("--queries holds 0 rows; expected at least 1")
        rows: list[LoadResult] = []
        interrupted = False
        with hx.open(index) as opened:
            x = opened.ivf.check_queries(given)
            number, chosen = choose_plan(opened, asked.plan, machine.device or (), machine.store, asked.precision)  # type: ignore[arg-type]
            target = slo_ms if slo_ms is not None else chosen.request.slo_ms if chosen is not None else None
            loads = [
                PoissonLoad(
                    rate=offered,
                    duration_s=duration,
                    k=asked.k,
                    nprobe=asked.nprobe,
                    slo_ms=target,
                    seed=seed,
                )
                for offered in rate
            ]
            with (
                open_router(opened, chosen, asked, machine) as router,
                CliProgress(quiet=machine.json) as progress,
            ):
                labels = [tier.label for tier in router.devices]
                used = sum(tier.used_bytes for tier in router.devices)
                fingerprint, scanned = router.index_fingerprint, router.precision
                try:
                    for load in loads:
                        bar = functools.partial(_one_bar, progress, f"{load.rate:g}/s")
                        rows.append(run_open_loop(router, x, load, progress=bar))
                except KeyboardInterrupt:
                    if not rows:
                        raise
                    interrupted = True  # what was measured is stored and shown
        table = Table(
            "rate/s", "answered/s", "p50 ms", "p95 ms", "p99 ms", "attainment", "hit rate", "batch",
            title=f"devices: {', '.join(labels) or 'none (host only)'}, {readable_bytes(used)} resident; {scanned}",
        )  # fmt: skip
        for row in rows:
            met = "-" if row.attainment is None else f"{row.attainment:.1%}"
            table.add_row(
                f"{row.rate:g}", f"{row.achieved_rate:.1f}", f"{row.p50_ms:.2f}", f"{row.p95_ms:.2f}",
                f"{row.p99_ms:.2f}", met, f"{row.hit_rate:.1%}", f"{row.mean_batch:.1f}",
            )  # fmt: skip
        payload = {"devices": labels, "precision": scanned, "resident_bytes": used, "slo_ms": target, "load": rows}
        try:
            with hx.open(index, verify="quick") as opened, opened.store(machine.store) as control:
                keep_bench(
                    control,
                    fingerprint,
                    number if labels else None,
                    devices=labels,
                    resident_bytes=used,
                    slo_ms=target,
                    load=[asdict(row) for row in rows],
                )
        except StoreError as error:
            err.print(f"this load is not stored, and no report will show it: {error}", highlight=False)
        emit(payload, as_json=machine.json, table=table)
        if interrupted:
            words = f"KeyboardInterrupt: interrupted; {len(rows)} of {len(loads)} rates were measured"
            err.print(words, highlight=False)
            sys.exit(ExitCode.INTERRUPTED)
