"""Lists read from other nodes of a cluster, as a source of a share. Their bytes are verified by the share."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from hybridindex.bearer import bearer
from hybridindex.errors import NotHeldError, UnreachableError
from hybridindex.index.share.source import FILES
from hybridindex.types import I64

__all__ = ["MOST_BYTES", "MOST_LISTS", "PeerSource"]

#: Of one request.
MOST_LISTS, MOST_BYTES = 4096, 64 << 20
#: Of a file beside the lists.
_MOST_FILE = 1 << 34


class PeerSource:
    """One node. A connection for each call; one thread at a time."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        spans: I64 | None = None,
        generation: int | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """
        Args:
            url: ``http(s)://host:port``.
            spans: (nlist, 2, 2) int64 where codes and ids of each list lie, for :meth:`read`.
            generation: of the lists; None: that which the node serves.
        """
        self.url = url
        self._spans, self._timeout_s, self._tls = spans, timeout_s, tls
        self._of = {} if generation is None else {"generation": generation}
        self._headers = {} if key is None else {"authorization": bearer(key, "key")}

    def files(self) -> dict[str, bytes]:
        """The files of the index beside its lists; no attributes.

        Raises:
            UnreachableError: the node does not give them.
        """
        connection = self._connect()
        try:
            return {name: self._ask(connection, "GET", f"/v1/cluster/files/{name}", None, _MOST_FILE) for name in FILES}
        finally:
            connection.close()

    def read(self, lists: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """Lists with their codes and ids.

        Raises:
            NotHeldError: the node has not all of them. UnreachableError: it does not answer.
        """
        assert self._spans is not None
        sizes = (self._spans[:, :, 1] - self._spans[:, :, 0]).tolist()
        connection = self._connect()
        try:
            for some in _in_requests(lists, sizes):
                expected = sum(sum(sizes[each]) for each in some)
                body = self._ask(connection, "POST", "/v1/cluster/lists", {"lists": some, **self._of}, expected)
                if len(body) != expected:
                    raise UnreachableError(
                        f"{self.url} gave {len(body)} bytes of {len(some)} lists; expected {expected}"
                    )
                at = 0
                for each in some:
                    codes, ids = sizes[each]
                    yield each, body[at : at + codes], body[at + codes : at + codes + ids]
                    at += codes + ids
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._timeout_s)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object, most_bytes: int
    ) -> bytes:
        headers = dict(self._headers)
        content = None
        if body is not None:
            content, headers["content-type"] = json.dumps(body).encode(), "application/json"
        try:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            found = answer.read(most_bytes + 1)
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"no answer from {self.url}: {error}") from error
        if answer.status == 503 and b"problem:not-held" in found:
            raise NotHeldError(f"{self.url} does not hold all of the lists that were asked for")
        if answer.status != 200 or len(found) > most_bytes:
            raise UnreachableError(f"{self.url} answered {path} with status {answer.status}, {len(found)} bytes")
        return found


def _in_requests(lists: Sequence[int], sizes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """In their order, so many at a time as one request takes."""
    some: list[int] = []
    nbytes = 0
    for each in lists:
        own = sum(sizes[each])
        if some and (len(some) == MOST_LISTS or nbytes + own > MOST_BYTES):
            yield some
            some, nbytes = [], 0
        some.append(int(each))
        nbytes += own
    if some:
        yield some
