"""Commands that search: search, bench."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

import hybridindex as hx
from hybridindex.cli.console import CliProgress, emit, err, load_npy, parse_bytes, readable_bytes
from hybridindex.cli.options import Devices, IndexPath, Json, Nprobe, PlanChoice, QueriesPath, StoreUrl, Threads
from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.stored import load_plan
from hybridindex.profiler.hardware import hardware_info
from hybridindex.profiler.open_loop import run_open_loop

__all__ = ["Budget", "choose_plan", "register"]


def choose_plan(index: hx.Index, choice: str, devices: list[str] | None, store: str | None) -> Plan | None:
    """Without devices a plan only gives nprobe; then a missing one is no error."""
    with index.store(store) as control:
        if choice == "latest" and not devices and not control.list_plans(index_fingerprint=index.fingerprint):
            return None
        found = load_plan(index, choice, control)
    if found is None:
        return None
    number, plan = found
    here = hardware_info().fingerprint
    if devices and plan.hardware_fingerprint != here:
        raise ProfileMismatchError(
            f"plan {number} was made from a profile of machine {plan.hardware_fingerprint}, this is machine {here}; "
            "run profile and plan here"
        )
    return plan


def _one_bar(progress: CliProgress, name: str, _stage: str, done: int, total: int | None) -> None:
    progress(name, done, total)


def _budget(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


Budget = Annotated[str | None, typer.Option("--budget", help="Bytes per device; default the plan's.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    def search(
        index: IndexPath,
        queries: QueriesPath,
        k: Annotated[int, typer.Option("-k", help="Neighbours per query.", min=1)] = 10,
        nprobe: Nprobe = None,
        plan: PlanChoice = "latest",
        device: Devices = None,
        budget: Budget = None,
        threads: Threads = None,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Write ids and distances here.")
        ] = None,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Search with the stored plan, or on the host alone."""
        x = load_npy(queries, "--queries")
        with (
            hx.open(index) as opened,
            opened.router(
                choose_plan(opened, plan, device, store),
                device or (),
                threads=threads,
                device_budget_bytes=_budget(budget),
            ) as router,
        ):
            result = router.search(np.asarray(x), k, nprobe)
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
        if len(result.ids) > 20 and not json:
            err.print(f"showing 20 of {len(result.ids)} queries; --json or --output gives all")
        payload = {
            "devices": labels,
            "k": k,
            "ids": result.ids if output is None else None,
            "distances": result.distances if output is None else None,
            "nprobe_used": result.nprobe_used,
            "hit_rate": float(result.hit_rate.mean()),
            "output": output,
        }
        emit(payload, as_json=json, table=table)

    @app.command()
    def bench(
        index: IndexPath,
        queries: QueriesPath,
        rate: Annotated[list[float], typer.Option("--rate", help="Requests per second; repeat for several.")],
        duration: Annotated[float, typer.Option(help="Seconds per rate.")] = 10.0,
        slo_ms: Annotated[float | None, typer.Option("--slo-ms", help="Default the plan's.")] = None,
        k: Annotated[int, typer.Option("-k", help="Neighbours per query.", min=1)] = 10,
        nprobe: Nprobe = None,
        plan: PlanChoice = "latest",
        device: Devices = None,
        budget: Budget = None,
        threads: Threads = None,
        seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Open-loop Poisson load of single queries: latency percentiles, attainment, hit rate."""
        x = np.ascontiguousarray(load_npy(queries, "--queries"))
        rows = []
        with hx.open(index) as opened:
            chosen = choose_plan(opened, plan, device, store)
            target = slo_ms if slo_ms is not None else chosen.request.slo_ms if chosen is not None else None
            with (
                opened.router(chosen, device or (), threads=threads, device_budget_bytes=_budget(budget)) as router,
                CliProgress(quiet=json) as progress,
            ):
                labels = [tier.label for tier in router.devices]
                used = sum(tier.used_bytes for tier in router.devices)
                for offered in rate:
                    bar = functools.partial(_one_bar, progress, f"{offered:g}/s")
                    measured = run_open_loop(
                        router, x, rate=offered, duration_s=duration, k=k, nprobe=nprobe, slo_ms=target, seed=seed,
                        progress=bar,
                    )  # fmt: skip
                    rows.append(measured)
        table = Table(
            "rate/s", "answered/s", "p50 ms", "p95 ms", "p99 ms", "attainment", "hit rate", "batch",
            title=f"devices: {', '.join(labels) or 'none (host only)'}, {readable_bytes(used)} resident",
        )  # fmt: skip
        for row in rows:
            met = "-" if row.attainment is None else f"{row.attainment:.1%}"
            table.add_row(
                f"{row.rate:g}", f"{row.achieved_rate:.1f}", f"{row.p50_ms:.2f}", f"{row.p95_ms:.2f}",
                f"{row.p99_ms:.2f}", met, f"{row.hit_rate:.1%}", f"{row.mean_batch:.1f}",
            )  # fmt: skip
        emit({"devices": labels, "resident_bytes": used, "slo_ms": target, "load": rows}, as_json=json, table=table)
