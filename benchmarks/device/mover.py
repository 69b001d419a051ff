"""What the mover costs the host: this checkout against another one, with a copy stream that starts nothing.

Each side is a process of its own, run with its checkout's package: the old checkout, this one, and the old one again.
They take turns, and stand still while another side's turn is on. All load the same lists of about 300 kB into an arena
whose pages are all free, or of which every second page is taken; from page-locked memory, which nothing is copied from
here, or from the mapped file through the staging buffers, which are filled. Only the copies themselves are left out: on
a GPU the driver's calls come to it.

Targets from page-locked memory: as fast as 60 GB/s, and 25 GB/s where every second page is taken. Such rates are this
machine's; the ratio of both sides beside old against old is what can be carried elsewhere.

    git worktree add ../old COMMIT    # make its .venv, and build the extension
    python -m benchmarks.device.mover --old ../old
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

#: As the side numbers them.
CASES = ("page-locked", "page-locked, used arena", "mapped", "mapped, used arena")
#: GB/s at least, by case.
TARGETS = {0: 60.0, 1: 25.0}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", type=Path, required=True, metavar="DIR", help="a checkout with the extension")
    parser.add_argument("--mib", type=int, default=128, help="MiB of lists")
    parser.add_argument("--list-kb", type=int, default=300, help="kB of a list, on average")
    parser.add_argument("--repeats", type=int, default=21)


def main() -> None:
    args = arguments(__doc__, _options)
    told = (json.dumps({"mib": args.mib, "list_kb": args.list_kb}),)
    old = (args.old.resolve(), told)
    rows: list[dict[str, Any]] = []
    sides = {"old": old, "new": (ROOT, told), "old again": old}
    with open_sides(Path(__file__).with_name("mover_side.py"), sides) as opened:
        nbytes = args.mib << 20
        n_lists = max(32, nbytes // (1000 * args.list_kb))
        for number, case in enumerate(CASES):
            measured = compare_sides(opened, number, 3, args.repeats)
            row = {name: measured[name] for name in sides} | {"case": case, "lists": n_lists, "bytes": nbytes}
            for name in sides:
                row[name]["gb_per_s"] = nbytes / row[name]["us"] / 1e3
                row[name]["us_per_list"] = row[name]["us"] / n_lists
            row["target_gb_per_s"] = TARGETS.get(number)
            if number in TARGETS:
                row["met"] = row["new"]["gb_per_s"] >= TARGETS[number]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    show(
        f"what the mover costs the host, lists of {args.list_kb} kB, no copies",
        ("lists", "old us a list", "new", "old GB/s", "new", "target", "new over old", "quartiles", "A/A quartiles"),
        [
            (
                row["case"],
                *(f"{row[name]['us_per_list']:.2f}" for name in ("old", "new")),
                *(f"{row[name]['gb_per_s']:.1f}" for name in ("old", "new")),
                f"{row['target_gb_per_s']:g} ({'met' if row['met'] else 'missed'})" if "met" in row else "",
                f"{row['new']['ratio_quartiles'][1]:.3f}",
                *(
                    f"{low:.3f} to {high:.3f}"
                    for low, _, high in (row["new"]["ratio_quartiles"], row["old again"]["ratio_quartiles"])
                ),
            )
            for row in rows
        ],
    )
    write(args.json, "mover", {"sides": list(sides), "rows": rows})


if __name__ == "__main__":
    main()
