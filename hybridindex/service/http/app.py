"""The HTTP routes: each parses a request, calls the service and writes its result.

``middleware.py`` has identity, logging and metrics; ``daemon.py`` the process; ``wire.py`` the formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from hybridindex import __version__
from hybridindex.errors import HybridIndexError, OverloadedError, ProfileError, ProfileMismatchError, ReloadError
from hybridindex.plans.stored import plan_tradeoff
from hybridindex.service.auth import Caller, Keyring
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.http import openapi
from hybridindex.service.http import openapi_answers as answers
from hybridindex.service.http.bodies import media_type, read_body
from hybridindex.service.http.middleware import CALLER, RequestMiddleware
from hybridindex.service.http.page.files import PAGE_FILES, PageFile
from hybridindex.service.http.problems import Problem, ProblemError, problem_of
from hybridindex.service.http.recent import RECENT_PATH, RecentQueries
from hybridindex.service.http.requests import EVENTS, SERIES, Body
from hybridindex.service.http.searching import SearchRoute
from hybridindex.service.http.wire import BodyError
from hybridindex.service.observe.events import DeviceWatch, read_events
from hybridindex.service.observe.logs import REQUEST_ID
from hybridindex.service.observe.metrics import CONTENT_TYPE, Metrics
from hybridindex.service.observe.series import Series
from hybridindex.service.pruning import prune_now_and_then
from hybridindex.service.status import health_of, status_of

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

#: Time between two samples of the series.
_SAMPLE_S = 1.0
#: Time between two looks for another generation, where that is followed.
_FOLLOW_S = 1.0
Handler = Callable[[Request], Awaitable[Response]]
_Row = tuple[str, str, Handler, str, dict[str, Any], dict[int | str, dict[str, Any]]]


def create_app(
    service: Service, *, keyring: Keyring | None = None, on_drain: Callable[[], None] | None = None
) -> Application:
    """The ASGI application of one service. Its lifespan warms up; it closes nothing.

    Args:
        keyring: None: every caller is an admin. Only for loopback addresses and unix sockets.
        on_drain: called by ``POST /v1/drain``; None: the service drains, and the process goes on.
    """
    metrics = Metrics(service)
    series = Series(service, time.time)
    search = SearchRoute(service, metrics)
    middleware = RequestMiddleware(service, metrics, keyring, search)
    app = Application(
        middleware,
        title="hybridindex",
        version=__version__,
        description="Search in a hybrid CPU+GPU IVF index. Errors are problem documents (RFC 9457).",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
        lifespan=lambda _app: _lifespan(service, series, middleware),
    )
    routes = _Routes(service, metrics, series, search, on_drain, keyring)
    routes.register(app)
    service.generations.on_generation.append(lambda _number: routes.redescribe(app))
    for file in PAGE_FILES:
        app.router.routes.append(_PlainRoute(file.path, _serving(file), methods=["GET"]))
    # FastAPI's routes describe every path, but take 0.2 ms per request: searches bypass them.
    app.router.routes.insert(0, _PlainRoute("/v1/sessions/{session}/search", search, methods=["POST"]))
    app.add_exception_handler(HTTPException, _not_routed)
    # Below Starlette's own error page, which is no problem document, and above the routes.
    app.add_middleware(middleware.around)
    _describe_all(app, keys=keyring is not None)
    return app


@contextlib.asynccontextmanager
async def _lifespan(service: Service, series: Series, middleware: RequestMiddleware) -> AsyncIterator[None]:
    watch = DeviceWatch(service)

    async def sample() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            try:
                await asyncio.to_thread(series.sample)
                await asyncio.to_thread(watch.look)
            except Exception:  # noqa: BLE001 - one sample is missing; searches go on
                _log.exception("a sample could not be taken; the next one is tried")

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(10.0, service.config.limits.session_ttl_s / 4))
            try:
                await asyncio.to_thread(service.sessions.sweep)
                await asyncio.to_thread(service.generations.close_unused)
            except Exception:  # noqa: BLE001 - the next sweep must come
                _log.exception("sessions could not be swept; it is tried again")

    async def follow() -> None:
        while True:
            await asyncio.sleep(_FOLLOW_S)
            try:
                if await asyncio.to_thread(service.generations.changed):
                    await asyncio.to_thread(service.reload, "auto")
            except OverloadedError as error:
                _log.info("another generation is there, and waits: %s", error)
            except ReloadError:
                pass  # it is logged, counted and in the status
            except Exception:  # noqa: BLE001 - the next generation must be seen
                _log.exception("the index could not be looked at; it is tried again")

    async def warm_up() -> None:
        try:
            await asyncio.to_thread(service.warm_up)
        except Exception:
            _log.exception("warming up failed: this daemon will not become ready")
            raise

    service.start()
    endless = [sweep(), sample(), prune_now_and_then(service)]
    if service.config.reload == "auto":
        endless.append(follow())
    tasks = [asyncio.create_task(work) for work in (warm_up(), *endless)]
    try:
        yield
    finally:
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        middleware.flush()


class Application(FastAPI):
    """FastAPI's routes and document, with the middleware outermost."""

    def __init__(self, middleware: RequestMiddleware, **options: Any) -> None:
        super().__init__(**options)
        self._middleware = middleware
        self.turn_away = middleware.turn_away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self._middleware(scope, receive, send)


