"""What the OpenAPI document says of bodies and answers. The tests send these examples."""

from __future__ import annotations

from typing import Any

from hybridindex.answers import ANSWER_TYPE
from hybridindex.service.problems import PROBLEM_TYPE

__all__ = ["LOOKAHEAD", "PROBLEM_SCHEMA", "RECENT", "REPARTITION", "SEARCH", "SESSION", "problems"]

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "example": "urn:hybridindex:problem:invalid-input"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "example": "k is 0; expected an integer 1..2048"},
        "field": {"type": "string", "example": "k"},
        "request_id": {"type": "string"},
        "retry_after_s": {"type": "number"},
    },
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses that are problem documents."""
    words = {
        400: "A field is wrong",
        401: "No key, or not a valid one",
        403: "The key's role does not allow this",
        404: "No such session or plan",
        408: "The body did not come in time",
        409: "No profile to plan from, or queries are not kept",
        413: "Too large",
        415: "Media type not supported",
        429: "This client's share of the queue is full; see Retry-After",
        503: "The queue is full, or the daemon drains; see Retry-After",
        507: "The control store cannot be used; see /healthz",
        504: "The deadline passed before the search started",
    }
    schema = {"$ref": "#/components/schemas/Problem"}
    return {s: {"description": words[s], "content": {PROBLEM_TYPE: {"schema": schema}}} for s in statuses}


def _object(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_QUERIES: dict[str, Any] = {
    "description": "One query of d numbers, or n of them.",
    "type": "array",
    "items": {"oneOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
}
_COUNT = {"type": "integer", "minimum": 1}
_BYTES = {"type": "integer", "minimum": 0}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_OPTIONS: dict[str, Any] = {
    "k": {**_COUNT, "default": 10},
    "nprobe": {**_COUNT, "description": "Default: the plan's."},
    "deadline_ms": {**_POSITIVE, "description": "nprobe may be lowered, down to min_nprobe, to answer by then."},
    "min_nprobe": {**_COUNT, "description": "Floor of nprobe under a deadline or overload."},
}


def _parameters(options: dict[str, Any]) -> list[dict[str, Any]]:
    described = {
        "n": {**_COUNT, "description": "Rows of an octet-stream."},
        "d": {**_COUNT, "description": "Its columns."},
    }
    return [{"name": n, "in": "query", "schema": s} for n, s in {**described, **options}.items()]


def _body(options: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    return {
        "parameters": _parameters(options),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _object({"queries": _QUERIES, **options}, ("queries",)),
                    "example": example,
                },
                "application/octet-stream": binary,
                "application/x-npy": binary,
            },
        },
    }


_ANSWER = {
    "type": "object",
    "properties": {
        "ids": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "distances": {"type": "array", "items": {"type": "array", "items": {"type": "number", "nullable": True}}},
        "nprobe_used": {"type": "array", "items": {"type": "integer"}},
        "hit_rate": {"type": "array", "items": {"type": "number"}},
    },
    "example": {"ids": [[17, 4]], "distances": [[0.11, 0.36]], "nprobe_used": [64], "hit_rate": [0.83]},
}

SEARCH: dict[str, Any] = {
    **_body(_OPTIONS, {"queries": [[0.1, 0.2, 0.3]], "k": 2, "nprobe": 64}),
    "responses": {
        "200": {
            "description": "Neighbours, best first. An empty place has id -1 and a null distance.",
            "content": {
                "application/json": {"schema": _ANSWER},
                ANSWER_TYPE: {"schema": {"type": "string", "format": "binary"}},
            },
        }
    },
}
LOOKAHEAD: dict[str, Any] = _body(
    {"nprobe": _COUNT, "budget_bytes": _BYTES}, {"queries": [[0.1, 0.2, 0.3]], "budget_bytes": 1048576}
)
_UPLOAD = _body({}, {"queries": [[0.1, 0.2, 0.3]]})
RECENT: dict[str, Any] = {
    **_UPLOAD,
    "responses": {
        "200": {
            "description": "How many were given, and how many recent queries are kept now.",
            "content": {
                "application/json": {
                    "schema": _object({"offered": {"type": "integer"}, "kept": {"type": "integer"}}),
                    "example": {"offered": 1, "kept": 1},
                }
            },
        }
    },
}
SESSION: dict[str, Any] = {
    "requestBody": {
        "content": {
            "application/json": {
                "schema": _object({"lookahead_bytes": _BYTES, "window_ms": _POSITIVE}),
                "example": {"lookahead_bytes": 8388608},
            }
        }
    }
}
REPARTITION: dict[str, Any] = {
    "requestBody": {
        "content": {
            "application/json": {
                "schema": _object(
                    {
                        "apply": {"type": "boolean", "default": False},
                        "slo_ms": _POSITIVE,
                        "device_budget_bytes": {"oneOf": [_BYTES, {"type": "array", "items": _BYTES}]},
                        "rate_qps": _POSITIVE,
                        "coverage": {"type": "number", "minimum": 0, "maximum": 1},
                        "bandwidth_share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                    }
                ),
                "example": {"apply": False, "slo_ms": 50},
            }
        }
    }
}
