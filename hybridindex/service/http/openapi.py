"""Parameters and problem answers of the OpenAPI document.

``requests.py`` has the bodies, ``openapi_answers.py`` the answers.
"""

from __future__ import annotations

from typing import Any

from hybridindex.service.http.openapi_answers import closed
from hybridindex.service.http.problems import PROBLEM_TYPE

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
    403: "The key's role does not allow this, or the daemon refuses changes of rows",
    404: "No such session or plan",
    408: "The body did not come in time",
    409: "An id exists already, another process writes to the index, no profile to plan from, "
    "a new target beside a fixed coverage, an infeasible plan without force, queries are "
    "not kept, a device has failed, or another generation cannot serve",
    413: "Too large",
    415: "Media type not supported",
    422: "Rows or documents of the index cannot be changed, documents cannot be embedded here, or the idempotency "
    "key came with another request before",
    429: "This client's share of the queue is full; see Retry-After-Ms",
    502: "A change may or may not have been made: the daemon ended, or a node of a cluster was lost during the change",
    503: "The queue is full, the daemon drains, another change is under way, rows come faster than lists can be "
    "rewritten, the embedder of documents fails, or the search needs damaged lists; see Retry-After-Ms",
    504: "The deadline passed before the search started",
    507: "The control store or the texts of the index cannot be used, or the disk of the index cannot be written; see "
    "/healthz",
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


def _path(name: str, **words: Any) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, **words}]


SESSION_PATH = _path("session", schema={"type": "string"})
PLAN_PATH = _path(
    "plan",
    schema={"type": "string", "pattern": "^([0-9]+|latest|current)$"},
    description="Its id, latest (the newest) or current (applied last).",
    example="current",
)
