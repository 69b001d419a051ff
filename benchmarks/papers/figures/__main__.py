"""All figures of all papers: ``python -m benchmarks.papers.figures [--plot DIR] [--json FILE] [--only X] [--quick]``.

``make figures`` writes docs/images and benchmarks/results, and then the texts that quote them
(:mod:`benchmarks.texts`). Where ``--json FILE`` exists, what is not computed anew stays in it as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.claims import Claim, table_of
from benchmarks.common.measure import arguments, write
from benchmarks.papers import schedule_figures
from benchmarks.papers.figures import compressed, piperag, telerag, vectorliterag

_PAPERS: dict[str, ModuleType] = {
    "vectorliterag": vectorliterag,
    "compressed": compressed,
    "telerag": telerag,
    "piperag": piperag,
}
#: Of these ``--quick`` computes a part, or nothing.
_SIMULATED = ("vectorliterag", "compressed")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw as SVG")
    parser.add_argument("--only", choices=[*_PAPERS, "rago"], action="append", help="repeat; default all")
    parser.add_argument("--quick", action="store_true", help="seconds: without pictures and without what is simulated")


def main() -> None:
    build(arguments(__doc__ or "", _options))


def build(args: argparse.Namespace) -> None:
    """Computes what is asked for, and writes it. ``rago`` goes to schedule_figures.json beside the file given."""
    chosen = set(args.only or [*_PAPERS, "rago"])
    former = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    rows, took = former.get("claims", {}), former.get("seconds", {})
    for name, module in _PAPERS.items():
        if name not in chosen:
            continue
        began = time.process_time()
        claims = list(module.claims(quick=args.quick))
        _show(name, claims)
        fresh = [asdict(claim) for claim in claims]
        rows[name] = renewed(rows.get(name, ()), fresh) if args.quick and name in _SIMULATED else fresh
        if args.plot is not None and not args.quick:
            module.figures(args.plot)
        if not args.quick:
            took[name] = time.process_time() - began
    if "rago" in chosen and not args.quick:
        began = time.process_time()
        beside = None if args.json is None else args.json.with_name("schedule_figures.json")
        schedule_figures.build(json=beside, plot=args.plot)
        took["rago"] = time.process_time() - began
    sys.stderr.write(", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()) + "\n")
    missing = {name: [asdict(one) for one in module.MISSING] for name, module in _PAPERS.items()}
    write(args.json, "figures", {"claims": rows, "missing": missing, "seconds": took})


def renewed(former: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``former`` rows with the ``fresh`` ones of the same figure and words in their places; new ones follow."""
    by_name = {(row["figure"], row["what"]): row for row in fresh}
    kept = [by_name.pop((row["figure"], row["what"]), row) for row in former]
    return [*kept, *by_name.values()]


def _show(name: str, claims: list[Claim]) -> None:
    if not claims:
        Console().print(f"{name}: all of it is simulated, which --quick leaves out")
        return
    table = Table("figure", "what", "paper", "ours", "difference", title=name)
    for claim in claims:
        cells = table_of([claim]).splitlines()[2].split("|")[3:5]
        table.add_row(claim.figure, claim.what, *(cell.strip() for cell in cells), claim.deviation)
    Console().print(table)


if __name__ == "__main__":
    main()
