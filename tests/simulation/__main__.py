"""``python -m tests.simulation``: runs for so many virtual hours, one run again, or the mutants."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", metavar="WORLD:SEED:SECONDS", help="one run again")
    parser.add_argument("--fixed", action="store_true", help="the runs of the suite")
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="which of these mutants, or of all, are found")
    parser.add_argument("--mutant", metavar="NAME", help="run with this mutant of the product")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tests.simulation import mutants

    if asked.mutants is not None:
        return mutants.hunt(asked.mutants)
    if asked.mutant is not None:
        mutants.install(asked.mutant)
    return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    # After a mutant was installed.
    from tests.simulation.cases import FIXED, Case, endless, indexes
    from tests.simulation.virtual.scheduler import ViolationError

    cases = iter(FIXED) if asked.fixed else endless(asked.seed)
    if asked.replay is not None:
        cases = iter([Case.parse(asked.replay)])
    seconds, n_turns, done, began_s, shown_s = 0.0, 0, Counter[str](), time.monotonic(), 0.0
    with ExitStack() as stack:
        try:
            found = stack.enter_context(indexes())
        except ViolationError as error:
            print(f"VIOLATION while the indexes are made: {error}", flush=True)
            return 1
        for number, case in enumerate(cases):
            try:
                outcome = case.run(found)
            except ViolationError as error:
                print(f"VIOLATION after {seconds / 3600:.1f} virtual hours: {error}")
                print("\n".join(getattr(error, "__notes__", [])))
                again = f"python -m tests.simulation --replay {case}"
                print(again if asked.mutant is None else f"{again} --mutant {asked.mutant}", flush=True)
                if asked.replay is not None:
                    raise
                return 1
            seconds, n_turns, done = seconds + outcome.seconds, n_turns + outcome.n_turns, done + outcome.done
            over = not (asked.fixed or asked.replay) and seconds >= 3600 * asked.hours
            if over or asked.replay or time.monotonic() - shown_s > 10:
                shown_s = time.monotonic()
                print(
                    f"{number + 1} runs, {seconds / 3600:.1f} virtual hours, {n_turns} turns, "
                    f"{done['answers']} answers, {done['faults']} faults, {shown_s - began_s:.0f} s; "
                    f"last {case} {outcome.digest:08x}",
                    flush=True,
                )
            if over:
                break
    print(f"{seconds / 3600:.1f} virtual hours without a violation in {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
