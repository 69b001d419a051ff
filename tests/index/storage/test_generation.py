"""Whatever stops a build, the directory holds the old generation or the new one, and the next build cleans up."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from hybridindex import filesystem
from hybridindex.errors import (
    BuildError,
    DiskFullError,
    HybridIndexError,
    InvalidInputError,
    MissingFileError,
    NotWritableError,
)
from hybridindex.filesystem import Call, watched_by
from hybridindex.index import build, from_faiss, open_index, read_manifest, save, to_faiss, verify
from hybridindex.index.storage import generation
from tests.conftest import clustered_vectors
from tests.faults import WRITES, FaultyDisk, of
from tests.small_disk import small_disk

OLD, NEW = clustered_vectors(300, 8), clustered_vectors(400, 8, seed=1)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("stage", ["spool", "train", "assign", "encode", "pack", "checksum"])
@pytest.mark.parametrize("exists", [False, True])
def test_ctrl_c_leaves_nothing_half_made(tmp_path: Path, stage: str, exists: bool) -> None:
    path = tmp_path / "i"
    if exists:
        build(OLD, path, nlist=4)

    def progress(at: str, done: int, total: int | None) -> None:
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(iter([NEW]), path, nlist=4, codec="pqfs", replace=True, progress=progress)
    if exists:
        assert names(path) == [".lock", ".log.lock", "CURRENT", "gen-000001"]
        assert open_index(path).count == 300
    else:
        assert not path.exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_failure_at_any_step_leaves_old_or_new(tmp_path: Path, error: int) -> None:
    path = tmp_path / "i"
    build(OLD, path, nlist=2)
    disk = FaultyDisk(counts=of(*WRITES))
    with watched_by(disk):
        build(OLD, path, nlist=2, replace=True)
    total, outcomes = len(disk.calls), []
    assert total > 12
    for allowed in range(total):
        count = open_index(path).count
        new = NEW if count == 300 else OLD
        with (
            watched_by(FaultyDisk(counts=of(*WRITES), allowed=allowed, number=error)),
            pytest.raises(BuildError, match=str(path)) as caught,
        ):
            build(new, path, nlist=2, replace=True)
        found = open_index(path).count
        assert found in (count, len(new))
        outcomes.append(found == len(new))
        assert isinstance(caught.value, DiskFullError) == (error == errno.ENOSPC)
        words = "is current, but" if outcomes[-1] else "the previous generation is untouched"
        assert words in str(caught.value)
        assert not any(name.startswith(".building") for name in names(path))
    assert outcomes == sorted(outcomes), "there is one moment of commit"
    assert outcomes[0] is False
    build(NEW, path, nlist=2, replace=True)
    assert len(names(path)) == 6


def test_an_error_of_the_callers_own_input_stays_what_it_is(tmp_path: Path) -> None:
    def batches() -> Any:
        yield OLD
        raise ConnectionResetError(errno.ECONNRESET, "the feed ended")

    with pytest.raises(ConnectionResetError, match="the feed ended"):
        build(batches(), tmp_path / "i", nlist=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_beside_the_index_is_the_callers_own(tmp_path: Path) -> None:
    def batches() -> Any:
        yield OLD
        yield filesystem.read_array(tmp_path / "i.npy")

    with pytest.raises(MissingFileError, match=r"i\.npy cannot be opened"):
        build(batches(), tmp_path / "i", nlist=2)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(OLD, tmp_path / "i", nlist=2).close()

    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(NotWritableError, match=r"/i .*Function not implemented.*no file locks: use a local one"):
        build(NEW, tmp_path / "i", nlist=2, replace=True)
    with pytest.raises(NotWritableError, match="no file locks"), generation.writers_lock(tmp_path / "i"):
        pass
    assert open_index(tmp_path / "i").count == 300


def test_ctrl_c_right_after_the_switch_keeps_the_new_generation(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build(OLD, path, nlist=2)

    def interrupt(call: Call) -> None:
        # The first call after CURRENT got its new name.
        if call.name == "sync_folder" and (path / "CURRENT").read_text() == "gen-000002\n":
            raise KeyboardInterrupt

    with watched_by(interrupt), pytest.raises(KeyboardInterrupt):
        build(NEW, path, nlist=2, replace=True)
    assert open_index(path).count == 400


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_disk_full_on_a_first_build_leaves_nothing(tmp_path: Path, error: int) -> None:
    disk = FaultyDisk(counts=of("write", "sync"), allowed=3, number=error)
    with watched_by(disk), pytest.raises(DiskFullError, match="nothing was left behind"):
        build(OLD, tmp_path / "i", nlist=2)
    assert list(tmp_path.iterdir()) == []


def test_really_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        path = disk / "i"
        build(OLD, path, nlist=2)
        big = clustered_vectors(20_000, 32)
        for source in (big, iter([big])):
            with pytest.raises(DiskFullError):
                build(source, path, nlist=2, replace=True)
            assert open_index(path).count == 300
            assert names(path) == [".lock", ".log.lock", "CURRENT", "gen-000001"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    disk = FaultyDisk(counts=of("make_folder"), allowed=0, number=errno.EROFS)
    with watched_by(disk), pytest.raises(BuildError, match=r"cannot be written.*Read-only"):
        build(OLD, tmp_path / "i", nlist=2)


def test_killed_builder_leaves_the_old_generation_and_the_next_build_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build(OLD, path, nlist=2)
    code = f"""
