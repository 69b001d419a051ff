"""A daemon on a real socket and a thread of the test's own process, so that a test can also look inside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridindex.service.auth import Keyring
from hybridindex.service.core import Service
from hybridindex.service.daemon import Daemon
from hybridindex.service.daemon_address import bind_tcp


class _Lasting(Daemon):
    """``POST /v1/drain`` is answered and ends nothing: a test that calls every route goes on."""

    def drain(self) -> None:
        pass


@contextmanager
def live(service: Service, keyring: Keyring | None = None) -> Iterator[int]:
    """Serves on a free port of the loopback; gives the port. Signals stay the test's."""
    bound = bind_tcp("127.0.0.1", 0)
    (server,) = _Lasting(service, keyring, [bound])._servers
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        while not (service.ready and server.started):
            assert thread.is_alive()
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(300)
        bound.close()
    assert not thread.is_alive()
