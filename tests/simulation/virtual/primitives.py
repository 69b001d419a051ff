"""Locks, queues, futures and pools of simulated threads: what the product takes from the standard library.

Made by a thread outside a simulation, each is the standard library's own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as StandardFuture
from concurrent.futures import ThreadPoolExecutor as StandardExecutor
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar

from tests.simulation.virtual.scheduler import Scheduler, SimThread, current, running

__all__ = [
    "REPLACED",
    "Condition",
    "Event",
    "Executor",
    "Future",
    "Lock",
    "Module",
    "RLock",
    "Semaphore",
    "SimpleQueue",
]

T = TypeVar("T")


class Lock:
    """As :func:`threading.Lock`; any thread may release it."""

    def __init__(self) -> None:
        self._sim: Scheduler = running()
        self._held = False
        self._line: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sim = self._sim
        sim.maybe_switch()
        if self._held and (
            not blocking or not sim.wait_in(self._line, timeout if timeout >= 0 else None, lambda: not self._held)
        ):
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        self._sim.wake_one(self._line)
        self._sim.maybe_switch()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """As :func:`threading.RLock`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: SimThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = current()
        if self._count and self._owner is me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def release_all(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def take_again(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = current(), count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """As :class:`threading.Condition`."""

    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._sim: Scheduler = running()
        self._lock = RLock() if lock is None else lock
        self._line: list[SimThread] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = current()
        assert me is not None, "a thread outside the simulation would wait for one inside"
        self._line.append(me)
        count = 0
        if isinstance(self._lock, RLock):
            count = self._lock.release_all()
        else:
            self._lock.release()
        # It may have been notified between the release and here.
        told = me not in self._line or self._sim.wait(timeout)
        if me in self._line:
            self._line.remove(me)
        if isinstance(self._lock, RLock):
            self._lock.take_again(count)
        else:
            self._lock.acquire()
        return told

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        ends = None if timeout is None else self._sim.now + timeout
        while not (found := predicate()):
            left = None if ends is None else ends - self._sim.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._line))):
            self._sim.wake_one(self._line)

    def notify_all(self) -> None:
        self._sim.wake_all(self._line)


class Event:
    """As :class:`threading.Event`."""

    def __init__(self) -> None:
        self._sim: Scheduler = running()
        self._set = False
        self._line: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._sim.wake_all(self._line)
        self._sim.maybe_switch()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._sim.maybe_switch()
        return self._sim.wait_in(self._line, timeout, lambda: self._set)


class Semaphore:
    """As :class:`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._sim: Scheduler = running()
        self._left = value
        self._line: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        self._sim.maybe_switch()
        if not self._left and (not blocking or not self._sim.wait_in(self._line, timeout, lambda: self._left > 0)):
            return False
        self._left -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._left += n
        for _ in range(min(n, len(self._line))):
            self._sim.wake_one(self._line)
        self._sim.maybe_switch()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue(Generic[T]):
    """As :class:`queue.SimpleQueue`: a finalizer may put, anywhere."""

    def __init__(self) -> None:
        self._sim: Scheduler = running()
        self._items: deque[T] = deque()
        self._line: list[SimThread] = []

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._sim.wake_one(self._line)
        self._sim.maybe_switch()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        self._sim.maybe_switch()
        if not self._items and (not block or not self._sim.wait_in(self._line, timeout, lambda: bool(self._items))):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Future(StandardFuture[T]):
    """As :class:`concurrent.futures.Future`, which waits with a condition of its own."""

    def __init__(self) -> None:
        super().__init__()
        if current() is not None:
            self._condition = Condition()  # type: ignore[assignment]


class Executor:
    """As :class:`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, max_workers: int = 8, thread_name_prefix: str = "pool") -> None:
        self._most, self._name = max_workers, thread_name_prefix
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.threads: list[SimThread] = []
        self._n_idle = 0
        self._closed = False

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        self._jobs.put((future, partial(call, *args, **kwargs)))
        if self._n_idle:
            self._n_idle -= 1
        elif len(self.threads) < self._most:
            name = f"{self._name}_{len(self.threads)}"
            self.threads.append(SimThread(target=self._work, name=name, daemon=True))
            self.threads[-1].start()
        return future

    def _work(self) -> None:
        while True:
            if self._jobs.empty():
                self._n_idle += 1
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)
                return
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - the future gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            # An idle thread must not keep what its last call held.
            del job, future, call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        while cancel_futures and not self._jobs.empty():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        self._jobs.put(None)
        if wait:
            for thread in self.threads:
                thread.join()


class Local:
    """As :class:`threading.local`. Of the threads of one run."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[f"{_own()} {name}"]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[f"{_own()} {name}"] = value


def _own() -> int:
    """The number of the thread that calls; that of no other."""
    thread = current()
    return -1 if thread is None else thread.ident


class Module(ModuleType):
    """A module of which simulated threads see other parts."""

    def __init__(self, module: ModuleType, parts: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self._module = module
        self.__dict__.update({name: _in_simulation(part, getattr(module, name)) for name, part in parts.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _in_simulation(simulated: Callable[..., Any], standard: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (standard if current() is None else simulated)(*args, **kwargs)

    return choose


def _clock() -> float:
    return running().read_clock()


def _sleep(seconds: float) -> None:
    running().sleep(seconds)


def _current_thread() -> Any:
    return current()


_CLOCKS = ("monotonic", "perf_counter", "time", "process_time", "thread_time")
_threads = {
    "Thread": SimThread,
    "Lock": Lock,
    "RLock": RLock,
    "Condition": Condition,
    "local": Local,
    "Event": Event,
    "Semaphore": Semaphore,
    "BoundedSemaphore": Semaphore,
    "current_thread": _current_thread,
}

#: What the product's modules hold -> what they hold in a simulation.
REPLACED: list[tuple[Any, Any]] = [
    (threading, Module(threading, _threads)),
    (time, Module(time, {**dict.fromkeys(_CLOCKS, _clock), "sleep": _sleep})),
    (queue, Module(queue, {"SimpleQueue": SimpleQueue, "Queue": SimpleQueue})),
    (queue.SimpleQueue, _in_simulation(SimpleQueue, queue.SimpleQueue)),
    (StandardFuture, Future),
    (StandardExecutor, _in_simulation(Executor, StandardExecutor)),
    *((getattr(time, name), _in_simulation(_clock, getattr(time, name))) for name in _CLOCKS),
]
