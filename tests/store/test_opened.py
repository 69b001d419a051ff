"""Files that are deleted, moved or replaced while a store is open: nothing is taken that would not last."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridindex.errors import StoreError, StoreLockedError, StoreVersionError, io_cure
from hybridindex.filesystem import Call, watched_by
from hybridindex.store import ControlStore
from tests.faults import FaultyDisk, of

Spoil = Callable[[Path], object]


def kinds(store: ControlStore) -> list[str]:
    return [event.kind for event in reversed(store.list_events())]


def kinds_at(path: Path) -> list[str]:
    with ControlStore.open(path) as store:
        store.check_invariants()
        return kinds(store)


def beside(path: Path) -> set[str]:
    return {file.name.removeprefix(path.name) for file in path.parent.glob(f"{path.name}*")}


def delete(path: Path) -> None:
    path.unlink()


def move(path: Path) -> None:
    path.rename(path.with_name("moved.sqlite"))


def delete_all(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.mkdir()


def replace_folder(path: Path) -> None:
    move_folder(path)
    ControlStore.open(path).close()


def delete_log(path: Path) -> None:
    os.unlink(f"{path}-wal")


def replace_log(path: Path) -> None:
    delete_log(path)
    Path(f"{path}-wal").touch()


def delete_shared(path: Path) -> None:
    os.unlink(f"{path}-shm")


def file_for_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.touch()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "control.sqlite"


@pytest.mark.parametrize(
    ("spoil", "named", "kept"),
    [
        (delete, "", False),
        (move, "", False),
        (delete_all, "", False),
        (move_folder, "", False),
        (replace_folder, "", False),
        (delete_log, "-wal", True),
        (replace_log, "-wal", True),
        (delete_shared, "-shm", True),
    ],
)
def test_nothing_is_taken_once_a_file_is_gone(place: Path, spoil: Spoil, named: str, kept: bool) -> None:
    with ControlStore.open(place) as store:
        store.record_event("before", {})
        spoil(place)
        with pytest.raises(StoreError, match=f"{place}{named} was open, and .*rename it into place"):
            store.record_event("while", {})
        store.record_event("after", {})
        seen = kinds(store)
        assert store.openings == 2
        assert store.problem is None
    # What was acknowledged is there, and what was refused counts for nothing.
    assert seen == (["before", "after"] if kept else ["after"])
    assert kinds_at(place) == seen
    assert beside(place) == {"", ".lock"}


def test_reading_and_looking_notice_it_too(place: Path) -> None:
    with ControlStore.open(place) as store:
        for look in (store.list_events, store.check_place, store.check_writable, store.check_invariants):
            place.unlink()
            with pytest.raises(StoreError, match="deleted or moved away"):
                look()
            store.check_place()


def test_what_was_committed_goes_with_a_database_that_is_moved(place: Path) -> None:
    with ControlStore.open(place) as store:
        store.record_event("before", {})
        move(place)
        with pytest.raises(StoreError):
            store.check_place()
        store.record_event("after", {})
        assert kinds_at(place.with_name("moved.sqlite")) == ["before"]


def test_a_database_that_is_put_back_goes_on(place: Path) -> None:
    with ControlStore.open(place) as store:
        store.record_event("before", {})
        move(place)
        with pytest.raises(StoreError):
            store.check_place()
        place.with_name("moved.sqlite").rename(place)
        store.record_event("after", {})
        assert kinds(store) == ["before", "after"]
    assert kinds_at(place) == ["before", "after"]


def test_a_folder_that_became_a_file_is_a_store_that_is_gone(place: Path) -> None:
    with ControlStore.open(place) as store:
        file_for_folder(place)
        with pytest.raises(StoreError, match="deleted or moved away"):
            store.check_place()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_place_that_cannot_be_looked_at_is_a_store_out_of_reach(place: Path, number: int) -> None:
    def unseen() -> FaultyDisk:
        return FaultyDisk(counts=of("stat", path=place.name), allowed=0, number=number)

    says = f"control store {place}: .*{io_cure(OSError(number, ''))}"
    with ControlStore.open(place) as store:
        store.record_event("before", {})
        with watched_by(unseen()):
            for _ in range(2):
                with pytest.raises(StoreError, match=says):
                    store.record_event("while", {})
            assert io_cure(OSError(number, "")) in str(store.problem)
            with pytest.raises(StoreError, match=says):
                ControlStore.open(place)
            with ControlStore.open(place, required=False) as other:
                assert other.problem is not None
        store._retry_s = 0.0
        store.record_event("after", {})
        assert (kinds(store), store.problem) == (["before", "after"], None)
    assert kinds_at(place) == ["before", "after"]


@pytest.mark.parametrize("gone", [False, True])
def test_connections_end_with_the_store_wherever_its_files_are(
    place: Path, gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = ControlStore.open(place)
    opened = store._opened
    assert opened is not None
    if gone:
        move(place)
    with watched_by(FaultyDisk(counts=of("lock" if gone else "stat"), allowed=0, number=errno.EIO)):
        store.close()
    assert opened.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert f"control store {place}" in caplog.text


def test_an_opening_that_fails_keeps_no_connection(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ControlStore.open(place).close()
    made, real = [], sqlite3.connect

    def connect(*args: object, **options: object) -> sqlite3.Connection:
        made.append(real(*args, **options))  # type: ignore[call-overload]
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", connect)
    # Looked at before the upgrade, and before and after the connection that stays.
    disk = FaultyDisk(counts=of("stat", path="-shm"), allowed=2, number=errno.EIO)
    with watched_by(disk), pytest.raises(StoreError, match="-shm cannot be looked at") as caught:
        ControlStore.open(place)
    assert caught.value.__cause__ is not None
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_a_copy_is_of_what_was_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = place.with_name("other.sqlite")
    ControlStore.open(other).close()
    real = sqlite3.connect

    def connect(*args: object, **options: object) -> sqlite3.Connection:
        if other.exists():
            other.rename(place)
        return real(*args, **options)  # type: ignore[call-overload, no-any-return]

    with ControlStore.open(place) as store:
        store.record_event("ours", {})
        monkeypatch.setattr(sqlite3, "connect", connect)
        with pytest.raises(StoreError, match="another file is in its place"):
            store.copy_to(place.with_name("copy.sqlite"))
    assert not place.with_name("copy.sqlite").exists()


def test_files_that_another_process_made_meanwhile_stay(place: Path) -> None:
    store = ControlStore.open(place)
    store.record_event("ours", {})
    delete(place)
    opened = store._opened
    assert opened is not None
    theirs = [Path(f"{place}{suffix}") for suffix in ("", "-wal", "-shm")]

    def make_theirs(call: Call) -> None:
        if call.name == "lock":
            for file in theirs:
                file.unlink(missing_ok=True)
                file.write_text("theirs")

    with watched_by(make_theirs):
        opened.close()
    assert [file.read_text() for file in theirs] == ["theirs"] * 3
    store._opened = None
    store.close()


def test_the_logs_of_all_that_were_replaced_are_kept(place: Path) -> None:
    with ControlStore.open(place) as store:
        store.copy_to(place.with_name("first.sqlite"))
        store.copy_to(place.with_name("second.sqlite"))
        for name in ("first", "second"):
            store.record_event(f"before {name}", {})
            place.rename(place.with_name(f"moved {name}"))
            place.with_name(f"{name}.sqlite").rename(place)
            with pytest.raises(StoreError, match="another file is in its place"):
                store.check_place()
            store.check_place()
    for name, number in (("first", ""), ("second", "1")):
        moved = place.with_name(f"moved {name}")
        Path(f"{place}.replaced{number}-wal").rename(f"{moved}-wal")
        assert kinds_at(moved) == [f"before {name}"]


def test_a_copy_in_its_place_is_opened_without_the_log_of_the_old_one(place: Path) -> None:
    with ControlStore.open(place) as store:
        store.record_event("copied", {})
        store.copy_to(place.with_name("copy.sqlite"))
        store.record_event("later", {})
        move(place)
        place.with_name("copy.sqlite").rename(place)
        with pytest.raises(StoreError, match="another file is in its place"):
            store.list_events()
        store.record_event("after", {})
        assert kinds(store) == ["copied", "after"]
        store.check_invariants()
    assert kinds_at(place) == ["copied", "after"]
    # The log of the old one is kept for who wants it back.
    moved = place.with_name("moved.sqlite")
    Path(f"{place}.replaced-wal").rename(f"{moved}-wal")
    assert kinds_at(moved) == ["copied", "later"]


def test_a_file_that_goes_while_a_call_runs_is_noticed_before_its_answer(place: Path) -> None:
    with ControlStore.open(place) as store:
        with pytest.raises(StoreError, match="deleted or moved away"), store._transaction(writes=True):
            place.unlink()
        with pytest.raises(StoreError, match="deleted or moved away"), store._transaction(writes=True):
            place.unlink()


def test_calls_of_before_end_before_it_is_opened_again(place: Path) -> None:
    with ControlStore.open(place, busy_timeout_s=0.05) as store:
        began, end = threading.Event(), threading.Event()

        def read() -> None:
            with store._transaction():
                began.set()
                end.wait()

        thread = threading.Thread(target=read)
        thread.start()
        began.wait()
        place.unlink()
        with pytest.raises(StoreError, match="deleted or moved away"):
            store.check_place()
        with pytest.raises(StoreLockedError, match="do not end"):
            store.check_place()
        # Until the next try is due, calls say at once why the last one failed.
        with pytest.raises(StoreLockedError, match="do not end"):
            store.check_place()
        end.set()
        thread.join()
        store._retry_s = 0.0
        store.check_place()


def test_a_wait_that_is_interrupted_keeps_nobody_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with ControlStore.open(place) as store:
        place.unlink()
        with pytest.raises(StoreError, match="deleted or moved away"):
            store.check_place()
        with monkeypatch.context() as waits:
            waits.setattr(store._idle, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.check_place()
        store.check_place()


def not_there(path: Path) -> None:
    path.parent.rmdir()


def no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def newer(path: Path) -> None:
    with ControlStore.open(path) as store, store._opened.writer.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (not_there, StoreError, "does not exist"),
        (no_database, StoreError, "not a SQLite database"),
        (newer, StoreVersionError, "upgrade hybridindex"),
    ],
)
def test_one_that_is_not_required_is_opened_when_it_can_be(
    place: Path, spoil: Spoil, kind: type[StoreError], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(place)
    with pytest.raises(kind, match=says):
        ControlStore.open(place)
    with ControlStore.open(place, required=False) as store:
        assert (store.openings, store.revision) == (0, None)
        assert says in str(store.problem)
        with pytest.raises(kind, match=says):
            store.record_event("lost", {})
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        # It is not tried at each call.
        with pytest.raises(kind, match=says):
            store.check_place()
        store._retry_s = 0.0
        with caplog.at_level(logging.INFO):
            store.record_event("taken", {})
        assert (store.openings, store.problem) == (1, None)
        assert "it is open again" in caplog.text
    assert kinds_at(place) == ["taken"]
