"""uvicorn's HTTP protocol with an end to patience: for headers that do not come, and for answers that are not taken.

Bodies that do not come are :mod:`hybridindex.service.app`'s business.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hybridindex.errors import MissingDependencyError

try:
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingDependencyError("the daemon needs uvicorn: pip install 'hybridindex[service]'") from error

__all__ = ["PatientProtocol"]


class PatientProtocol(H11Protocol):
    """Closes a connection on which a request's headers, or the taking of its answer, last longer than the keep-alive
    time. (uvicorn itself only ends connections that say nothing at all after an answer.)"""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        if self._between_requests():
            self._wait_for_headers()
        super().data_received(data)
        if not self._between_requests():
            self._stop_waiting()

    def _between_requests(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait_for_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self._between_requests() and not self.transport.is_closing():
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        # close() would wait for a client that never reads the rest.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> Any:
        self._stop_waiting()
        super().connection_lost(exc)
