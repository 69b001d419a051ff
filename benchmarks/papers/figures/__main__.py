"""All figures of all papers: ``python -m benchmarks.papers.figures [--report FILE] [--plot DIR] [--json FILE] [--only
X]``.

``make figures`` writes docs/images, the tables of docs/reproduction.md and benchmarks/results/figures.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from benchmarks.common.claims import Claim, replace_section, table_of
from benchmarks.common.measure import arguments, write
from benchmarks.papers import schedule_figures
from benchmarks.papers.figures import piperag, telerag, vectorliterag

_PAPERS: dict[str, ModuleType] = {"vectorliterag": vectorliterag, "telerag": telerag, "piperag": piperag}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw as SVG")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the tables between its markers")
    parser.add_argument("--only", choices=[*_PAPERS, "rago"], action="append", help="repeat; default all")


def main() -> None:
    args = arguments(__doc__ or "", _options)
    chosen, rows, took = args.only or [*_PAPERS, "rago"], {}, {}
    for name, module in _PAPERS.items():
        if name not in chosen:
            continue
        began = time.perf_counter()
        claims = list(module.claims())
        rows[name] = [asdict(claim) for claim in claims]
        _show(name, claims)
        if args.report is not None:
            replace_section(args.report, name, f"{table_of(claims)}\n{_not_drawn(module)}")
        if args.plot is not None:
            module.figures(args.plot)
        took[name] = time.perf_counter() - began
    if "rago" in chosen:
        began = time.perf_counter()
        schedule_figures.build(json=None, plot=args.plot, report=args.report)
        took["rago"] = time.perf_counter() - began
    sys.stderr.write(", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()) + "\n")
    write(args.json, "figures", {"claims": rows, "seconds": took})


def _not_drawn(module: ModuleType) -> str:
    lines = ["| not reproduced | what | the paper prints | which input is missing |", "|---|---|---|---|"]
    lines += [f"| {one.figure} | {one.what} | {one.printed} | {one.why} |" for one in module.MISSING]
    return "\n".join(lines) + "\n"


def _show(name: str, claims: list[Claim]) -> None:
    table = Table("figure", "what", "paper", "ours", "difference", title=name)
    for claim in claims:
        cells = table_of([claim]).splitlines()[2].split("|")[3:5]
        table.add_row(claim.figure, claim.what, *(cell.strip() for cell in cells), claim.deviation)
    Console().print(table)


if __name__ == "__main__":
    main()
