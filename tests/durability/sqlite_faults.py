"""The process in which ``failing_calls.c`` is preloaded: SQLite's calls fail, one in each run. Prints what is wrong."""

from __future__ import annotations

import ctypes
import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from hybridindex.errors import HybridIndexError, StoreError, io_cure
from hybridindex.rag.documents import Document, DocumentStore, write_documents
from hybridindex.store import ControlStore
from tests.store.conftest import make_profile

#: Errors, and whether they stay. 0: a write takes half of its bytes.
FAULTS = [(number, sticks) for number in (errno.EIO, errno.ENOSPC, errno.EACCES) for sticks in (False, True)]
FAULTS.append((0, False))


#: SQLite does not say which error of the system it met.
CURES = [io_cure(OSError(number, "")) for number in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EPERM)]
CURES += ["its directory must exist and be writable", "restore it from a copy", "write it anew"]


def first_open(path: Path) -> None:
    ControlStore.open(path / "new.sqlite").close()


def record(path: Path) -> None:
    with ControlStore.open(path / "control.sqlite") as store:
        store.record_event("new", {})


def save(path: Path) -> None:
    with ControlStore.open(path / "control.sqlite") as store:
        store.save_profile(PROFILE)


def read(path: Path) -> None:
    with ControlStore.open(path / "control.sqlite") as store:
        store.load_profile()


def copy(path: Path) -> None:
    with ControlStore.open(path / "control.sqlite") as store:
        store.copy_to(path / "copy.sqlite")


def ingest(path: Path) -> None:
    found = [Document(id=i, text=f"text {i}") for i in range(4)]
    write_documents(path / "documents.sqlite", found, index_fingerprint="f", embedder="e", dim=4)


def read_documents(path: Path) -> None:
    with DocumentStore(path / "documents.sqlite") as store:
        store.read([0])


SCENARIOS = [first_open, record, save, read, copy, ingest, read_documents]
PROFILE = make_profile()


def rows(path: Path) -> list[object]:
    if not path.exists():
        return []
    with ControlStore.open(path) as store:
        store.check_invariants()
        return [len(store.list_profiles()), len(store.list_events())]


def state(path: Path) -> list[object]:
    with DocumentStore(path / "documents.sqlite") as documents:
        count = len(documents.first(9))
    new = path / "new.sqlite"
    # What was begun of a new store is finished when it is opened.
    return [rows(path / "control.sqlite"), rows(path / "copy.sqlite"), new.exists() and rows(new), count]


def main(folder: Path, every: bool) -> None:
    calls = ctypes.CDLL(None)
    base, path = folder / "base", folder / "w"
    base.mkdir()
    record(base)
    save(base)
    write_documents(base / "documents.sqlite", [Document(id=0, text="a")], index_fingerprint="f", embedder="e", dim=4)

    def run(scenario: Callable[[Path], None], after: int, number: int, sticks: bool) -> tuple[int, str]:
        calls.faults_arm(str(path).encode(), ctypes.c_long(after), number, int(sticks))
        try:
            scenario(path)
        except HybridIndexError as error:
            words = str(error)
        except Exception as error:  # noqa: BLE001
            words = f"RAW {error!r}"
        else:
            words = ""
        return int(calls.faults_disarm()), words

    wrong, tried = [], 0
    for scenario in SCENARIOS:
        shutil.copytree(base, path)
        before = state(path)
        total, _ = run(scenario, 1 << 30, errno.EIO, False)
        after = state(path)
        shutil.rmtree(path)
        # Long scenarios are alike; 3 shares no factor with the number of faults.
        for n in range(0, total, 1 if every or total < 60 else 3):
            for at, (number, sticks) in enumerate(FAULTS):
                if not every and at != n % len(FAULTS):
                    continue
                tried += 1
                shutil.copytree(base, path)
                seen, words = run(scenario, n, number, sticks)
                where = f"{scenario.__name__}, call {n} of {total}, {errno.errorcode.get(number, 'short')} {sticks}"
                if words.startswith("RAW") or (words and str(path) not in words):
                    wrong.append(f"{where}: {words}")
                elif words and not any(cure in words for cure in CURES):
                    wrong.append(f"{where}: no cure: {words}")
                if seen <= n:
                    wrong.append(f"{where}: the fault did not come, {seen} calls")
                try:
                    now = state(path)
                    if any(a not in (b, c) for a, b, c in zip(now, before, after, strict=True)):
                        wrong.append(f"{where}: lost: {now}, was {before}, becomes {after}")
                    if not words and now != after:
                        wrong.append(f"{where}: acknowledged and not there: {now}, expected {after}")
                except StoreError as error:
                    wrong.append(f"{where}: broken: {error}")
                shutil.rmtree(path)
    print(json.dumps({"tried": tried, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), bool(sys.argv[2]))
