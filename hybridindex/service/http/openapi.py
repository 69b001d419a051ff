"""Parameters, request bodies and problem answers of the OpenAPI document, with the limits of one index and daemon.

``openapi_answers.py`` has the answers. Tests send what the document allows and what it forbids, and check every answer
against it. Two rules stand there in words alone: a JSON body holds its own options, and vectors have a greatest length.
"""

from __future__ import annotations

from typing import Any

from hybridindex.plans.replan import SOLVE
from hybridindex.service.config import Limits
from hybridindex.service.http.openapi_answers import closed
from hybridindex.service.http.problems import PROBLEM_TYPE
from hybridindex.service.http.wire import MIN_BANDWIDTH_SHARE, MOST_BYTES
from hybridindex.service.observe.events import MAX_EVENTS

PROBLEM_SCHEMA: dict[str, Any] = {
    **closed(
        {
            "type": {"type": "string", "pattern": "^urn:hybridindex:problem:[a-z-]+$"},
            "title": {"type": "string"},
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": {"type": "string", "minLength": 1},
            "field": {"type": "string"},
            "request_id": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
            "retry_after_s": {"type": "number", "minimum": 0},
        },
        optional=("field", "retry_after_s"),
    ),
    "example": {
        "type": "urn:hybridindex:problem:invalid-input",
        "title": "Invalid input",
        "status": 400,
        "detail": "k is 0; expected an integer 1..2048",
        "field": "k",
        "request_id": "9f86d081884c7d65",
    },
}
#: For daemons with a key file.
SECURITY = {"key": {"type": "http", "scheme": "bearer", "description": "hybridindex keys add FILE NAME"}}
_WORDS = {
    400: "A field is wrong",
    401: "No key, or not a valid one",
    403: "The key's role does not allow this",
    404: "No such session or plan",
    408: "The body did not come in time",
    409: "No profile to plan from, a new target beside a fixed coverage, queries are not kept, or a device has failed",
    413: "Too large",
    415: "Media type not supported",
    429: "This client's share of the queue is full; see Retry-After-Ms",
    503: "The queue is full, the daemon drains, or another change is under way; see Retry-After-Ms",
    504: "The deadline passed before the search started",
    507: "The control store cannot be used; see /healthz",
}
_RETRY_AFTER = {
    name: {"required": True, "description": unit, "schema": {"type": "integer", "minimum": 1}}
    for name, unit in (("Retry-After", "Whole seconds, rounded up"), ("Retry-After-Ms", "Milliseconds"))
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses that are problem documents."""
    content = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    described: dict[int | str, dict[str, Any]] = {s: {"description": _WORDS[s], "content": content} for s in statuses}
    for status in described.keys() & {429, 503}:
        described[status]["headers"] = _RETRY_AFTER
    return described


def _count(most: int, **words: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most, **words}


_BYTES = {"type": "integer", "minimum": 0, "maximum": MOST_BYTES}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def _query(**schemas: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]}


SERIES = _query(since={"type": "number", "description": "Only what ended later: seconds since 1970."})
EVENTS = _query(
    since={"type": "integer", "minimum": 0, "description": "Only events with a larger id."},
    limit={**_count(MAX_EVENTS), "default": 100},
)


def _path(name: str, **words: Any) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, **words}]


SESSION_PATH = _path("session", schema={"type": "string"})
PLAN_PATH = _path("plan", schema={"type": "string", "pattern": "^([0-9]+|latest)$"}, description="Its id, or latest.")


_WINDOW = {**_POSITIVE, "maximum": 86_400_000, "description": "Generation time that hides these copies."}


class Bodies:
    """Parameters and bodies of the routes that take queries."""

    def __init__(self, dim: int, nlist: int, limits: Limits) -> None:
        self._limits = limits
        self._row = {"type": "array", "minItems": dim, "maxItems": dim, "items": {"type": "number"}}
        self._example = [[round(0.1 * (i % 10), 1) for i in range(dim)]]
        nprobe = min(nlist, limits.max_nprobe or nlist)
        self._nprobe = _count(nprobe, description="Default: the plan's.")
        self._floor = _count(nprobe, description="Floor of nprobe under a deadline or overload.")
        self._dim = dim

    def search(self) -> dict[str, Any]:
        options = {
            "k": _count(self._limits.max_k, default=10),
            "nprobe": self._nprobe,
            "deadline_ms": {
                **_POSITIVE,
                "maximum": 86_400_000,
                "description": "nprobe may be lowered, down to min_nprobe, to answer by then.",
            },
            "min_nprobe": self._floor,
        }
        return self._with(options, {"queries": self._example, "k": 2})

    def lookahead(self) -> dict[str, Any]:
        options = {"nprobe": self._nprobe, "budget_bytes": _BYTES, "window_ms": _WINDOW}
        return self._with(options, {"queries": self._example, "budget_bytes": 1 << 20})

    def recent(self) -> dict[str, Any]:
        return self._with({}, {"queries": self._example})

    def _with(self, options: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
        rows = self._limits.max_queries
        queries = {
            "description": "One query, or several. Finite in float32, and no longer than 1.58e18.",
            "oneOf": [self._row, {"type": "array", "minItems": 1, "maxItems": rows, "items": self._row}],
        }
        shape = {
            "n": _count(rows, description="Rows of an octet-stream; default what the body makes."),
            "d": {"const": self._dim, "type": "integer", "description": "Its columns."},
        }
        return {
            "parameters": [
                {"name": name, "in": "query", "schema": schema, "description": "Binary bodies only."}
                for name, schema in {**shape, **options}.items()
            ],
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": closed({"queries": queries, **options}, optional=tuple(options)),
                        "example": example,
                    },
                    "application/octet-stream": _BINARY,
                    "application/x-npy": _BINARY,
                },
            },
        }


def _options(properties: dict[str, Any], example: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {**closed(properties, optional=tuple(properties)), **more}
    return {"requestBody": {"content": {"application/json": {"schema": schema, "example": example}}}}


SESSION: dict[str, Any] = _options(
    {"lookahead_bytes": _BYTES, "window_ms": {**_POSITIVE, "description": "Instead of bytes: time to hide copies in."}},
    {"lookahead_bytes": 8 << 20},
    **{"not": {"required": ["lookahead_bytes", "window_ms"]}},
)


def repartition(n_devices: int) -> dict[str, Any]:
    """The body of a change of the plan. A list of budgets has one entry per device."""
    each = {"type": "array", "items": _BYTES, "minItems": n_devices, "maxItems": n_devices}
    return _options(
        {
            "apply": {"type": "boolean", "default": False},
            "slo_ms": _POSITIVE,
            "device_budget_bytes": {"oneOf": [_BYTES, each]},
            "rate_qps": _POSITIVE,
            "coverage": {"oneOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"const": SOLVE}]},
            "bandwidth_share": {"type": "number", "minimum": MIN_BANDWIDTH_SHARE, "maximum": 1},
        },
        {"apply": False, "slo_ms": 50, "coverage": SOLVE},
    )
