"""Every call on a file fails, once and for good: the error names path and cure, and nothing that was there is lost.

What SQLite does below Python is swept by ``test_sqlite_faults.py``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridindex.cli.ingest_parts import _keep_older_documents
from hybridindex.demo import cache
from hybridindex.errors import HybridIndexError, StoreError, io_cure
from hybridindex.filesystem import Call, watched_by
from hybridindex.index import (
    build,
    compress,
    from_faiss,
    open_index,
    previous_generation,
    remove_replaced,
    rollback,
    save,
    to_faiss,
    verify,
)
from hybridindex.index.storage.beside import follow, lead_to
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.checkpoint import Checkpoint
from hybridindex.rag.documents import Document, DocumentStore, write_documents
from hybridindex.rag.records import Answer
from hybridindex.rag.trace import TraceWriter, read_traces
from hybridindex.report import write as report_write
from hybridindex.report.style import Drawn, Picture
from hybridindex.service.auth import KeyFile
from hybridindex.service.daemon_address import DaemonAddress, find_daemon
from hybridindex.store import ControlStore
from tests.faults import WRITES, FaultyDisk, of
from tests.memory_folder import memory_folder
from tests.partitioner.synthetic import make_profile

ROWS = np.random.default_rng(5).standard_normal((60, 4)).astype(np.float32)
OLDER = "gen-000001/documents.sqlite"
OLDEST, OLD, NEW = ROWS[:40], ROWS[:50], ROWS
#: All errors at every call instead of one each.
EVERYTHING = bool(os.environ.get("HYBRIDINDEX_ALL_FAULTS"))


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    number: int | None
    sticks: bool
    #: What may fail so: no read finds the disk full.
    calls: Callable[[Call], bool]


FAULTS = [
    Fault("EIO once", errno.EIO, False, of()),
    Fault("EIO for good", errno.EIO, True, of()),
    Fault("EACCES once", errno.EACCES, False, of()),
    Fault("EACCES for good", errno.EACCES, True, of()),
    Fault("ENOSPC once", errno.ENOSPC, False, of(*WRITES)),
    Fault("ENOSPC for good", errno.ENOSPC, True, of(*WRITES)),
    Fault("short write", None, False, of("write")),
]


def answer() -> Answer:
    return Answer(pipeline="p", question="q", text="", passages=(), events=(), seconds=0.0)


def documents(count: int) -> list[Document]:
    return [Document(id=i, text=f"text {i}") for i in range(count)]


def build_old(path: Path) -> None:
    build(OLDEST, path, nlist=2).close()
    build(OLD, path, nlist=2, replace=True).close()


def build_new(path: Path) -> None:
    build(NEW, path / "idx", nlist=2, replace=True).close()


def build_in_chunks(path: Path) -> None:
    ids = np.arange(len(NEW))[::-1].astype(np.int64)
    chunks = ((NEW[at : at + 20], ids[at : at + 20]) for at in range(0, len(NEW), 20))
    build(chunks, path / "idx", nlist=2, codec="pqfs", replace=True).close()


def build_first(path: Path) -> None:
    # replace: what a failing disk did not let be removed is no reason to refuse.
    build(path / "new.npy", path / "first", nlist=2, replace=True).close()


def open_and_search(path: Path) -> None:
    with open_index(path / "idx") as index:
        index.stored_codes(0)


def export(path: Path) -> None:
    with open_index(path / "idx", verify="quick") as index:
        to_faiss(index, path / "export.faiss")


def save_copy(path: Path) -> None:
    with open_index(path / "idx", verify="quick") as index:
        save(index, path / "copy", replace=True).close()


def make_codes(path: Path) -> None:
    with open_index(path / "idx", verify="quick") as index:
        compress(index, bits=2)


def checkpoint(path: Path) -> None:
    kept = Checkpoint(path / "profile.checkpoint.npz", "key")
    kept.put("stage", {"n": 1}, {"x": np.arange(3)})
    kept.put("next", {"n": 2})
    assert Checkpoint(path / "profile.checkpoint.npz", "other").get("stage") is None
    kept.remove()


def add_key(path: Path) -> None:
    KeyFile(path / "keys.json").add("new", "search")


def revoke_key(path: Path) -> None:
    KeyFile(path / "keys.json").revoke("old")


def announce(path: Path) -> None:
    address = DaemonAddress(path / "idx")
    try:
        address.announce(("http://here",), 2)
        found = find_daemon(path / "idx")
        assert found is None or found.urls == ("http://here",)
    finally:
        address.leave()


def ingest(path: Path) -> None:
    write_documents(path / "documents.sqlite", documents(4), index_fingerprint="new", embedder="e", dim=4)
    with DocumentStore(path / "documents.sqlite") as store:
        store.read([0, 3])


def older_documents(path: Path) -> None:
    _keep_older_documents(path / "plain", 2)


def links(path: Path) -> None:
    lead_to(path / "idx", 2, "documents.sqlite")
    follow(path / "idx", 2)


def trace(path: Path) -> None:
    with TraceWriter(path / "trace", model="m") as writer:
        writer.append(answer())


def copy_store(path: Path) -> None:
    (path / "idx" / "copied.sqlite").unlink(missing_ok=True)
    with ControlStore.open(path / "idx" / "control.sqlite") as store:
        store.copy_to(path / "copied.sqlite")


def sealed(path: Path) -> None:
    with cache.atomic_path(path / "cache" / "text") as beside:
        beside.write_text("new")
    cache.seal(path / "cache" / "text", {"n": 2})


def report(path: Path) -> None:
    report_write.write_report(path / "report", index_info={}, profile=PROFILE, plan=PLAN, title="new")


PROFILE = make_profile(nlist=16, n=200)
PLAN = make_plan(PROFILE, PlanRequest.resolve(slo_ms=50, device_budget_bytes=4 << 20))


SCENARIOS: dict[str, Callable[[Path], object]] = {
    "build": build_new,
    "build in chunks": build_in_chunks,
    "first build": build_first,
    "import": lambda path: from_faiss(path / "given.faiss", path / "idx", replace=True).close(),
    "save": save_copy,
    "codes": make_codes,
    "rollback": lambda path: rollback(path / "idx"),
    "gc": lambda path: remove_replaced(path / "idx"),
    "open": open_and_search,
    "verify": lambda path: verify(path / "idx"),
    "export": export,
    "checkpoint": checkpoint,
    "a key more": add_key,
    "a key less": revoke_key,
    "address": announce,
    "ingest": ingest,
    "older documents": older_documents,
    "links": links,
    "report": report,
    "trace": trace,
    "copy of the store": copy_store,
    "cache": sealed,
}


def index_state(path: Path) -> object:
    """Whose rows it has, and what it can go back to; None: nothing is there."""
    if not path.exists() or not (path / "CURRENT").exists():
        return None
    verify(path)
    with open_index(path) as index:
        return index.fingerprint, previous_generation(path)


def codes_state(path: Path) -> object:
    with open_index(path) as index:
        return index.rabitq and index.rabitq.spec.bits, index.rabitq_problem


def digest(path: Path) -> object:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def documents_of(path: Path) -> object:
    with DocumentStore(path) as store:
        return store.info.count, len(store.first(9))


def store_state(path: Path) -> object:
    with ControlStore.open(path) as store:
        store.check_invariants()
        return len(store.list_events())


#: All that a user has.
STATES: dict[str, Callable[[Path], object]] = {
    "index": lambda path: index_state(path / "idx"),
    "codes": lambda path: codes_state(path / "idx"),
    "copy": lambda path: index_state(path / "copy"),
    "first": lambda path: index_state(path / "first"),
    "keys": lambda path: sorted(key.name for key in KeyFile(path / "keys.json").read()),
    "documents": lambda path: documents_of(path / "documents.sqlite"),
    "documents of the index": lambda path: documents_of(path / "idx" / "documents.sqlite"),
    "older documents": lambda path: documents_of(path / "plain" / OLDER) if (path / "plain" / OLDER).exists() else None,
    "export": lambda path: digest(path / "export.faiss"),
    "report": lambda path: digest(path / "report" / "report.html"),
    "trace": lambda path: [run.question for run in read_traces(path / "trace")],
    "store": lambda path: store_state(path / "idx" / "control.sqlite"),
    "copy of the store": lambda path: (
        store_state(path / "copied.sqlite") if (path / "copied.sqlite").exists() else None
    ),
    "cache": lambda path: cache.check(path / "cache" / "text") and (path / "cache" / "text").read_text(),
}
#: Which of them a scenario may change, by the first word of its name; the index, where it is not here.
CHANGED = {
    "first": ["first"],
    "save": ["copy", "index"],
    "codes": ["codes", "index"],
    "export": ["export"],
    "a": ["keys"],
    "ingest": ["documents"],
    "older": ["older documents"],
    "links": ["documents of the index", "index"],
    "trace": ["trace"],
    "report": ["report"],
    "cache": ["cache"],
    "copy": ["copy of the store", "store"],
    "checkpoint": [],
}
#: Those that say nothing where they could not: what stays goes at the next time.
MAY_DO_NOTHING = {"gc"}


def besides(name: str, key: str, after: Any) -> list[object]:
    """What may be there, besides the old and the new, where all ended in the midst of it."""
    if key == "cache":
        return [None]  # it is made again
    # Between the two pointers: this was the last rollback.
    return [(after[0], None)] if name == "rollback" else []


def state(path: Path, name: str) -> dict[str, object]:
    return {key: STATES[key](path) for key in CHANGED.get(name.split()[0], ["index"])}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the scenarios change."""
    path = tmp_path_factory.mktemp("world")
    build_old(path / "idx")
    with open_index(path / "idx") as index:
        compress(index, bits=1)
    build(OLD, path / "copy", nlist=2).close()
    with build(OLD, path / "plain", nlist=2) as plain:
        about = {"index_fingerprint": plain.fingerprint, "embedder": "e", "dim": 4}
        write_documents(path / "plain" / "documents.sqlite", documents(3), **about)
    np.save(path / "new.npy", NEW)
    with build(NEW, path / "given", nlist=2) as given:
        to_faiss(given, path / "given.faiss")
    with open_index(path / "copy") as index:
        to_faiss(index, path / "export.faiss")
    keys = KeyFile(path / "keys.json")
    keys.add("old", "admin")
    keys.add("kept", "search")
    write_documents(path / "documents.sqlite", documents(3), index_fingerprint="old", embedder="e", dim=4)
    for generation in ("gen-000001", "gen-000002"):
        shutil.copy(path / "documents.sqlite", path / "idx" / generation)
    lead_to(path / "idx", 2, "documents.sqlite")
    trace(path)
    with ControlStore.open(path / "idx" / "control.sqlite") as store:
        store.record_event("test", {})
    (path / "cache").mkdir()
    (path / "cache" / "text").write_text("old")
    cache.seal(path / "cache" / "text", {"n": 1})
    (path / "report").mkdir()
    (path / "report" / "report.html").write_text("old")
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made


