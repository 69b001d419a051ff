"""Routes that mean one index."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

from hybridindex.errors import ProfileError, ProfileMismatchError
from hybridindex.plans.stored import plan_tradeoff
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.http import openapi
from hybridindex.service.http import openapi_answers as answers
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.recent import RECENT_PATH, RecentQueries
from hybridindex.service.http.requests import EVENTS, NOTHING, SERIES, Body
from hybridindex.service.http.routes.common import Row, add_routes, caller_of, json_answer, operation_id, read_object
from hybridindex.service.http.routes.of_documents import DocumentRoutes
from hybridindex.service.http.routes.of_rows import RowRoutes
from hybridindex.service.http.searching import SearchRoute, options_of
from hybridindex.service.http.store_calls import StoreCalls
from hybridindex.service.observe.events import read_events
from hybridindex.service.observe.metrics import Metrics
from hybridindex.service.observe.series import Series
from hybridindex.service.status import status_of

__all__ = ["IndexRoutes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRoutes:
    """Of one index, below one prefix."""

    #: Of their paths: "/v1", or with the index's name.
    prefix: str
    #: Whether they stand in the document.
    shown: bool
    service: Service
    metrics: Metrics
    series: Series
    search: SearchRoute
    calls: StoreCalls
    rows: RowRoutes
    documents: DocumentRoutes

    def _table(self) -> tuple[Row, ...]:
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
                "GET", "/plan/tradeoff", self.tradeoff, "Predicted latency and hit rate for other device bytes", {},
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
            *self.rows.table(),
            *self.documents.table(),
            (
                "POST", "/reload", self.reload, "Serve the current generation of the index; admin", {},
                {200: answers.RELOADED, **taken, **change},
            ),
        )  # fmt: skip

    def register(self, app: FastAPI) -> None:
        add_routes(app, self._rows(), shown=self.shown)

    def _rows(self) -> list[Row]:
        """With their whole paths."""
        return [(row[0], self.prefix + row[1], *row[2:]) for row in self._table()]

    def redescribe(self, app: FastAPI, _generation: int) -> None:
        """Limits of another generation come into the document."""
        extras = {operation_id(method, path): extra for method, path, _, _, extra, _ in self._rows()}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.operation_id in extras:
                route.openapi_extra = extras[route.operation_id] or None
        app.openapi_schema = None

    async def _object(self, request: Request, kind: Body) -> dict[str, Any]:
        return await read_object(request, kind, self.service.config.limits)

    # Sessions

    async def open_session(self, request: Request) -> Response:
        options = await self._object(request, self.search.requests.session)
        name = await asyncio.to_thread(self.service.open_session, caller_of(request).name, **options)
        return json_answer({"session": name, "ttl_s": self.service.config.limits.session_ttl_s}, 201)

    async def session_stats(self, request: Request) -> Response:
        return json_answer(self.service.session_stats(request.path_params["session"], caller_of(request).name))

    async def lookahead(self, request: Request) -> Response:
        scope = request.scope
        parse = self.search.requests.lookahead.read
        drafts, options = await self.search.read(scope, request.receive, dict(scope["headers"]), parse)
        session, client = request.path_params["session"], caller_of(request).name
        dropped = await asyncio.to_thread(self.service.lookahead, session, client, drafts, **options)
        return json_answer({"started": True, "dropped": dropped}, 202)

    async def close_session(self, request: Request) -> Response:
        await asyncio.to_thread(self.service.close_session, request.path_params["session"], caller_of(request).name)
        return Response(status_code=204)

    # Plans and state

    async def status(self, _request: Request) -> Response:
        return json_answer(status_of(self.service))

    async def plan(self, _request: Request) -> Response:
        return json_answer(describe(await asyncio.to_thread(self.service.plan)))

    async def stored_plan(self, request: Request) -> Response:
        choice = request.path_params["plan"]
        try:
            found = await self.calls.read(caller_of(request).name, self.service.stored_plan, choice)
        except ProfileError:
            raise _unknown_plan(choice) from None
        return json_answer(describe(found))

    async def plans(self, request: Request) -> Response:
        return json_answer(await self.calls.read(caller_of(request).name, self.service.history))

    async def tradeoff(self, _request: Request) -> Response:
        return json_answer(describe(await asyncio.to_thread(plan_tradeoff, self.service.router.plan)))

    async def read_series(self, request: Request) -> Response:
        since_s = SERIES.parse_query(options_of(request.scope)).get("since", 0.0)
        return Response(
            await asyncio.to_thread(lambda: json.dumps(self.series.read(since_s), allow_nan=False)),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )

    async def events(self, request: Request) -> Response:
        asked = {"since": 0, "limit": 100, **EVENTS.parse_query(options_of(request.scope))}
        return json_answer(await self.calls.read(caller_of(request).name, read_events, self.service, **asked))

    async def repartition(self, request: Request) -> Response:
        asked = {"apply": False, "force": False, **await self._object(request, self.search.requests.repartition)}
        answer = await self.calls.change(caller_of(request).name, self.service.repartition, **asked)
        return json_answer(describe(answer))

    async def apply_plan(self, request: Request) -> Response:
        asked = {"force": False, **await self._object(request, self.search.requests.apply)}
        dry_run = asked.pop("dry_run", False)
        choice = request.path_params["plan"]
        try:
            client = caller_of(request).name
            answer = await self.calls.change(client, self.service.apply_plan, choice, apply=not dry_run, **asked)
        except ProfileMismatchError:
            raise
        except ProfileError:
            raise _unknown_plan(choice) from None
        return json_answer(describe(answer))

    async def reload(self, request: Request) -> Response:
        await self._object(request, NOTHING)
        return json_answer(describe(await self.calls.change(caller_of(request).name, self.service.reload)))


def _unknown_plan(choice: str) -> ProblemError:
    detail = f"there is no plan {choice} of this index; GET /v1/plans lists those there are"
    return ProblemError(Problem(404, "unknown-plan", "Unknown plan", detail, "plan"))


async def _described(_request: Request) -> Response:
    """The search routes in the OpenAPI document; requests do not come here."""
    raise AssertionError("searches are answered in searching.py")
