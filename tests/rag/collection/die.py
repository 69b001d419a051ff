"""Makes a change of a copy of a folder, and dies at its first call on a file or transaction; of another copy, and dies
at its second; and so on, until one is done.

    python -m tests.rag.collection.die FOLDER CHANGE STEP

STEP: only at each such call. Leaves a copy for each: FOLDER-0001 and so on; in the last one the change was done. One
process loads what the change needs and forks for each; it makes none itself, for threads do not survive a fork. What is
ingested lies in texts, beside the folder.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.filesystem import Call
from hybridindex.rag.collection import Collection
from hybridindex.rag.collection import store as stores
from hybridindex.rag.ingest import put_texts, remove_texts
from tests.rag.collection.world import COLUMNS, Embedder, given_texts, ingest, put

#: A watcher is gone when nobody has it.
_kept: list[Any] = []


def change(path: Path, which: str) -> None:
    if which == "make":
        with Collection(path / "idx", columns=COLUMNS) as made:
            put(made, range(4))
        return
    with Collection(path / "idx") as collection:
        if which == "put":
            put(collection, range(2, 7), "second")
        elif which == "delete":
            collection.delete(keys=["k0", "k1", "none"])
        elif which == "compact":
            collection.compact()
        elif which == "texts":
            put_texts(collection, given_texts("second"), Embedder())
        elif which == "removal":
            remove_texts(collection, ["text 0", "text 1", "none"])
        elif which == "ingest":
            # Many batches, so that it dies between them, too.
            setattr(importlib.import_module("hybridindex.rag.ingest.update"), "_BATCH", 3)  # noqa: B010
            ingest(collection, path.parent / "texts")
        else:
            raise AssertionError(which)


def die_at(number: int) -> None:
    left = number

    def count(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    connected = stores._connected

    def traced(path: Path) -> Any:
        db = connected(path)
        # Between two statements of a transaction nothing reaches the disk.
        db.set_trace_callback(lambda said: count(said) if said.startswith(("BEGIN", "COMMIT")) else None)
        return db

    stores._connected = traced

    def watch(call: Call) -> None:
        if call.name not in ("stat", "list_folder", "open", "read", "map"):
            count(call)

    watching = filesystem.watched_by(watch)
    watching.__enter__()
    _kept.append(watching)


def load_what_it_needs(folder: Path, which: str) -> None:
    """Imports what a process has imported after the change: else each one that dies would do so for itself."""
    with tempfile.TemporaryDirectory() as rehearsal:
        shutil.copytree(folder, Path(rehearsal) / "f", symlinks=True)
        if (texts := folder.parent / "texts").exists():
            shutil.copytree(texts, Path(rehearsal) / "texts")
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            try:
                change(Path(rehearsal) / "f", which)
                os.write(writing, "\n".join(sys.modules).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as names:
            found = names.read().split()
        os.waitpid(pid, 0)
    for name in found:
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(name)


def main(folder: Path, which: str, step: int) -> None:
    load_what_it_needs(folder, which)
    for number in range(1, 2000, step):
        copy = folder.with_name(f"{folder.name}-{number:04d}")
        shutil.copytree(folder, copy, symlinks=True)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                die_at(number)
                change(copy, which)
                code = 0
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        assert status == -signal.SIGKILL, status
    raise AssertionError("it never ends")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
