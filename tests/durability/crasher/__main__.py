"""``python -m tests.durability.crasher``: so many kills, and what came of them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.durability.crasher", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where the index lies; default: temporary files")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="writes what came of it")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.durability.crasher.parent import Crasher
    from tests.simulation.virtual.scheduler import ViolationError

    logging.disable(logging.WARNING)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hybridindex-crasher-", dir=asked.folder) as made:
        crasher = Crasher(Path(made), asked.seed)
        report = crasher.report
        while report.kills < asked.kills:
            try:
                crasher.crash()
            except ViolationError as error:
                report.failures.append(f"after kill {report.kills}: {error}")
                print(f"VIOLATION {report.failures[-1]}", flush=True)
                break
            if report.kills % 50 == 0:
                print(f"{report.kills} kills, {report.changes} changes, {time.monotonic() - began:.0f} s", flush=True)
        report.seconds = round(time.monotonic() - began, 1)
        crasher.close()
    if asked.json is not None:
        asked.json.write_text(report.json() + "\n")
    print(report.json())
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
