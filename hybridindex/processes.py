"""Between processes: lock files that only owners can open, and objects with threads, which a fork leaves without them.
Between threads: how long one that runs Python keeps others waiting.

A lock is of use to whoever can open its file, if only to read it. So lock files are for those who may write the folder:
its owner, and its group where that may write.

``os.fork`` copies objects and not threads: in the child, a lock may be held for ever and a queue is emptied by nobody.
Therefore every object that derives from :class:`OfOneProcess` turns, in a child process, into one whose methods raise
:class:`hybridindex.errors.ForkedError`. Nothing is asked in the parent: a search costs what it did.

A search takes the GIL several times, and waits for up to its switch interval each time that another thread runs Python.
The process has one interval. Who shortens it restores it, also while it only waits: busy threads would switch for
nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import iscoroutinefunction
from io import FileIO
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast
from weakref import WeakSet

from filelock import FileLock, Timeout

from hybridindex import filesystem
from hybridindex.errors import FileError, ForkedError

__all__ = [
    "ONE_THREAD",
    "SHORT_S",
    "KeptLock",
    "OfOneProcess",
    "keep_to_writers",
    "lock_file",
    "short_switch_interval",
    "take_pipes",
    "usual_switch_interval",
    "weakly",
]

#: Between tries to take a lock that is kept.
_LOOK_S = 0.001

_Owner = TypeVar("_Owner")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def lock_file(path: Path, *, timeout_s: float) -> FileLock:
    """A lock between processes, not taken yet. Its file stays where it is.

    Taking it raises ``filelock.Timeout`` when another process holds it for ``timeout_s``, and FileError where the file
    cannot be opened, or its file system has no locks.
    """
    mode = keep_to_writers(path)
    return _Lock(path, timeout=timeout_s, mode=mode, fallback_to_soft=False)


class _Lock(FileLock):
    def _acquire(self) -> None:
        with filesystem.performing("lock", self.lock_file):
            super()._acquire()


class KeptLock:
    """:func:`lock_file` whose file stays open: taking it again costs a tenth. One thread at a time; in a child process
    :meth:`let_go` comes first.
    """

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._fd = -1
        #: Closes the file when nobody has this any more.
        self._closing: weakref.finalize[Any, KeptLock] | None = None

    def __enter__(self) -> None:
        end_s = time.monotonic() + self._timeout_s
        try:
            while not self._try():
                if time.monotonic() >= end_s:
                    raise Timeout(str(self._path))
                time.sleep(_LOOK_S)
        except BaseException:
            self.let_go()  # and with it the lock, where it was taken
            raise

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def let_go(self) -> None:
        """Closes the file; it is opened again when the lock is taken."""
        if self._closing is not None:
            self._closing()
            self._closing = None

    def _try(self) -> bool:
        with filesystem.performing("lock", self._path):
            if self._closing is None:
                self._open()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another one has it, in the words of either kind of system
                return False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                    return True
            # Another file has the name: others lock that one.
            self.let_go()
            return False

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._closing = weakref.finalize(self, os.close, self._fd)
        # At the end of the interpreter a thread may still write; the system closes it behind that one.
        self._closing.atexit = False
        keep_to_writers(self._path)


def weakly(owner: _Owner, do: Callable[Concatenate[_Owner, _P], _R]) -> Callable[_P, _R]:
    """``do`` with ``owner``, for what the owner holds and calls: a bound method would keep both alive until a garbage
    collection, with the index and all memory that they hold. Nothing is done once the owner is gone."""
    found = weakref.ref(owner)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        there = found()
        return cast("_R", None) if there is None else do(there, *args, **kwargs)

    return call


def take_pipes(niceness: int) -> tuple[FileIO, FileIO]:
    """What a worker process begins with: it gives way to others, has its calls and answers where standard input and
    output were, and ends at once when who started it is gone. Whatever a library prints goes to standard error."""
    with suppress(OSError):
        os.nice(niceness)
    with suppress(OSError, AttributeError):
        # Longer time slices, and never before a thread that just woke up.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    calls_in, answers_out = FileIO(os.dup(0)), FileIO(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(calls_in.fileno(),), daemon=True).start()
    return calls_in, answers_out


def _end_with(fd: int) -> None:
    """Ends this process when the other side of ``fd`` is closed."""
    watch = select.poll()
    watch.register(fd, 0)  # a hang-up is always reported
    watch.poll()
    os._exit(1)


def keep_to_writers(path: Path) -> int:
    """Lets nobody open a file, if it is there and ours, but those who may write its folder; returns that mode."""
    mode = 0o600
    with suppress(FileError):
        folder = filesystem.stat(path.parent)
        if folder.st_mode & stat.S_IWGRP:
            mode = 0o660
        found = filesystem.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            if mode == 0o660 and found.st_gid != folder.st_gid:
                filesystem.chown(path, folder.st_gid)
            if stat.S_IMODE(found.st_mode) != mode:
                filesystem.chmod(path, mode)
    return mode


#: What owners call at the end. It was the parent's to do: here it does nothing, at once.
_ENDS = frozenset({"close", "stop", "settle", "__exit__", "__aexit__", "__del__"})

#: omp.h
_OMP_PAUSE_SOFT = 1

_alive: WeakSet[OfOneProcess] = WeakSet()
#: Came over a fork. Kept, so that nothing of theirs is freed: device memory, for one, is the parent's.
_carried: list[OfOneProcess] = []
_pid = os.getpid()


class OfOneProcess:
    """Base of objects that own threads, processes or connections, and of what uses them."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        self = super().__new__(cls)
        _alive.add(self)
        return self


