"""Errors name path and cure; files that are replaced are whole; writes that are cut short go on."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest

from hybridindex import filesystem
from hybridindex.errors import FileError, MissingFileError, io_cure
from tests.faults import FaultyDisk, of


def test_an_error_names_path_and_cure_and_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"none cannot be opened: No such file.*something that is there"
    ) as caught:
        filesystem.read_bytes(tmp_path / "none")
    assert isinstance(caught.value, MissingFileError)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "none"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, number: int) -> None:
    file = tmp_path / "file"
    filesystem.replace_file(file, "old")
    disk = FaultyDisk()
    with filesystem.watched_by(disk):
        filesystem.replace_file(file, "old")
    for allowed, call in enumerate(disk.calls):
        with (
            filesystem.watched_by(FaultyDisk(allowed=allowed, number=number, sticks=False)),
            pytest.raises(FileError) as caught,
        ):
            filesystem.replace_file(file, "new")
        assert io_cure(OSError(number, os.strerror(number))) in str(caught.value)
        assert call.path in str(caught.value)
        # The last call makes the new name last.
        assert file.read_text() == ("new" if call.name == "sync_folder" else "old")
        assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_takes_half_goes_on(tmp_path: Path) -> None:
    data = bytes(range(200))
    disk = FaultyDisk(counts=of("write"), allowed=0)
    with filesystem.watched_by(disk):
        filesystem.write_bytes(tmp_path / "buffered", data)
        with filesystem.File(tmp_path / "raw", "w+") as file:
            file.write_at(data, 0)
    assert disk.failed > 4
    assert (tmp_path / "buffered").read_bytes() == (tmp_path / "raw").read_bytes() == data


def test_a_pipe_takes_what_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        filesystem.write_bytes(pipe, b"bytes")
        assert os.read(reader, 4096) == b"bytes"
        with filesystem.open_text(pipe, "w") as file:
            file.write("text")
        assert os.read(reader, 4096) == b"text"
        filesystem.write_arrays(pipe, x=np.arange(3))
        with np.load(io.BytesIO(os.read(reader, 1 << 16))) as stored:
            assert stored["x"].tolist() == [0, 1, 2]
    finally:
        os.close(reader)


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    x = np.arange(6.0).reshape(2, 3)
    filesystem.write_bytes(tmp_path / "x.npy", filesystem.array_bytes(x))
    filesystem.write_arrays(tmp_path / "x.npz", x=x)
    assert (filesystem.read_array(tmp_path / "x.npy") == x).all()
    assert (filesystem.read_arrays(tmp_path / "x.npz")["x"] == x).all()
    raw = filesystem.map_array(tmp_path / "x.npy", np.uint8)
    assert len(raw) == (tmp_path / "x.npy").stat().st_size


@pytest.mark.parametrize("header", [b"{'shape': (1", b"{'shape", b"{b'a': 1, 'a': 1}", b"{'a': 01}", b"{"])
def test_a_damaged_array_is_a_value_error(tmp_path: Path, header: bytes) -> None:
    """numpy passes on what Python's parser says of a damaged header, and an index with one did not open."""
    content = bytearray(filesystem.array_bytes(np.arange(6.0)))
    content[10:127] = header.ljust(117)
    filesystem.write_bytes(tmp_path / "x.npy", bytes(content))
    with pytest.raises(ValueError, match=r"."):
        filesystem.read_array(tmp_path / "x.npy")


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(50), b""])
def test_what_is_no_array_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    filesystem.write_bytes(tmp_path / "x.npy", content)
    with pytest.raises((ValueError, EOFError)):
        filesystem.read_array(tmp_path / "x.npy")


def test_what_is_not_there_is_no_error_to_look_at(tmp_path: Path) -> None:
    assert not filesystem.exists(tmp_path / "none")
    assert not filesystem.is_file(tmp_path)
    assert filesystem.is_dir(tmp_path)
    with (
        filesystem.watched_by(FaultyDisk(allowed=0, number=errno.EACCES)),
        pytest.raises(FileError, match="cannot be looked at"),
    ):
        filesystem.exists(tmp_path / "none")
