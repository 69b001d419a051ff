"""The daemon as a whole against its reference model, under whatever may happen to it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from tests.durability.machine.base import counts
from tests.durability.machine.machine import DaemonMachine
from tests.durability.machine.mutants import MUTANTS
from tests.durability.machine.world import Lab
from tests.small_disk import small_disk

#: With a number here, so many examples are drawn anew, and faults are seeded into the daemon, too.
EXAMPLES = int(os.environ.get("HYBRIDINDEX_MACHINE", "0"))
#: Of an example.
STEPS = int(os.environ.get("HYBRIDINDEX_MACHINE_STEPS", "20"))


@pytest.fixture(scope="module")
def lab(launcher):
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="hix-"))  # short, as it holds sockets
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            place, mounted = stack.enter_context(small_disk(folder / "disk", 128)), True
        except pytest.skip.Exception:
            place, mounted = folder / "disk", False
        made = Lab(launcher, folder, place, mounted=mounted)
        stack.callback(made.close)
        yield made


def run(lab, examples, *, drawn):
    run_state_machine_as_test(
        lambda: DaemonMachine(lab),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=not drawn,
            database=None,
            deadline=None,
            # Shrinking would start daemons for an hour; the steps that are printed are few.
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(max(900, 60 * EXAMPLES))
def test_what_was_acknowledged_stays_and_answers_are_exact(lab, record_property):
    run(lab, EXAMPLES or 4, drawn=EXAMPLES)
    record_property("counts", dict(counts))
    print(dict(counts))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_seeded_fault_is_of_the_product_as_it_is(launcher, tmp_path, mutant):
    begin = ("tests.durability.machine.hooks:begin", tmp_path, mutant)
    child = launcher.start("--version", before=begin)
    assert child.wait() == 0, child.log


@pytest.mark.skipif(not EXAMPLES, reason="takes about an hour: make machine EXAMPLES=500 SEED=1")
@pytest.mark.timeout(max(900, 60 * EXAMPLES))
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_seeded_fault_is_found(lab, mutant, capsys):
    lab.mutant = mutant
    try:
        with pytest.raises((AssertionError, Flaky)):
            run(lab, EXAMPLES, drawn=True)
    finally:
        lab.mutant = ""
    found = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{mutant}: {next((line for line in found.splitlines() if 'Error' in line), 'found')}")
