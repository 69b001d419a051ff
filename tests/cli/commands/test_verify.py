"""verify reads the control store beside the index, too, and names everything in it that is damaged."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing

import pytest
from filelock import FileLock

from hybridindex.cli.console import ExitCode
from hybridindex.store.control import ControlStore


@pytest.fixture
def file(index_path):
    return index_path / "control.sqlite"


def change(file, *statements):
    with closing(sqlite3.connect(file)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_a_whole_store_is_named(cli, index_path, file):
    found = cli("verify", index_path, "--json")
    assert found.code == 0
    assert (found.json["ok"], found.json["store"], found.json["store_problems"]) == (True, str(file), [])
    assert "all checksums match" in cli("verify", index_path).out


def test_all_that_is_damaged_in_a_store_is_named(cli, index_path, file):
    change(
        file,
        "UPDATE plans SET verdict = 'infeasible' WHERE id = 1",
        "UPDATE profiles SET nprobe = 2 WHERE id = 1",
        "UPDATE events SET data = '{' WHERE id = 1",
    )
    found = cli("verify", index_path, "--json")
    assert (found.code, found.json["ok"], found.json["rabitq_problem"]) == (ExitCode.BAD_INDEX, False, None)
    problems = found.json["store_problems"]
    for problem, says in zip(problems, ("profile 1: damaged", "plan 1: damaged", "event 1: a row is"), strict=True):
        assert problem.startswith(f"control store {file}: {says}")
    told = cli("verify", index_path)
    assert (told.code, "the control store is damaged" in told.out) == (ExitCode.BAD_INDEX, True)
    assert all(problem in told.err for problem in problems)


def test_a_row_that_cannot_be_decoded_is_named(cli, index_path, file):
    change(file, "UPDATE plans SET data = '{'")
    (problem,) = cli("verify", index_path, "--json").json["store_problems"]
    assert "a row is damaged (JSONDecodeError" in problem
    assert problem.endswith("it is of plan 1")


def test_references_that_lead_nowhere_are_named(cli, index_path, file):
    change(file, "PRAGMA foreign_keys = OFF", "UPDATE plan_arrays SET plan_id = 77")
    found = cli("verify", index_path, "--json")
    assert found.code == ExitCode.BAD_INDEX
    assert any("('plan_arrays'," in problem for problem in found.json["store_problems"])
    assert any("plan 1: damaged" in problem for problem in found.json["store_problems"])


def test_a_file_that_is_no_store_is_damaged(cli, index_path, file):
    file.write_bytes(b"no database" * 100)
    found = cli("verify", index_path, "--json")
    assert found.code == ExitCode.BAD_INDEX
    assert found.json["store"] == str(file)
    (problem,) = found.json["store_problems"]
    assert "not a SQLite database" in problem


def test_a_store_out_of_reach_says_nothing_against_the_index(cli, index_path, file, monkeypatch):
    """On a read-only mount a whole index was called damaged."""

    def refuse(_lock):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    found = cli("verify", index_path, "--json")
    assert (found.code, found.json["ok"], found.json["store_problems"]) == (0, True, [])
    assert "Read-only file system" in found.json["store_unread"]
    assert "the control store was not read" in cli("verify", index_path).err
    assert cli("verify", index_path, "--store", file).code == ExitCode.BAD_INDEX, "it was asked for"


def test_a_damaged_store_out_of_reach_is_damaged(cli, index_path, file, monkeypatch):
    """On a read-only disk, and while another process upgraded the store, verify called damaged pages whole."""
    raw = file.read_bytes()
    # A page in the middle: the header and the schema can be read.
    file.write_bytes(raw[: 4096 * 12] + bytes(4096) + raw[4096 * 13 :])
    damaged = file.read_bytes()

    def refuse(_lock):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    found = cli("verify", index_path, "--json")
    assert (found.code, found.json["ok"]) == (ExitCode.BAD_INDEX, False)
    assert found.json["store_problems"]
    assert all(problem.startswith(f"control store {file}: ") for problem in found.json["store_problems"])
    assert "Read-only file system" in found.json["store_unread"]
    # It was only read.
    assert file.read_bytes() == damaged
    assert not file.with_name("control.sqlite-wal").exists()


@pytest.mark.parametrize("size", [0, 1])
def test_a_store_that_was_cut_off_is_damaged_and_stays(cli, index_path, file, size):
    """verify made a new store of it, and said that all was well."""
    file.write_bytes(b"x" * size)
    found = cli("verify", index_path, "--json")
    assert (found.code, found.json["ok"], found.json["store"]) == (ExitCode.BAD_INDEX, False, str(file))
    (problem,) = found.json["store_problems"]
    assert f"it has {size} bytes" in problem
    assert file.stat().st_size == size


def test_a_server_that_does_not_answer_is_named_without_its_password(cli, index_path):
    pytest.importorskip("psycopg")
    found = cli("verify", index_path, "--store", "postgresql://me:secret@127.0.0.1:1/none", "--json")
    assert (found.code, found.json["ok"]) == (ExitCode.BAD_INDEX, False)
    assert "127.0.0.1:1/none" in found.json["store"]
    assert "secret" not in found.out + found.err


def test_an_index_without_a_store_gets_none(cli, index_path, file, tmp_path):
    file.unlink()
    found = cli("verify", index_path, "--json")
    assert (found.code, found.json["ok"], found.json["store"]) == (0, True, None)
    refused = cli("verify", index_path, "--store", tmp_path / "other.sqlite")
    assert (refused.code, "which does not exist" in refused.err) == (ExitCode.BAD_INPUT, True)
    assert not file.exists()
    with ControlStore.open(tmp_path / "other.sqlite") as store:
        store.record_event("kept", {})
    assert cli("verify", index_path, "--store", tmp_path / "other.sqlite", "--json").json["store_problems"] == []
