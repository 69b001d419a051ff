"""The power fails in the middle of a change of texts: no row is without its text, a change of given texts is there or
not, and what an ingest had not done is done by the next one.

SQLite's own files are as it promises them: what was committed is on disk when the call returns.
"""

from __future__ import annotations

import importlib
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridindex.filesystem import Call, watched_by
from hybridindex.rag.collection import Collection
from hybridindex.rag.ingest import put_texts, remove_texts
from tests.durability.power_cut import Recorder, write_image
from tests.rag.collection.test_crashes import write_texts
from tests.rag.collection.world import COLUMNS, DIM, Embedder, check, chunks_of, given_texts, ingest, put

update = importlib.import_module("hybridindex.rag.ingest.update")


class _Recorded(sqlite3.Connection):
    """Tells of each transaction before it begins and ends, and of what is on disk afterwards."""

    recorder: Recorder

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._file = Path(super().execute("PRAGMA database_list").fetchone()[2])

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement in ("BEGIN IMMEDIATE", "COMMIT"):
            self.recorder(Call(name="sqlite", path=str(self._file)))
        found = super().execute(statement, *values)
        if statement == "COMMIT":
            self._mark()
        return found

    def close(self) -> None:
        super().close()
        # It has written its log into the file, synced that, and removed the log.
        self._mark()

    def _mark(self) -> None:
        for file in (self._file, self._file.with_name(f"{self._file.name}-wal")):
            if file.exists():
                self.recorder.mark(file)


@contextmanager
def recording(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder(path, but=("-shm", ".lock"))
    kind = type("Recorded", (_Recorded,), {"recorder": recorder})
    with monkeypatch.context() as patched, watched_by(recorder):
        patched.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=kind))
        yield recorder
    recorder.end()


def images(recorder: Recorder, path: Path) -> Iterator[str]:
    """Lets the folder hold one after the other; and says before what the power failed."""
    for image, call in recorder.cuts.items():
        shutil.rmtree(path)
        write_image(image, path)
        yield f"before {call.name} {call.path}"


CHANGES = {
    "texts": lambda collection: put_texts(collection, given_texts("second"), Embedder()),
    "one text": lambda collection: put_texts(collection, given_texts("second")[:1], Embedder()),
    "removal": lambda collection: remove_texts(collection, ["text 0", "text 1"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_texts_is_there_or_not(tmp_path, monkeypatch, name):
    path = tmp_path / "idx"
    with Collection(path, columns=COLUMNS) as collection:
        put(collection, range(3))
        put_texts(collection, given_texts("first"), Embedder())
    before = chunks_of(path)
    with recording(path, monkeypatch) as recorder, Collection(path) as collection:
        CHANGES[name](collection)
    after = chunks_of(path)
    assert before != after
    assert len(recorder.cuts) > 10
    seen = []
    for where in images(recorder, path):
        check(path, recovered=False)
        with Collection(path) as collection:
            collection.recover()
        check(path)
        seen.append(chunks_of(path))
        assert seen[-1] in (before, after), where
    assert before in seen
    assert after in seen
    shutil.rmtree(path)
    write_image(recorder.acknowledged, path)
    check(path)
    assert chunks_of(path) == after, "it was acknowledged"


def test_an_ingest_is_ended_by_the_next(tmp_path, monkeypatch):
    path, texts = tmp_path / "idx", tmp_path / "texts"
    monkeypatch.setattr(update, "_BATCH", 3)
    write_texts(texts, 0)
    with Collection(path, columns=COLUMNS) as collection:
        collection.create(DIM)
        ingest(collection, texts)
    write_texts(texts, 1)
    with recording(path, monkeypatch) as recorder, Collection(path) as collection:
        ingest(collection, texts)
    after = chunks_of(path)
    assert set(after) == {str(file) for file in texts.iterdir()}
    assert len(recorder.cuts) > 30
    for where in images(recorder, path):
        check(path, recovered=False)
        with Collection(path) as collection:
            ingest(collection, texts)
        check(path)
        assert chunks_of(path) == after, where
    shutil.rmtree(path)
    write_image(recorder.acknowledged, path)
    assert chunks_of(path) == after, "it was acknowledged"
