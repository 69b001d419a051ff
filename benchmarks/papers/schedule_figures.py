"""RAGO's published figures beside ours: ``python -m benchmarks.papers.schedule_figures [--json FILE] [--plot DIR]``.

Everything is computed from shipped profiles; nothing is measured but the time of the searches.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.claims import Claim, table_of
from benchmarks.common.measure import arguments, write
from benchmarks.papers.schedule_cases import PAPER, section_5
from benchmarks.papers.schedule_policies import search_seconds, section_7
from hybridindex.studies.schedule import Frontier, case, llm_extension, search


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write the frontiers as SVG")


def main() -> None:
    args = arguments(__doc__ or "", _options)
    build(json=args.json, plot=args.plot)


def build(*, json: Path | None, plot: Path | None) -> None:
    """Computes everything, and writes what is asked for."""
    characterisation, policies = list(section_5()), list(section_7())
    seconds = search_seconds()
    claims = [*characterisation, *policies]
    _show(claims)
    print("search, processor seconds:", ", ".join(f"{name} {s:.2f}" for name, s in seconds.items()))
    if json is not None:
        parts = {"section 5": characterisation, "section 7": policies}
        rows = {name: [asdict(claim) for claim in part] for name, part in parts.items()}
        write(json, "schedule_figures", {"claims": rows, "search_cpu_s": seconds})
    if plot is not None:
        draw_frontiers(plot)


def _show(claims: list[Claim]) -> None:
    table = Table("figure", "what", "paper", "ours", "difference")
    for claim in claims:
        cells = table_of([claim]).splitlines()[2].split("|")[3:5]
        table.add_row(claim.figure, claim.what, *(cell.strip() for cell in cells), claim.deviation)
    Console().print(table)


def draw_frontiers(folder: Path) -> None:
    """Figure 15: frontiers of both cases and of their baselines, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    # Text as text, and the same bytes for the same numbers.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "schedules"})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, name in zip(axes, ("case2", "case4"), strict=True):
        _draw(axis, search(case(name), PAPER), "search")
        _draw(axis, llm_extension(case(name), PAPER), "extended LLM system, 64 + 64 chips")
        axis.set(
            title=name, xlabel="time to first token, ms", ylabel="requests/s per chip", xscale="log", ylim=(0, None)
        )
        axis.legend(fontsize=8)
    figure.savefig(folder / "schedule-frontiers.svg", metadata={"Date": None})
    plt.close(figure)


def _draw(axis: Any, frontier: Frontier, label: str) -> None:
    points = [(s.ttft_s * 1e3, s.qps_per_chip) for s in frontier.schedules]
    axis.step(*zip(*points, strict=True), where="post", marker="o", markersize=3, label=label)


if __name__ == "__main__":
    main()
