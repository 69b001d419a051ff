"""What the manager of a cluster asks of one node, over HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from hybridindex.bearer import bearer
from hybridindex.client.messages import object_of
from hybridindex.errors import ServiceError, UnreachableError
from hybridindex.index.share.ranges import ranges_of
from hybridindex.router.remote.cluster_map import ClusterMap, IndexGeneration

__all__ = ["NodeCalls", "generation_of"]

#: Of an answer: whatever else may listen where a node did must not fill the memory of who asks. Of a node's, they grow
#: with the lists of the index.
_MOST_BYTES, _MOST_OF_PING = 1 << 28, 1 << 16


def generation_of(said: dict[str, Any], of: IndexGeneration) -> dict[str, Any] | None:
    """What a node said (:meth:`NodeCalls.node`) of one generation of the index; None: it does not have it."""
    return next((each for each in said["generations"] if (each["fingerprint"], each["generation"]) == of), None)


class NodeCalls:
    """Of one node, from any thread; a connection for each call, but for :meth:`watch`."""

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        """``key``: with the role admin. Raises InvalidInputError for one that no header can carry."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url, self._host, self._port, self._secure = url, parts.hostname, parts.port, parts.scheme == "https"
        self._tls = tls
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = bearer(key, "key (HYBRIDINDEX_CLUSTER_KEY of the environment)")
        #: Of :meth:`watch`: a handshake can take longer than a node may be silent.
        self._watching: http.client.HTTPConnection | None = None

    def watch(self, timeout_s: float) -> None:
        """:meth:`ping` over a connection that stays open; of one thread.

        Raises:
            UnreachableError: it does not answer, or something else. ServiceError: it answers, and refuses.
        """
        connection = self._watching or self._connect(timeout_s)
        self._watching = None
        try:
            connection.request("GET", "/v1/cluster/ping", None, self._headers)
            answer = connection.getresponse()
            content = answer.read(_MOST_OF_PING)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UnreachableError(f"no answer from {self.url}: {error or type(error).__name__}") from error
        if answer.status != 204:
            connection.close()
            # 404: a daemon that is no node. 503: one that has too much to do.
            if (400 <= answer.status < 500 and answer.status != 404) or answer.status == 503:
                raise self._refusal("ping", answer.status, content)
            raise UnreachableError(f"{self.url} answers with status {answer.status}")
        self._watching = connection

    def close(self) -> None:
        """Ends the connection of :meth:`watch`; of its thread."""
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def ping(self, timeout_s: float) -> None:
        """Raises UnreachableError."""
        self._ask("GET", "ping", None, timeout_s)

    def node(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """What the node says of itself. Raises UnreachableError."""
        said: dict[str, Any] = json.loads(self._ask("GET", "node", None, timeout_s))
        return said

    def nodes(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The nodes that serve, as this one knows them. Raises UnreachableError, ServiceError."""
        return object_of(self._ask("GET", "nodes", None, timeout_s))

    def probes(self, nlist: int, timeout_s: float = 10.0) -> npt.NDArray[np.int64]:
        """(n, p) int64 lists that recent queries of clients probe there, -1 = skip. Raises UnreachableError,
        ServiceError."""
        said = np.array(json.loads(self._ask("GET", "probes", None, timeout_s))["probes"], dtype=np.int64)
        found = said.reshape(len(said), -1)
        if found.size and not -1 <= found.min() <= found.max() < nlist:
            raise ServiceError(f"{self.url} told lists outside -1..{nlist - 1}")
        return found

    def apply(self, map_: ClusterMap, timeout_s: float = 10.0) -> None:
        """Puts a map in force.

        Raises:
            UnreachableError: it does not answer. ServiceError: it refuses the map, and why.
        """
        self._ask("PUT", "map", map_.to_json().encode(), timeout_s)

    def hold(
        self,
        lists: npt.NDArray[np.bool_],
        bytes_per_s: int | None,
        timeout_s: float = 10.0,
        *,
        generation: int | None = None,
        replace: bool = False,
    ) -> None:
        """Has the node begin to take lists of a generation, or of the one that it serves; ``replace``: instead of those
        on their way. Raises as :meth:`apply`."""
        body: dict[str, Any] = {"lists": ranges_of(lists), "replace": replace, **_of(generation)}
        if bytes_per_s is not None:
            body["bytes_per_s"] = bytes_per_s
        self._ask("POST", "hold", json.dumps(body).encode(), timeout_s)

    def drop(self, lists: npt.NDArray[np.bool_], timeout_s: float = 60.0, *, generation: int | None = None) -> int:
        """Has the node give up lists; the bytes of them. Raises as :meth:`apply`."""
        body = {"lists": ranges_of(lists), **_of(generation)}
        answer = self._ask("POST", "drop", json.dumps(body).encode(), timeout_s)
        return int(json.loads(answer)["bytes"])

    def open(self, of: IndexGeneration, timeout_s: float = 10.0) -> None:
        """Has the node begin to open a generation beside the one that it serves. Raises as :meth:`apply`."""
        self._ask("POST", "open", json.dumps(of._asdict()).encode(), timeout_s)

    def let_go(self, generation: int, timeout_s: float = 60.0) -> None:
        """Has the node close a generation that it does not serve. Raises as :meth:`apply`."""
        self._ask("POST", "let-go", json.dumps({"generation": generation}).encode(), timeout_s)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _ask(self, method: str, name: str, body: bytes | None, timeout_s: float) -> bytes:
        connection = self._connect(timeout_s)
        try:
            connection.request(method, f"/v1/cluster/{name}", body, self._headers)
            answer = connection.getresponse()
            content = answer.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"no answer from {self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if len(content) > _MOST_BYTES:
            raise UnreachableError(f"{self.url} answers {name} with more than {_MOST_BYTES} bytes")
        if answer.status >= 400:
            raise self._refusal(name, answer.status, content)
        return content

    def _refusal(self, name: str, status: int, content: bytes) -> ServiceError:
        try:
            why = str(json.loads(content)["detail"])
        except (ValueError, KeyError, TypeError):
            why = f"status {status}"
        return ServiceError(f"{self.url} refused {name}: {why}")


def _of(generation: int | None) -> dict[str, int]:
    return {} if generation is None else {"generation": generation}
