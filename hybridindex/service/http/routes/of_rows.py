"""Routes that change the rows of one index: add, replace, delete, compact."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from typing import Any

from fastapi import Request, Response

from hybridindex.errors import HybridIndexError, OverloadedError, ReloadError
from hybridindex.service.core import Service
from hybridindex.service.http import openapi
from hybridindex.service.http import openapi_answers as answers
from hybridindex.service.http.bodies import CHARGE, LARGE_JSON, hold
from hybridindex.service.http.requests import Body
from hybridindex.service.http.routes.changing import KEY_PARAMETER, Changing
from hybridindex.service.http.routes.common import Row, caller_of, json_answer, read_object
from hybridindex.service.http.routes.row_bodies import COMPACT, RowsBody
from hybridindex.service.http.searching import SearchRoute, options_of
from hybridindex.service.http.store_calls import StoreCalls
from hybridindex.service.http.wire import parsed_bytes

__all__ = ["RowRoutes"]

_log = logging.getLogger(__name__)

#: Copies of the vectors while they are encoded.
_COPIES = 4
#: A compaction that cannot begin is known so soon.
_BEGINS_S = 0.2
#: For one that another node of the cluster makes.
_FORWARDED_S = 3600.0


class RowRoutes:
    """Of one service, below all its prefixes."""

    def __init__(self, service: Service, search: SearchRoute, calls: StoreCalls, changing: Changing) -> None:
        self._service = service
        self._changing = changing
        self._search = search
        self._calls = calls
        #: All generations of an index have the same dimension.
        self._body = RowsBody(service.config.limits, service.index.dim)
        self._compacting: asyncio.Task[dict[str, Any]] | None = None

    def table(self) -> tuple[Row, ...]:
        """As that of :class:`hybridindex.service.http.routes.of_index.IndexRoutes`."""
        taken = openapi.problems(400, 401, 403, 408, 409, 413, 415, 422, 429, 502, 503, 507)
        delete = {**self._search.requests.delete.document, "parameters": KEY_PARAMETER}
        return (
            (
                "POST", "/vectors", self.add, "Add or replace rows; write", self._body.document,
                {200: answers.ADDED, **taken},
            ),
            (
                "POST", "/vectors/delete", self.delete, "Delete rows; write", delete,
                {200: answers.DELETED, **taken},
            ),
            (
                "POST", "/compact", self.compact, "Rewrite the lists with all changes; admin", COMPACT.document,
                {200: answers.COMPACTED, 202: answers.COMPACTING, **taken},
            ),
        )  # fmt: skip

    async def add(self, request: Request) -> Response:
        body, media = await self._changing.body_of(request)
        options, charge = options_of(request.scope), request.scope[CHARGE]

        def parse() -> Any:
            return self._body.read(body, media, options)

        if len(body) <= LARGE_JSON:
            asked, values = parse(), 0
        else:
            values = parsed_bytes(self._body.json_of(body, media))
            hold(charge, 2 * len(body) + values)
            asked = await asyncio.to_thread(parse)
        # Attributes stay values until the rows are written.
        values = 0 if asked.attributes is None else values
        hold(charge, 2 * len(body) + values + _COPIES * asked.vectors.nbytes)
        rows = self._service.rows
        change = rows.upsert if asked.replace else rows.add

        def run(client: str) -> Awaitable[dict[str, Any]]:
            # No change of the plan is waited for.
            return self._calls.write(client, change, asked.vectors, asked.ids, asked.attributes)

        return await self._changing.once("add", request, body, run)

    async def delete(self, request: Request) -> Response:
        kind: Body = self._search.requests.delete
        body, asked = await self._changing.object_of(request, kind)

        def run(client: str) -> Awaitable[dict[str, Any]]:
            return self._calls.write(client, self._service.rows.delete, **asked)

        return await self._changing.once("delete", request, body, run)

    async def compact(self, request: Request) -> Response:
        asked = await read_object(request, COMPACT, self._service.config.limits)
        self._changing.refuse_at_the_end()
        body = json.dumps(asked).encode()
        if (said := await self._changing.elsewhere(request, body, _FORWARDED_S)) is not None:
            answer = json.loads(said)
            return json_answer(answer, 202 if "started" in answer else 200)
        task = self._compacting
        if task is None or task.done():
            self._compacting = task = asyncio.ensure_future(self._compact(caller_of(request).name))
            task.add_done_callback(_note)
        if not asked.get("wait", False):
            await asyncio.wait({task}, timeout=_BEGINS_S)
            if not task.done() or task.exception() is None:
                return json_answer({"started": True}, 202)
        return json_answer(await asyncio.shield(task))

    async def _compact(self, client: str) -> dict[str, Any]:
        done = await asyncio.to_thread(self._service.rows.compact)
        if done["compacted"]:
            try:
                await self._calls.change(client, self._service.reload, "compaction")
            except (OverloadedError, ReloadError) as error:
                # It is tried again, and what serves has every row.
                _log.info("generation %s does not serve yet: %s", done["generation"], error)
        return {**done, "serves": self._service.index.ivf.generation == done["generation"]}


def _note(task: asyncio.Task[dict[str, Any]]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    _log.error("the compaction failed: %s", error, exc_info=None if isinstance(error, HybridIndexError) else error)