def copied(world: Path, to: Path) -> Path:
    return Path(shutil.copytree(world, to, symlinks=True))


def cases(calls: list[Call], seed: str) -> list[tuple[int, Fault]]:
    """The failing call and how it fails: each call with each fault, or with one; calls of one name take turns."""
    start = int(hashlib.sha256(seed.encode()).hexdigest(), 16)
    turns = Counter[str]()
    chosen = []
    for n, call in enumerate(calls):
        fitting = [fault for fault in FAULTS if fault.calls(call)]
        turn = (start + turns[call.name]) % len(fitting)
        turns[call.name] += 1
        chosen += [(n, fault) for fault in (fitting if EVERYTHING else fitting[turn : turn + 1])]
    return chosen


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second and touches no file: the report's pictures are the same every time."""
    drawn = {
        "slo": "slo-bytes",
        "prediction_check": "latency-check",
        "hit_rate": "hit-rate",
        "latency_fit": "latency-fit",
    }
    for name in ("slo", "hit_rate", "access", "load", "latency_fit", "prediction_check", "recall", "transfers"):
        there = None if name == "recall" else Drawn(png=b"png", csv="x,y\n")
        picture = Picture(name=drawn.get(name, name), title="", caption="", drawn=there)
        monkeypatch.setattr(report_write, f"draw_{name}", lambda *_, picture=picture, **__: picture)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_fails(name: str, world: Path, folder: Path, record_property: Any) -> None:
    run = SCENARIOS[name]
    disk = FaultyDisk()
    path = copied(world, folder / "w")
    before = state(path, name)
    with watched_by(disk):
        run(path)
    after = state(path, name)
    shutil.rmtree(path)
    wrong = []
    tried = cases(disk.calls, name)
    for n, fault in tried:
        copied(world, path)
        faulty = FaultyDisk(allowed=n, number=fault.number, sticks=fault.sticks)
        try:
            problem = one(name, path, faulty, fault, before, after)
        except HybridIndexError as error:
            problem = f"afterwards: {error!r}"
        if problem:
            wrong.append(f"call {n} {disk.calls[n].name} {disk.calls[n].path}, {fault.name}: {problem}")
        shutil.rmtree(path)
    record_property("cases", len(tried))
    assert not wrong, f"{len(wrong)} of {len(tried)}:\n" + "\n".join(wrong)


