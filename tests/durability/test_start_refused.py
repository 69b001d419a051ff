"""Damaged and foreign files stop the start of a daemon, and the message names the file and what to do."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from hybridindex.cli.console import ExitCode
from tests.durability.whole import restarted


def flip(path, name):
    file = path / "gen-000001" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def foreign_database(path, _name):
    file = path / "control.sqlite"
    file.unlink()
    with closing(sqlite3.connect(file)) as raw:
        raw.execute("CREATE TABLE notes (text)")


def newer_database(path, _name):
    with closing(sqlite3.connect(path / "control.sqlite")) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
        raw.commit()


def no_database(path, _name):
    for rest in path.glob("control.sqlite-*"):
        rest.unlink()
    (path / "control.sqlite").write_bytes(b"no database" * 1000)


def make_folder(path, name):
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()


CASES = [
    (flip, "lists.bin", ExitCode.BAD_INDEX, "build it again"),
    (flip, "model.faiss", ExitCode.BAD_INDEX, "build it again"),
    (flip, "manifest.json", ExitCode.BAD_INDEX, "build it again"),
    (lambda p, n: (p / "gen-000001" / n).unlink(), "lists.bin", ExitCode.BAD_INDEX, "build it again"),
    (lambda p, n: (p / n).unlink(), "CURRENT", ExitCode.BAD_INDEX, "build it again"),
    (lambda p, n: (p / n).write_text("gen-000009\n"), "CURRENT", ExitCode.BAD_INDEX, "build it again"),
    (lambda p, n: (p / n).write_text("what\n"), "CURRENT", ExitCode.BAD_INDEX, "expected a name like"),
    (no_database, "control.sqlite", ExitCode.NO_PROFILE, "move it away"),
    (foreign_database, "control.sqlite", ExitCode.NO_PROFILE, "move it away"),
    (newer_database, "control.sqlite", ExitCode.NO_PROFILE, "upgrade hybridindex"),
    (make_folder, "control.sqlite", ExitCode.NO_PROFILE, "give the path of a file"),
    (make_folder, "daemon.lock", ExitCode.SERVICE, "cannot be written"),
]


@pytest.mark.parametrize(("spoil", "name", "code", "remedy"), CASES)
def test_the_start_is_refused_by_file_and_remedy(launcher, index_path, tmp_path, spoil, name, code, remedy):
    spoil(index_path, name)
    uds = tmp_path / "s"
    child = launcher.start("serve", index_path, "--device", "cpu", "--no-tcp", "--uds", uds, "--json")
    assert child.wait() == code, child.log
    error = json.loads(next(line for line in child.log.splitlines() if line.startswith("{")))["error"]
    assert name in error["message"] or name == "daemon.lock"
    assert str(index_path) in error["message"]
    assert remedy in error["message"]
    assert "Traceback" not in child.log
    # It held nothing and left nothing that looks like a running daemon.
    assert not uds.exists()
    assert not (index_path / "daemon.json").exists()


def test_files_of_others_beside_an_index_are_left_alone(index_path):
    (index_path / "notes.txt").write_text("mine")
    with restarted(index_path) as service:
        assert service.plan_id == 1
    assert (index_path / "notes.txt").read_text() == "mine"
