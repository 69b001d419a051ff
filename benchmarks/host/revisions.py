"""The search path of two checkouts against each other, beside an A/A floor.

Each side is a process of its own, run by its checkout's ``.venv/bin/python``: the old checkout, this one, and the old
one again. All build an index from the same vectors and answer the same queries with the same threads; they take turns
by the round, in an order that changes, and stand still (SIGSTOP) while another side's turn is on. Answers are
compared. A change is within the floor where its median lies inside the quartiles of old against old, or is no larger
than the larger of these. The background scrub is off where a checkout has one; ``--scrub`` compares this checkout with
it and without instead, in turns that are long enough for whole passes.

    git worktree add ../old COMMIT    # make its .venv, and build the extension
    python -m benchmarks.host.revisions --old ../old
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import arguments, show, write
from benchmarks.common.sides import compare_sides, open_sides

#: Batch size -> searches in one turn.
_CALLS = {1: 200, 4: 100, 16: 40, 64: 12, 256: 4}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", type=Path, metavar="DIR", help="a checkout with an environment and the extension")
    parser.add_argument("--scrub", action="store_true", help="this checkout with the background scrub and without")
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--codecs", nargs="+", default=["flat", "sq8"])
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--threads", type=int, default=os.cpu_count())


def main() -> None:
    args = arguments(__doc__, _options)
    if (args.old is None) is not args.scrub:
        raise SystemExit("give --old DIR, or --scrub")
    quiet = {"scrub_bytes_per_s": 0}
    if args.scrub:
        compared = {"without": (ROOT, quiet), "with": (ROOT, {}), "without again": (ROOT, quiet)}
    else:
        old = args.old.resolve()
        has_scrub = "scrub_bytes_per_s" in (old / "hybridindex/config.py").read_text()
        before = (old, quiet if has_scrub else {})
        compared = {"old": before, "new": (ROOT, quiet), "old again": before}
    dataset = benchmark_dataset(args.dataset)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        vectors = dataset.centered(np.asarray(dataset.vectors()))
        np.save(data / "vectors.npy", vectors)
        np.save(data / "log.npy", dataset.centered(np.asarray(dataset.log_queries)))
        nlist = int(4 * np.sqrt(len(vectors)))
        for codec in args.codecs:
            settings = {"nlist": nlist, "codec": codec, "threads": args.threads, "nprobe": args.nprobe}
            told = {
                name: (root, (str(data), json.dumps({"router": router, **settings})))
                for name, (root, router) in compared.items()
            }
            with open_sides(Path(__file__).with_name("revisions_side.py"), told) as sides:
                for batch, calls in _CALLS.items():
                    # A pass begins every ten seconds: a turn with the scrub must hold some.
                    many = (40, max(args.repeats // 5, 3)) if args.scrub else (1, args.repeats)
                    row = {"codec": codec} | compare_sides(sides, batch, calls * many[0], many[1])
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    first, second, again = compared
    show(
        f"{second} over {first}, per turn (quartiles), {args.threads} threads, nprobe {args.nprobe}",
        ("codec", "batch", f"{first} us", "ratio", "quartiles", f"A/A: {again}", "quartiles", "p99 ratio", "A/A p99"),
        [
            (
                row["codec"],
                row["batch"],
                row[first]["us"],
                *(
                    cell
                    for name in (second, again)
                    for low, middle, high in [row[name]["ratio_quartiles"]]
                    for cell in (f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
                ),
                row[second]["p99_ratio"],
                row[again]["p99_ratio"],
            )
            for row in rows
        ],
    )
    write(args.json, "revisions", {"sides": list(compared), "nprobe": args.nprobe, "rows": rows})


if __name__ == "__main__":
    main()
