"""Queries that were asked elsewhere or earlier, given to the refresh to plan from.

They go into the refresher's sample of recent queries, in memory alone, and nowhere else: not into windows of the load,
a log or the control store. Where queries are not kept, none is taken. The sample itself is in
:mod:`hybridindex.refresh.reservoir`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from hybridindex.errors import MissingDependencyError, ProfileError
from hybridindex.service.core import Service
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.wire import BodyError, LookaheadRequest, parse_lookahead

try:
    from starlette.requests import Request
    from starlette.responses import Response
except ImportError as error:
    raise MissingDependencyError("the daemon needs FastAPI: pip install 'hybridindex[service]'") from error

__all__ = ["RECENT_PATH", "RecentQueries"]

RECENT_PATH = "/v1/queries/recent"


class RecentQueries:
    """The route. On the event loop."""

    def __init__(self, service: Service, parsed: Callable[[Request, Callable[..., Any]], Awaitable[Any]]) -> None:
        """``parsed``: reads a request's body, within its limits, and hands it to a parser of ``wire.py``."""
        self._service = service
        self._parsed = parsed

    async def upload(self, request: Request) -> Response:
        """Answers how many were offered and how many are kept now.

        Raises:
            ProblemError: 409, queries are not kept. BodyError: they cannot be used.
        """
        refresher = self._service.refresher
        if refresher is None:
            raise _not_kept("the daemon follows no load; start it with --refresh")
        asked: LookaheadRequest = await self._parsed(request, parse_lookahead)
        for name in ("nprobe", "budget_bytes"):
            if getattr(asked, name) is not None:
                raise BodyError(name, "is not known here; expected queries alone")
        if not np.isfinite(asked.queries).all():
            raise BodyError("queries", "hold NaN or infinity; expected finite numbers")
        try:
            kept = await asyncio.to_thread(refresher.offer, asked.queries)
        except ProfileError as error:
            raise _not_kept(str(error)) from error
        answer = json.dumps({"offered": len(asked.queries), "kept": kept})
        return Response(answer, 200, {"cache-control": "no-store"}, "application/json")


def _not_kept(why: str) -> ProblemError:
    return ProblemError(Problem(409, "not-kept", "Queries are not kept", why))
