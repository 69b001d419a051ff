"""Damaged and foreign files of an index stop the start of a daemon, and the message names the file and what to do.

Those of the control store do not: see test_start_without_store.py.
"""

from __future__ import annotations

import json

import pytest

from hybridindex.cli.console import ExitCode
from tests.durability.whole import restarted


def flip(path, name):
    file = path / "gen-000001" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


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
    (make_folder, "daemon.lock", ExitCode.SERVICE, "give the path of a file"),
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
