"""Mutants of the product that the runs must find: each takes away what one promise rests on. In ``mutants.toml``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from functools import cache
from pathlib import Path

from tests.simulation.mutants import Mutant

__all__ = ["VARIABLE", "all_mutants", "hunt"]

#: Names the mutant that a process shall run.
VARIABLE = "HYBRIDINDEX_CHANGES_MUTANT"
_ROOT = Path(__file__).parents[3]


@cache
def all_mutants() -> dict[str, Mutant]:
    """By name."""
    tables = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
    return {name: Mutant(name=name, **table) for name, table in tables.items()}


def hunt(names: list[str], seconds: float) -> int:
    """Prints which mutants are found within so many seconds each; 1: one is not."""
    missed = []
    for name in names or all_mutants():
        began = time.monotonic()
        with tempfile.NamedTemporaryFile() as report:
            command = [sys.executable, "-m", "tests.simulation.changes", "--seconds", str(seconds)]
            done = subprocess.run(
                [*command, "--json", report.name],
                env={**os.environ, VARIABLE: name},
                cwd=_ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
        said = next((line for line in done.stdout.splitlines() if line.startswith("VIOLATION")), "")
        what = said[:150] or f"NOT FOUND {done.stderr[-300:]}"
        print(f"{name}: {what} ({time.monotonic() - began:.0f} s)", flush=True)
        if not said:
            missed.append(name)
    print(f"{len(names or all_mutants()) - len(missed)} found; not found: {', '.join(missed) or 'none'}")
    return int(bool(missed))
