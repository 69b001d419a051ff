"""Around every request, before routing and after the answer: its id, its caller, its log line, its metrics.

Plain ASGI. What a route does is in ``app.py``; whatever it raises becomes a problem document here.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from hybridindex.service.auth import Caller, Keyring, Role
from hybridindex.service.core import Service
from hybridindex.service.logs import REQUEST_ID
from hybridindex.service.metrics import Metrics
from hybridindex.service.origin import OriginPolicy
from hybridindex.service.page.files import PAGE_PATHS
from hybridindex.service.problems import Problem, ProblemError, problem_of

__all__ = ["CALLER", "Shell"]

_log = logging.getLogger("hybridindex.access")
_audit = logging.getLogger("hybridindex.audit")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Where the shell leaves the :class:`Caller` in a request's scope.
CALLER = "hybridindex.caller"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
#: Probes of an orchestrator carry no key, and say one word; the page holds no data, and asks for a key itself.
_OPEN = frozenset({"/livez", "/readyz"}) | PAGE_PATHS
_ADMIN = frozenset({"/v1/repartition", "/v1/drain", "/v1/queries/recent"})
#: Asked for all the time; logged only when something is wrong.
_QUIET = frozenset({"/livez", "/readyz", "/healthz", "/metrics", "/v1/series", "/v1/events"}) | PAGE_PATHS


class Shell:
    """An ASGI application around another. On the event loop."""

    def __init__(
        self, app: Any, service: Service, metrics: Metrics, keyring: Keyring | None, shortcut: Any = None
    ) -> None:
        """``shortcut``: a Starlette route without parameters that is served without asking ``app``."""
        self._app = app
        self._shortcut = shortcut
        self._shortcut_path = None if shortcut is None else shortcut.path
        self._service = service
        self._metrics = metrics
        self._keyring = keyring
        self._origin = OriginPolicy(host=service.config.host, keyed=keyring is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = dict(scope["headers"])
        shown = headers.get(b"x-request-id", b"")
        request_id = shown.decode() if _REQUEST_ID.fullmatch(shown) else secrets.token_hex(8)
        token = REQUEST_ID.set(request_id)
        traces = self._service.traces
        try:
            if traces is None or scope["path"] in _QUIET:
                await self._answer(scope, receive, send, headers, request_id, started)
                return
            with traces.request(scope["method"], headers, request_id) as span:
                status = await self._answer(scope, receive, send, headers, request_id, started)
                traces.describe(span, scope["method"], _route_of(scope), status)
        finally:
            REQUEST_ID.reset(token)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes], request_id: str, started: float
    ) -> int:
        """The status of the answer; 0 where none was begun."""
        status = 0

        async def send_stamped(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                stamped = [*message["headers"], (b"x-request-id", request_id.encode())]
                if self._service.admission.draining:
                    stamped.append((b"connection", b"close"))
                message = {**message, "headers": stamped}
            await send(message)

        caller: Caller | None = None
        try:
            self._origin.check(scope, headers)
            caller = self._identify(scope, headers)
            scope[CALLER] = caller
            if scope["path"] == self._shortcut_path and scope["method"] in self._shortcut.methods:
                scope["route"], scope["path_params"] = self._shortcut, {}
                await self._shortcut.app(scope, receive, send_stamped)
            else:
                await self._app(scope, receive, send_stamped)
        except Exception as error:  # noqa: BLE001 - the client gets an answer, the log the reason
            problem = problem_of(error)
            if problem.status >= 500:
                _log.exception("a request failed")
            if not status:
                await send_problem(problem, request_id, send_stamped)
        finally:
            self._note(scope, caller, status, time.perf_counter() - started)
        return status

    def _identify(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        path = scope["path"]
        if self._keyring is None or path in _OPEN:
            address = (scope.get("client") or ("",))[0] or "local"
            return Caller(name=address, role=Role.ADMIN if self._keyring is None else Role.SEARCH)
        shown = headers.get(b"authorization")
        caller = self._keyring.identify(None if shown is None else shown.decode("latin-1"))
        if path in _ADMIN and caller.role is not Role.ADMIN:
            _audit.warning("refused", extra={"action": path, "client": caller.name, "outcome": 403})
            raise ProblemError(Problem(403, "forbidden", "Forbidden", "this needs a key with the role admin"))
        return caller

    def _note(self, scope: Scope, caller: Caller | None, status: int, seconds: float) -> None:
        route = _route_of(scope)
        self._metrics.count_response(route, status, seconds)
        client = caller.name if caller is not None else "unknown"
        if scope["path"] in _ADMIN and caller is not None and caller.role is Role.ADMIN:
            _audit.info("admin call", extra={"action": scope["path"], "client": client, "outcome": status})
        if route in _QUIET and status < 400:
            return
        _log.info(
            "request",
            extra={
                "method": scope["method"],
                "route": route,
                "status": status,
                "ms": round(seconds * 1e3, 3),
                "client": client,
            },
        )


def _route_of(scope: Scope) -> str:
    """The template that was matched: no label may hold what a client made up."""
    route: str = getattr(scope.get("route"), "path", "unmatched")
    return route


async def send_problem(problem: Problem, request_id: str, send: Send) -> None:
    """A problem document as a whole answer."""
    body = problem.body(request_id)
    headers = [*problem.headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
