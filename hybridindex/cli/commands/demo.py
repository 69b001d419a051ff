"""The command demo: runs the demo; prints and writes what it measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hybridindex.cli.commands.plan import index_info
from hybridindex.cli.console import CliProgress, emit, err, readable_bytes, to_json
from hybridindex.cli.options import Json
from hybridindex.demo.cache import write_json
from hybridindex.plans.stored import plan_summary

__all__ = ["register"]


def _table(rows: list[dict[str, Any]], slo_ms: float, device: str) -> Table:
    table = Table(
        "policy", "rate/s", "p50 ms", "p95 ms", "p99 ms", f"within {slo_ms:g} ms", "hit rate", "on device",
        title=f"host against hybrid, device: {device}",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["policy"], f"{row['rate']:g}", f"{row['p50_ms']:.2f}", f"{row['p95_ms']:.2f}", f"{row['p99_ms']:.2f}",
            f"{row['attainment']:.1%}", f"{row['hit_rate']:.1%}", readable_bytes(row["device_bytes"]),
        )  # fmt: skip
    return table


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""

    @app.command()
    def demo(
        output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Output directory.")] = Path(
            "build/demo"
        ),
        device: Annotated[str, typer.Option(help="auto, cuda:N, or cpu for the stand-in device.")] = "auto",
        hardware: Annotated[
            str, typer.Option(metavar="NAMExN|FILE.jsonxN", help="Hardware to project the last act for, without a GPU.")
        ] = "h100",
        json: Json = False,
    ) -> None:
        """Build, profile, plan, serve with and without the plan, and report; real text, real queries."""
        from hybridindex.demo.run import run_demo
        from hybridindex.report import write_report
        from hybridindex.report.acts import acts_of_demo, hot_shares

        def say(text: str) -> None:
            if not json:
                err.print(text, highlight=False, soft_wrap=True)

        with CliProgress(quiet=json) as progress:
            done = run_demo(output, device=device, hardware=hardware, progress=progress, say=say)
        with done.index as index:
            facts = index_info(index)
        rows = [{"policy": one.policy, "device_bytes": one.device_bytes, **asdict(one.result)} for one in done.load]
        slo_ms = done.plan.request.slo_ms
        same, projection = asdict(done.same), None if done.projection is None else done.projection.to_data()
        lookahead = None if done.lookahead is None else asdict(done.lookahead)
        summary = {
            "index": facts,
            "device": done.device,
            "plan": plan_summary(done.plan),
            "hot": hot_shares(done.plan),
            "same_answers": same,
            "lookahead": lookahead,
            "projection": projection,
            "load": rows,
            "slo_ms": slo_ms,
            "sources": [asdict(source) for source in done.data.sources],
            "notes": done.notes,
        }
        write_json(output / "summary.json", to_json(summary))
        files = write_report(
            output,
            index_info=facts,
            profile=done.profile,
            plan=done.plan,
            load=rows,
            notes=done.notes,
            devices=[done.device],
            title="hybridindex demo",
            acts=acts_of_demo(done.plan, same, lookahead, projection, rows, done.device),
        )
        emit({**summary, "report": files.html}, as_json=json, table=_table(rows, slo_ms, done.device))
        say(f"report: {files.html}\nnumbers: {output / 'summary.json'}")
