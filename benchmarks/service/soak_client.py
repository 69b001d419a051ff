"""The soak's client: what each arrival sends, and what may be answered.

Anything else than a right answer, a documented refusal with Retry-After, or 504 under a deadline is unexpected.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.service.connection import Answer, Pool, request_bytes
from benchmarks.service.soak_load import Kind, Load
from benchmarks.service.soak_oracle import PoolOracle
from hybridindex.answer_codec import ANSWER_TYPE, decode_answer
from hybridindex.service.auth import KeyFile
from hybridindex.types import F32, F64, I64, SearchResult

__all__ = ["SESSION_TTL_S", "Client"]

_RAW, _NPY, _JSON = "application/octet-stream", "application/x-npy", "application/json"
_STATE = ("/v1/status", "/v1/plan", "/v1/plans", "/metrics", "/healthz", "/readyz", "/v1/openapi.json")
#: Most that are kept of each list of complaints.
_KEPT = 1000
_MOST_OPEN = 32
#: After which the daemon ends a session that nobody uses.
SESSION_TTL_S = 15


@dataclass(slots=True)
class _Conversation:
    name: str
    #: When its last request was given to a connection, or to the queue for one: the daemon took it no earlier.
    asked_s: float
    steps: int = 0

    def is_late(self) -> bool:
        """Whether the daemon may have ended it meanwhile: the load runs late on a crowded machine."""
        return time.perf_counter() - self.asked_s > SESSION_TTL_S


class Client:
    """Sends one load and judges the answers. On one event loop."""

    def __init__(
        self,
        pool: Pool,
        load: Load,
        queries: F32,
        oracle: PoolOracle,
        keys: KeyFile,
        *,
        admin: str,
        fixed: str,
        default_nprobe: int,
    ) -> None:
        """``admin``, ``fixed``: keys that stay, for changes and for sessions; ``queries``: the oracle's pool."""
        self._pool, self._load, self._queries, self._oracle, self._keys = pool, load, queries, oracle, keys
        self._admin, self._fixed, self._default_nprobe = admin, fixed, default_nprobe
        self._key = fixed
        #: Searches under way by key: one is revoked when nothing that was sent with it can still arrive.
        self._users: Counter[str] = Counter()
        self._idle: list[_Conversation] = []
        self._n_open = 0
        self._bad = _bad_requests(queries.shape[1], fixed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.changes: Counter[str] = Counter()
        #: (n,) from due time to answer, by number of the request.
        self.latencies_ms: F64 = np.zeros(len(load.due))
        self.wrong: list[str] = []
        self.unexpected: list[str] = []
        self.n_checked = self.n_queries_checked = 0
        #: ``GET /v1/status`` after the last answer.
        self.final: dict[str, Any] = {}

    async def until_ready(self) -> None:
        """Returns when the daemon has warmed up."""
        while (await self._pool.ask(request_bytes("GET", "/readyz"))).status != 200:
            await asyncio.sleep(0.05)

    async def play(self, number: int, due_s: float) -> None:
        """Request ``number`` of the load, due at a time of ``time.perf_counter``. Never raises."""
        kind, key = self._load.kind[number], self._key
        self._users[key] += 1
        try:
            if kind is Kind.SESSION:
                outcome = await self._step(number)
            elif kind is Kind.BAD:
                outcome = await self._misbehave(number)
            elif kind is Kind.STATE:
                outcome = await self._look(number, key)
            else:
                outcome = await self._search(number, kind, "/v1/search", key)
        except (OSError, ValueError, KeyError) as error:
            outcome = self._complain(f"request {number}, {kind}: {type(error).__name__}: {error}")
        self._users[key] -= 1
        self.outcomes[kind, outcome] += 1
        self.latencies_ms[number] = (time.perf_counter() - due_s) * 1e3

    def _complain(self, text: str) -> str:
        if len(self.unexpected) < _KEPT:
            self.unexpected.append(text)
        return "unexpected"

    def _refused(self, answer: Answer, what: str, talk: _Conversation | None = None) -> str:
        """For an answer that is not the one that was hoped for. ``talk``: the session that it was asked for in."""
        if answer.status == 404 and talk is not None and talk.is_late():
            return "late"
        if answer.status in (429, 503) and answer.header("retry-after"):
            return f"refused {answer.status}"
        return self._complain(f"{what}: {answer.status} {answer.body[:300]!r}")

    async def _search(self, number: int, kind: Kind, target: str, key: str, talk: _Conversation | None = None) -> str:
        load = self._load
        rows: I64 = load.rows[number, : load.batch[number]]
        options: dict[str, Any] = {"k": int(load.k[number])}
        most = least = int(load.nprobe[number]) or self._default_nprobe
        if load.nprobe[number]:
            options["nprobe"] = most
        if kind is Kind.DEADLINE:
            least = max(1, most // 4)
            options |= {"deadline_ms": float(load.deadline_ms[number]), "min_nprobe": least}
        queries = self._queries[rows]
        if kind is Kind.JSON:
            body = json.dumps({"queries": queries.tolist(), **options}).encode()
            request = request_bytes("POST", target, body, key=key, kind=_JSON)
        else:
            asked = "&".join(f"{name}={value}" for name, value in options.items())
            media, body = _RAW, queries.tobytes()
            if kind is Kind.NPY:
                stream = io.BytesIO()
                np.save(stream, queries)
                media, body = _NPY, stream.getvalue()
            request = request_bytes("POST", f"{target}?{asked}", body, key=key, kind=media, accept=ANSWER_TYPE)
        answer = await self._pool.ask(request)
        if answer.status == 504 and kind is Kind.DEADLINE:
            return "deadline 504"
        if answer.status != 200:
            return self._refused(answer, f"request {number}, {kind}", talk)
        result = _from_json(answer.body) if kind is Kind.JSON else decode_answer(answer.body)
        problem = self._oracle.problem(rows, options["k"], least, most, result)
        self.n_checked += 1
        self.n_queries_checked += len(rows)
        if problem is None:
            return "right"
        if len(self.wrong) < _KEPT:
            self.wrong.append(f"request {number}, {kind}, {options}: {problem}")
        return "WRONG"

    async def _step(self, number: int) -> str:
        """Opens a session or takes one a step further: lookahead, search, search, a look, the end."""
        asked_s = time.perf_counter()
        if not self._idle or (self._n_open < _MOST_OPEN and number % 4 == 0):
            body = b'{"window_ms": 50}' if number % 2 else b""
            answer = await self._pool.ask(request_bytes("POST", "/v1/sessions", body, key=self._fixed, kind=_JSON))
            if answer.status != 201:
                return self._refused(answer, f"request {number}, opening a session")
            self._n_open += 1
            self._idle.append(_Conversation(json.loads(answer.body)["session"], asked_s))
            return "opened"
        talk = self._idle.pop(0)
        talk.steps += 1
        outcome = await self._speak(number, talk)
        if outcome in ("late", "closed", "abandoned"):
            self._n_open -= 1
        else:
            talk.asked_s = asked_s
            self._idle.append(talk)
        return outcome

    async def _speak(self, number: int, talk: _Conversation) -> str:
        path = f"/v1/sessions/{talk.name}"
        if talk.steps in (2, 4):
            return await self._search(number, Kind.BINARY, f"{path}/search", self._fixed, talk)
        if talk.steps in (1, 3):
            body = self._queries[self._load.rows[number, :2]].tobytes()
            request = request_bytes("POST", f"{path}/lookahead?nprobe=8", body, key=self._fixed, kind=_RAW)
            answer = await self._pool.ask(request)
            return "lookahead" if answer.status == 202 else self._refused(answer, f"request {number}, lookahead", talk)
        if talk.steps == 5:
            answer = await self._pool.ask(request_bytes("GET", path, key=self._fixed))
            good = answer.status == 200 and json.loads(answer.body)["lookaheads"] <= 2
            return "stats" if good else self._refused(answer, f"request {number}, session stats", talk)
        if number % 10 == 0:
            return "abandoned"  # its name is forgotten: the daemon has to end it
        answer = await self._pool.ask(request_bytes("DELETE", path, key=self._fixed))
        if answer.status == 204:
            return "closed"
        return self._refused(answer, f"request {number}, closing", talk)

    async def _misbehave(self, number: int) -> str:
        request, status = self._bad[number % len(self._bad)]
        answer = await self._pool.ask(request)
        if answer.status == status and answer.header("content-type") == "application/problem+json":
            return str(status)
        return self._refused(answer, f"request {number}, expected {status}, {request[:80]!r}")

    async def _look(self, number: int, key: str) -> str:
        path = _STATE[number % len(_STATE)]
        answer = await self._pool.ask(request_bytes("GET", path, key=key))
        return "200" if answer.status == 200 else self._refused(answer, f"request {number}, {path}")

    async def change_things(self, seconds: float) -> None:
        """Rotates keys and changes the plan by hand, a dozen times in ``seconds`` and on."""
        turn = 0
        while True:
            await asyncio.sleep(max(1.0, seconds / 24))
            turn += 1
            if turn % 2:
                await self._rotate(turn)
            else:
                await self._repartition(0.1 + 0.1 * (turn // 2 % 4))

    async def _rotate(self, turn: int) -> None:
        old, self._key = self._key, await asyncio.to_thread(self._keys.add, f"web-{turn}", "search")
        self.changes["keys rotated"] += 1
        if turn == 1:
            return  # the first one was the sessions' key, which stays
        while self._users[old]:
            await asyncio.sleep(0.05)
        del self._users[old]
        await asyncio.to_thread(self._keys.revoke, f"web-{turn - 2}")
        answer = await self._pool.ask(request_bytes("GET", "/v1/plan", key=old))
        if answer.status != 401:
            self._complain(f"a revoked key got {answer.status}")

    async def _repartition(self, coverage: float) -> None:
        body = json.dumps({"apply": True, "coverage": coverage}).encode()
        answer = await self._pool.ask(request_bytes("POST", "/v1/repartition", body, key=self._admin, kind=_JSON))
        applied = answer.status == 200 and json.loads(answer.body)["applied"]
        outcome = "applied" if applied else self._refused(answer, f"repartition to {coverage:.1f}")
        self.changes[f"repartition {outcome}"] += 1

    async def end(self) -> None:
        """Ends the sessions that are known and waits until the daemon ended the others; reads its last status."""
        for talk in self._idle:
            await self._pool.ask(request_bytes("DELETE", f"/v1/sessions/{talk.name}", key=self._fixed))
        ends = time.perf_counter() + 60
        while True:
            answer = await self._pool.ask(request_bytes("GET", "/v1/status", key=self._admin))
            self.final = json.loads(answer.body)
            if self.final["sessions"]["open"] == 0 or time.perf_counter() > ends:
                return
            await asyncio.sleep(0.5)


def _from_json(body: bytes) -> SearchResult:
    data = json.loads(body)
    distances = [[np.inf if d is None else d for d in row] for row in data["distances"]]
    return SearchResult(
        ids=np.array(data["ids"], dtype=np.int64),
        distances=np.array(distances, dtype=np.float32),
        nprobe_used=np.array(data["nprobe_used"], dtype=np.int32),
        hit_rate=np.array(data["hit_rate"], dtype=np.float32),
    )


def _bad_requests(dim: int, key: str) -> list[tuple[bytes, int]]:
    """Requests with the status that each must get."""

    def search(body: bytes, kind: str = _RAW, options: str = "", who: str = key) -> bytes:
        return request_bytes("POST", f"/v1/search{options}", body, key=who, kind=kind)

    one = np.zeros(dim, dtype=np.float32)
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object))
    # It promises a body that does not come, so nothing else may follow on its connection.
    endless = request_bytes("POST", "/v1/search", key=key, kind=_RAW).replace(
        b"content-length: 0", b"connection: close\r\ncontent-length: 99999999999"
    )
    return [
        (search(one.tobytes()[:-1]), 400),
        (search(one.tobytes(), options="?k=0"), 400),
        (search(one.tobytes(), options="?nprobe=100000"), 400),
        (search(one.tobytes(), options="?deadline_ms=nan"), 400),
        (search(np.full(dim, np.nan, np.float32).tobytes()), 400),
        (search(stream.getvalue(), _NPY), 400),
        (search(b'{"queries": [[1', _JSON), 400),
        (search(b"<x/>", "text/xml"), 415),
        (search(one.tobytes(), who="hix_wrong"), 401),
        (request_bytes("POST", "/v1/repartition", b"{}", key=key, kind=_JSON), 403),
        (request_bytes("GET", "/v1/search", key=key), 405),
        (request_bytes("GET", "/v1/nowhere", key=key), 404),
        (request_bytes("GET", "/v1/sessions/none", key=key), 404),
        (endless, 413),
    ]
