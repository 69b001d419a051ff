"""What a whole device scan costs the host: this checkout against another one, with launches that do nothing.

Each side is a process of its own, run with its checkout's package: the old checkout, this one, and the old one again.
All scan the same probes of lists on scattered pages of a stand-in arena, with the workspace of a GPU; they take turns,
and stand still while another side's turn is on. Answers are compared. What a GPU adds to this, and the launches
themselves, are not in it.

Targets: at most 25, 60 and 150 microseconds a scan at batch 1, 8 and 64 and nprobe 256. Such times are this machine's;
the ratio of both sides beside old against old is what can be carried elsewhere.

    git worktree add ../old COMMIT    # make its .venv, and build the extension
    python -m benchmarks.device.host_work --old ../old
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common.measure import arguments, show, write
from benchmarks.common.sides import compare_sides, open_sides

#: Batch size -> scans in one turn, and microseconds of one at most.
CALLS = {1: 300, 8: 150, 64: 40}
TARGETS = {1: 25.0, 8: 60.0, 64: 150.0}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", type=Path, required=True, metavar="DIR", help="a checkout with the extension")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--nprobe", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=31)


def main() -> None:
    args = arguments(__doc__, _options)
    told = (json.dumps({"dim": args.dim, "rows": args.rows, "nprobe": args.nprobe}),)
    old = (args.old.resolve(), told)
    rows: list[dict[str, Any]] = []
    sides = {"old": old, "new": (ROOT, told), "old again": old}
    with open_sides(Path(__file__).with_name("host_work_side.py"), sides) as opened:
        for batch, calls in CALLS.items():
            row = compare_sides(opened, batch, calls, args.repeats) | {"target_us": TARGETS[batch]}
            row["met"] = row["new"]["us"] <= TARGETS[batch]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    show(
        f"host work of a device scan, nprobe {args.nprobe}, d = {args.dim} bf16, no launches",
        ("batch", "old us", "new us", "target", "new over old", "quartiles", "A/A quartiles"),
        [
            (
                row["batch"],
                row["old"]["us"],
                row["new"]["us"],
                f"{row['target_us']:g} ({'met' if row['met'] else 'missed'})",
                f"{row['new']['ratio_quartiles'][1]:.3f}",
                *(
                    f"{low:.3f} to {high:.3f}"
                    for low, _, high in (row["new"]["ratio_quartiles"], row["old again"]["ratio_quartiles"])
                ),
            )
            for row in rows
        ],
    )
    settings = {"nprobe": args.nprobe, "dim": args.dim, "rows_in_all": args.rows}
    write(args.json, "host_work", {"sides": list(sides), **settings, "rows": rows})


if __name__ == "__main__":
    main()
