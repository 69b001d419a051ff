"""``POST /v1/queries/recent``: gives the refresh queries that were served elsewhere or earlier.

They go into the refresher's sample of recent queries (:mod:`hybridindex.refresh.reservoir`), in memory alone: not into
drift windows, a log or the control store. A refresher that keeps no queries takes none.
"""

from __future__ import annotations

import asyncio
import json

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hybridindex.errors import ProfileError
from hybridindex.service.core import Service
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.searching import SearchRoute
from hybridindex.service.http.wire import BodyError

__all__ = ["RECENT_PATH", "RecentQueries"]

#: Below the prefix of the index.
RECENT_PATH = "/queries/recent"


class RecentQueries:
    """The route. On the event loop."""

    def __init__(self, service: Service, search: SearchRoute) -> None:
        """``search``: reads bodies."""
        self._service = service
        self._search = search

    async def upload(self, request: Request) -> Response:
        """Answers how many queries were offered and how many are kept now.

        Raises:
            ProblemError: 409, queries are not kept. BodyError: bad queries.
        """
        refresher = self._service.refresher
        if refresher is None:
            raise _not_kept("the daemon keeps no recent queries; start it with --refresh")
        scope = request.scope
        read = self._search.requests.lookahead.read
        queries, options = await self._search.read(scope, request.receive, dict(scope["headers"]), read)
        for name in options:
            raise BodyError(name, "is not known here; expected queries alone")
        if not np.isfinite(queries).all():
            raise BodyError("queries", "hold NaN or infinity; expected finite numbers")
        try:
            kept = await asyncio.to_thread(refresher.offer, queries)
        except ProfileError as error:
            raise _not_kept(str(error)) from error
        answer = json.dumps({"offered": len(queries), "kept": kept})
        return Response(answer, 200, {"cache-control": "no-store"}, "application/json")


def _not_kept(why: str) -> ProblemError:
    return ProblemError(Problem(409, "not-kept", "Queries are not kept", why))
