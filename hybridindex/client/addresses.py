"""Addresses of hosts by their names, within a time: the system's look-up of a name has no limit of its own."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future

__all__ = ["Addresses"]


class Addresses:
    """Any thread. A name is looked up by one thread at a time, whoever else asks for it meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By host and port: look-ups under way.
        self._looking: dict[tuple[str, int], Future[list[str]]] = {}

    def of(self, host: str, port: int, timeout_s: float | None) -> list[str]:
        """The addresses of ``host``, in the system's order. One that is an address already is returned as it is.

        Raises:
            httpcore.ConnectError: the name has none. httpcore.ConnectTimeout: it was not looked up in time.
        """
        import httpcore

        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            pass
        else:
            return [host]
        looking = self._begin(host, port)
        try:
            return looking.result(timeout_s)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"the name {host} was not looked up in time") from error
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the name {host} has no address: {error}") from error

    def _begin(self, host: str, port: int) -> Future[list[str]]:
        with self._lock:
            looking = self._looking.get((host, port))
            if looking is None:
                looking = Future()
                thread = threading.Thread(
                    target=self._look_up, args=(host, port, looking), name="hybridindex-address", daemon=True
                )
                thread.start()
                self._looking[host, port] = looking
            return looking

    def _look_up(self, host: str, port: int, looking: Future[list[str]]) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            self._end(host, port)
            looking.set_exception(error)
        else:
            self._end(host, port)
            looking.set_result(list(dict.fromkeys(str(address[0]) for *_, address in found)))

    def _end(self, host: str, port: int) -> None:
        with self._lock:
            del self._looking[host, port]