def _after_fork_in_child() -> None:
    global _pid
    parent, _pid = _pid, os.getpid()
    carried = list(_alive)
    _alive.clear()
    _carried.extend(carried)
    kinds = {type(found): _left_behind(type(found), parent) for found in carried}
    for found in carried:
        found.__class__ = kinds[type(found)]


def _left_behind(kind: type[OfOneProcess], parent: int) -> type[OfOneProcess]:
    """``kind`` for an object that came over a fork of process ``parent``."""

    def refuse(*_: object, **__: object) -> Any:
        raise ForkedError(
            f"this {kind.__name__} was opened in process {parent}, and process {os.getpid()} is a fork of that "
            f"without its threads; open index and {kind.__name__} after the fork, in the process that uses them"
        )

    def nothing(*_: object, **__: object) -> None:
        return None

    async def nothing_awaited(*_: object, **__: object) -> None:
        return None

    def end(name: str) -> Callable[..., Any]:
        return nothing_awaited if iscoroutinefunction(getattr(kind, name, None)) else nothing

    def attribute(self: OfOneProcess, name: str) -> Any:
        if name in _ENDS:
            return end(name)
        return object.__getattribute__(self, name) if name.startswith("__") else refuse()

    special: dict[str, Callable[..., Any]] = {
        name: end(name) if name in _ENDS else refuse
        for name in dir(kind)
        if name.startswith("__") and name not in dir(object) and callable(getattr(kind, name))
    }
    words = f"<{kind.__name__} of process {parent}>"
    members = {**special, "__getattribute__": attribute, "__setattr__": refuse, "__repr__": lambda _: words}
    return type(kind.__name__, (kind,), members)


def _before_fork() -> None:
    """Ends the OpenMP threads of the thread that forks; the next parallel loop makes new ones.

    GNU's OpenMP keeps them for ever, and would wait for them in the child, where they are not. faiss and torch use it.
    """
    for name in ("faiss._swigfaiss", "torch._C"):
        file = getattr(sys.modules.get(name), "__file__", None)
        pause = None if file is None else getattr(ctypes.CDLL(file), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_SOFT)


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


#: Of the environment of a process: one thread for every library that would take all cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")

#: A small part of a small search. A thread that ran Python beside searches did as much in a second as at 0.5 ms.
SHORT_S = 0.00005


class _SwitchInterval:
    """Owner of the interval. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Blocks of all threads that want it short, and the interval before the first.
        self._users = 0
        self._usual_s = 0.0
        #: ``depth``: blocks that this thread is in.
        self._own = threading.local()

    def shorten(self) -> None:
        with self._lock:
            if not self._users:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SHORT_S))
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._usual_s)

    @contextmanager
    def short(self) -> Iterator[None]:
        """Threads that wait for the GIL get it after :data:`SHORT_S`; its usual interval is 5 ms."""
        self.shorten()
        self._own.depth = self._depth() + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            self.restore()

    @contextmanager
    def usual(self) -> Iterator[None]:
        """Within :meth:`short` on the same thread: the interval as it was, as far as this thread is concerned."""
        if not self._depth():
            yield
            return
        self.restore()
        try:
            yield
        finally:
            self.shorten()

    def _depth(self) -> int:
        depth: int = getattr(self._own, "depth", 0)
        return depth


_interval = _SwitchInterval()
short_switch_interval = _interval.short
usual_switch_interval = _interval.usual
