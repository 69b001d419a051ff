"""Routes that mean all indexes, or the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from hybridindex.service.auth import Keyring
from hybridindex.service.describe import describe
from hybridindex.service.http import openapi
from hybridindex.service.http import openapi_answers as answers
from hybridindex.service.http.problems import Problem
from hybridindex.service.http.requests import NOTHING
from hybridindex.service.http.routes.common import TEXT, Row, add_routes, json_answer, problem_answer, read_object
from hybridindex.service.observe.metrics import CONTENT_TYPE, Metrics, render
from hybridindex.service.several.indexes import Indexes
from hybridindex.service.status import StorageWatch

__all__ = ["DaemonRoutes"]


@dataclass(frozen=True, slots=True)
class DaemonRoutes:
    """Of one daemon."""

    _indexes: Indexes
    _metrics: Mapping[str, Metrics]
    _on_drain: Callable[[], None] | None
    _keyring: Keyring | None
    _storage: Mapping[str, StorageWatch]

    def register(self, app: FastAPI) -> None:
        read = openapi.problems(401)
        taken = openapi.problems(400, 401, 403, 408, 413, 415, 503)
        rows: tuple[Row, ...] = (
            ("GET", "/v1/indexes", self.indexes, "Which indexes are served", {}, {200: answers.INDEXES, **read}),
            ("POST", "/v1/drain", self.drain, "Finish and stop; admin", {}, {202: answers.DRAINING, **taken}),
            ("GET", "/metrics", self.metrics, "Prometheus metrics", {}, {**TEXT, **read}),
            ("GET", "/livez", self.livez, "The process answers", {"security": []}, TEXT),
            ("GET", "/readyz", self.readyz, "Warmed up", {"security": []}, {**TEXT, **openapi.problems(503)}),
            (
                "GET", "/healthz", self.healthz, "What needs attention", {},
                {200: answers.HEALTH, 503: answers.HEALTH, **read},
            ),
        )  # fmt: skip
        add_routes(app, rows)

    async def indexes(self, _request: Request) -> Response:
        return json_answer(await asyncio.to_thread(self._indexes.listing))

    async def drain(self, request: Request) -> Response:
        await read_object(request, NOTHING, self._indexes.config.limits)
        if self._on_drain is not None:
            self._on_drain()
        else:
            self._indexes.drain()
        return json_answer({"draining": True}, 202)

    async def metrics(self, _request: Request) -> Response:
        return Response(render(self._metrics), media_type=CONTENT_TYPE)

    async def livez(self, _request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, _request: Request) -> Response:
        if self._indexes.ready:
            return Response("ok\n", media_type="text/plain")
        return problem_answer(Problem(503, "not-ready", "Not ready", "warming up, or about to stop", retry_after_s=1))

    async def healthz(self, _request: Request) -> Response:
        ring = self._keyring
        problem = None if ring is None else ring.problem
        found = await asyncio.gather(*(watch.read() for watch in self._storage.values()))
        health = self._indexes.health(dict(zip(self._storage, found, strict=True)), problem, keys=ring is not None)
        return json_answer({"ok": health.ok, **describe(health)}, 200 if health.ok else 503)
