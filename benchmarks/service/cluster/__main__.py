"""Several machines: right answers while nodes fail and rows change, what a hop and a failure cost, fan-out, and rate.

    python -m benchmarks.service.cluster --json benchmarks/results/cluster.json --parts answers,routing

The nodes are daemons on this machine, and share its cores with each other and with the client: latencies and rates are
those of a machine that does all of it. Parts stand in the files beside this one.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.measure import Attempts, arguments, write
from benchmarks.service.cluster.answers import measure_answers
from benchmarks.service.cluster.changes import measure_changes
from benchmarks.service.cluster.failures import measure_hang, measure_kill
from benchmarks.service.cluster.forecast import measure_forecast
from benchmarks.service.cluster.going_on import measure_generations
from benchmarks.service.cluster.nodes import Workload, make_workload
from benchmarks.service.cluster.rate import measure_rate
from benchmarks.service.cluster.routing import measure_routing
from benchmarks.service.cluster.spread import measure_fan_out

_PARTS = ("answers", "changes", "generations", "routing", "hang", "kill", "fan_out", "rate", "forecast")


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := set(parts) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; expected some of {','.join(_PARTS)}")
    if "forecast" in parts and "rate" not in parts:
        raise argparse.ArgumentTypeError("forecast is compared with what rate measures; name that, too")
    return [part for part in _PARTS if part in parts]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=_parts, default=list(_PARTS), metavar="A,B", help=f"of {','.join(_PARTS)}")
    parser.add_argument("--quick", action="store_true", help="whether it runs; no numbers to keep")
    parser.add_argument("--mib", type=int, help="of the index; default 96")
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--nlist", type=int, default=1024)
    parser.add_argument("--nprobe", type=int, default=16)
    parser.add_argument("--code-bits", type=int, choices=(1, 2, 4), help="scan RaBitQ codes; default: rows")
    parser.add_argument("--queries", type=int, help="of answers; default 100,000")
    parser.add_argument("--maps", type=int, help="of answers: clusters with placements of their own; default 4")
    parser.add_argument("--rate", type=float, default=50.0, help="searches/s of hang and kill")
    parser.add_argument("--answers-rate", type=float, default=400.0, help="queries/s of answers, about")
    parser.add_argument("--trials", type=int, help="of hang and kill; default 4")
    parser.add_argument("--most-nodes", type=int, default=2, choices=(2, 4), help="of rate, one a core; default 2")
    parser.add_argument("--profile-seconds", type=float, default=5.0, help="of each round of forecast")
    parser.add_argument("--rounds", type=int, default=5, help="of forecast")
    parser.add_argument("--folder", type=Path, help="for the index and the shares; default a temporary one")


def main() -> None:
    args = arguments(__doc__, _options)
    # Nodes that are killed are reported by those who watch them.
    logging.getLogger("hybridindex").setLevel(logging.CRITICAL)
    quick = args.quick
    queries = args.queries or (2_000 if quick else 100_000)
    maps = args.maps or (1 if quick else 4)
    trials = args.trials or (1 if quick else 4)
    mib = args.mib or (8 if quick else 96)
    seconds = 3.0 if quick else 8.0
    # Codes are for searches of some lists.
    nprobes = (args.nprobe,) if args.code_bits else (args.nlist,) if quick else tuple(sorted({args.nprobe, args.nlist}))
    attempts = Attempts()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        workload = make_workload(
            folder / "index",
            nbytes=mib << 20,
            dim=args.dim,
            nlist=args.nlist,
            nprobe=args.nprobe,
            code_bits=args.code_bits,
        )
        runs: dict[str, Callable[[Workload, Path], dict[str, Any]]] = {
            "answers": lambda w, f: measure_answers(w, f, queries=queries, maps=maps, rate=args.answers_rate),
            "changes": lambda w, f: measure_changes(
                w, f, searches=500 if quick else queries // 5, changes_per_s=20.0, rounds=1 if quick else 4
            ),
            "generations": lambda w, f: measure_generations(w, f, rate=args.rate, seconds=seconds, trials=trials),
            "routing": lambda w, f: measure_routing(w, f, repeats=11 if quick else 101),
            "hang": lambda w, f: measure_hang(w, f, rate=args.rate, seconds=seconds, trials=trials),
            "kill": lambda w, f: measure_kill(w, f, rate=args.rate, seconds=seconds, trials=trials),
            "fan_out": lambda w, f: measure_fan_out(w, f, queries=300 if quick else 3000),
            "rate": lambda w, f: measure_rate(
                w,
                f,
                seconds=1.5 if quick else 4.0,
                nprobes=nprobes,
                most_nodes=args.most_nodes,
            ),
            "forecast": lambda w, f: measure_forecast(
                w,
                f,
                results["rate"],
                profile_s=3.0 if quick else args.profile_seconds,
                rounds=1 if quick else args.rounds,
                repeats=13,
            ),
        }
        index = {
            "vectors": len(workload.vectors), "dim": args.dim, "nlist": args.nlist, "nprobe": args.nprobe,
            "bytes": workload.index_bytes, "code_bits": workload.code_bits, "candidates": workload.candidates,
        }  # fmt: skip
        for part in args.parts:
            with attempts(part):
                before = os.getloadavg()[0]
                results[part] = {**runs[part](workload, folder), "load_average_before": before}
            # What is there is kept, whatever becomes of the next one.
            write(args.json, "cluster", {"quick": quick, "index": index, **results, "failed": attempts.failed})
    attempts.end()
    if not all(results[part]["passed"] for part in ("answers", "changes") if part in results):
        raise SystemExit("answers were wrong, or silently partial")


if __name__ == "__main__":
    main()
