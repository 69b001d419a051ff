"""Routes between the nodes of a cluster, and of its manager: plain ASGI, in no document but docs/cluster.md.

A node is asked thousands of scans a second, on channels that begin here, and pinged; both bypass admission, which the
asking node has had, and the access log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt

from hybridindex.errors import HybridIndexError
from hybridindex.index.share.ranges import mask_of
from hybridindex.index.share.source import FILES, FolderSource
from hybridindex.router.remote.changes import CHANGED_PATH
from hybridindex.router.remote.cluster_map import ClusterMap
from hybridindex.router.remote.frames import CHANNEL_PATH, UPGRADE
from hybridindex.router.remote.list_source import MOST_BYTES, MOST_LISTS
from hybridindex.router.remote.locality import LOCALITY_PATH
from hybridindex.router.remote.peer import NOT_SEEN, PING_PATH, SEEN
from hybridindex.service.auth import Keyring, Role
from hybridindex.service.changes.members import Members
from hybridindex.service.cluster.member import Member
from hybridindex.service.core import Service
from hybridindex.service.http.bodies import CHARGE, hold, read_body
from hybridindex.service.http.middleware import CALLER, Receive, Scope, Send
from hybridindex.service.http.nodes.channel import ScanChannel
from hybridindex.service.http.nodes.scans import Scans, other_generation
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.protocol import SWITCH, Switch
from hybridindex.service.http.wire import BodyError, parse_json_object
from hybridindex.service.observe.metrics import Metrics

__all__ = ["PEER_PREFIX", "ClusterRoutes"]

#: Of their paths.
PEER_PREFIX = "/v1/cluster/"
_BYTES, _JSON = b"application/octet-stream", b"application/json"
#: Bytes of a scan's arrays. Filters make them many, and their memory is taken from the budget of requests.
_MOST_SCAN = 1 << 28
#: Bytes of a map, and of ranges of lists: both grow with the lists of the index, whatever requests may have.
_MOST_LISTS_TEXT = 1 << 28
#: Of the number of a change.
_MOST_DIGITS = 18


class ClusterRoutes:
    """Of one node. On the event loop."""

    def __init__(self, service: Service, members: Members, keyring: Keyring | None, metrics: Metrics) -> None:
        self._service, self._members, self._keyring, self._metrics = service, members, keyring, metrics
        self._scans = Scans(members)
        service.on_search.append(lambda seen: members.current.count_search(seen.queries))
        self.handlers: Mapping[tuple[str, str], Callable[[Scope, Receive, Send], Awaitable[None]]] = {
            ("GET", PING_PATH.removeprefix(PEER_PREFIX)): self._ping,
            ("GET", CHANNEL_PATH.removeprefix(PEER_PREFIX)): self._channel,
            ("GET", "node"): self._node,
            ("GET", "nodes"): self._nodes,
            ("GET", LOCALITY_PATH.removeprefix(PEER_PREFIX)): self._locality,
            ("PUT", "map"): self._apply,
            ("POST", "open"): self._open,
            ("POST", "let-go"): self._let_go,
            ("POST", "hold"): self._hold,
            ("POST", "drop"): self._drop,
            ("POST", "lists"): self._lists,
            ("GET", "probes"): self._probes,
            ("POST", CHANGED_PATH.removeprefix(PEER_PREFIX)): self._changed,
            **{("GET", f"files/{name}"): self._file for name in FILES},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(PEER_PREFIX)
        handler = self.handlers.get((scope["method"], name))
        if handler is None:
            raise ProblemError(Problem(404, "not-found", "Not found", "no such route between nodes"))
        await handler(scope, receive, send)

    async def _ping(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """``of``: the node that asks."""
        name = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("of", "")
        await _answer_empty(send, SEEN if not name or self._members.pinged_by(name) else NOT_SEEN)

    async def _channel(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        """From here on the connection is a channel."""
        switch: Switch | None = scope.get(SWITCH)
        if switch is None or (b"upgrade", UPGRADE.encode()) not in scope["headers"]:
            problem = Problem(426, "upgrade-required", "Upgrade required", f"expected Upgrade: {UPGRADE}, by HTTP/1.1")
            raise ProblemError(problem)
        caller = scope[CALLER].name
        shown = dict(scope["headers"]).get(b"authorization")
        authorization = None if shown is None else shown.decode("latin-1")

        def is_allowed() -> bool:
            try:
                return self._keyring is None or self._keyring.identify(authorization).role.includes(Role.ADMIN)
            except HybridIndexError:
                return False

        channel = ScanChannel(
            self._scans,
            lambda: self._service.memory.open(caller),
            replace(self._service.config.limits, max_body_bytes=_MOST_SCAN),
            is_allowed=is_allowed,
            on_answer=partial(self._metrics.count_response, f"{PEER_PREFIX}scan"),
        )
        switch(channel, UPGRADE)

    async def _node(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _answer(send, json.dumps(self._members.status()).encode(), _JSON)

    async def _nodes(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """What clients need to know."""
        member = self._members.current
        map_ = member.remote.map
        nodes = [] if map_ is None else [{"name": node.name, "url": node.url} for node in map_.nodes if node.serving]
        version = 0 if map_ is None else map_.version
        answer = {"version": version, "dim": member.index.dim, "nodes": nodes}
        await _answer(send, json.dumps(answer).encode(), _JSON)

    async def _locality(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Which node holds what a query is near to."""
        encoded = await asyncio.to_thread(self._members.current.locality)
        await _answer(send, encoded, _BYTES)

    async def _apply(self, scope: Scope, receive: Receive, send: Send) -> None:
        map_ = ClusterMap.from_json(await self._read(scope, receive))
        applied = await asyncio.to_thread(self._members.apply, map_)
        if applied is None:
            raise other_generation(
                f"this node has {self._members.names()}; the map is of {map_.fingerprint}.{map_.generation}"
            )
        if not applied:
            raise ProblemError(Problem(409, "older-map", "Older map", "a newer map is in force", "version"))
        await _answer_empty(send, 204)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A generation beside the one that serves, which then takes lists and waits for its map."""
        given = await self._object(scope, receive, {"fingerprint", "generation"})
        fingerprint = given.get("fingerprint")
        if not isinstance(fingerprint, str):
            raise BodyError("fingerprint", "is not text; expected that of the generation")
        await asyncio.to_thread(self._members.open_beside, _number(given), fingerprint)
        await _answer_empty(send, 202)

    async def _let_go(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = await self._object(scope, receive, {"generation"})
        await asyncio.to_thread(self._members.let_go, _number(given))
        await _answer_empty(send, 204)

    async def _hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = await self._object(scope, receive, {"lists", "bytes_per_s", "replace", "generation"})
        member = self._of(given)
        bytes_per_s, again = given.get("bytes_per_s"), given.get("replace", False)
        if bytes_per_s is not None and (type(bytes_per_s) is not int or not 1 <= bytes_per_s <= 1 << 50):
            raise BodyError("bytes_per_s", f"is {bytes_per_s!r}; expected whole bytes above 0")
        if type(again) is not bool:
            raise BodyError("replace", f"is {again!r}; expected true or false")
        n = await asyncio.to_thread(member.hold, _mask(given, member), bytes_per_s, replace=again)
        await _answer(send, json.dumps({"lists": n}).encode(), _JSON, 202)

    async def _drop(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = await self._object(scope, receive, {"lists", "generation"})
        member = self._of(given)
        nbytes = await asyncio.to_thread(member.drop, _mask(given, member))
        await _answer(send, json.dumps({"bytes": nbytes}).encode(), _JSON)

    async def _lists(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = await self._object(scope, receive, {"lists", "generation"})
        lists, member = given.get("lists"), self._of(given)
        index = member.index
        nlist = index.nlist
        if not isinstance(lists, list) or not 1 <= len(lists) <= MOST_LISTS:
            raise BodyError("lists", f"is not a list of 1..{MOST_LISTS} numbers")
        if not all(type(each) is int and 0 <= each < nlist for each in lists):
            raise BodyError("lists", f"names lists outside 0..{nlist - 1}")
        spans = index.integrity.spans[lists]
        nbytes = int((spans[:, :, 1] - spans[:, :, 0]).sum())
        if nbytes > MOST_BYTES and len(lists) > 1:
            raise BodyError("lists", f"have {nbytes} bytes; expected {MOST_BYTES} at most")
        hold(scope[CHARGE], 2 * nbytes)

        def read() -> bytes:
            return b"".join(codes + ids for _, codes, ids in member.share.read(lists))

        await _answer(send, await asyncio.to_thread(read), _BYTES)

    async def _probes(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Lists that recent queries of clients probe."""
        probes = await asyncio.to_thread(self._members.current.recent.probes, self._service.router.nprobe)
        await _answer(send, json.dumps({"probes": probes.tolist()}).encode(), _JSON)

    async def _changed(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Rows were changed: searches see it when this answers."""
        number = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("number", "")
        if not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise BodyError("number", f"is {number[:20]!r}; expected an integer of 0 or more")
        known = await asyncio.to_thread(self._members.know, int(number))
        await _answer(send, str(known).encode(), _JSON)

    async def _file(self, scope: Scope, _receive: Receive, send: Send) -> None:
        name = scope["path"].rpartition("/")[2]
        content = await asyncio.to_thread(lambda: FolderSource(self._members.current.index.path).file(name))
        hold(scope[CHARGE], len(content))
        await _answer(send, content, _BYTES)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limits = self._service.config.limits
        limits = replace(limits, max_body_bytes=max(limits.max_body_bytes, _MOST_LISTS_TEXT))
        return await read_body(dict(scope["headers"]), receive, limits, scope[CHARGE])

    async def _object(self, scope: Scope, receive: Receive, names: set[str]) -> dict[str, Any]:
        return parse_json_object(await self._read(scope, receive), names)

    def _of(self, given: Mapping[str, Any]) -> Member:
        """The member of the generation that is asked for; without one, of that which serves."""
        generation = _number(given) if "generation" in given else None
        member = self._members.of(generation)
        if member is None:
            raise other_generation(f"this node has {self._members.names()}, and generation {generation} was asked")
        return member


def _mask(given: Mapping[str, Any], member: Member) -> npt.NDArray[np.bool_]:
    return mask_of(given.get("lists"), member.index.nlist)


def _number(given: Mapping[str, Any]) -> int:
    number = given.get("generation")
    if type(number) is not int or not 1 <= number < 1 << 53:
        raise BodyError("generation", f"is {number!r}; expected the number of one, 1 or more")
    return number


async def _answer_empty(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, body: bytes, kind: bytes, status: int = 200) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
