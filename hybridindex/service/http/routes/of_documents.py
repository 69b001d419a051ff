"""Routes that change the documents of one index: add, replace, delete."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import Request, Response

from hybridindex.service.core import Service
from hybridindex.service.http import openapi
from hybridindex.service.http import openapi_answers as answers
from hybridindex.service.http.bodies import CHARGE, hold
from hybridindex.service.http.routes.changing import KEY_PARAMETER, Changing
from hybridindex.service.http.routes.common import Row
from hybridindex.service.http.routes.document_bodies import DocumentsBody, SourcesBody, most_chunks
from hybridindex.service.http.store_calls import StoreCalls

__all__ = ["DocumentRoutes"]

#: Copies of vectors and of texts while they are written.
_COPIES = 4
#: For another node of a cluster, which embeds all that was sent, after what came before.
_FORWARDED_S = 3600.0


class DocumentRoutes:
    """Of one service, below all its prefixes."""

    def __init__(self, service: Service, calls: StoreCalls, changing: Changing) -> None:
        self._service = service
        self._calls = calls
        self._changing = changing
        self._body, self._sources = DocumentsBody(service.config.limits), SourcesBody(service.config.limits)

    def table(self) -> tuple[Row, ...]:
        """As that of :class:`hybridindex.service.http.routes.of_index.IndexRoutes`."""
        taken = openapi.problems(400, 401, 403, 408, 409, 413, 415, 422, 429, 502, 503, 507)
        add, delete = ({**body.document, "parameters": KEY_PARAMETER} for body in (self._body, self._sources))
        return (
            (
                "POST", "/documents", self.add, "Add or replace documents; write", add,
                {200: answers.DOCUMENTS_ADDED, **taken},
            ),
            (
                "POST", "/documents/delete", self.delete, "Delete documents; write", delete,
                {200: answers.DOCUMENTS_DELETED, **taken},
            ),
        )  # fmt: skip

    async def add(self, request: Request) -> Response:
        body, asked = await self._changing.object_of(request, self._body)
        texts = asked["texts"]
        n = min(most_chunks(texts), self._service.config.limits.max_rows)
        vectors = n * self._service.index.dim * 4
        hold(request.scope[CHARGE], (2 + _COPIES) * len(body) + _COPIES * vectors)

        def run(client: str) -> Awaitable[dict[str, Any]]:
            return self._calls.write_documents(client, self._service.documents.put, texts)

        return await self._changing.once("add documents", request, body, run, _FORWARDED_S)

    async def delete(self, request: Request) -> Response:
        body, asked = await self._changing.object_of(request, self._sources)

        def run(client: str) -> Awaitable[dict[str, Any]]:
            return self._calls.write_documents(client, self._service.documents.delete, asked["sources"])

        return await self._changing.once("delete documents", request, body, run, _FORWARDED_S)
