"""An address whose packets are not answered, as of a machine that is away or a network that is cut."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def unreachable(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Who connects there waits until the end; the port."""
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind((host, port))
        full.listen(0)
        # They take the places of those who wait to be accepted.
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()[1]
