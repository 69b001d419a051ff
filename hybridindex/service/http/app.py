"""The ASGI application: the routes of all indexes and of the daemon, the page, and what frames them.

``middleware.py`` has identity, logging and metrics; ``daemon.py`` the process; ``wire.py`` the formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from hybridindex import __version__
from hybridindex.errors import HybridIndexError, OverloadedError
from hybridindex.service.auth import Keyring
from hybridindex.service.core import Service
from hybridindex.service.http import openapi
from hybridindex.service.http.middleware import INDEXES, RequestMiddleware
from hybridindex.service.http.page.files import PAGE_FILES, PageFile
from hybridindex.service.http.problems import Problem
from hybridindex.service.http.routes.changing import Changing
from hybridindex.service.http.routes.common import Handler, problem_answer
from hybridindex.service.http.routes.of_cluster import ClusterRoutes
from hybridindex.service.http.routes.of_daemon import DaemonRoutes
from hybridindex.service.http.routes.of_documents import DocumentRoutes
from hybridindex.service.http.routes.of_index import IndexRoutes
from hybridindex.service.http.routes.of_rows import RowRoutes
from hybridindex.service.http.searching import SearchRoute
from hybridindex.service.http.store_calls import StoreCalls
from hybridindex.service.http.upkeep import keep_running
from hybridindex.service.observe.metrics import Metrics
from hybridindex.service.observe.series import Series
from hybridindex.service.several.indexes import Indexes
from hybridindex.service.status import StorageWatch

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

#: When to ask again for an index that could not be opened.
_UNAVAILABLE_S = 30.0
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


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
        IndexRoutes(
            prefix=prefix,
            shown=prefix == "/v1" or indexes.several,
            service=service,
            metrics=metrics[name],
            series=series,
            search=SearchRoute(service, metrics[name], prefix),
            calls=calls,
            rows=rows,
            documents=documents,
        )
        for name, service in indexes.services.items()
        for series in [Series(service, time.time)]
        for calls in [StoreCalls(service.clock, client_share=service.config.limits.client_share)]
        for changing in [Changing(service)]
        for rows in [RowRoutes(service, SearchRoute(service, metrics[name]), calls, changing)]
        for documents in [DocumentRoutes(service, calls, changing)]
        for prefix in (*(["/v1"] if service is indexes.first else []), f"{INDEXES}{name}")
    ]
    middleware = RequestMiddleware(
        indexes,
        next(iter(metrics.values())),
        keyring,
        [(group.search, group.service) for group in groups],
        _between_nodes(indexes.first, keyring, next(iter(metrics.values()))),
    )
    storage = {name: StorageWatch(service, service.clock) for name, service in indexes.services.items()}
    app = Application(
        middleware,
        {name: group for group in groups for name in indexes.services if indexes.services[name] is group.service},
        title="hybridindex",
        version=__version__,
        description="Search in a hybrid CPU+GPU IVF index. Errors are problem documents (RFC 9457).",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
        lifespan=lambda _app: _lifespan({group.service: group for group in groups}, middleware, storage.values()),
    )
    for group in groups:
        group.register(app)
        group.service.generations.on_generation.append(partial(group.redescribe, app))
        # FastAPI's routes describe every path, but take 0.2 ms per request: searches bypass them.
        in_session = _PlainRoute(f"{group.prefix}/sessions/{{session}}/search", group.search, methods=["POST"])
        app.router.routes.insert(0, in_session)
    DaemonRoutes(indexes, metrics, on_drain, keyring, storage).register(app)
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


def _between_nodes(first: Service | None, keyring: Keyring | None, metrics: Metrics) -> ClusterRoutes | None:
    """What other nodes of the first index's cluster ask; None: it is of none."""
    members = None if first is None else first.members
    return None if first is None or members is None else ClusterRoutes(first, members, keyring, metrics)


@contextlib.asynccontextmanager
async def _lifespan(
    served: Mapping[Service, IndexRoutes], middleware: RequestMiddleware, storage: Iterable[StorageWatch]
) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as running:
        running.callback(middleware.flush)
        for watch in storage:
            running.callback(watch.close)
        for service, routes in served.items():
            await running.enter_async_context(keep_running(service, routes.series, routes.calls))
        yield


class Application(FastAPI):
    """FastAPI's routes and document, with the middleware outermost."""

    def __init__(self, middleware: RequestMiddleware, routes: Mapping[str, IndexRoutes], **options: Any) -> None:
        super().__init__(**options)
        self._routes = routes
        self._middleware = middleware
        #: Indexes whose reload waits for another change.
        self._waiting: set[str] = set()
        self.turn_away = middleware.turn_away

    async def reload(self, reason: str) -> None:
        """Each index its own current generation, in the line of its changes, however long these take: nobody would ask
        again. A failure is logged."""
        await asyncio.gather(*(self._reload(name, routes, reason) for name, routes in self._routes.items()))

    async def _reload(self, name: str, routes: IndexRoutes, reason: str) -> None:
        try:
            while True:
                try:
                    await routes.calls.change("", routes.service.reload, reason)
                    return
                except OverloadedError as error:
                    if routes.service.admission.draining:
                        raise
                    if name in self._waiting:
                        return  # that one will meet what is there then
                    _log.info("%s: index %s waits: %s", reason, name, error)
                    self._waiting.add(name)
                    try:
                        await asyncio.sleep(error.retry_after_s)
                    finally:
                        self._waiting.discard(name)
        except HybridIndexError as error:
            _log.warning("%s: index %s: %s", reason, name, error)

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
    return problem_answer(problem, headers)


def _serving(file: PageFile) -> Handler:
    async def serve(request: Request) -> Response:
        if file.unchanged(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=file.headers())
        return Response(file.body, headers=file.headers(), media_type=file.media_type)

    return serve


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
        return problem_answer(
            Problem(503, "index-unavailable", "Index unavailable", detail, retry_after_s=_UNAVAILABLE_S)
        )

    return refuse
