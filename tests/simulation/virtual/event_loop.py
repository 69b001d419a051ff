"""An event loop on virtual time, and connections in memory. It runs on one simulated thread."""

from __future__ import annotations

import asyncio
import signal as signals
from asyncio.futures import _chain_future  # type: ignore[attr-defined]
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tests.simulation.virtual.primitives import Executor, Future
from tests.simulation.virtual.scheduler import Scheduler, SimThread, current, running

__all__ = ["ASYNCIO", "Connection", "SimLoop", "on_loop"]

#: Bytes that a connection takes before its reader reads.
_HIGH_WATER = 1 << 16


class _Selector:
    """Nothing is ever read from the system: it waits until somebody wakes the loop."""

    def __init__(self, sim: Scheduler) -> None:
        self._sim = sim
        self._line: list[SimThread] = []
        self._woken = False

    def select(self, timeout: float | None) -> list[Any]:
        self._sim.maybe_switch()
        if timeout is None or timeout > 0:
            self._sim.wait_in(self._line, timeout, lambda: self._woken)
        self._woken = False
        return []

    def wake(self) -> None:
        self._woken = True
        self._sim.wake_all(self._line)


class SimLoop(asyncio.BaseEventLoop):
    """Its servers listen to :meth:`connect`; its signals come from :meth:`send_signal`."""

    def __init__(self) -> None:
        super().__init__()
        self._sim = running()
        self._selector = _Selector(self._sim)
        self._clock_resolution = 1e-9
        self._threads = Executor(8, "asyncio")
        self._handlers: dict[int, Callable[[], object]] = {}
        #: Makers of protocols, of what listens.
        self.listening: list[Callable[[], asyncio.Protocol]] = []
        #: Opens connections, given a maker of a protocol, and a port; None: nobody can be reached.
        self.dial: Callable[[Callable[[], Any], int], Awaitable[Any]] | None = None

    def time(self) -> float:
        return self._sim.now

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        self._selector.wake()

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]
        handle = super().call_soon_threadsafe(*args, **kwargs)
        self._sim.maybe_switch()
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        threads = self._threads if executor is None else executor
        return asyncio.wrap_future(threads.submit(func, *args), loop=self)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._threads.shutdown(wait=False)
        while any(thread.is_alive() for thread in self._threads.threads):
            await asyncio.sleep(0.01)

    # Signals

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self._handlers[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._handlers.pop(sig, None) is not None

    def send_signal(self, sig: signals.Signals) -> None:
        if (handler := self._handlers.get(sig)) is not None:
            self.call_soon(handler)

    # Connections

    def delay_s(self) -> float:
        """On the way from a client."""
        return self._sim.random.uniform(1e-4, 2e-3)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: str, port: int, **_options: Any
    ) -> Any:
        if self.dial is None:
            raise ConnectionRefusedError
        return await self.dial(protocol_factory, port)

    async def create_server(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        self.listening.append(protocol_factory)
        return _Server(self, protocol_factory)

    def connect(self, address: str) -> Connection:
        """A client's new connection.

        Raises:
            ConnectionRefusedError: nobody listens.
        """
        if not self.listening:
            raise ConnectionRefusedError
        return Connection(self, self.listening[0](), address)


class _Server:
    def __init__(self, loop: SimLoop, factory: Any) -> None:
        self._loop, self._factory = loop, factory
        self.sockets: list[Any] = []

    def close(self) -> None:
        if self._factory in self._loop.listening:
            self._loop.listening.remove(self._factory)

    async def wait_closed(self) -> None:
        pass


class Connection:
    """Both ends: the client's own methods, and the server's transport."""

    def __init__(self, loop: SimLoop, protocol: Any, address: str) -> None:
        self._loop = loop
        self._protocol = protocol
        #: Sent by the server and not read by the client.
        self._unread = bytearray()
        self._to_server = bytearray()
        self._arrived = asyncio.Event()
        self._reads_paused = self._writes_paused = False
        #: The server's end is closed once the client has read what was written; or at once.
        self._closing = self._lost = False
        self.transport = _Transport(self, address)
        protocol.connection_made(self.transport)

    # The client's end

    def send(self, data: bytes) -> None:
        """Raises ConnectionResetError: the server has closed it."""
        if self._lost or self._closing:
            raise ConnectionResetError
        self._to_server += data
        self._loop.call_later(self._loop.delay_s(), self._deliver)

    def _deliver(self) -> None:
        if self._to_server and not self._reads_paused and not self._lost and not self._closing:
            data, self._to_server = bytes(self._to_server), bytearray()
            self._protocol.data_received(data)

    async def read(self) -> bytes:
        """What has come, once anything has; b"": the server has closed it."""
        while not self._unread and not self._lost:
            self._arrived.clear()
            await self._arrived.wait()
        data, self._unread = bytes(self._unread), bytearray()
        if self._writes_paused:
            self._writes_paused = False
            self._protocol.resume_writing()
        if self._closing:
            self._loop.call_soon(self.lose)
        return data

    def leave(self) -> None:
        """The client is gone."""
        self._unread.clear()
        self._loop.call_soon(self.lose)

    # The server's end

    def write(self, data: bytes) -> None:
        if self._lost or self._closing:
            return
        self._unread += data
        self._arrived.set()
        if len(self._unread) > _HIGH_WATER and not self._writes_paused:
            self._writes_paused = True
            self._protocol.pause_writing()

    def pause(self, paused: bool) -> None:
        self._reads_paused = paused
        if not paused:
            self._loop.call_soon(self._deliver)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._unread:
                self._loop.call_soon(self.lose)

    def lose(self) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._arrived.set()
            self._protocol.connection_lost(None)

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def n_unread(self) -> int:
        return len(self._unread)


class _Transport(asyncio.Transport):
    """What a protocol sees of a :class:`Connection`."""

    def __init__(self, connection: Connection, address: str) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 80)})
        self._connection = connection

    def write(self, data: Any) -> None:
        self._connection.write(bytes(data))

    def is_closing(self) -> bool:
        return self._connection.closing

    def close(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        self._connection._loop.call_soon(self._connection.lose)
        self._connection._closing = True

    def pause_reading(self) -> None:
        self._connection.pause(True)

    def resume_reading(self) -> None:
        self._connection.pause(False)

    def get_write_buffer_size(self) -> int:
        return self._connection.n_unread

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, _HIGH_WATER

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def on_loop(make: Callable[[SimLoop], Any]) -> Any:
    """Runs a coroutine to its end on a loop of its own, on the calling simulated thread."""
    assert current() is not None
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)
        return runner.run(make(loop))


def _run_threadsafe(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
    """As :func:`asyncio.run_coroutine_threadsafe`."""
    future: Future[Any] = Future()
    loop.call_soon_threadsafe(lambda: _chain_future(asyncio.ensure_future(coroutine, loop=loop), future))
    return future


#: What simulated threads see of :mod:`asyncio` instead. All of them are one thread for the system, which has one loop.
ASYNCIO: dict[str, Callable[..., Any]] = {
    "new_event_loop": SimLoop,
    "run_coroutine_threadsafe": _run_threadsafe,
    "set_event_loop": lambda _loop: None,
}
