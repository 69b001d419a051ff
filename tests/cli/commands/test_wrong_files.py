"""A file that is not what a command needs: one line says which file, what is wrong, and what would be right."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from hybridindex import Index
from hybridindex.cli.console import ExitCode, err
from tests.clustered import DIM, clustered
from tests.small_disk import small_disk


@pytest.fixture
def queries(tmp_path):
    np.save(tmp_path / "q.npy", clustered(5))
    return tmp_path / "q.npy"


@pytest.mark.parametrize("name", ["text.npy", "table.csv"])
def test_a_text_in_place_of_queries_is_not_called_a_pickle(cli, index_path, tmp_path, name):
    """numpy would advise to load it unsafely."""
    (tmp_path / name).write_text("1 2 3\n4 5 6\n")
    refused = cli("search", index_path, "-q", tmp_path / name)
    assert refused.code == ExitCode.BAD_INPUT
    assert f"{name} is not a readable .npy file (it begins with b'1 2 3\\n'); numpy.save writes one" in refused.err
    assert "pickle" not in refused.err


@pytest.mark.parametrize("command", ["build", "add"])
def test_a_text_in_place_of_vectors_is_not_called_a_pickle(cli, index_path, tmp_path, command):
    (tmp_path / "text.npy").write_text("1 2 3\n4 5 6\n")
    words = (tmp_path / "text.npy", tmp_path / "new") if command == "build" else (index_path, tmp_path / "text.npy")
    refused = cli(command, *words)
    assert refused.code == ExitCode.BAD_INPUT
    assert "is not a readable .npy file of numbers (it begins with b'1 2 3\\n')" in refused.err
    assert "pickle" not in refused.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "No data left in file"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "EOF: reading array header"),
        (b"\x93NUMPY\x01\x00\x88\x13{'shape':" + b"-" * 4989 + b"1}\n", ""),
    ],
    ids=["empty", "cut off", "deep"],
)
def test_a_damaged_file_of_queries_keeps_the_reason(cli, index_path, tmp_path, content, said):
    (tmp_path / "q.npy").write_bytes(content)
    refused = cli("search", index_path, "-q", tmp_path / "q.npy")
    assert refused.code == ExitCode.BAD_INPUT
    assert f"q.npy is not a readable .npy file ({said}" in refused.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1\n99999999999999999999\n", "line 2 of ids.txt is '99999999999999999999'; expected a 64-bit integer"),
        (b"1\nx\n", "line 2 of ids.txt is 'x'; expected a 64-bit integer"),
        (b"\xff\xfe1\x00", "ids.txt is not UTF-8 text; expected a .npy file, or a text file with one id per line"),
    ],
    ids=["too large", "no number", "no text"],
)
@pytest.mark.parametrize("command", ["search", "delete"])
def test_ids_that_are_none_are_named_with_their_file(cli, index_path, queries, monkeypatch, command, content, said):
    monkeypatch.chdir(queries.parent)
    (queries.parent / "ids.txt").write_bytes(content)
    option = ("-q", queries, "--allow-ids") if command == "search" else ("--ids",)
    refused = cli(command, index_path, *option, "ids.txt")
    assert refused.code == ExitCode.BAD_INPUT
    assert f"{option[-1]}: {said}" in refused.err


@pytest.mark.parametrize("dtype", ["U1", "complex64", "bool"])
def test_rows_to_add_must_be_numbers(cli, index_path, tmp_path, dtype):
    np.save(tmp_path / "rows.npy", np.zeros((3, DIM), dtype=dtype))
    refused = cli("add", index_path, tmp_path / "rows.npy")
    assert refused.code == ExitCode.BAD_INPUT
    assert f"vectors have dtype {np.dtype(dtype)}; expected float32, float16" in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "--ids and --where are both missing"), (("--ids", "ids.txt", "--where", "a = 1"), "are both given")],
)
def test_delete_names_its_options(cli, index_path, words, said):
    refused = cli("delete", index_path, *words)
    assert refused.code == ExitCode.BAD_INPUT
    assert said in refused.err


def test_an_export_does_not_replace_a_pipe_or_a_device(cli, index_path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused = cli("export", index_path, tmp_path / "pipe")
    assert refused.code == ExitCode.BAD_INPUT
    assert "a device or a pipe; expected a new or regular file" in refused.err
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("words", [("search",), ("bench", "--rate", 50, "--duration", 0.1), ("apply",)])
def test_a_store_that_is_not_there_is_refused_and_not_made(cli, index_path, queries, tmp_path, words):
    """The plan of the right store would be passed over without a word, and with it its nprobe."""
    given = () if words == ("apply",) else ("-q", queries)
    refused = cli(*words, index_path, *given, "--store", tmp_path / "other.sqlite")
    assert refused.code == ExitCode.BAD_INPUT
    assert "which does not exist; expected a control store" in refused.err
    assert not (tmp_path / "other.sqlite").exists()


def test_attributes_to_remove_and_a_table_are_named_as_in_the_help(cli, index_path, tmp_path):
    refused = cli("attributes", index_path, tmp_path / "table.csv", "--remove")
    assert refused.code == ExitCode.BAD_INPUT
    assert "--remove is given with FILE; expected --remove alone" in refused.err


def test_a_row_that_cannot_be_added_is_counted_from_the_first_of_the_file(cli, index_path, tmp_path):
    rows = clustered(25)
    rows[23, 3] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    refused = cli("add", index_path, tmp_path / "rows.npy", "--batch", 10)
    assert refused.code == ExitCode.BAD_INPUT
    assert "rows.npy, row 23, holds NaN or infinity; expected finite values" in refused.err
    assert "20 rows are already in the index" in refused.err


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_says_how_many_rows_were_added(cli, index_path, tmp_path, monkeypatch, as_json):
    """They are there for good: "no partial result was left" would be read as if none were."""
    np.save(tmp_path / "rows.npy", clustered(25))
    add = Index.add

    def interrupted(index, *given, **options):
        if index.n_added == 20:
            raise KeyboardInterrupt
        return add(index, *given, **options)

    monkeypatch.setattr(Index, "add", interrupted)
    ended = cli("add", index_path, tmp_path / "rows.npy", "--batch", 10, *(["--json"] if as_json else []))
    assert ended.code == ExitCode.INTERRUPTED
    said = "interrupted; 20 rows are already in the index; with ids, repeat the command with --upsert"
    assert f"KeyboardInterrupt: {said}" in ended.err.splitlines()
    assert "half-made" not in ended.err
    if as_json:
        assert ended.json["error"] == {"type": "KeyboardInterrupt", "message": said, "exit_code": 130}


@pytest.mark.parametrize("there", [True, False])
def test_results_that_have_no_room_leave_what_was_there(cli, index_path, queries, tmp_path, there):
    with small_disk(tmp_path / "disk", 1) as disk:
        results = disk / "r.npz"
        asked = ("search", index_path, "--plan", "none", "-q", queries, "-o", results)
        if there:
            assert cli(*asked).code == 0
        before = results.read_bytes() if there else None
        with pytest.raises(OSError, match="No space left"):
            (disk / "fill").write_bytes(bytes(2 << 20))
        refused = cli(*asked, "-k", 1000)
        assert refused.code == ExitCode.BAD_INPUT
        assert "No space left on device" in refused.err
        assert (results.read_bytes() if results.exists() else None) == before
        assert sorted(path.name for path in disk.iterdir()) == ["fill", *(["r.npz"] if there else [])]


def test_results_go_into_a_device_itself(cli, index_path, queries, tmp_path):
    (tmp_path / "link.npz").symlink_to("/dev/null")
    assert cli("search", index_path, "-q", queries, "--plan", "none", "-o", tmp_path / "link.npz").code == 0
    assert (tmp_path / "link.npz").is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_to_revoke_a_key_takes_the_file_of_keys(cli, tmp_path):
    refused = cli("keys", "revoke", tmp_path / "keys.json", "web")
    assert refused.code == ExitCode.BAD_INPUT
    assert "keys.json' cannot be read: No such file or directory" in refused.err


def test_the_kind_of_an_error_is_not_broken_over_lines(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(err, "_width", 10)
    assert len(cli("verify", tmp_path / "none").err.splitlines()) == 1


@pytest.mark.parametrize("words", [("list",), ("remove", "nightly")])
def test_a_schedule_of_a_store_that_is_not_there_is_refused(cli, index_path, tmp_path, words):
    command, *name = words
    refused = cli("refresh-schedule", command, index_path, *name, "--store", tmp_path / "other.sqlite")
    assert refused.code == ExitCode.BAD_INPUT
    assert "which does not exist; expected a control store" in refused.err
    assert not (tmp_path / "other.sqlite").exists()