class _PlainRoute(Route):
    """A route without FastAPI's dependencies. Like FastAPI's, it puts itself into the scope."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self} if match is not Match.NONE else child


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # Starlette names the methods of the first route alone.
        path, routes = request.url.path, [r for r in request.app.router.routes if isinstance(r, Route)]
        allowed = {method for r in routes if r.path_regex.match(path) for method in r.methods or ()}
        headers["Allow"] = ", ".join(sorted(allowed))
    names = {404: ("not-found", "Not found"), 405: ("method", "Method not allowed")}
    name, title = names.get(error.status_code, ("http", "HTTP error"))
    problem = Problem(error.status_code, name, title, str(error.detail))
    return _problem(problem, headers)


def _problem(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    own = {name.decode(): value.decode() for name, value in problem.headers()}
    return Response(problem.body(REQUEST_ID.get()), problem.status, {**own, **(headers or {})})


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, {"cache-control": "no-store"}, "application/json")


def _answering(handler: Handler) -> Handler:
    """Expected errors become problem documents; the middleware logs the others."""

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


def _serving(file: PageFile) -> Handler:
    async def serve(request: Request) -> Response:
        if file.unchanged(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=file.headers())
        return Response(file.body, headers=file.headers(), media_type=file.media_type)

    return serve


def _unknown_plan(choice: str) -> ProblemError:
    detail = f"there is no plan {choice} of this index; GET /v1/plans lists those there are"
    return ProblemError(Problem(404, "unknown-plan", "Unknown plan", detail, "plan"))


def _describe_all(app: FastAPI, *, keys: bool) -> None:
    make = app.openapi

    def with_components() -> dict[str, Any]:
        schema: dict[str, Any] = make()
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = openapi.PROBLEM_SCHEMA
        if keys:
            components["securitySchemes"] = openapi.SECURITY
            schema["security"] = [{"key": []}]
        return schema

    app.openapi = with_components  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Routes:
    _service: Service
    _metrics: Metrics
    _series: Series
    _search: SearchRoute
    _on_drain: Callable[[], None] | None
    _keyring: Keyring | None

    def _table(self) -> tuple[_Row, ...]:
        """Method, path, handler, summary, what the document says besides, and answers."""
        bodies, taken = self._search.requests, openapi.problems(400, 401, 408, 413, 415, 503)
        unknown, read = openapi.problems(404), openapi.problems(401)
        searching: dict[int | str, dict[str, Any]] = {200: answers.SEARCHED, **taken, **openapi.problems(429, 504)}
        change = openapi.problems(403, 409)
        text: dict[int | str, dict[str, Any]] = {
            200: {"description": "ok", "content": {"text/plain": {"schema": {"type": "string"}}}}
        }
        session = {"parameters": openapi.SESSION_PATH}
        in_session, ahead = (
            {**body.document, "parameters": [*openapi.SESSION_PATH, *body.parameters]}
            for body in (bodies.search, bodies.lookahead)
        )
        recent = RecentQueries(self._service, self._search)
        gone = {204: {"description": "It is over"}, **read, **unknown}
        return (
            ("POST", "/v1/search", _described, "Search", bodies.search.document, searching),
            (
                "POST", "/v1/sessions", self.open_session, "Open a session", bodies.session.document,
                {201: answers.SESSION_OPENED, **taken, **openapi.problems(409)},
            ),
            (
                "GET", "/v1/sessions/{session}", self.session_stats, "What lookahead did", session,
                {200: answers.SESSION_STATS, **read, **unknown},
            ),
            (
                "POST", "/v1/sessions/{session}/lookahead", self.lookahead, "Move lists of drafts", ahead,
                {202: answers.STARTED, **taken, **unknown, **openapi.problems(409)},
            ),
            (
                "POST", "/v1/sessions/{session}/search", _described, "Search in it", in_session,
                {**searching, **unknown},
            ),
            ("DELETE", "/v1/sessions/{session}", self.close_session, "Close it", session, gone),
            ("GET", "/v1/status", self.status, "What is served", {}, {200: answers.STATUS, **read}),
            ("GET", "/v1/plan", self.plan, "The plan in force", {}, {200: answers.PLAN, **read}),
            ("GET", "/v1/plans", self.plans, "Stored and applied plans", {}, {200: answers.PLANS, **read}),
            (
                "GET", "/v1/plans/{plan}", self.stored_plan, "A stored plan", {"parameters": openapi.PLAN_PATH},
                {200: answers.STORED_PLAN, **read, **openapi.problems(400, 404)},
            ),
            (
                "GET", "/v1/plan/tradeoff", self.tradeoff, "What other device bytes would bring", {},
                {200: answers.TRADEOFF, **read},
            ),
            (
                "GET", "/v1/series", self.series, "The last hour", SERIES.document,
                {200: answers.SERIES, **read, **openapi.problems(400)},
            ),
            (
                "GET", "/v1/events", self.events, "What happened", EVENTS.document,
                {200: answers.EVENTS, **read, **openapi.problems(400)},
            ),
            (
                "POST", "/v1/repartition", self.repartition, "Plan anew; admin", bodies.repartition.document,
                {200: answers.REPARTITIONED, **taken, **change, **openapi.problems(507)},
            ),
            (
                "POST", "/v1/plans/{plan}/apply", self.apply_plan, "Make a stored plan the one that serves; admin",
                {**bodies.apply.document, "parameters": openapi.PLAN_PATH},
                {200: answers.REPARTITIONED, **taken, **change, **openapi.problems(404, 507)},
            ),
            (
                "POST", RECENT_PATH, recent.upload, "Give recent queries to the refresh; admin", bodies.recent.document,
                {200: answers.RECENT, **taken, **change},
            ),
            (
                "POST", "/v1/reload", self.reload, "Serve the current generation of the index; admin", {},
                {200: answers.RELOADED, **taken, **change},
            ),
            (
                "POST", "/v1/drain", self.drain, "Finish and stop; admin", {},
                {202: answers.DRAINING, **taken, **openapi.problems(403)},
            ),
            ("GET", "/metrics", self.metrics, "Prometheus metrics", {}, {**text, **read}),
            ("GET", "/livez", self.livez, "The process answers", {"security": []}, text),
            ("GET", "/readyz", self.readyz, "Warmed up", {"security": []}, {**text, **openapi.problems(503)}),
            (
                "GET", "/healthz", self.healthz, "What needs attention", {},
                {200: answers.HEALTH, 503: answers.HEALTH, **read},
            ),
        )  # fmt: skip

    def register(self, app: FastAPI) -> None:
        for method, path, handler, summary, extra, responses in self._table():
            app.add_api_route(
                path,
                _answering(handler),
                methods=[method],
                status_code=min(s for s in responses if isinstance(s, int)),
                summary=summary,
                operation_id=_operation(method, path),
                response_class=Response,
                responses=responses,
                openapi_extra=extra or None,
            )

    def redescribe(self, app: FastAPI) -> None:
        """Limits of another generation come into the document."""
        extras = {_operation(method, path): extra for method, path, _, _, extra, _ in self._table()}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.operation_id in extras:
                route.openapi_extra = extras[route.operation_id] or None
        app.openapi_schema = None

    async def _object(self, request: Request, kind: Body) -> dict[str, Any]:
        headers = dict(request.scope["headers"])
        body, media = await read_body(headers, request.receive, self._service.config.limits), media_type(headers)
        # A form of another site cannot send JSON.
        if body and media != "application/json":
            raise BodyError("Content-Type", f"is {media[:60]!r}; expected application/json", 415)
        return kind.parse(body)

    # Sessions

    async def open_session(self, request: Request) -> Response:
        options = await self._object(request, self._search.requests.session)
        name = await asyncio.to_thread(self._service.open_session, _caller(request).name, **options)
        return _json({"session": name, "ttl_s": self._service.config.limits.session_ttl_s}, 201)

    async def session_stats(self, request: Request) -> Response:
        return _json(self._service.session_stats(request.path_params["session"], _caller(request).name))

    async def lookahead(self, request: Request) -> Response:
        scope = request.scope
        parse = self._search.requests.lookahead.read
        drafts, options = await self._search.read(scope, request.receive, dict(scope["headers"]), parse)
        session, client = request.path_params["session"], _caller(request).name
        await asyncio.to_thread(self._service.lookahead, session, client, drafts, **options)
        return _json({"started": True}, 202)

    async def close_session(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.close_session, request.path_params["session"], _caller(request).name)
        return Response(status_code=204)

    # Plans and state

    async def status(self, _request: Request) -> Response:
        return _json(status_of(self._service))

    async def plan(self, _request: Request) -> Response:
        return _json(describe(await asyncio.to_thread(self._service.plan)))

    async def stored_plan(self, request: Request) -> Response:
        choice = request.path_params["plan"]
        try:
            found = await asyncio.to_thread(self._service.stored_plan, choice)
        except ProfileError:
            raise _unknown_plan(choice) from None
        return _json(describe(found))

    async def plans(self, _request: Request) -> Response:
        return _json(await asyncio.to_thread(self._service.history))

    async def tradeoff(self, _request: Request) -> Response:
        return _json(describe(await asyncio.to_thread(plan_tradeoff, self._service.router.plan)))

    async def series(self, request: Request) -> Response:
        since_s = SERIES.parse_query(request.query_params).get("since", 0.0)
        return Response(
            await asyncio.to_thread(lambda: json.dumps(self._series.read(since_s), allow_nan=False)),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )

    async def events(self, request: Request) -> Response:
        asked = {"since": 0, "limit": 100, **EVENTS.parse_query(request.query_params)}
        return _json(await asyncio.to_thread(read_events, self._service, **asked))

    async def repartition(self, request: Request) -> Response:
        asked = {"apply": False, "force": False, **await self._object(request, self._search.requests.repartition)}
        answer = await asyncio.to_thread(self._service.repartition, **asked)
        return _json(describe(answer))

    async def apply_plan(self, request: Request) -> Response:
        asked = {"force": False, **await self._object(request, self._search.requests.apply)}
        dry_run = asked.pop("dry_run", False)
        choice = request.path_params["plan"]
        try:
            answer = await asyncio.to_thread(self._service.apply_plan, choice, apply=not dry_run, **asked)
        except ProfileMismatchError:
            raise
        except ProfileError:
            raise _unknown_plan(choice) from None
        return _json(describe(answer))

    async def reload(self, request: Request) -> Response:
        await self._object(request, self._search.requests.nothing)
        return _json(describe(await asyncio.to_thread(self._service.reload)))

    async def drain(self, request: Request) -> Response:
        await self._object(request, self._search.requests.nothing)
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


async def _described(_request: Request) -> Response:
    """The search routes in the OpenAPI document; requests do not come here."""
    raise AssertionError("searches are answered in searching.py")


def _operation(method: str, path: str) -> str:
    return f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}"


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller
