"""Runs every benchmark, each in a process of its own: ``python -m benchmarks.all --output DIR``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = (
    "split_probes",
    "solver",
    "router_overhead",
    "host_scan",
    "device_tier",
    "early_dispatch",
    "recall_qps",
    "hit_rate",
    "latency",
    "exactness",
    "schedulers",
    "lookahead_replay",
    "drift",
    "drift_trace",
    "repartition_cycle",
    "schedule_figures",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/bench"), metavar="DIR")
    args = parser.parse_args()
    failed = []
    for name in NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(args.output / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
