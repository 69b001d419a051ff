"""The device tier in one call: scan, copies, what a neighbour loses, sessions and plan changes.

Runs ``device_scan``, ``device_copy``, ``device_beside`` and ``device_router`` one after another, each in a process of
its own, and writes their results into one file. Without a GPU they run on the stand-in device, say so, and claim
nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, write

PARTS = ("device_scan", "device_copy", "device_beside", "device_router")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME")


def main() -> None:
    args = arguments(__doc__, _options)
    results: dict[str, Any] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts:
            file = Path(folder) / f"{name}.json"
            start = time.perf_counter()
            if subprocess.run(
                [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)], check=False
            ).returncode:
                failed.append(name)
            if file.exists():
                results[name] = json.loads(file.read_text())
            sys.stderr.write(f"{name}: {time.perf_counter() - start:.0f} s\n")
    write(args.json, "device_tier", {"failed": failed, "parts": results})
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
