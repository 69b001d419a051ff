"""``python -m tests.simulation.changes``: runs for so many seconds, one run again, or those of the suite."""

from __future__ import annotations

import argparse
import os
import sys
import traceback


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.changes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one run again")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--go-on", action="store_true", help="also after a violation")
    parser.add_argument("--json", metavar="FILE", help="writes what came of it")
    parser.add_argument(
        "--mutants", nargs="*", metavar="NAME", help="which of these, or of all, are found in --seconds"
    )
    asked = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked.mutants is not None:
        from tests.simulation.changes.mutants import hunt

        return hunt(asked.mutants, asked.seconds)
    from tests.simulation.changes.runs import many, one

    if asked.replay is not None:
        try:
            print(one(asked.replay))
        except AssertionError:
            traceback.print_exc()
            return 1
        return 0
    return many(asked.seed, asked.seconds, asked.workers, go_on=asked.go_on, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
