"""A minute of the simulation with fixed seeds, and mutants of the product that it must find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.cases import FIXED, Case, indexes
from tests.simulation.mutants import all_mutants, find, hunt

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def searched():
    with indexes() as found:
        yield found


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_nothing_that_must_hold_is_broken(searched, case):
    outcome = case.run(searched)
    assert outcome.done["answers"]
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize("world", ["router", "daemon", "nodes"])
def test_a_seed_gives_the_same_run_again(searched, world):
    case = Case(world=world, seed=7, seconds=30)
    first, again = case.run(searched), case.run(searched)
    assert (first.digest, first.n_turns, first.done) == (again.digest, again.n_turns, again.done)


def test_another_process_gives_the_same_run(searched):
    """As a violation says that it can be had again."""
    case = Case(world="daemon", seed=7, seconds=30)
    command = [sys.executable, "-m", "tests.simulation", "--replay", str(case)]
    seed = "0" if os.environ.get("PYTHONHASHSEED") != "0" else "1"
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"{case} {case.run(searched).digest:08x}" in done.stdout


def test_every_mutant_changes_a_file_that_compiles():
    assert len(all_mutants()) >= 20
    for mutant in all_mutants().values():
        compile(mutant.changed(), mutant.file, "exec")


@pytest.mark.parametrize("name", ["a-request-keeps-its-bytes", "a-part-is-answered-twice"])
def test_a_mutant_is_found(name):
    """All of them: ``python -m tests.simulation --mutants``."""
    assert find(name).startswith("VIOLATION")


def test_a_run_that_crashes_finds_nothing(capsys):
    assert hunt(["no-such-mutant"]) == 1
    assert "NOT FOUND: KeyError" in capsys.readouterr().out
