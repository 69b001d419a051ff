"""The daemon's process: opens its indexes, listens, serves, reloads at SIGHUP, drains at SIGTERM, stops at the second.

One uvicorn server per socket, on one event loop: TCP may have TLS, the unix socket needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridindex import filesystem
from hybridindex.errors import (
    FileError,
    HybridIndexError,
    MissingDependencyError,
    cannot_read,
    how_to_install,
    without_path,
)
from hybridindex.index.storage.generation import require_directory
from hybridindex.refresh.config import RefreshConfig
from hybridindex.router.remote.loop_thread import new_event_loop
from hybridindex.service.auth import Keyring
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.daemon_address import DaemonAddress, bind_tcp, bind_unix
from hybridindex.service.http.app import create_app
from hybridindex.service.http.protocol import MAX_HEAD_BYTES, choose_protocol
from hybridindex.service.observe.logs import configure
from hybridindex.service.serving import MakeRefresher
from hybridindex.service.several.config import IndexConfig, name_of
from hybridindex.service.several.indexes import Indexes

try:
    import uvicorn
except ImportError as error:
    raise MissingDependencyError(f"the daemon needs uvicorn: {how_to_install('service')}") from error

if TYPE_CHECKING:
    from hybridindex.service.observe.traces import Traces

__all__ = ["Daemon", "MakeRefresher", "bound_arenas", "serve"]

_log = logging.getLogger(__name__)

#: mallopt's parameter M_ARENA_MAX, and its value here.
_M_ARENA_MAX, _ARENAS = -8, 2


def bound_arenas() -> bool:
    """Lets threads share glibc's heaps; without glibc does nothing and returns False.

    With a heap per thread, memory that plans and batches free in one cannot serve another. Most of our work holds the
    GIL or allocates nothing, so threads seldom wait for a heap.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS))
    except (OSError, AttributeError):
        return False


