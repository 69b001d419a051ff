"""An index is replaced only where somebody asked for it, and what was replaced can come back until it is removed."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from hybridindex.errors import BuildError, CorruptIndexError, IndexExistsError, InvalidInputError, NotWritableError
from hybridindex.filesystem import watched_by
from hybridindex.index import (
    build,
    from_faiss,
    open_index,
    previous_generation,
    read_manifest,
    remove_replaced,
    rollback,
    save,
    to_faiss,
    verify,
    write_layout,
)
from hybridindex.service.daemon_address import DaemonAddress
from tests.conftest import clustered_vectors
from tests.faults import FaultyDisk, of

OLD, NEW = clustered_vectors(300, 8), clustered_vectors(400, 8, seed=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build(OLD, tmp_path / "i", nlist=2).close()
    return tmp_path / "i"


def replace(path: Path, **options: object) -> None:
    build(NEW, path, nlist=2, replace=True, **options).close()  # type: ignore[arg-type]


def generations(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith("gen-"))


def test_no_writer_replaces_an_index_unasked(path: Path, tmp_path: Path) -> None:
    with open_index(path) as index:
        to_faiss(index, tmp_path / "a.faiss")
        for write in (
            lambda: build(NEW, path, nlist=2),
            lambda: from_faiss(tmp_path / "a.faiss", path),
            lambda: save(index, path),
            lambda: write_layout(index, path, "rows"),
        ):
            with pytest.raises(IndexExistsError, match=r"1, 300 x 8, flat, ip.*no daemon serves it.*--replace"):
                write()
    assert generations(path) == ["gen-000001"]
    assert verify(path).count == 300


def test_the_refusal_names_who_serves(path: Path) -> None:
    address = DaemonAddress(path)
    address.announce(("http://127.0.0.1:1",), 1)
    try:
        # File locks are per process and reentrant only by the same object: the lock is seen as held here, too.
        with pytest.raises(IndexExistsError, match=r"pid \d+ serves generation 1 at http://127.0.0.1:1"):
            build(NEW, path, nlist=2)
    finally:
        address.leave()


def test_what_was_replaced_comes_back_and_goes_again(path: Path) -> None:
    old = read_manifest(path)
    replace(path)
    assert (read_manifest(path).count, previous_generation(path)) == (400, 1)
    assert rollback(path) == old
    assert open_index(path).count == 300
    assert rollback(path).count == 400
    assert remove_replaced(path) == [1]
    assert generations(path) == ["gen-000002"]
    with pytest.raises(InvalidInputError, match="no generation to go back to"):
        rollback(path)
    # A number is never used for two contents while one of them is there.
    replace(path)
    assert generations(path) == ["gen-000002", "gen-000003"]


def test_only_one_is_kept_and_rather_the_one_that_is_served(path: Path) -> None:
    replace(path)
    replace(path)
    assert generations(path) == ["gen-000002", "gen-000003"]
    address = DaemonAddress(path)
    address.announce((), 2)
    try:
        replace(path)
    finally:
        address.leave()
    assert generations(path) == ["gen-000002", "gen-000004"]
    assert rollback(path).generation == 2


def test_a_damaged_one_does_not_come_back(path: Path) -> None:
    replace(path)
    file = path / "gen-000001/lists.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptIndexError, match=r"lists\.bin"):
        rollback(path)
    assert read_manifest(path).generation == 2


def test_damage_of_the_current_one_names_the_way_back(path: Path) -> None:
    replace(path)
    (path / "gen-000002/model.faiss").unlink()
    with pytest.raises(CorruptIndexError, match="hybridindex rollback"):
        open_index(path)
    rollback(path)
    assert open_index(path).count == 300


def test_nothing_is_removed_for_a_daemon_that_serves_another_one(path: Path) -> None:
    replace(path)
    assert remove_replaced(path, serving=1) == []
    assert remove_replaced(path, serving=2) == [1]


def test_a_generation_that_was_never_current_does_not_come_back(path: Path) -> None:
    """A writer died between the name of its generation and the switch."""
    replace(path)
    remove_replaced(path)
    (path / "gen-000002").rename(path / "gen-000003")
    (path / "CURRENT").write_text("gen-000003\n")
    np.save(path / "gen-000003" / "x.npy", OLD)
    build(OLD, path.parent / "other", nlist=2).close()
    (path.parent / "other/gen-000001").rename(path / "gen-000004")
    with pytest.raises(InvalidInputError, match="no generation to go back to"):
        rollback(path)


def test_a_writer_at_work_is_not_disturbed(path: Path) -> None:
    replace(path)
    with FileLock(path / ".lock"):
        for change in (rollback, remove_replaced):
            with pytest.raises(BuildError, match="another process"):
                change(path)  # type: ignore[operator]
    assert generations(path) == ["gen-000001", "gen-000002"]


def test_what_a_killed_writer_left_is_removed_with_what_was_replaced(path: Path) -> None:
    """A daemon does it when it starts; a writer that lives holds the lock."""
    half, pointer = path / ".building-gen-000002", path / "CURRENT.new"
    half.mkdir()
    (half / "lists.bin").write_bytes(bytes(100))
    pointer.write_text("gen-00")
    with FileLock(path / ".lock"):
        assert remove_replaced(path) == []
        assert half.exists()
    assert remove_replaced(path, serving=1) == []
    assert not half.exists()
    assert not pointer.exists()
    assert verify(path).count == 300


def test_a_leftover_that_a_failing_disk_keeps_is_no_writer(path: Path) -> None:
    (path / ".building-gen-000002").mkdir()
    disk = FaultyDisk(counts=of("sync_folder"), allowed=0, number=errno.EIO)
    with watched_by(disk), pytest.raises(NotWritableError, match="its disk, or the way to it, fails"):
        remove_replaced(path)