import os, signal, numpy as np
from hybridindex.index import build
def progress(stage, done, total):
    if stage == "checksum":
        os.kill(os.getpid(), signal.SIGKILL)
build(np.ones((50, 4), np.float32), {str(path)!r}, nlist=1, replace=True, progress=progress)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert run.returncode == -9, run.stderr
    assert ".building-gen-000002" in names(path)
    assert open_index(path).count == 300
    assert build(NEW, path, nlist=2, replace=True).generation == 2
    assert names(path) == [".lock", ".log.lock", "CURRENT", "PREVIOUS", "gen-000001", "gen-000002"]


def test_a_second_writer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build(OLD, path, nlist=2)
    with FileLock(path / ".lock"), pytest.raises(BuildError, match="another process"):
        build(NEW, path, nlist=2, replace=True)
    assert open_index(path).count == 300
    assert verify(path).generation == 1


def test_damaged_index_is_not_swept_away_before_the_new_one_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build(OLD, path, nlist=2)
    (path / "CURRENT").write_text("gen-000007\n")

    def progress(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(NEW, path, nlist=2, replace=True, progress=progress)
    assert "gen-000001" in names(path)
    assert build(NEW, path, nlist=2, replace=True).count == 400


def test_control_store_beside_the_generations_survives(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build(OLD, path, nlist=2)
    (path / "control.sqlite").write_bytes(b"profiles")
    build(NEW, path, nlist=2, replace=True)
    assert (path / "control.sqlite").read_bytes() == b"profiles"


def test_index_dtype_is_explicit_everywhere(tmp_path: Path) -> None:
    index = build(OLD, tmp_path / "i", nlist=2)
    assert index.list_sizes.dtype == index.list_bytes.dtype == index.list_ids(0).dtype == np.int64


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("file/sub", InvalidInputError),
        ("file/sub/sub", InvalidInputError),
        ("n" * 300, InvalidInputError),
        ("a\0b", InvalidInputError),
        ("/proc/foo", NotWritableError),
    ],
)
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, place: str, error: type[HybridIndexError]) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(error, match=place[:50].partition("\0")[0]):
        build(OLD, tmp_path / place, nlist=2)
    assert names(tmp_path) == ["file"]
    with pytest.raises(InvalidInputError):
        open_index(tmp_path / place)
    with pytest.raises(InvalidInputError):
        from_faiss(tmp_path / place, tmp_path / "i")


@pytest.mark.parametrize("path", [None, 3, b"bytes", ["list"]])
def test_what_is_no_path_is_refused(tmp_path: Path, path: Any) -> None:
    with build(OLD, tmp_path / "i", nlist=2) as index:
        for use in (open_index, read_manifest, verify):
            with pytest.raises(InvalidInputError, match="expected a string or a pathlib"):
                use(path)
        uses: list[Any] = [
            lambda: build(OLD, path, nlist=2),
            lambda: save(index, path),
            lambda: to_faiss(index, path),
            lambda: from_faiss(path, tmp_path / "j"),
        ]
        for call in uses:
            with pytest.raises(InvalidInputError, match="expected a string or a pathlib"):
                call()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("nope/x", NotWritableError),
        ("/proc/foo", NotWritableError),
        ("", InvalidInputError),
        ("i/CURRENT/x", InvalidInputError),
        ("n" * 300, InvalidInputError),
    ],
)
def test_an_export_to_no_place_for_a_file_is_refused(tmp_path: Path, place: str, error: type[HybridIndexError]) -> None:
    with build(OLD, tmp_path / "i", nlist=2) as index, pytest.raises(error):
        to_faiss(index, tmp_path / place)
    assert names(tmp_path) == ["i"]
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_no_export_is_named(tmp_path: Path, error: int) -> None:
    disk = FaultyDisk(counts=of(*WRITES), allowed=2, number=error)
    with (
        build(OLD, tmp_path / "i", nlist=2) as index,
        pytest.raises(BuildError, match=r"a\.faiss cannot be written .*nothing was left behind") as caught,
        watched_by(disk),
    ):
        to_faiss(index, tmp_path / "a.faiss")
    assert isinstance(caught.value, DiskFullError) == (error == errno.ENOSPC)
    assert names(tmp_path) == ["i"]
