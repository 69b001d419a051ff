"""The HTTP routes: each parses a request, calls the service and writes its result.

``middleware.py`` has identity, logging and metrics; ``daemon.py`` the process; ``wire.py`` the formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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
from hybridindex.service.config import Limits
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.http import openapi
from hybridindex.service.http import openapi_answers as answers
from hybridindex.service.http.bodies import media_type, read_body
from hybridindex.service.http.middleware import CALLER, INDEXES, RequestMiddleware
from hybridindex.service.http.page.files import PAGE_FILES, PageFile
from hybridindex.service.http.problems import Problem, ProblemError, problem_of
from hybridindex.service.http.recent import RECENT_PATH, RecentQueries
from hybridindex.service.http.requests import EVENTS, NOTHING, SERIES, Body
from hybridindex.service.http.searching import SearchRoute
from hybridindex.service.http.wire import BodyError
from hybridindex.service.observe.events import DeviceWatch, read_events
from hybridindex.service.observe.logs import REQUEST_ID
from hybridindex.service.observe.metrics import CONTENT_TYPE, Metrics, render
from hybridindex.service.observe.series import Series
from hybridindex.service.pruning import prune_now_and_then
from hybridindex.service.several.indexes import Indexes
from hybridindex.service.status import status_of

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

#: Time between two samples of the series.
_SAMPLE_S = 1.0
#: When to ask again for an index that could not be opened.
_UNAVAILABLE_S = 30.0
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
#: Time between two looks for another generation, where that is followed.
_FOLLOW_S = 1.0
Handler = Callable[[Request], Awaitable[Response]]
_Row = tuple[str, str, Handler, str, dict[str, Any], dict[int | str, dict[str, Any]]]


def create_app(
    served: Service | Indexes, *, keyring: Keyring | None = None, on_drain: Callable[[], None] | None = None
) -> Application:
    """The ASGI application of one service, or of several indexes. Its lifespan warms up; it closes nothing.

    Args:
        served: routes without an index's name mean the first.
        keyring: None: every caller is an admin. Only for loopback addresses and unix sockets.
        on_drain: called by ``POST /v1/drain``; None: the service drains, and the process goes on.
    """
    indexes = Indexes.of(served)
    metrics = {name: Metrics(service) for name, service in indexes.services.items()}
    # FastAPI's routes of a single index would stand in the document twice.
    groups = [
        _IndexRoutes(
            prefix=prefix,
            shown=prefix == "/v1" or indexes.several,
            service=service,
            metrics=metrics[name],
            series=series,
            search=SearchRoute(service, metrics[name], prefix),
        )
        for name, service in indexes.services.items()
        for series in [Series(service, time.time)]
        for prefix in (*(["/v1"] if service is indexes.first else []), f"{INDEXES}{name}")
    ]
    middleware = RequestMiddleware(
        indexes, next(iter(metrics.values())), keyring, [(group.search, group.service) for group in groups]
    )
    app = Application(
        middleware,
        title="hybridindex",
        version=__version__,
        description="Search in a hybrid CPU+GPU IVF index. Errors are problem documents (RFC 9457).",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
        lifespan=lambda _app: _lifespan({group.service: group.series for group in groups}, middleware),
    )
    for group in groups:
        group.register(app)
        group.service.generations.on_generation.append(partial(group.redescribe, app))
        # FastAPI's routes describe every path, but take 0.2 ms per request: searches bypass them.
        in_session = _PlainRoute(f"{group.prefix}/sessions/{{session}}/search", group.search, methods=["POST"])
        app.router.routes.insert(0, in_session)
    _DaemonRoutes(indexes, metrics, on_drain, keyring).register(app)
    for file in PAGE_FILES:
        app.router.routes.append(_PlainRoute(file.path, _serving(file), methods=["GET"]))
    for name, why in indexes.problems.items():
        for prefix in (f"{INDEXES}{name}", *(["/v1"] if name == indexes.names[0] else [])):
            path = f"{prefix}/{{rest:path}}"
            app.router.routes.append(_PlainRoute(path, _unavailable(name, why), methods=[*_METHODS]))
    app.add_exception_handler(HTTPException, _not_routed)
    # Below Starlette's own error page, which is no problem document, and above the routes.
    app.add_middleware(middleware.around)
    _describe_all(app, keys=keyring is not None)
    return app


@contextlib.asynccontextmanager
async def _lifespan(served: Mapping[Service, Series], middleware: RequestMiddleware) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as running:
        running.callback(middleware.flush)
        for service, series in served.items():
            await running.enter_async_context(_running(service, series))
        yield


@contextlib.asynccontextmanager
async def _running(service: Service, series: Series) -> AsyncIterator[None]:
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


def _unavailable(name: str, why: str) -> Handler:
    """Of each route of an index that could not be opened."""

    async def refuse(_request: Request) -> Response:
        detail = f"index {name} could not be opened: {why}"
        return _problem(Problem(503, "index-unavailable", "Index unavailable", detail, retry_after_s=_UNAVAILABLE_S))

    return refuse


def _add(app: FastAPI, rows: Iterable[_Row], *, shown: bool = True) -> None:
    for method, path, handler, summary, extra, responses in rows:
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
            include_in_schema=shown,
        )


_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "ok", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@dataclass(frozen=True, slots=True)
class _DaemonRoutes:
    """Routes that mean all indexes."""

    _indexes: Indexes
    _metrics: Mapping[str, Metrics]
    _on_drain: Callable[[], None] | None
    _keyring: Keyring | None

    def register(self, app: FastAPI) -> None:
        read = openapi.problems(401)
        taken = openapi.problems(400, 401, 403, 408, 413, 415, 503)
        rows: tuple[_Row, ...] = (
            ("GET", "/v1/indexes", self.indexes, "Which indexes are served", {}, {200: answers.INDEXES, **read}),
            ("POST", "/v1/drain", self.drain, "Finish and stop; admin", {}, {202: answers.DRAINING, **taken}),
            ("GET", "/metrics", self.metrics, "Prometheus metrics", {}, {**_TEXT, **read}),
            ("GET", "/livez", self.livez, "The process answers", {"security": []}, _TEXT),
            ("GET", "/readyz", self.readyz, "Warmed up", {"security": []}, {**_TEXT, **openapi.problems(503)}),
            (
                "GET", "/healthz", self.healthz, "What needs attention", {},
                {200: answers.HEALTH, 503: answers.HEALTH, **read},
            ),
        )  # fmt: skip
        _add(app, rows)

    async def indexes(self, _request: Request) -> Response:
        return _json(await asyncio.to_thread(self._indexes.listing))

    async def drain(self, request: Request) -> Response:
        await _object(request, NOTHING, self._indexes.config.limits)
        if self._on_drain is not None:
            self._on_drain()
        else:
            self._indexes.drain()
        return _json({"draining": True}, 202)

    async def metrics(self, _request: Request) -> Response:
        return Response(render(self._metrics), media_type=CONTENT_TYPE)

    async def livez(self, _request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, _request: Request) -> Response:
        if self._indexes.ready:
            return Response("ok\n", media_type="text/plain")
        return _problem(Problem(503, "not-ready", "Not ready", "warming up, or about to stop", retry_after_s=1))

    async def healthz(self, _request: Request) -> Response:
        ring = self._keyring
        problem = None if ring is None else ring.problem
        health = await asyncio.to_thread(self._indexes.health, problem, keys=ring is not None)
        return _json({"ok": health.ok, **describe(health)}, 200 if health.ok else 503)


async def _object(request: Request, kind: Body, limits: Limits) -> dict[str, Any]:
    headers = dict(request.scope["headers"])
    body, media = await read_body(headers, request.receive, limits), media_type(headers)
    # A form of another site cannot send JSON.
    if body and media != "application/json":
        raise BodyError("Content-Type", f"is {media[:60]!r}; expected application/json", 415)
    return kind.parse(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexRoutes:
    """Routes that mean one index."""

    #: Of their paths: "/v1", or with the index's name.
    prefix: str
    #: Whether they stand in the document.
    shown: bool
    service: Service
    metrics: Metrics
    series: Series
    search: SearchRoute

    def _table(self) -> tuple[_Row, ...]:
        """Method, path below the prefix, handler, summary, what the document says besides, and answers."""
        bodies, taken = self.search.requests, openapi.problems(400, 401, 408, 413, 415, 503)
        unknown, read = openapi.problems(404), openapi.problems(401)
        searching: dict[int | str, dict[str, Any]] = {200: answers.SEARCHED, **taken, **openapi.problems(429, 504)}
        change = openapi.problems(403, 409)
        session = {"parameters": openapi.SESSION_PATH}
        in_session, ahead = (
            {**body.document, "parameters": [*openapi.SESSION_PATH, *body.parameters]}
            for body in (bodies.search, bodies.lookahead)
        )
        recent = RecentQueries(self.service, self.search)
        gone = {204: {"description": "It is over"}, **read, **unknown}
        return (
            ("POST", "/search", _described, "Search", bodies.search.document, searching),
            (
                "POST", "/sessions", self.open_session, "Open a session", bodies.session.document,
                {201: answers.SESSION_OPENED, **taken, **openapi.problems(409)},
            ),
            (
                "GET", "/sessions/{session}", self.session_stats, "What lookahead did", session,
                {200: answers.SESSION_STATS, **read, **unknown},
            ),
            (
                "POST", "/sessions/{session}/lookahead", self.lookahead, "Move lists of drafts", ahead,
                {202: answers.STARTED, **taken, **unknown, **openapi.problems(409)},
            ),
            (
                "POST", "/sessions/{session}/search", _described, "Search in it", in_session,
                {**searching, **unknown},
            ),
            ("DELETE", "/sessions/{session}", self.close_session, "Close it", session, gone),
            ("GET", "/status", self.status, "What is served", {}, {200: answers.STATUS, **read}),
            ("GET", "/plan", self.plan, "The plan in force", {}, {200: answers.PLAN, **read}),
            ("GET", "/plans", self.plans, "Stored and applied plans", {}, {200: answers.PLANS, **read}),
            (
                "GET", "/plans/{plan}", self.stored_plan, "A stored plan", {"parameters": openapi.PLAN_PATH},
                {200: answers.STORED_PLAN, **read, **openapi.problems(400, 404)},
            ),
            (
                "GET", "/plan/tradeoff", self.tradeoff, "What other device bytes would bring", {},
                {200: answers.TRADEOFF, **read},
            ),
            (
                "GET", "/series", self.read_series, "The last hour", SERIES.document,
                {200: answers.SERIES, **read, **openapi.problems(400)},
            ),
            (
                "GET", "/events", self.events, "What happened", EVENTS.document,
                {200: answers.EVENTS, **read, **openapi.problems(400)},
            ),
            (
                "POST", "/repartition", self.repartition, "Plan anew; admin", bodies.repartition.document,
                {200: answers.REPARTITIONED, **taken, **change, **openapi.problems(507)},
            ),
            (
                "POST", "/plans/{plan}/apply", self.apply_plan, "Make a stored plan the one that serves; admin",
                {**bodies.apply.document, "parameters": openapi.PLAN_PATH},
                {200: answers.REPARTITIONED, **taken, **change, **openapi.problems(404, 507)},
            ),
            (
                "POST", RECENT_PATH, recent.upload, "Give recent queries to the refresh; admin", bodies.recent.document,
                {200: answers.RECENT, **taken, **change},
            ),
            (
                "POST", "/reload", self.reload, "Serve the current generation of the index; admin", {},
                {200: answers.RELOADED, **taken, **change},
            ),
        )  # fmt: skip

    def register(self, app: FastAPI) -> None:
        _add(app, self._rows(), shown=self.shown)

    def _rows(self) -> list[_Row]:
        """With their whole paths."""
        return [(row[0], self.prefix + row[1], *row[2:]) for row in self._table()]

    def redescribe(self, app: FastAPI, _generation: int) -> None:
        """Limits of another generation come into the document."""
        extras = {_operation(method, path): extra for method, path, _, _, extra, _ in self._rows()}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.operation_id in extras:
                route.openapi_extra = extras[route.operation_id] or None
        app.openapi_schema = None

    async def _object(self, request: Request, kind: Body) -> dict[str, Any]:
        return await _object(request, kind, self.service.config.limits)

    # Sessions

    async def open_session(self, request: Request) -> Response:
        options = await self._object(request, self.search.requests.session)
        name = await asyncio.to_thread(self.service.open_session, _caller(request).name, **options)
        return _json({"session": name, "ttl_s": self.service.config.limits.session_ttl_s}, 201)

    async def session_stats(self, request: Request) -> Response:
        return _json(self.service.session_stats(request.path_params["session"], _caller(request).name))

    async def lookahead(self, request: Request) -> Response:
        scope = request.scope
        parse = self.search.requests.lookahead.read
        drafts, options = await self.search.read(scope, request.receive, dict(scope["headers"]), parse)
        session, client = request.path_params["session"], _caller(request).name
        await asyncio.to_thread(self.service.lookahead, session, client, drafts, **options)
        return _json({"started": True}, 202)

    async def close_session(self, request: Request) -> Response:
        await asyncio.to_thread(self.service.close_session, request.path_params["session"], _caller(request).name)
        return Response(status_code=204)

    # Plans and state

    async def status(self, _request: Request) -> Response:
        return _json(status_of(self.service))

    async def plan(self, _request: Request) -> Response:
        return _json(describe(await asyncio.to_thread(self.service.plan)))

    async def stored_plan(self, request: Request) -> Response:
        choice = request.path_params["plan"]
        try:
            found = await asyncio.to_thread(self.service.stored_plan, choice)
        except ProfileError:
            raise _unknown_plan(choice) from None
        return _json(describe(found))

    async def plans(self, _request: Request) -> Response:
        return _json(await asyncio.to_thread(self.service.history))

    async def tradeoff(self, _request: Request) -> Response:
        return _json(describe(await asyncio.to_thread(plan_tradeoff, self.service.router.plan)))

    async def read_series(self, request: Request) -> Response:
        since_s = SERIES.parse_query(request.query_params).get("since", 0.0)
        return Response(
            await asyncio.to_thread(lambda: json.dumps(self.series.read(since_s), allow_nan=False)),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )

    async def events(self, request: Request) -> Response:
        asked = {"since": 0, "limit": 100, **EVENTS.parse_query(request.query_params)}
        return _json(await asyncio.to_thread(read_events, self.service, **asked))

    async def repartition(self, request: Request) -> Response:
        asked = {"apply": False, "force": False, **await self._object(request, self.search.requests.repartition)}
        answer = await asyncio.to_thread(self.service.repartition, **asked)
        return _json(describe(answer))

    async def apply_plan(self, request: Request) -> Response:
        asked = {"force": False, **await self._object(request, self.search.requests.apply)}
        dry_run = asked.pop("dry_run", False)
        choice = request.path_params["plan"]
        try:
            answer = await asyncio.to_thread(self.service.apply_plan, choice, apply=not dry_run, **asked)
        except ProfileMismatchError:
            raise
        except ProfileError:
            raise _unknown_plan(choice) from None
        return _json(describe(answer))

    async def reload(self, request: Request) -> Response:
        await self._object(request, NOTHING)
        return _json(describe(await asyncio.to_thread(self.service.reload)))


async def _described(_request: Request) -> Response:
    """The search routes in the OpenAPI document; requests do not come here."""
    raise AssertionError("searches are answered in searching.py")


def _operation(method: str, path: str) -> str:
    return f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}"


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller
