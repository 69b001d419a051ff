"""Some seconds of the simulation with fixed seeds, and what its parts promise."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from hybridindex import filesystem
from tests.simulation.changes.disk import SimDisk
from tests.simulation.changes.mutants import all_mutants
from tests.simulation.changes.runs import runner

ROOT = Path(__file__).parents[3]
#: Half a minute.
SEEDS = range(12)


@pytest.fixture(scope="module")
def once():
    """Makes a run of a seed, once."""
    with runner() as made:
        yield cache(made)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_comes_back_or_is_doubled(once, seed):
    found = once(seed)
    assert found.changes > 20
    assert found.done["audits"]


def test_devices_are_searched_while_rows_change(once):
    """In the same runs: a change of what is drawn must not leave devices out."""
    done = sum((once(seed).done for seed in SEEDS), Counter())
    least = {
        "device searches": 300,
        "device searches with filters": 50,
        "device scans of added rows": 150,
        "lists of added rows brought": 300,
        "looks at pages": 50,
        "devices at rest": 5,
        "generations followed": 10,
        "kills with devices": 5,
        "placements": 10,
        "routers with shared batches": 5,
        "parts of devices that the host took over": 30,
    }
    assert {name: done[name] for name in least if done[name] < least[name]} == {}


def test_a_seed_gives_the_same_run_in_another_process(once):
    """As a violation says that it can be had again."""
    command = [sys.executable, "-m", "tests.simulation.changes", "--replay", "7"]
    seed = "0" if os.environ.get("PYTHONHASHSEED") != "0" else "1"
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"digest={once(7).digest})" in done.stdout


def test_every_mutant_changes_a_file_that_compiles():
    """That each is found: ``python -m tests.simulation.changes --mutants --seconds 60``."""
    assert len(all_mutants()) >= 15
    for mutant in all_mutants().values():
        compile(mutant.changed(), mutant.file, "exec")


def written(root: Path, disk: SimDisk) -> None:
    """A file that is synced and named for sure, then more of it; and one that is neither."""
    with disk.known(), filesystem.watched_by(disk.see):
        with filesystem.File(root / "log", "x") as file:
            file.write_at(b"a" * 1000, 0)
            file.sync()
            filesystem.sync_folder(root)
            file.write_at(b"b" * 3000, 1000)
            file.cut(3500)
        filesystem.write_bytes(root / "new", b"c")
        filesystem.replace(root / "new", root / "newer")
    disk.check()


def test_a_power_cut_leaves_what_was_synced_and_any_part_of_the_rest(tmp_path):
    found = set()
    for seed in range(200):
        root = tmp_path / str(seed)
        root.mkdir()
        disk = SimDisk(root)
        written(root, disk)
        disk.cut_power(random.Random(seed))
        disk.check()
        raw = (root / "log").read_bytes()
        assert raw[:1000] == b"a" * 1000
        assert {*raw[1000:]} <= {0, ord("b")}
        names = {entry.name for entry in root.iterdir()}
        assert names in ({"log"}, {"log", "new"}, {"log", "newer"})
        found.add((len(raw), raw.count(b"b"), *sorted(names)))
    assert len(found) > 40
    # Nothing of it, all of it, a block behind one that is lost.
    assert {1000, 3500} <= {each[0] for each in found}
    assert any(each[1] < each[0] - 1000 for each in found)


def test_what_a_failed_sync_forgot_is_on_no_disk_after_the_next(tmp_path):
    disk = SimDisk(tmp_path)
    with filesystem.watched_by(disk.see), filesystem.File(tmp_path / "log", "x") as file:
        filesystem.sync_folder(tmp_path)
        file.write_at(b"a" * 8, 0)
        disk.forget_writes(str(tmp_path / "log"))
        file.write_at(b"b" * 8, 8)
        file.sync()
    found = {disk.left_of("log", random.Random(seed)) for seed in range(40)}
    assert all(each[8:] == b"b" * 8 for each in found)
    assert {b"a" * 8 + b"b" * 8, bytes(8) + b"b" * 8} <= found
