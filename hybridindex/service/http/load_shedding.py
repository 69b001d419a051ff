"""Refuses searches by their headers: reads no body, looks for no route, raises nothing.

At twice its capacity a daemon refuses as often as it answers, and each refusal takes time from admitted searches. So a
refusal sends a document made in advance, and one log line a second counts them all.
:meth:`hybridindex.service.admission.Admission.lack_of_room` decides, from what the headers tell. A request that passes
may still be refused when its body is known.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from hybridindex.errors import OverloadedError
from hybridindex.service.admission import UNKNOWN_RETRY_S, Lack
from hybridindex.service.core import Service
from hybridindex.service.http.problems import problem_of

__all__ = ["LoadShedder", "Refusal"]

_log = logging.getLogger("hybridindex.access")

#: How often refusals are logged.
_LOG_S = 1.0
_RAW = b"application/octet-stream"
_WORDS: dict[Lack, str] = {
    "draining": "the daemon is about to stop; ask another one",
    "queue": "the queue is full; it holds {queue} queries",
    "client": "your share of the queue is full; one client may have {share} queries wait",
    "deadline": "the queue is so long that deadline_ms would pass before the search could start",
}
_DEADLINE = re.compile(rb"(?:^|&)deadline_ms=([0-9]{1,9}(?:\.[0-9]*)?)(?:&|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A problem document without its request id, and its headers without its length."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    #: Status line and headers as they go over the wire.
    head: bytes
    before_id: bytes
    after_id: bytes

    def body(self, request_id: str) -> bytes:
        return self.before_id + request_id.encode() + self.after_id

    def message(self, request_id: str, lines: bytes) -> bytes:
        """The whole answer, with more header ``lines``."""
        body = self.body(request_id)
        shown = request_id.encode()
        return b"%b%bcontent-length: %d\r\nx-request-id: %b\r\n\r\n%b" % (self.head, lines, len(body), shown, body)


def deadline_ms(query: bytes) -> float | None:
    """The deadline in a query string; None: there is none, or only the parser can read it."""
    found = _DEADLINE.search(query)
    return None if found is None else float(found[1])


class LoadShedder:
    """Makes refusals. On the event loop."""

    def __init__(self, service: Service) -> None:
        self._admission = service.admission
        self._limits = service.config.limits
        self._row_bytes = 4 * service.index.dim
        #: One per reason and advised wait.
        self._made: dict[tuple[Lack, float], Refusal] = {}
        self._unlogged = 0

    def refusal(
        self, client: str, headers: Mapping[bytes, bytes], query: bytes, *, n_coming: int = 0
    ) -> Refusal | None:
        """The refusal of a search with these headers; None: it may come in.

        Args:
            query: the query string.
            n_coming: queries that were let in and have not reached the queue yet.
        """
        admission = self._admission
        if b"expect" in headers or (n := self.n_queries(headers)) is None:
            return None
        left_ms = deadline_ms(query) or self._limits.default_deadline_ms
        lack = admission.lack_of_room(client, n, None if left_ms is None else left_ms / 1e3, n_coming=n_coming)
        if lack is None:
            return None
        admission.refused[lack] += 1
        self._unlogged += 1
        if self._unlogged == 1:
            asyncio.get_running_loop().call_later(_LOG_S, self.flush)
        key = (lack, UNKNOWN_RETRY_S if lack == "draining" else admission.retry_after_s(n))
        return self._made.get(key) or self._make(*key)

    def n_queries(self, headers: Mapping[bytes, bytes]) -> int | None:
        """Least number of queries in the body, by the headers; None: the parser has to refuse the body."""
        length = headers.get(b"content-length")
        if length is None:
            return 1
        if not length.isdigit() or len(length) > 18 or int(length) > self._limits.max_body_bytes:
            return None
        if headers.get(b"content-type") != _RAW:
            return 1
        n = int(length) // self._row_bytes
        return n if 1 <= n <= self._limits.max_queries else None

    def _make(self, lack: Lack, wait_s: float) -> Refusal:
        limits, mark = self._limits, "-request-id-"
        words = _WORDS[lack].format(queue=limits.queue_queries, share=self._admission.share)
        problem = problem_of(OverloadedError(words, retry_after_s=wait_s, own_share=lack == "client"))
        before, _, after = problem.body(mark).partition(mark.encode())
        headers = tuple(problem.headers())
        first = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n".encode()
        head = first + b"".join([b"%b: %b\r\n" % header for header in headers])
        made = Refusal(status=problem.status, headers=headers, head=head, before_id=before, after_id=after)
        self._made[lack, wait_s] = made
        return made

    def flush(self) -> None:
        """Logs how many were refused since the last call."""
        count, self._unlogged = self._unlogged, 0
        if count:
            _log.info("searches refused by their headers", extra={"count": count})
