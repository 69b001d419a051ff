"""The HTTP interface: routes, and how each turns a body into a call of the service and its result into an answer.

Identity, logging and metrics are around it in ``shell.py``; the process in ``run.py``; formats in ``wire.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from hybridindex import __version__
from hybridindex.answers import ANSWER_TYPE, encode_answer
from hybridindex.errors import HybridIndexError, MissingDependencyError, ProfileError
from hybridindex.service import openapi
from hybridindex.service.auth import Caller, Keyring
from hybridindex.service.core import Service
from hybridindex.service.logs import REQUEST_ID
from hybridindex.service.metrics import CONTENT_TYPE, Metrics
from hybridindex.service.problems import Problem, ProblemError, problem_of
from hybridindex.service.pruning import prune_now_and_then
from hybridindex.service.recent import RECENT_PATH, RecentQueries
from hybridindex.service.shell import CALLER, Shell
from hybridindex.service.status import describe, health_of
from hybridindex.service.wire import (
    BodyError,
    accepts_binary,
    parse_json_object,
    parse_lookahead,
    parse_search,
    to_json_answer,
)
from hybridindex.types import SearchResult

try:
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.routing import Match, Route
    from starlette.types import Scope
except ImportError as error:
    raise MissingDependencyError("the daemon needs FastAPI: pip install 'hybridindex[service]'") from error

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

#: Larger JSON is parsed and written on a thread.
_LARGE_BYTES = 1 << 20
_REPARTITION = {"apply", "slo_ms", "device_budget_bytes", "rate_qps", "coverage", "bandwidth_share"}
Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    service: Service, *, keyring: Keyring | None = None, on_drain: Callable[[], None] | None = None
) -> FastAPI:
    """The ASGI application of one service. It warms up in its lifespan, and closes nothing.

    Args:
        keyring: None: every caller is an admin. Only for loopback addresses and unix sockets.
        on_drain: what ``POST /v1/drain`` starts; None: only the service drains, the process goes on.
    """
    metrics = Metrics(service)
    app = FastAPI(
        title="hybridindex",
        version=__version__,
        description="Search in a hybrid CPU+GPU IVF index. Errors are problem documents (RFC 9457).",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
        lifespan=lambda _app: _lifespan(service),
    )
    routes = _Routes(service, metrics, on_drain, keyring)
    routes.register(app)
    # FastAPI's routes describe every path, and take 0.2 ms to serve one: searches go past them.
    search = _PlainRoute("/v1/search", _answering(routes.search), methods=["POST"])
    in_session = _PlainRoute("/v1/sessions/{session}/search", _answering(routes.search), methods=["POST"])
    app.router.routes.insert(0, in_session)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_middleware(Shell, service=service, metrics=metrics, keyring=keyring, shortcut=search)
    _describe_problems(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(10.0, service.config.limits.session_ttl_s / 4))
            await asyncio.to_thread(service.sessions.sweep)

    async def warm_up() -> None:
        try:
            await asyncio.to_thread(service.warm_up)
        except Exception:
            _log.exception("warming up failed: this daemon will not become ready")
            raise

    service.start()
    tasks = [asyncio.create_task(work) for work in (warm_up(), sweep(), prune_now_and_then(service))]
    try:
        yield
    finally:
        for endless in tasks[1:]:
            endless.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _PlainRoute(Route):
    """A route without FastAPI's dependencies; says which it is, as FastAPI's do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self} if match is not Match.NONE else child


async def _not_routed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    names = {404: ("not-found", "Not found"), 405: ("method", "Method not allowed")}
    name, title = names.get(error.status_code, ("http", "HTTP error"))
    problem = Problem(error.status_code, name, title, str(error.detail))
    return _problem(problem, dict(error.headers or {}))


def _problem(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    own = {name.decode(): value.decode() for name, value in problem.headers()}
    return Response(problem.body(REQUEST_ID.get()), problem.status, {**own, **(headers or {})})


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, {"cache-control": "no-store"}, "application/json")