class _Server(uvicorn.Server):
    """Leaves signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but a client has as long for its TLS handshake as for its headers, and not a minute."""
        await super().startup(sockets=[])
        self.started = False
        config, loop = self.config, asyncio.get_running_loop()
        kind: Any = config.http_protocol_class
        make = partial(kind, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        limit_s = None if config.ssl is None else config.timeout_keep_alive
        for bound in sockets or []:
            server = await loop.create_server(
                make, sock=bound, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=limit_s
            )
            self.servers.append(server)
        self.started = True


class Daemon:
    """What is served, on its sockets. On the main thread's event loop."""

    def __init__(self, served: Service | Indexes, keyring: Keyring | None, sockets: list[socket.socket]) -> None:
        self._indexes = indexes = Indexes.of(served)
        self._stopping = asyncio.Event()
        self._signalled = False
        #: A task that nobody holds may be lost.
        self._reloads: set[asyncio.Future[None]] = set()
        self._app = create_app(indexes, keyring=keyring, on_drain=self.drain)
        self._sockets = sockets
        self._servers = [self._server(s, first=s is sockets[0]) for s in sockets]

    def _server(self, bound: socket.socket, *, first: bool) -> _Server:
        config = self._indexes.config
        tls = bound.family != socket.AF_UNIX and config.tls_cert is not None
        return _Server(
            uvicorn.Config(
                self._app,
                http=choose_protocol(self._app.turn_away),
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                # The application starts and ends once, with the first server.
                lifespan="on" if first else "off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=max(1, round(config.limits.client_timeout_s)),
                timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
                ssl_certfile=config.tls_cert if tls else None,
                ssl_keyfile=config.tls_key if tls else None,
            )
        )

    def drain(self) -> None:
        """Answers what was admitted, then ends; called again, does nothing."""
        if not self._stopping.is_set():
            _log.info("draining: %d queries wait or are searched", self._indexes.n_waiting)
            self._indexes.drain()
            self._stopping.set()

    def stop(self) -> None:
        """At a signal: drains; at the second one, stops at once."""
        self.drain()
        if self._signalled:
            _log.warning("stopping at once")
            for server in self._servers:
                server.force_exit = True
                for task in server.server_state.tasks:
                    task.cancel()
        self._signalled = True

    def reload(self) -> None:
        """Lets the current generation of each index serve; a failure is logged."""
        task = asyncio.ensure_future(self._app.reload("SIGHUP"))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def run(self) -> None:
        """Serves until :meth:`drain`, and until what was admitted is answered."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            serving = [
                asyncio.create_task(server.serve(sockets=[bound]))
                for server, bound in zip(self._servers, self._sockets, strict=True)
            ]
            stopping = asyncio.create_task(self._stopping.wait())
            # A server that ends by itself ends the others.
            await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
            self._indexes.drain()
            for server in self._servers:
                server.should_exit = True
            await asyncio.gather(*serving)
            stopping.cancel()
        finally:
            # The end of the loop waits for its threads: none may go on with a change of the plan.
            self._indexes.stop_changes()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)


def serve(
    indexes: Path | Mapping[str, IndexConfig],
    config: ServiceConfig,
    *,
    make_refresher: MakeRefresher | None = None,
    planning: RefreshConfig | None = None,
    on_listening: Callable[[tuple[str, ...]], None] | None = None,
) -> None:
    """Serves an index directory, or several by name, until a signal or ``POST /v1/drain`` ends it.

    Args:
        make_refresher: makes the refresher; None: plans change only on request.
        planning: where plans on request are made; see :class:`hybridindex.service.core.Service`.
        on_listening: given the addresses for clients, once connections are accepted.

    Raises:
        HybridIndexError: it cannot start.
    """
    configure(config.log_format)
    bound_arenas()
    keyring = None if config.key_file is None else Keyring(config.key_file)
    for name in ("tls_cert", "tls_key"):
        file = getattr(config, name)
        try:
            if file is not None:
                filesystem.open_for_reading(file).close()
        except FileError as error:
            raise cannot_read(error, name, file) from error
    named = {name_of(indexes): IndexConfig(path=indexes)} if isinstance(indexes, Path) else indexes
    addresses, problems = _addresses(named)
    sockets: list[socket.socket] = []
    traces: Traces | None = None
    try:
        # Addresses first: opening an index takes time, and the port may be taken.
        urls: list[str] = []
        if config.uds is not None:
            sockets.append(bind_unix(config.uds))
            urls.append(f"unix:{config.uds.absolute()}")
        if config.host is not None:
            sockets.append(bind_tcp(config.host, config.port))
            scheme = "https" if config.tls_cert is not None else "http"
            host = f"[{config.host}]" if ":" in config.host else config.host
            urls.append(f"{scheme}://{host}:{sockets[-1].getsockname()[1]}")
        traces = _open_traces(config.traces, os.environ)
        served = Indexes.open(
            named, config, make_refresher=make_refresher, planning=planning, traces=traces, problems=problems
        )
        try:
            for name in served.problems.keys() & addresses.keys():
                addresses[name].leave()
            for name, service in served.services.items():
                announce = partial(addresses[name].announce, tuple(urls), index=name)
                announce(service.index.ivf.generation)
                service.generations.on_generation.append(announce)
            each = [f"{named[name].path}{_precision(service)}" for name, service in served.services.items()]
            _log.info("serving %s at %s", ", ".join(each), ", ".join(urls))
            if on_listening is not None:
                on_listening(tuple(urls))
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_run(served, keyring, sockets))
        finally:
            served.close()
    finally:
        if traces is not None:
            traces.close()
        for bound in sockets:
            bound.close()
        if config.uds is not None and sockets:
            filesystem.discard(config.uds)
        for address in addresses.values():
            address.leave()
    _log.info("stopped")


def _precision(service: Service) -> str:
    """What searches scan, where they might scan something else."""
    said = service.router.precision
    return "" if said == "rows" else f" ({said})"


def _addresses(indexes: Mapping[str, IndexConfig]) -> tuple[dict[str, DaemonAddress], dict[str, str]]:
    """The address of each index, and why others have none.

    Raises:
        ServiceError: none has one.
    """
    addresses: dict[str, DaemonAddress] = {}
    problems: dict[str, str] = {}
    for name, told in indexes.items():
        assert told.path is not None
        try:
            require_directory(told.path)  # a lock would make it
            addresses[name] = DaemonAddress(told.path)
        except HybridIndexError as error:
            if len(problems) + 1 == len(indexes):
                raise
            _log.error("index %s cannot be served: %s", name, error)
            problems[name] = without_path(str(error), told.path)
    return addresses, problems


def _open_traces(asked: bool | None, environment: Mapping[str, str]) -> Traces | None:
    """``asked``: None: as the environment says; then a missing package is no error.

    Raises:
        MissingDependencyError: traces were asked for and OpenTelemetry is not installed.
    """
    if asked is False or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if asked is None:
        exporter = environment.get("OTEL_TRACES_EXPORTER", "")
        named = any(environment.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_"))
        if exporter not in ("", "otlp") or not (named or exporter):
            return None
    try:
        from hybridindex.service.observe.traces import to_collector

        return to_collector()
    except MissingDependencyError as error:
        if asked:
            raise
        _log.warning("the environment names a collector of traces, and %s", error)
        return None


async def _run(served: Indexes, keyring: Keyring | None, sockets: list[socket.socket]) -> None:
    await Daemon(served, keyring, sockets).run()
