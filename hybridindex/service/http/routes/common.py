"""What all routes do alike: read a JSON object, answer with JSON, make problem documents of errors, be described."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from hybridindex.errors import HybridIndexError
from hybridindex.service.auth import Caller
from hybridindex.service.config import Limits
from hybridindex.service.http.bodies import CHARGE, media_type, parse_within, read_body
from hybridindex.service.http.middleware import CALLER
from hybridindex.service.http.problems import Problem, ProblemError, problem_of
from hybridindex.service.http.requests import Body
from hybridindex.service.http.searching import options_of
from hybridindex.service.http.wire import BodyError, short
from hybridindex.service.observe.logs import REQUEST_ID

__all__ = [
    "TEXT",
    "Handler",
    "Row",
    "add_routes",
    "caller_of",
    "json_answer",
    "operation_id",
    "problem_answer",
    "read_object",
]

Handler = Callable[[Request], Awaitable[Response]]
#: Method, path, handler, summary, what the document says besides, and answers.
Row = tuple[str, str, Handler, str, dict[str, Any], dict[int | str, dict[str, Any]]]
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "ok", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def add_routes(app: FastAPI, rows: Iterable[Row], *, shown: bool = True) -> None:
    for method, path, handler, summary, extra, responses in rows:
        app.add_api_route(
            path,
            _answering(handler),
            methods=[method],
            status_code=min(s for s in responses if isinstance(s, int)),
            summary=summary,
            operation_id=operation_id(method, path),
            response_class=Response,
            responses=responses,
            openapi_extra=extra or None,
            include_in_schema=shown,
        )


def _answering(handler: Handler) -> Handler:
    """Expected errors become problem documents; the middleware logs the others."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except (HybridIndexError, ProblemError) as error:
            problem = problem_of(error)
            if problem.status == 500:
                raise
            return problem_answer(problem)
        except ClientDisconnect:
            return Response(status_code=499)

    return run


async def read_object(request: Request, kind: Body, limits: Limits) -> dict[str, Any]:
    for name in options_of(request.scope):
        raise BodyError(short(name), "stands in the query string; options of this route belong in the body, as JSON")
    headers = dict(request.scope["headers"])
    charge = request.scope[CHARGE]
    body = await read_body(headers, request.receive, limits, charge)
    media = media_type(headers)
    # A form of another site cannot send JSON.
    if body and media != "application/json":
        raise BodyError("Content-Type", f"is {media[:60]!r}; expected application/json", 415)
    return await parse_within(charge, body, media, lambda: kind.parse(body))


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, {"cache-control": "no-store"}, "application/json")


def problem_answer(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    own = {name.decode(): value.decode() for name, value in problem.headers()}
    return Response(problem.body(REQUEST_ID.get()), problem.status, {**own, **(headers or {})})


def operation_id(method: str, path: str) -> str:
    return f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}"


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller
