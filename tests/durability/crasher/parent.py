"""Starts processes, kills them, and looks at what they left."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

import hybridindex as hx
from hybridindex.index import open_index
from hybridindex.types import F32, Metric
from tests.durability.crasher.child import N_WRITERS, be_child, be_recoverer, vectors_of
from tests.simulation.changes.oracle import AUTO, Owner, Row, Rows, check_answer, mismatch, of_owners, unnamed_first
from tests.simulation.changes.views import View, dump
from tests.simulation.virtual.scheduler import ViolationError

__all__ = ["Crasher", "Report"]

_ROWS, _NLIST, _DIM = 300, 8, 8
#: A child is killed so many seconds after its start at most.
_LONGEST_S = 1.2
_QUERIES = 3


@dataclass(slots=True, kw_only=True)
class Report:
    """What came of it."""

    seed: int
    kills: int = 0
    #: Kills of a process that opened and compacted what another one left.
    kills_in_recovery: int = 0
    changes: int = 0
    #: That were under way at a kill: which were there afterwards.
    under_way: int = 0
    under_way_there: int = 0
    compactions: int = 0
    generations: int = 0
    audits: int = 0
    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def json(self) -> str:
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)}, indent=1)


class Crasher:
    """One index and all its crashes."""

    def __init__(self, folder: Path, seed: int, *, metric: Metric = "l2") -> None:
        self._path = folder / "idx"
        self._draw = random.Random(seed)
        self.report = Report(seed=seed)
        vectors = vectors_of(N_WRITERS, 0, _ROWS + 1, _DIM)
        ids = np.array([*range(_ROWS), AUTO - 1])
        with hx.build(vectors, self._path, nlist=_NLIST, metric=metric, ids=ids) as built:
            self._index = built.ivf
            rows = self._rows(vectors)
            self._template = open_index(self._path)
        self._index = self._template
        every = dict(zip(ids.tolist(), rows, strict=True))
        self._owners = [
            Owner(number, [Rows({each: row for each, row in every.items() if each % N_WRITERS == number})])
            for number in range(N_WRITERS)
        ]
        self._changes = [0] * N_WRITERS

    def close(self) -> None:
        self._template.close()

    def crash(self) -> None:
        """Once: a process, its end, perhaps others that recover and are killed, and a look.

        Raises:
            ViolationError: something is lost, back or doubled.
        """
        self._told(self._killed())
        while self._draw.random() < 0.3:
            self._fork(lambda: be_recoverer(self._path), self._draw.expovariate(60), None)
            self.report.kills_in_recovery += 1
        self._look()

    def _rows(self, vectors: F32) -> list[Row]:
        index = self._index
        codec = index.device_codec()
        assert codec is not None
        codes = index.encode_rows(index.transform(vectors), np.zeros(len(vectors), dtype=np.int64))
        decoded = codec.decode(codes, index.centroids[0])
        return [Row(code.tobytes(), row, None) for code, row in zip(codes, decoded, strict=True)]

    def _killed(self) -> list[Any]:
        """What a child said until it was killed."""
        ids = [{*owner.now.rows} for owner in self._owners]
        seed = self._draw.randrange(1 << 30)
        reading, writing = os.pipe()
        said = self._fork(
            lambda: be_child(self._path, seed, ids, list(self._changes), writing),
            self._draw.uniform(0.005, _LONGEST_S),
            (reading, writing),
        )
        self.report.kills += 1
        return [json.loads(line) for line in said.split(b"\n")[:-1]]

    def _fork(self, body: Callable[[], None], seconds: float, pipe: tuple[int, int] | None) -> bytes:
        """Kills it after so many seconds; what it wrote."""
        pid = os.fork()
        if not pid:
            try:
                body()
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(1)
        said, ends = b"", time.monotonic() + seconds
        if pipe is None:
            time.sleep(seconds)
        else:
            os.close(pipe[1])
            while (left := ends - time.monotonic()) > 0:
                if select.select([pipe[0]], [], [], left)[0]:
                    if not (part := os.read(pipe[0], 1 << 16)):
                        break
                    said += part
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if pipe is not None:
            while part := os.read(pipe[0], 1 << 16):
                said += part
            os.close(pipe[0])
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise ViolationError(f"a child ended by itself, with {os.waitstatus_to_exitcode(status)}")
        return said

    def _told(self, lines: list[Any]) -> None:
        for number, what, *rest in lines:
            if what == "error":
                raise ViolationError(f"a child failed: {rest[0]}")
            if what in ("open", "compacted"):
                self.report.compactions += what == "compacted" and bool(rest[0])
                continue
            owner, (change, kind, ids) = self._owners[number], rest
            self._changes[number] = change
            now = owner.versions[owner.current].rows
            if kind == "delete":
                after = Rows({each: row for each, row in now.items() if each not in {*ids}})
            else:
                n = ids if what == "begin" and kind == "name" else len(ids)
                rows = self._rows(vectors_of(number, change, n, _DIM))
                if what == "begin" and kind == "name":
                    after = Rows(now, rows)
                else:
                    after = Rows({**now, **dict(zip(ids, rows, strict=True))})
            if what == "begin":
                owner.begin(after)
            else:
                owner.acknowledge(after)
                self.report.changes += 1
                self.report.done[kind] += 1

    def _look(self) -> None:
        """Opens what is left, and compares it with what was acknowledged."""
        report = self.report
        with open_index(self._path) as index:
            found = dump(index, index.live.read_now())
            owned, others = of_owners(found, self._owners)
            for owner, rows in zip(self._owners, owned, strict=True):
                problems = []
                report.under_way += len(owner.versions) - 1 - owner.current
                for choice in unnamed_first(owner.versions[owner.current :], others):
                    codes = {row.code: row for row in choice.unnamed}
                    named = {each: codes[row.code] for each, row in others.items() if row.code in codes}
                    whole = choice if len(named) < len(codes) else Rows({**choice.rows, **named})
                    if not (problem := mismatch(rows | named, whole, {})):
                        break
                    problems.append(problem)
                else:
                    raise ViolationError(f"writer {owner.number}: {problems}")
                for each in named:
                    others.pop(each)
                report.under_way_there += choice is not owner.now
                owner.versions, owner.current, owner.floor = [whole], 0, 0
            if others:
                raise ViolationError(f"BACK: rows of nobody: {sorted(others)[:5]}")
            queries = index.transform(vectors_of(N_WRITERS, 1 + report.audits, _QUERIES, _DIM))
            seen = View(index).search(queries, 20)
            choices = [owner.versions for owner in self._owners]
            check_answer(seen, queries, choices, inner_product=index.metric == "ip")
            report.generations = index.generation
        report.audits += 1
