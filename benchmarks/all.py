"""Runs every benchmark in its own process: ``python -m benchmarks.all --output DIR``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

#: ``ROOM.NAME``; the results go to ``NAME.json``.
NAMES = (
    "host.split_probes",
    "host.solver",
    "host.router_overhead",
    "host.host_scan",
    "host.coarse",
    "host.busy_neighbours",
    "host.first_searches",
    "device.tier",
    "host.early_dispatch",
    "host.recall_qps",
    "host.compressed",
    "host.code_plans",
    "host.code_answers",
    "host.code_build",
    "host.pq",
    "host.filters",
    "host.hit_rate",
    "host.latency",
    "host.exactness",
    "host.schedulers",
    "rag.lookahead_replay",
    "service.drift",
    "service.drift_trace",
    "service.repartition_cycle",
    "service.repartition_load",
    "service.replacement",
    "papers.schedule_figures",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/bench"), metavar="DIR")
    args = parser.parse_args()
    failed = []
    for name in NAMES:
        file = args.output / f"{name.partition('.')[2]}.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
