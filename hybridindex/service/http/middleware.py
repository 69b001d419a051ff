"""The outermost ASGI application: request ids, callers and roles, refusals, problem documents, log lines, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from starlette.requests import ClientDisconnect

from hybridindex.errors import OverloadedError
from hybridindex.service.admission import Admission
from hybridindex.service.auth import Caller, Keyring, Role
from hybridindex.service.core import Service
from hybridindex.service.http.bodies import CHARGE
from hybridindex.service.http.load_shedding import LoadShedder
from hybridindex.service.http.origin import OriginPolicy
from hybridindex.service.http.page.files import PAGE_PATHS
from hybridindex.service.http.problems import Problem, ProblemError, problem_of
from hybridindex.service.http.protocol import SWITCHED
from hybridindex.service.intake.request_memory import Charge
from hybridindex.service.observe.logs import REQUEST_ID, AccessLog
from hybridindex.service.observe.metrics import Metrics
from hybridindex.service.several.indexes import Indexes

__all__ = ["CALLER", "INDEXES", "RequestMiddleware", "send_problem"]

_log = logging.getLogger("hybridindex.access")
_audit = logging.getLogger("hybridindex.audit")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Key of the :class:`Caller` in a request's scope.
CALLER = "hybridindex.caller"
#: Key of the number of queries that count as coming until the request's task begins.
_COMING = "hybridindex.coming"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
#: No key needed: an orchestrator's probes say one word, and the page holds no data and asks for a key itself.
_OPEN = frozenset({"/livez", "/readyz"}) | PAGE_PATHS
#: Where several indexes are served, the routes of one begin with this and its name, in place of ``/v1``.
INDEXES = "/v1/indexes/"
_ADMIN = frozenset({"/v1/repartition", "/v1/reload", "/v1/drain", "/v1/queries/recent", "/v1/compact"})
_DELETE = frozenset({"/v1/vectors/delete", "/v1/documents/delete"})
_WRITE = frozenset({"/v1/vectors", "/v1/documents"}) | _DELETE
#: What nodes of a cluster and their manager ask; and of that what is asked all the time.
_BETWEEN_NODES = "/v1/cluster/"
_FOR_CLIENTS = frozenset({f"{_BETWEEN_NODES}{name}" for name in ("ping", "nodes", "locality")})
_SCANS = frozenset({f"{_BETWEEN_NODES}{name}" for name in ("ping", "channel", "nodes")})
#: Answered whatever memory other requests hold.
_ALWAYS = frozenset({"/livez", "/readyz", "/healthz", "/metrics"}) | PAGE_PATHS
#: As these, between nodes: who is out of memory is not down, and may not keep others from seeing what was changed.
_ALWAYS_BETWEEN = frozenset({f"{_BETWEEN_NODES}{name}" for name in ("ping", "changed")})
#: Larger answers count until the client has taken them.
_LARGE_BYTES = 1 << 16
#: Polled; logged only at errors.
_QUIET = frozenset({"/livez", "/readyz", "/healthz", "/metrics", "/v1/series", "/v1/events"}) | PAGE_PATHS
#: Of a request that was not answered when the daemon ended.
_STOPPED = "the daemon stops before this request ends; ask another one"
_QUIET_OF_INDEX = ("/series", "/events")


class _BetweenNodes:
    """A route, for metrics."""

    path = f"{_BETWEEN_NODES}*"


class SearchPath(Protocol):
    """An ASGI application for one path."""

    path: str

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...


class RequestMiddleware:
    """Answers searches itself, and passes other requests on. On the event loop."""

    def __init__(
        self,
        indexes: Indexes,
        metrics: Metrics,
        keyring: Keyring | None,
        searches: Iterable[tuple[SearchPath, Service]],
        between_nodes: ASGI | None = None,
    ) -> None:
        """
        Args:
            searches: answer their paths; the application of :meth:`around` answers all others.
            between_nodes: answers what nodes of a cluster ask each other; None: it is of none.
        """
        self._between_nodes = between_nodes
        self._app: Any = None
        #: Any: all have the same traces, and drain together.
        self._service = next(iter(indexes.services.values()))
        self._memory = indexes.memory
        self._metrics = metrics
        self._keyring = keyring
        self._origin = OriginPolicy(host=indexes.config.host, keyed=keyring is not None)
        queues = {service: _Queue(service) for service in indexes.services.values()}
        self._queues = tuple(queues.values())
        self._searches = {search.path: (search, queues[service]) for search, service in searches}
        self._targets = {path.encode(): found for path, found in self._searches.items()}
        self._access = AccessLog(_log)
        self._ids = _RequestIds()

    def around(self, app: Any) -> RequestMiddleware:
        """Sets the application for everything but searches."""
        self._app = app
        return self

    def flush(self) -> None:
        """Writes pending log lines."""
        for queue in self._queues:
            queue.shedder.flush()
        self._access.flush()

    def turn_away(self, scope: Scope, target: bytes, lines: bytes) -> bytes | None:
        """The whole answer to a search that is refused before it has a task; None: it may come in.

        Without this, a refusal takes 1.7 times as long on the event loop.

        Args:
            scope: of a POST request on a connection that is kept, without the path.
            target: path and query string as sent.
            lines: header lines of every answer, as bytes on the wire.
        """
        path, _, query = target.partition(b"?")
        if self._service.traces is not None or (found := self._targets.get(path)) is None:
            return None
        search, queue = found
        if not queue.admission.n_waiting or queue.admission.draining:
            return None
        started = time.perf_counter()
        headers = dict(scope["headers"])
        try:
            self._origin.check(scope, headers)
        except ProblemError:
            return None  # the request's task will answer it
        if (client := self._recall(scope, headers)) is None:
            return None
        refusal = queue.shedder.refusal(client, headers, query, n_coming=queue.n_coming)
        if refusal is None:
            coming = queue.shedder.n_queries(headers) or 1
            scope[_COMING] = queue, coming
            queue.n_coming += coming
            return None
        answer = refusal.message(self._id_of(headers), lines)
        self._metrics.count_response(search.path, refusal.status, time.perf_counter() - started)
        return answer

    def _id_of(self, headers: dict[bytes, bytes]) -> str:
        shown = headers.get(b"x-request-id")
        return self._ids.next() if shown is None or not _REQUEST_ID.fullmatch(shown) else shown.decode()

    def _recall(self, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
        """The caller's name, without a look at the key file."""
        if self._keyring is None:
            return _address_of(scope)
        shown = headers.get(b"authorization")
        caller = self._keyring.recall(None if shown is None else shown.decode("latin-1"))
        return None if caller is None else caller.name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (coming := scope.pop(_COMING, None)) is not None:
            coming[0].n_coming -= coming[1]
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = self._id_of(headers)
        token = REQUEST_ID.set(request_id)
        traces = self._service.traces
        try:
            if traces is None or scope["path"] in _QUIET:
                await self._answer(scope, receive, send, headers, request_id, started)
                return
            with traces.request(scope["method"], headers, request_id) as answered:
                status = await self._answer(scope, receive, send, headers, request_id, started)
                answered(_route_of(scope), status)
        finally:
            REQUEST_ID.reset(token)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes], request_id: str, started: float
    ) -> int:
        """Returns the status of the answer; 0: none was begun."""
        answer = _Stamped(send, request_id, self._service)
        refused = False
        try:
            self._origin.check(scope, headers)
            caller = self._identify(scope, headers)
            if scope["path"] in _ALWAYS:
                await self._app(scope, receive, answer)
                return answer.status
            app, found = self._app, self._searches.get(scope["path"])
            if self._between_nodes is not None and scope["path"].startswith(_BETWEEN_NODES):
                app, scope["route"] = self._between_nodes, _BetweenNodes
                if scope["path"] in _ALWAYS_BETWEEN:
                    await app(scope, receive, answer)
                    return answer.status
            if found is not None and scope["method"] == "POST":
                app, queue = found
                scope["route"], scope["path_params"] = app, {}
                refusal = queue.shedder.refusal(caller.name, headers, scope["query_string"])
                if refusal is not None:
                    refused = True
                    await _send_whole(refusal.status, refusal.headers, refusal.body(request_id), answer)
                    return answer.status
            with self._memory.open(caller.name) as charge:
                scope[CHARGE] = answer.charge = charge
                await app(scope, receive, answer)
            if SWITCHED in scope:
                answer.status = 101
        except ClientDisconnect:
            answer.status = answer.status or 499
        except asyncio.CancelledError:
            if answer.status or not self._service.admission.draining:
                raise
            # The drain has lasted as long as it may; the server would call it an error of the daemon.
            await send_problem(problem_of(OverloadedError(_STOPPED, retry_after_s=1)), request_id, answer)
        except Exception as error:  # noqa: BLE001 - the client gets an answer, the log the reason
            problem = problem_of(error)
            if problem.status == 500:
                _log.exception("a request failed")
            elif problem.status == 507:
                _log.error("a request failed: %s", error)
            if not answer.status:
                await send_problem(problem, request_id, answer)
        finally:
            seconds = time.perf_counter() - started
            if refused:
                # The load shedder logs refusals together.
                self._metrics.count_response(scope["path"], answer.status, seconds)
            else:
                self._note(scope, answer.status, request_id, seconds)
        return answer.status

    def _identify(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """The caller, who stands in the scope from then on, also where a role is missing."""
        path = scope["path"]
        if self._keyring is None or path in _OPEN:
            role = Role.ADMIN if self._keyring is None else Role.SEARCH
            scope[CALLER] = caller = Caller(name=_address_of(scope), role=role)
        else:
            shown = headers.get(b"authorization")
            scope[CALLER] = caller = self._keyring.identify(None if shown is None else shown.decode("latin-1"))
        if not path.isprintable():
            # What routes requests takes a path with a line feed behind it for the path without, and roles do not.
            raise ProblemError(Problem(404, "not-found", "Not found", "no path has control characters"))
        if self._keyring is None or path in _OPEN:
            return caller
        if not caller.role.includes(needed := _role_for(_of_one(path))):
            raise ProblemError(Problem(403, "forbidden", "Forbidden", f"this needs a key with the role {needed}"))
        return caller

    def _note(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        route = _route_of(scope)
        self._metrics.count_response(route, status, seconds)
        if status < 400 and scope["path"] in _SCANS:
            return
        caller: Caller | None = scope.get(CALLER)
        client = caller.name if caller is not None else "unknown"
        path = _of_one(scope["path"])
        needed = _role_for(path)
        allowed = caller is not None and caller.role.includes(needed)
        # Rows that come are in the access log alone.
        if needed is Role.ADMIN or path in _DELETE or (needed is Role.WRITE and not allowed):
            # A client's text: without control characters, and not of any length.
            fields = {"action": quote(scope["path"][:200]), "client": client, "outcome": status}
            if allowed:
                _audit.info("%s call", needed, extra=fields)
            else:
                _audit.warning("refused", extra=fields)
        if status < 400 and (route in _QUIET or (route.startswith(INDEXES) and route.endswith(_QUIET_OF_INDEX))):
            return
        fields = {"method": scope["method"], "route": route, "status": status, "ms": round(seconds * 1e3, 3)}
        self._access.note("request", {**fields, "client": client, "request_id": request_id})


@dataclass(slots=True, eq=False)
class _Queue:
    """Of one service."""

    service: InitVar[Service]
    admission: Admission = field(init=False)
    shedder: LoadShedder = field(init=False)
    #: Queries that :meth:`RequestMiddleware.turn_away` let in and whose tasks have not begun: they take room already.
    n_coming: int = 0

    def __post_init__(self, service: Service) -> None:
        self.admission, self.shedder = service.admission, LoadShedder(service)


def _of_one(path: str) -> str:
    """Where one of several indexes is meant, the same route of the first."""
    return "/v1/" + path.removeprefix(INDEXES).partition("/")[2] if path.startswith(INDEXES) else path


def _role_for(path: str) -> Role:
    """What a key must be allowed, at least."""
    if path in _FOR_CLIENTS:
        return Role.SEARCH
    if path in _ADMIN or path.startswith(_BETWEEN_NODES) or (path.startswith("/v1/plans/") and path.endswith("/apply")):
        return Role.ADMIN
    return Role.WRITE if path in _WRITE else Role.SEARCH


class _Stamped:
    """The ``send`` of one request: adds its id to the answer, keeps the status, waits until a large answer is taken."""

    __slots__ = ("_request_id", "_send", "_service", "charge", "status")

    def __init__(self, send: Send, request_id: str, service: Service) -> None:
        self._send = send
        self._request_id = request_id
        self._service = service
        #: 0 until the answer begins.
        self.status = 0
        #: Of the request; None: it has none.
        self.charge: Charge | None = None

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            if self.charge is not None:
                _hold_answer(self.charge, message["headers"])
            self.status = message["status"]
            stamped = [*message["headers"], (b"x-request-id", self._request_id.encode())]
            if self._service.admission.draining:
                stamped.append((b"connection", b"close"))
            message = {**message, "headers": stamped}
        elif len(message.get("body", b"")) > _LARGE_BYTES and self.charge is not None:
            return self._send_large(message)
        return self._send(message)

    async def _send_large(self, message: MutableMapping[str, Any]) -> None:
        """Ends when the client has taken it, or is gone: until then the connection holds it."""
        await self._send({**message, "more_body": True})
        await self._send({**message, "body": b""})


def _hold_answer(charge: Charge, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises OverloadedError: there is no room for a large answer; a search has taken it before."""
    for name, value in headers:
        if name == b"content-length":
            if (nbytes := int(value)) > max(charge.nbytes, _LARGE_BYTES):
                charge.hold(nbytes)
            return


class _RequestIds:
    """Random ids from the system's source, many with one call."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def next(self) -> str:
        if not self._left:
            text = secrets.token_hex(8 * 256)
            self._left = [text[at : at + 16] for at in range(0, len(text), 16)]
        return self._left.pop()


def _address_of(scope: Scope) -> str:
    return (scope.get("client") or ("",))[0] or "local"


def _route_of(scope: Scope) -> str:
    """The route's template: a metric's label must not hold a path that a client made up."""
    route: str = getattr(scope.get("route"), "path", "unmatched")
    return route


async def _send_whole(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, send: Send) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_problem(problem: Problem, request_id: str, send: Send) -> None:
    """The whole answer."""
    await _send_whole(problem.status, problem.headers(), problem.body(request_id), send)
