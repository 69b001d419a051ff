"""The real things: an index directory, a key file, a daemon's process, commands beside it, requests to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import hybridindex as hx
from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import ServiceError
from hybridindex.index import read_manifest
from hybridindex.index.storage.going_back import previous_generation
from hybridindex.plans.current import current_plan_id, latest_plan_id
from hybridindex.store import ControlStore
from hybridindex.types import F32, SearchResult
from tests.clustered import clustered
from tests.durability.launcher import PLANS_SOON, Child, Launcher
from tests.durability.machine.hooks import BROKEN_DEVICE, HELD
from tests.durability.machine.model import Generation, Key, Plans
from tests.durability.points import Point
from tests.oracle import check_answer

__all__ = ["CONTENTS", "NLIST", "NPROBE", "Answer", "Lab", "World"]

NLIST, NPROBE = 12, 4
#: What an index may hold: rows, dimension, and what the first store has for it. Clients cannot go on with ``wide``.
CONTENTS = {"a": (700, 16), "b": (900, 16), "c": (500, 16), "wide": (600, 20)}
#: Statuses that docs/service.md names beside success.
_DOCUMENTED = {400, 401, 403, 404, 408, 409, 413, 415, 421, 429, 503, 504, 507}
#: What may lie in an index directory beside the current generation, where no daemon runs and nothing was replaced.
_NEIGHBOURS = {
    ".log.lock",
    ".lock",
    "CURRENT",
    "daemon.lock",
    *(f"control.sqlite{end}" for end in ("", "-wal", "-shm", ".lock", ".replaced-wal")),
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    data: dict[str, Any]

    @property
    def kind(self) -> str:
        """Of a problem document."""
        return str(self.data.get("type", "")).rpartition(":")[2]


class Lab:
    """What all examples share: files of vectors, indexes to compare with, a first index with plans."""

    def __init__(self, launcher: Launcher, folder: Path, place: Path, *, mounted: bool, mutant: str = "") -> None:
        """``place``: where the worlds are; ``mounted``: it is a small file system of its own."""
        self.launcher = launcher
        self.folder = folder
        self.place = place
        self.mounted = mounted
        self.mutant = mutant
        self.number = 0
        self.references: dict[str, hx.Index] = {}
        for content, (n, dim) in CONTENTS.items():
            np.save(self.vectors(content), clustered(n, dim, seed=n))
            self.references[content] = self._build(content, folder / f"reference-{content}")
            np.save(self.calibration(content), clustered(80, dim, seed=2))
        self.first = folder / "first"
        for content in ("c", "b", "a"):
            with self._build(content, self.first) as index:
                profile = index.profile(np.load(self.calibration(content)), NPROBE, devices=["cpu"], max_seconds=0.2)
                if content != "c":
                    index.apply_plan(index.plan(5000, 16 << 20, profile, coverage=0.4))
        hx.remove_replaced(self.first)
        # Another index's.
        with self._build("a", folder / "other") as index, index.store():
            pass

    def _build(self, content: str, path: Path) -> hx.Index:
        return hx.build(np.load(self.vectors(content)), path, nlist=NLIST, metric="l2", nprobe=NPROBE, replace=True)

    def vectors(self, content: str) -> Path:
        return self.folder / f"{content}.npy"

    def calibration(self, content: str) -> Path:
        return self.folder / f"calibration-{content}.npy"

    def queries(self, content: str, n: int, seed: int) -> F32:
        return clustered(n, CONTENTS[content][1], seed=100 + seed)

    def check(self, content: str, queries: F32, k: int, nprobe: int, ids: Any, distances: Any) -> None:
        """The answer is that of the oracle over this content."""
        ivf = self.references[content].ivf
        assert np.max(ids) < CONTENTS[content][0], "an id of another content"
        moved = ivf.transform(queries)
        probes, _ = ivf.quantize(moved, nprobe)
        check_answer(ivf, moved, probes, k, distances, ids)

    def content_of(self, fingerprint: str) -> str:
        (found,) = (name for name, index in self.references.items() if index.fingerprint == fingerprint)
        return found

    def close(self) -> None:
        for index in self.references.values():
            index.close()


class World:
    """One index, its key file, and at most one daemon."""

    def __init__(self, lab: Lab) -> None:
        lab.number += 1
        self.lab = lab
        self.place = lab.place / str(lab.number)
        self.outside = lab.folder / f"w{lab.number}"
        self.outside.mkdir()
        # A failed example may have left the disk full.
        self.make_room()
        self.index = shutil.copytree(lab.first, self.place / "idx")
        self.keys = self.place / "keys.json"
        self.uds = self.outside / "s"
        self.url = f"unix:{self.uds}"
        self.child: Child | None = None
        self.http: httpx.Client | None = None
        self.log = ""
        self.threads = ThreadPoolExecutor(4)

    # Processes

    def command(self, *words: object, at: Point | None = None) -> tuple[int, dict[str, Any]]:
        """Exit status of a command and the object that it printed, with an empty one where it was killed."""
        child = self.lab.launcher.start(*words, "--json", at=at)
        status = child.wait()
        assert "Traceback" not in child.log, child.log
        said = [line for line in child.log.splitlines() if line.startswith("{")]
        assert status < 0 or said, child.log
        return status, json.loads(said[-1]) if said else {}

    def serve(self, asked: str, drain_s: int, at: Point | None, *, uds: Path | None = None) -> Child:
        words = ["serve", self.index, "--device", "cpu", "--no-tcp", "--uds", uds or self.uds, "--keys", self.keys]
        words += PLANS_SOON
        words += ["--drain-timeout", drain_s, "--refresh-planning", "here", "--json"]
        words += [] if asked == "current" else ["--plan", asked]
        begin = ("tests.durability.machine.hooks:begin", self.outside, self.lab.mutant)
        return self.lab.launcher.start(*words, at=at, before=begin)

    def start(self, asked: str, drain_s: int, at: Point | None) -> None:
        self.child = self.serve(asked, drain_s, at)
        self.child.wait_for('"urls"')
        # After what was replaced is removed.
        self.child.wait_for("warmed up")
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.uds)), base_url="http://daemon", timeout=120
        )

    def ended(self) -> int:
        """Waits for the end of the daemon; its status."""
        assert self.child is not None
        assert self.http is not None
        status = self.child.wait()
        self.http.close()
        self.log, self.child, self.http = self.child.log, None, None
        return status

    @property
    def said(self) -> str:
        """The log of the daemon, or of the last one."""
        return self.log if self.child is None else self.child.log

    def signal(self, number: int) -> None:
        assert self.child is not None
        os.kill(self.child.pid, number)

    def close(self) -> None:
        if self.child is not None:
            self.child.end()
        if self.http is not None:
            self.http.close()
        self.threads.shutdown()
        shutil.rmtree(self.place, ignore_errors=True)

    # Requests

    def ask(self, method: str, path: str, key: Key | None, **options: Any) -> Answer | None:
        """The answer, which is a success or a documented problem; None: the connection ended without one."""
        assert self.http is not None
        headers = {} if key is None else {"authorization": f"Bearer {key.secret}"}
        headers |= options.pop("headers", {})
        try:
            answer = self.http.request(method, path, headers=headers, **options)
        except httpx.TransportError:
            return None
        kind = answer.headers.get("content-type", "")
        data = json.loads(answer.content) if "json" in kind and answer.content else {}
        if answer.status_code >= 400 and path != "/healthz":
            assert answer.status_code in _DOCUMENTED, (answer.status_code, data, self.child and self.child.log)
            assert kind == "application/problem+json", kind
            assert data["status"] == answer.status_code
            assert data["detail"]
        return Answer(answer.status_code, data)

    def search(
        self, how: str, key: Key, queries: F32, k: int, nprobe: int, session: str | None = None
    ) -> SearchResult | Answer | ServiceError | None:
        """By the library's client, or as JSON."""
        if how == "client":
            with Client(self.url, key=key.secret, timeout_s=300, retry=RetryPolicy(attempts=1)) as client:
                try:
                    return client.search(queries, k, nprobe)
                except ServiceError as error:
                    return error
        path = "/v1/search" if session is None else f"/v1/sessions/{session}/search"
        body = {"queries": queries.tolist(), "k": k, "nprobe": nprobe}
        answer = self.ask("POST", path, key, json=body)
        if answer is None or answer.status != 200:
            return answer
        data = answer.data
        distances = [[np.inf if d is None else d for d in row] for row in data["distances"]]
        return SearchResult(
            ids=np.array(data["ids"], np.int64),
            distances=np.array(distances, np.float32),
            nprobe_used=np.array(data["nprobe_used"], np.int32),
            hit_rate=np.array(data["hit_rate"], np.float32),
        )

    def searching(
        self, key: Key, queries: F32, k: int, nprobe: int
    ) -> Future[SearchResult | Answer | ServiceError | None]:
        """On a thread, with a connection of its own."""
        return self.threads.submit(self.search, "client", key, queries, k, nprobe)

    # Switches

    def switch(self, name: str, *, on: bool) -> None:
        if on:
            (self.outside / name).touch()
        else:
            (self.outside / name).unlink(missing_ok=True)

    @property
    def armed_by(self) -> str:
        """The file that arms the point of the daemon."""
        return str(self.outside / "armed")

    def all_off(self) -> None:
        for name in (HELD, BROKEN_DEVICE, "armed"):
            self.switch(name, on=False)

    # The disk

    def fill(self) -> None:
        with (self.lab.place / "filler").open("wb") as file:
            step = 1 << 30
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
                except OSError:
                    step //= 2

    def make_room(self) -> None:
        (self.lab.place / "filler").unlink(missing_ok=True)

    # The index directory

    def lose_store(self, how: str) -> bool:
        """Whether it is lost; otherwise it is damaged in place. SQLite's files beside it go along with another one."""
        file = self.index / "control.sqlite"
        beside = [file.with_name(f"{file.name}{end}") for end in ("-wal", "-shm")]
        if how in ("deleted", "database deleted"):
            for each in (file, *(beside if how == "deleted" else ())):
                each.unlink(missing_ok=True)
            return True
        if how == "other index's":
            with suppress(OSError):  # of a full disk
                shutil.copy2(self.lab.folder / "other" / file.name, file.with_name("coming"))
                file.with_name("coming").replace(file)
                for each in beside:
                    each.unlink(missing_ok=True)
                return True
            file.with_name("coming").unlink(missing_ok=True)
        if not file.exists():
            return True
        with file.open("r+b") as opened:
            size = os.fstat(opened.fileno()).st_size
            if how == "junk":
                opened.write(b"no database" * (size // 11))
            elif how == "flipped":
                for at in range(100, size, 4096):
                    opened.seek(at + 1000)
                    opened.write(b"\xff")
            else:
                opened.truncate(size // 2 if how == "truncated" else 0)
        return False

    def generations(self, known: dict[int, str]) -> tuple[Generation, Generation | None]:
        """The current and the previous one; of ``known``, by number, or read from the disk."""

        def of(number: int) -> Generation:
            if number not in known:
                with hx.open(self.index, verify="full") as index:
                    known[number] = self.lab.content_of(index.fingerprint)
            return Generation(number, known[number])

        current = of(read_manifest(self.index).generation)
        before = previous_generation(self.index)
        return current, None if before is None else of(before)

    def ledger(self) -> dict[str, Plans]:
        """What the control store says, read beside whoever runs."""
        found: dict[str, Plans] = {}
        with ControlStore.open(self.index / "control.sqlite") as store:
            store.check_invariants()
            for content, index in self.lab.references.items():
                mark = index.fingerprint
                plans = store.list_plans(index_fingerprint=mark)
                for plan in plans:
                    store.load_plan(plan.id)
                found[content] = Plans(
                    profiled=bool(store.list_profiles(index_fingerprint=mark)),
                    stored={plan.id for plan in plans},
                    current=current_plan_id(store, mark),
                    latest=latest_plan_id(store, mark),
                )
        return found

    def left_behind(self, current: Generation, previous: Generation | None) -> set[str]:
        """Names in the index directory that nobody needs, where no daemon runs."""
        kept = {f"gen-{each.number:06d}" for each in (current, previous) if each is not None}
        kept |= set() if previous is None else {"PREVIOUS"}
        return {entry.name for entry in self.index.iterdir()} - _NEIGHBOURS - kept


#: Signals that rules send.
HUP, TERM, KILL = signal.SIGHUP, signal.SIGTERM, signal.SIGKILL
