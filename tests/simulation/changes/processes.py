"""Processes in a simulation: threads that end when their process is killed, locks between processes, and what the
product keeps once for each process."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock
from weakref import WeakKeyDictionary, WeakValueDictionary

from filelock import Timeout

from hybridindex import filesystem
from hybridindex.errors import FileError
from hybridindex.index.changes import claim, writer
from hybridindex.index.live import store
from hybridindex.index.storage import generation
from tests.simulation.virtual.primitives import Local, Lock
from tests.simulation.virtual.scheduler import Scheduler, SimThread, current

__all__ = ["KilledError", "Process", "ProcessScheduler", "processes_apart"]


class KilledError(BaseException):
    """Raised in every thread of a process that was killed."""


class Process:
    """What one has to itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_killed = False
        self.stores: WeakValueDictionary[tuple[int, int], Any] = WeakValueDictionary()
        self.claims: dict[tuple[int, int], claim.WritersClaim] = {}
        self.sharing, self.making = Lock(), Lock()


class ProcessScheduler(Scheduler):
    """A thread belongs to the process of the thread that made it; the first one to none."""

    def __init__(self, seed: int, *, switch: float) -> None:
        super().__init__(seed, switch=switch, most_steps=3_000_000)
        self._process_of: dict[SimThread, Process] = {}
        #: Paths of lock files, and who has them.
        self.locked: dict[str, _FileLock] = {}
        self._locks_line: list[SimThread] = []

    def start(self, process: Process, thread: SimThread) -> None:
        self._process_of[thread] = process
        thread.start()

    @property
    def process(self) -> Process | None:
        """Of the calling thread."""
        me = current()
        return None if me is None else self._process_of.get(me)

    def kill(self, process: Process) -> None:
        """All its threads end where they are; the system gives up its locks."""
        process.is_killed = True
        for thread, owner in self._process_of.items():
            if owner is process:
                self.wake(thread)
        for path, lock in list(self.locked.items()):
            if lock.process is process:
                del self.locked[path]
        self.wake_all(self._locks_line)

    def make_ready(self, thread: SimThread) -> None:
        if thread not in self._process_of and (mine := self.process) is not None:
            self._process_of[thread] = mine
        super().make_ready(thread)

    def maybe_switch(self) -> None:
        process = self.process
        if process is None or not process.is_killed:
            super().maybe_switch()

    def wait(self, timeout: float | None = None) -> bool:
        self.die()
        return super().wait(timeout)

    def die(self) -> None:
        """Raises KilledError: the process of the calling thread was killed."""
        process = self.process
        if process is not None and process.is_killed:
            raise KilledError

    def _hand_over(self, me: SimThread) -> None:
        super()._hand_over(me)
        self.die()

    def fail(self, error: BaseException) -> NoReturn:
        if (process := self.process) is not None and process.is_killed:
            # A thread of the product's own: what it raises on its way out is of no interest.
            return  # type: ignore[misc]
        super().fail(error)

    def wait_for_lock(self, path: str, timeout: float) -> bool:
        return self.wait_in(self._locks_line, None if timeout < 0 else timeout, lambda: path not in self.locked)

    def unlock(self, path: str) -> None:
        self.locked.pop(path, None)
        self.wake_all(self._locks_line)


class _FileLock:
    """As :func:`hybridindex.processes.lock_file`; another object of the same process waits, too."""

    def __init__(self, sim: ProcessScheduler, path: Path, timeout_s: float) -> None:
        self._sim, self._path, self._timeout_s = sim, str(path), timeout_s
        self.process = sim.process

    def acquire(self) -> None:
        sim = self._sim
        with filesystem.performing("lock", self._path):
            pass
        if not sim.wait_for_lock(self._path, self._timeout_s):
            raise Timeout(self._path)
        sim.die()
        sim.locked[self._path] = self

    def release(self) -> None:
        if self._sim.locked.get(self._path) is self:
            self._sim.unlock(self._path)
            self._sim.maybe_switch()

    def __enter__(self) -> _FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Held(Local):
    """As that of :mod:`hybridindex.index.storage.generation`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = set[str]()
            setattr(self, name, value)
            return value


class _Mine:
    """What the process of the calling thread has in this place; outside, what was there."""

    def __init__(self, sim: ProcessScheduler, name: str, outside: Any) -> None:
        self._sim, self._name, self._outside = sim, name, outside

    def _found(self) -> Any:
        process = self._sim.process
        return self._outside if process is None else getattr(process, self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._found()[key] = value

    def __enter__(self) -> Any:
        return self._found().__enter__()

    def __exit__(self, *error: object) -> None:
        self._found().__exit__(*error)


class _InOrder(WeakKeyDictionary[Any, None]):
    """As a :class:`weakref.WeakSet`, in the order in which members came: that of a set depends on their addresses."""

    def add(self, member: Any) -> None:
        self[member] = None

    def discard(self, member: Any) -> None:
        self.pop(member, None)


@contextlib.contextmanager
def processes_apart(sim: ProcessScheduler) -> Iterator[None]:
    """Within the block each process has stores, claims and locks of its own."""

    def lock_file(path: Path, *, timeout_s: float) -> _FileLock:
        with contextlib.suppress(FileError):
            filesystem.stat(path.parent)
        return _FileLock(sim, path, timeout_s)

    places = [
        (store, "WeakSet", _InOrder),
        (writer, "WeakSet", _InOrder),
        (store, "_shared", _Mine(sim, "stores", WeakValueDictionary())),
        (store, "_sharing", _Mine(sim, "sharing", threading.Lock())),
        (claim, "_claims", _Mine(sim, "claims", {})),
        (claim, "_making", _Mine(sim, "making", threading.Lock())),
        (claim, "lock_file", lock_file),
        (generation, "lock_file", lock_file),
        (generation, "KeptLock", lock_file),
        (generation, "_held", _Held()),
    ]
    with contextlib.ExitStack() as patches:
        for module, name, value in places:
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def draws(*words: object) -> random.Random:
    """Of its own for each purpose."""
    return random.Random(" ".join(map(str, words)))
