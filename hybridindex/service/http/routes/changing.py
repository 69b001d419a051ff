"""What all routes that change rows do alike: read a body, refuse at the end, and make a change of one idempotency key
once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from hybridindex.errors import OverloadedError
from hybridindex.index.storage.checksums import digest_bytes
from hybridindex.service.core import Service
from hybridindex.service.http.bodies import CHARGE, media_type, parse_within, read_body
from hybridindex.service.http.nodes.writes import NodeWrites
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.requests import Body
from hybridindex.service.http.routes.answered_keys import AnsweredKeys
from hybridindex.service.http.routes.common import caller_of
from hybridindex.service.http.searching import options_of
from hybridindex.service.http.wire import BodyError, short

__all__ = ["KEY_PARAMETER", "Changing"]

_MOST_KEY_CHARACTERS = 128
_KEY = re.compile(rf"[!-~]{{1,{_MOST_KEY_CHARACTERS}}}")
KEY_PARAMETER: list[dict[str, Any]] = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "schema": {"type": "string", "pattern": f"^[!-~]{{1,{_MOST_KEY_CHARACTERS}}}$"},
        "description": "A name for this change. The same name with the same request within a day changes nothing more "
        "and returns the same answer.",
    }
]


class Changing:
    """Of one service, for all its routes that change rows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._writes = None if service.members is None else NodeWrites(service, service.members)
        self._answered = AnsweredKeys(service.clock)

    async def elsewhere(self, request: Request, body: bytes, limit_s: float) -> bytes | None:
        """The answer of the node of a cluster that writes; None: this one does. Raises as
        :meth:`hybridindex.service.http.nodes.writes.NodeWrites.elsewhere`."""
        return None if self._writes is None else await self._writes.elsewhere(request, body, None, limit_s)

    def refuse_at_the_end(self) -> None:
        """Raises OverloadedError: the daemon is about to stop."""
        if self._service.admission.draining:
            raise OverloadedError("the daemon is about to stop", retry_after_s=1)

    async def body_of(self, request: Request) -> tuple[bytes, str]:
        """The body and its media type."""
        self.refuse_at_the_end()
        headers = dict(request.scope["headers"])
        limits = self._service.config.limits
        return await read_body(headers, request.receive, limits, request.scope[CHARGE]), media_type(headers)

    async def object_of(self, request: Request, kind: Body) -> tuple[bytes, dict[str, Any]]:
        """The body, and the JSON object that it is."""
        body, media = await self.body_of(request)
        for name in options_of(request.scope):
            raise BodyError(
                short(name), "stands in the query string; options of this route belong in the body, as JSON"
            )
        # A form of another site cannot send JSON.
        if body and media != "application/json":
            raise BodyError("Content-Type", f"is {media[:60]!r}; expected application/json", 415)
        return body, await parse_within(request.scope[CHARGE], body, media, lambda: kind.parse(body))

    async def once(
        self,
        what: str,
        request: Request,
        body: bytes,
        change: Callable[[str], Awaitable[dict[str, Any]]],
        limit_s: float | None = None,
    ) -> Response:
        """Makes a change, and answers with what it says; with a key that was answered before, with what was said.

        Args:
            what: names the route.
            change: given the name of the client.
            limit_s: for another node of a cluster that makes it; None: as long as for any change.
        """
        client, key = caller_of(request).name, request.headers.get("idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            words = f"is {short(key)}; expected 1..{_MOST_KEY_CHARACTERS} visible ASCII characters"
            raise BodyError("Idempotency-Key", words)
        known = client, key
        if key is not None and self._writes is not None:
            known = "", self._writes.key_of(request, client, key)

        async def run() -> bytes:
            if self._writes is None:
                return json.dumps(await change(client)).encode()
            return await self._writes.make(request, body, known[1], lambda: change(client), limit_s)

        headers = {"cache-control": "no-store"}
        try:
            if known[1] is None:
                return Response(await run(), 200, headers, "application/json")
            asked = (what, request.headers.get("content-type"), request.url.query, digest_bytes(body))
            answer, again = await self._answered.once(known[0], known[1], repr(asked), run)
        except asyncio.CancelledError:
            if not self._service.admission.draining:
                raise
            # The drain has lasted as long as it may.
            words = "the daemon ends during the change, which may or may not have been made"
            raise ProblemError(Problem(502, "unknown-outcome", "Unknown outcome", words)) from None
        if again:
            headers["idempotency-replayed"] = "true"
        return Response(answer, 200, headers, "application/json")