def _answering(handler: Handler) -> Handler:
    """Deliberate errors become problem documents; others go on to the shell, which logs them."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except (HybridIndexError, ProblemError) as error:
            problem = problem_of(error)
            if problem.status == 500:
                raise
            return _problem(problem)
        except ClientDisconnect:
            return Response(status_code=499)

    return run


def _describe_problems(app: FastAPI) -> None:
    make = app.openapi

    def with_problems() -> dict[str, Any]:
        schema: dict[str, Any] = make()
        schema.setdefault("components", {}).setdefault("schemas", {})["Problem"] = openapi.PROBLEM_SCHEMA
        return schema

    app.openapi = with_problems  # type: ignore[method-assign]


class _Routes:
    def __init__(
        self, service: Service, metrics: Metrics, on_drain: Callable[[], None] | None, keyring: Keyring | None
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._on_drain = on_drain
        self._keyring = keyring

    def register(self, app: FastAPI) -> None:
        searching = openapi.problems(400, 401, 408, 413, 415, 429, 503, 504)
        sessions = openapi.problems(400, 401, 404, 413, 415, 429, 503)
        session = {"parameters": [{"name": "session", "in": "path", "required": True, "schema": {"type": "string"}}]}
        stored = {"parameters": [{"name": "plan", "in": "path", "required": True, "schema": {"type": "string"}}]}
        in_session = {**openapi.SEARCH, "parameters": [*session["parameters"], *openapi.SEARCH["parameters"]]}
        ahead = {**openapi.LOOKAHEAD, "parameters": [*session["parameters"], *openapi.LOOKAHEAD["parameters"]]}
        recent = RecentQueries(self._service, self._parsed)
        for method, path, handler, summary, extra, responses in (
            ("POST", "/v1/search", self.search, "Search", openapi.SEARCH, searching),
            ("POST", "/v1/sessions", self.open_session, "Open a session", openapi.SESSION, sessions),
            ("GET", "/v1/sessions/{session}", self.session_stats, "What lookahead did", session, sessions),
            ("POST", "/v1/sessions/{session}/lookahead", self.lookahead, "Move lists of drafts", ahead, sessions),
            ("POST", "/v1/sessions/{session}/search", self.search, "Search in it", in_session, searching),
            ("DELETE", "/v1/sessions/{session}", self.close_session, "Close it", session, sessions),
            ("GET", "/v1/status", self.status, "What is served", {}, openapi.problems(401)),
            ("GET", "/v1/plan", self.plan, "The plan in force", {}, openapi.problems(401)),
            ("GET", "/v1/plans", self.plans, "Stored and applied plans", {}, openapi.problems(401)),
            ("GET", "/v1/plans/{plan}", self.stored_plan, "A stored plan", stored, openapi.problems(400, 401, 404)),
            (
                "POST", "/v1/repartition", self.repartition, "Plan anew; admin", openapi.REPARTITION,
                openapi.problems(400, 401, 403, 409, 503, 507),
            ),
            (
                "POST", RECENT_PATH, recent.upload, "Give recent queries to the refresh; admin", openapi.RECENT,
                openapi.problems(400, 401, 403, 408, 409, 413, 415),
            ),
            ("POST", "/v1/drain", self.drain, "Finish and stop; admin", {}, openapi.problems(401, 403)),
            ("GET", "/metrics", self.metrics, "Prometheus metrics", {}, openapi.problems(401)),
            ("GET", "/livez", self.livez, "The process answers", {}, {}),
            ("GET", "/readyz", self.readyz, "Warmed up", {}, openapi.problems(503)),
            ("GET", "/healthz", self.healthz, "What needs attention", {}, openapi.problems(401)),
        ):  # fmt: skip
            app.add_api_route(
                path,
                _answering(handler),
                methods=[method],
                summary=summary,
                operation_id=f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
                response_class=Response,
                responses=responses,
                openapi_extra=extra or None,
            )

    # Bodies

    async def _body(self, request: Request) -> bytes:
        """The body, within its limits of size and time.

        Raises:
            BodyError: compressed, or too large. ProblemError: too slow.
        """
        limits = self._service.config.limits
        if "content-encoding" in request.headers:
            raise BodyError("Content-Encoding", "is not supported; send the body as it is", 415)
        length = request.headers.get("content-length")
        too_large = BodyError("body", f"is too large; expected at most {limits.max_body_bytes} bytes", 413)
        if length is not None and (not length.isdecimal() or int(length[:20]) > limits.max_body_bytes):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(limits.client_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > limits.max_body_bytes:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            detail = f"the body did not come within {limits.client_timeout_s:g} s"
            raise ProblemError(Problem(408, "timeout", "Request timeout", detail)) from None
        return b"".join(parts)

    async def _parsed(self, request: Request, parse: Callable[..., Any]) -> Any:
        body = await self._body(request)
        started = time.perf_counter()
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        index = self._service.index
        arguments = (body, kind, dict(request.query_params), self._service.config.limits, index.dim, index.nlist)
        # float32 bodies are only looked at here; JSON is work.
        if len(body) > _LARGE_BYTES and kind == "application/json":
            parsed = await asyncio.to_thread(parse, *arguments)
        else:
            parsed = parse(*arguments)
        self._metrics.time_stage("parse", time.perf_counter() - started)
        return parsed

    async def _object(self, request: Request, known: set[str]) -> dict[str, Any]:
        return parse_json_object(await self._body(request), known)

    # Searching

    async def search(self, request: Request) -> Response:
        asked = await self._parsed(request, parse_search)
        result = await self._service.search(asked, _caller(request).name, request.path_params.get("session"))
        started = time.perf_counter()
        answer = await _encode(result, accepts_binary(request.headers.get("accept", "")))
        self._metrics.time_stage("encode", time.perf_counter() - started)
        return answer

    async def open_session(self, request: Request) -> Response:
        options = await self._object(request, {"lookahead_bytes", "window_ms"})
        name = await asyncio.to_thread(self._service.open_session, _caller(request).name, **options)
        return _json({"session": name, "ttl_s": self._service.config.limits.session_ttl_s}, 201)

    async def session_stats(self, request: Request) -> Response:
        return _json(self._service.session_stats(request.path_params["session"], _caller(request).name))

    async def lookahead(self, request: Request) -> Response:
        asked = await self._parsed(request, parse_lookahead)
        await asyncio.to_thread(
            self._service.lookahead,
            request.path_params["session"],
            _caller(request).name,
            asked.queries,
            nprobe=asked.nprobe,
            budget_bytes=asked.budget_bytes,
        )
        return _json({"started": True}, 202)

    async def close_session(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.close_session, request.path_params["session"], _caller(request).name)
        return Response(status_code=204)

    # Plans and state

    async def status(self, _request: Request) -> Response:
        return _json(self._service.status())

    async def plan(self, _request: Request) -> Response:
        return _json(describe(await asyncio.to_thread(self._service.plan)))

    async def stored_plan(self, request: Request) -> Response:
        choice = request.path_params["plan"]
        try:
            found = await asyncio.to_thread(self._service.stored_plan, choice)
        except ProfileError:
            detail = f"there is no plan {choice} of this index; GET /v1/plans lists those there are"
            raise ProblemError(Problem(404, "unknown-plan", "Unknown plan", detail, "plan")) from None
        return _json(describe(found))

    async def plans(self, _request: Request) -> Response:
        return _json(await asyncio.to_thread(self._service.history))

    async def repartition(self, request: Request) -> Response:
        options = await self._object(request, _REPARTITION)
        apply = options.pop("apply", False)
        if not isinstance(apply, bool):
            raise BodyError("apply", f"is {apply!r}; expected true or false")
        for name in sorted(set(options) - {"device_budget_bytes"}):
            if isinstance(options[name], bool) or not isinstance(options[name], int | float):
                raise BodyError(name, f"is {str(options[name])[:60]!r}; expected a number")
        budget = options.get("device_budget_bytes")
        if isinstance(budget, list):
            options["device_budget_bytes"] = tuple(budget)
        elif budget is not None and not isinstance(budget, int):
            raise BodyError("device_budget_bytes", "is no number of bytes; expected an integer or a list of them")
        answer = await asyncio.to_thread(self._service.repartition, apply=apply, **options)
        return _json(describe(answer))

    async def drain(self, _request: Request) -> Response:
        if self._on_drain is not None:
            self._on_drain()
        else:
            self._service.admission.drain()
        return _json({"draining": True}, 202)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def livez(self, _request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, _request: Request) -> Response:
        if self._service.ready:
            return Response("ok\n", media_type="text/plain")
        return _problem(Problem(503, "not-ready", "Not ready", "warming up, or about to stop", retry_after_s=1))

    async def healthz(self, _request: Request) -> Response:
        ring = self._keyring
        problem = None if ring is None else ring.problem
        health = await asyncio.to_thread(health_of, self._service, problem, keys=ring is not None)
        return _json({"ok": health.ok, **describe(health)}, 200 if health.ok else 503)


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


async def _encode(result: SearchResult, binary: bool) -> Response:
    if binary:
        return Response(encode_answer(result), media_type=ANSWER_TYPE)
    if result.ids.nbytes > _LARGE_BYTES:
        text = await asyncio.to_thread(lambda: json.dumps(to_json_answer(result)))
    else:
        text = json.dumps(to_json_answer(result))
    return Response(text, media_type="application/json")
