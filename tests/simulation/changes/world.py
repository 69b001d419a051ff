"""One run: a small index, and lives of processes that write, compact and search it, each ended by a kill or not."""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.filesystem import Call
from hybridindex.index import open_index
from hybridindex.index.changes import compact as compact_module
from hybridindex.index.changes import writer as writer_module
from hybridindex.index.live.store import LiveStore
from hybridindex.types import F32, Metric
from tests.simulation.changes.devices import Devices, devices_applied
from tests.simulation.changes.disk import SimDisk
from tests.simulation.changes.faults import Faults
from tests.simulation.changes.oracle import AUTO, Owner, Row, Rows
from tests.simulation.changes.processes import KilledError, Process, ProcessScheduler, draws, processes_apart
from tests.simulation.virtual.scheduler import SimThread, ViolationError, current

__all__ = ["Outcome", "Setup", "World", "run"]

#: Writers: three threads of one process, and another process.
N_OWNERS, OTHER = 4, 3
#: Numbers that writers give.
POOL = 1200
_ROWS, _NLIST = 160, 6

#: What a call takes that is slow.
_CALL_S = 0.003
_OPERATIONS = ("adds", "upserts", "deletes", "searches", "compactions", "rewrites", "failed", "refused", "refused ids")

Ending = Literal["power", "process", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What of an index differs between runs."""

    metric: Metric
    codec: str
    dim: int
    attributes: bool
    codes: bool

    @classmethod
    def of(cls, draw: random.Random) -> Setup:
        return cls(
            metric=draw.choice(("l2", "ip")),
            codec=draw.choice(("flat", "flat", "flat", "sq8", "fp16")),
            dim=draw.choice((4, 8)),
            attributes=draw.random() < 0.4,
            codes=draw.random() < 0.04,
        )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One run."""

    seed: int
    #: Changes that were acknowledged; and all calls, searches included.
    changes: int = 0
    operations: int = 0
    kills: int = 0
    #: What was done, how often; and where kills came: "during call".
    done: Counter[str] = field(default_factory=Counter)
    killed_in: Counter[str] = field(default_factory=Counter)
    digest: int = 0


class Template:
    """An index as it was built, and how its rows are stored."""

    def __init__(self, setup: Setup, place: Path) -> None:
        self.setup = setup
        self.path = place / "-".join(map(str, (setup.metric, setup.codec, setup.dim, setup.attributes, setup.codes)))
        generator = np.random.default_rng(7)
        vectors = generator.standard_normal((_ROWS + 1, setup.dim)).astype(np.float32)
        ids = np.array([*range(_ROWS), AUTO - 1])
        drawn = generator.integers(0, 100, len(ids)).tolist()
        tags: list[int | None] = [each if setup.attributes else None for each in drawn]
        attributes = {"owner": [each % N_OWNERS for each in range(_ROWS)] + [0], "tag": tags}
        with hx.build(
            vectors,
            self.path,
            nlist=_NLIST,
            metric=setup.metric,
            codec=setup.codec,
            ids=ids,
            attributes=attributes if setup.attributes else None,
        ) as built:
            if setup.codes:
                built.compress(1)
        self.index = open_index(self.path)
        rows = self.rows(vectors, tags)
        self.first: list[dict[int, Row]] = [{} for _ in range(N_OWNERS)]
        for each, row in zip(ids.tolist(), rows, strict=True):
            self.first[0 if each == AUTO - 1 else each % N_OWNERS][each] = row

    def rows(self, vectors: F32, tags: list[int | None]) -> list[Row]:
        """As they are stored."""
        index, codec = self.index, self.index.device_codec()
        assert codec is not None
        lists = np.zeros(len(vectors), dtype=np.int64)
        codes = index.encode_rows(index.transform(vectors), lists)
        decoded = codec.decode(codes, index.centroids[0])
        return [Row(code.tobytes(), row, tag) for code, row, tag in zip(codes, decoded, tags, strict=True)]


class World:
    """Shared by all lives of one run."""

    def __init__(self, seed: int, place: Path, template: Template) -> None:
        self.seed, self.template, self.setup = seed, template, template.setup
        self.path = place / "run" / "idx"
        shutil.rmtree(place / "run", ignore_errors=True)
        self.path.parent.mkdir()
        shutil.copytree(template.path, self.path)
        self.disk = SimDisk(self.path)
        self.owners = [Owner(number, [Rows(rows)]) for number, rows in enumerate(template.first)]
        self.outcome = Outcome(seed=seed)
        self.draw = draws("world", seed)
        #: Some changes may be lost with the power.
        self.is_synced = True


class Life:
    """One life of the processes: what the disk does, and when it ends."""

    def __init__(self, world: World, number: int, *, ending: Ending, faults: bool) -> None:
        self.world, self.number = world, number
        self.draw = draw = draws("life", world.seed, number)
        self.sim = ProcessScheduler(draw.randrange(1 << 30), switch=draw.choice((0.02, 0.1, 0.4)))
        self.faults = Faults(
            world.disk, draws("faults", world.seed, number), often=draw.choice((0.002, 0.01)) if faults else 0
        )
        self.ending: Ending = ending
        self.n_calls = 0
        #: At which call the kill comes; drawn again where a compaction begins.
        self.kill_at: int | None = None
        if ending != "none":
            self.kill_at = draw.choice((draw.randrange(1, 60), draw.randrange(1, 400), draw.randrange(1, 6000)))
        #: Or before one of a kind; and how often a call takes its time.
        self._kill_on = draw.choice(("", "", "sync", "sync_folder", "replace", "truncate", "write"))
        self._kill_in = draw.randrange(1, 12)
        self._slow = draw.choice((0.02, 0.1, 0.4))
        self.is_over = False
        self.was_killed = False
        #: The writer has recovered; it keeps the claim; another process writes, too; writers that go on.
        self.is_ready = self.is_kept = self.writes_elsewhere = False
        self.n_busy = 0
        #: Another process compacted twice before this one looked.
        self.has_to_open_again = False
        #: What each thread does.
        self.doing: dict[SimThread | None, str] = {}
        #: Of the writer; None: it has none.
        self.devices: Devices | None = None
        self.victim: Process | None = None
        self.others: list[Process] = []

    def see(self, call: Call) -> int | None:
        """For ``filesystem.watched_by``."""
        world, sim = self.world, self.sim
        if not world.disk.is_ours(call):
            return None
        thread = current()
        if thread is None or (process := sim.process) is None:
            world.disk.see(call)
            return None
        sim.die()
        if self.draw.random() < self._slow:  # others go on meanwhile
            sim.sleep(self.draw.expovariate(1 / _CALL_S))
        if process is self.victim and self.kill_at is not None:
            self.n_calls += 1
            if call.name == self._kill_on:
                self._kill_in -= 1
            if self.n_calls >= self.kill_at or not self._kill_in:
                self._kill(process, call)
        taken = self.faults.see(call)
        world.disk.see(call, taken)
        return taken

    def aim(self, within: int) -> None:
        """The kill comes within so many calls."""
        if self.kill_at is not None and self.draw.random() < 0.6:
            self.kill_at = min(self.kill_at, self.n_calls + self.draw.randrange(1, within))

    def _kill(self, process: Process, call: Call) -> None:
        outcome = self.world.outcome
        outcome.kills += 1
        outcome.done["kills with devices"] += self.devices is not None and self.devices.router is not None
        outcome.killed_in[f"{self.doing.get(current(), 'maintenance')}: {call.name}"] += 1
        self.was_killed = True
        if self.ending == "power":
            if self.draw.random() < 0.5:  # it was on its way
                taken = self.draw.randrange(len(call.data) + 1) if call.name == "write" else None
                self.world.disk.see(call, taken)
            for each in self.others:
                self.sim.kill(each)
        self.sim.kill(process)
        self.is_over = True
        raise KilledError


@contextlib.contextmanager
def small_thresholds() -> Iterator[None]:
    """Maintenance has something to do in an index of some hundred rows, and does it in the simulation."""

    def in_this_process(*args: Any, apart: bool, **options: Any) -> Any:
        return compact_module.compact(*args, apart=False, **options)

    defaults = LiveStore.rewrite.__kwdefaults__
    with (
        mock.patch.dict(defaults, {"least_bytes": 3000}),
        mock.patch.object(compact_module, "_WORTH_BYTES", 200),
        mock.patch.object(writer_module, "compact", in_this_process),
    ):
        yield


def run(seed: int, place: Path, templates: dict[Setup, Template], *, n_lives: int = 8) -> Outcome:
    """Raises ViolationError. Within :func:`tests.simulation.virtual.patching.patched`."""
    from tests.simulation.changes.lives import live

    draw = draws("run", seed)
    setup = Setup.of(draw)
    if setup not in templates:
        templates[setup] = Template(setup, place)
    world = World(seed, place, templates[setup])
    gc.disable()
    try:
        with small_thresholds(), world.disk.known():
            for number in range(n_lives):
                last = number == n_lives - 1
                ending: Ending = "none" if last else draw.choice(("power", "power", "power", "process", "none"))
                life = Life(world, number, ending=ending, faults=not last and draw.random() < 0.4)
                with filesystem.watched_by(life.see), processes_apart(life.sim), devices_applied(life):
                    try:
                        life.sim.run(partial(live, life))
                    except ViolationError as error:
                        error.add_note(f"life {number} of {setup}, {ending}; killed: {dict(world.outcome.killed_in)}")
                        raise
                world.outcome.digest = (31 * world.outcome.digest + life.sim.digest) & 0xFFFF_FFFF
                if life.was_killed and ending == "power":
                    world.disk.cut_power(draws("power", seed, number))
                elif number % 4 == 0:
                    world.disk.check()
                for owner in world.owners:
                    owner.tidy()
    finally:
        gc.collect()
        gc.enable()
    world.outcome.operations = sum(world.outcome.done[name] for name in _OPERATIONS)
    return world.outcome