def one(
    name: str,
    path: Path,
    disk: FaultyDisk,
    fault: Fault,
    before: dict[str, object],
    after: dict[str, object],
) -> str:
    """What is wrong after a run with a fault; empty: nothing."""
    run, acknowledged = SCENARIOS[name], False
    try:
        with watched_by(disk):
            run(path)
    except HybridIndexError as error:
        words = str(error)
        if str(path) not in words and disk.calls[-1].path not in words:
            return f"no path: {words}"
        if fault.number is not None and io_cure(OSError(fault.number, "")) not in words:
            return f"no cure: {words}"
        if name == "copy of the store" and not isinstance(error, StoreError):
            return f"no error of the store: {error!r}"
        if fault.number is None:
            return f"a short write is an error: {words}"
    except Exception as error:  # noqa: BLE001
        return f"raw: {error!r}"
    else:
        acknowledged = name not in MAY_DO_NOTHING
    if not disk.failed:
        return "the fault did not come"
    now = state(path, name)
    if acknowledged and now != after:
        return f"acknowledged and not there: {now} instead of {after}"
    over = False
    for key, value in now.items():
        ended = besides(name, key, after[key]) if fault.sticks or key == "cache" else []
        over = over or (name == "rollback" and value in ended)
        if value not in (before[key], after[key], *ended):
            return f"lost: {key} is {value}, was {before[key]}, becomes {after[key]}"
    # It goes on as if nothing had been.
    if now != after and not over and (EVERYTHING or len(disk.calls) % 3 == 0):
        run(path)
        if (again := state(path, name)) != after:
            return f"again: {again} instead of {after}"
    return ""
