"""Maps errors to problem documents (RFC 9457).

A client is told which field is wrong. Internal errors go to the log, under the request's id.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from hybridindex.errors import (
    AccessDeniedError,
    BuildError,
    BusyWritingError,
    CorruptIndexError,
    DamagedListsError,
    DeadlineExceededError,
    DeviceError,
    DiskFullError,
    DocumentStoreError,
    DuplicateIdError,
    EmbeddingError,
    FileError,
    IncompleteAnswerError,
    InfeasiblePlanError,
    InvalidInputError,
    LeftBehindError,
    NoDocumentsError,
    NoEmbedderError,
    NotHeldError,
    NotWritableError,
    OverloadedError,
    PlanConflictError,
    PlanningError,
    ProfileError,
    RefreshError,
    ReloadError,
    RouterClosedError,
    StoreError,
    SupersededError,
    UnknownSessionError,
    UnsupportedIndexError,
)
from hybridindex.service.changes.rows import WritesOffError
from hybridindex.service.http.wire import BodyError

__all__ = ["PROBLEM_TYPE", "Problem", "ProblemError", "problem_of"]

PROBLEM_TYPE = "application/problem+json"
#: Searches that need damaged lists need not come again before.
_RESTORED_S = 60.0
#: An embedder that failed was asked several times.
_EMBEDDER_S = 5.0
_FIELD = re.compile(r"[a-z][a-z_]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem document and its HTTP status."""

    status: int
    name: str
    title: str
    detail: str
    field: str | None = None
    retry_after_s: float | None = None

    def body(self, request_id: str) -> bytes:
        data: dict[str, Any] = {
            "type": f"urn:hybridindex:problem:{self.name}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "request_id": request_id,
        }
        if self.field is not None:
            data["field"] = self.field
        if self.retry_after_s is not None:
            data["retry_after_s"] = self.retry_after_s
        return json.dumps(data).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"content-type", PROBLEM_TYPE.encode()), (b"cache-control", b"no-store")]
        if self.retry_after_s is not None:
            # Retry-After has whole seconds, which is long for a queue. Several clients read the other header.
            found.append((b"retry-after", b"%d" % math.ceil(self.retry_after_s)))
            found.append((b"retry-after-ms", b"%d" % math.ceil(1e3 * self.retry_after_s)))
        if self.status == 401:
            found.append((b"www-authenticate", b'Bearer realm="hybridindex"'))
        return found


class ProblemError(Exception):
    """A problem without an error class of the library."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def problem_of(error: BaseException) -> Problem:
    """The document for ``error``."""
    if isinstance(error, ProblemError):
        return error.problem
    if isinstance(error, BodyError):
        names = {413: ("too-large", "Too large"), 415: ("media-type", "Media type not supported")}
        name, title = names.get(error.status, ("invalid-input", "Invalid input"))
        return Problem(error.status, name, title, str(error), error.field)
    if isinstance(error, OverloadedError):
        if error.own_share:
            return Problem(429, "too-many-requests", "Too many requests", str(error), retry_after_s=error.retry_after_s)
        return Problem(503, "overloaded", "Overloaded", str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, RouterClosedError):
        return Problem(503, "overloaded", "Overloaded", "the daemon is about to stop", retry_after_s=1)
    if isinstance(error, PlanningError):
        return Problem(503, "no-plan", "No plan was made", str(error), retry_after_s=5)
    if isinstance(error, RefreshError):
        detail = "an update of the plan is under way or being verified; try again when it has ended"
        return Problem(503, "overloaded", "Overloaded", detail, retry_after_s=5)
    if isinstance(error, DeviceError):
        return Problem(409, "device-failed", "Device failed", "a device has failed; GET /healthz says which")
    if isinstance(error, DamagedListsError):
        # Another replica has them; so has this daemon when the file was restored.
        return Problem(503, "damaged-lists", "Damaged lists", str(error), retry_after_s=_RESTORED_S)
    if isinstance(error, IncompleteAnswerError):
        # Another node may have what this one cannot reach.
        return Problem(503, "incomplete-answer", "Lists are missing", str(error), "allow_partial", _RESTORED_S)
    if isinstance(error, NotHeldError):
        # Another node has them; so has this one when its share was filled.
        return Problem(503, "not-held", "Lists on other nodes", str(error), retry_after_s=_RESTORED_S)
    if isinstance(error, DeadlineExceededError):
        return Problem(504, "deadline", "Deadline exceeded", str(error), "deadline_ms")
    if isinstance(error, ReloadError):
        return Problem(409, "reload-failed", "The index was not replaced", str(error))
    if isinstance(error, UnknownSessionError):
        return Problem(404, "unknown-session", "Unknown session", str(error), "session")
    if isinstance(error, AccessDeniedError):
        return Problem(401, "access-denied", "Access denied", str(error))
    if isinstance(error, PlanConflictError):
        return Problem(409, "plan-conflict", "Contradiction to the plan in force", str(error), "coverage")
    if isinstance(error, InfeasiblePlanError):
        return Problem(409, "infeasible-plan", "The plan cannot meet its SLO", str(error), "force")
    if isinstance(error, DuplicateIdError):
        return Problem(409, "duplicate-id", "Ids exist already", str(error), "ids")
    if isinstance(error, InvalidInputError):
        # Messages begin with the name of the field.
        named = _FIELD.match(str(error))
        return Problem(400, "invalid-input", "Invalid input", str(error), named[0] if named else None)
    if isinstance(error, DiskFullError | NotWritableError | FileError):
        return Problem(507, "disk", "Nothing was written", "the disk of the index cannot be written; see the log")
    if isinstance(error, BusyWritingError):
        return Problem(503, "busy-writing", "Too many new rows", str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, LeftBehindError):
        words = "another process compacted the index; its new generation is about to serve"
        return Problem(503, "overloaded", "Overloaded", words, retry_after_s=1)
    if isinstance(error, SupersededError):
        return Problem(503, "overloaded", "Overloaded", "the index is being compacted again and again", retry_after_s=1)
    if isinstance(error, WritesOffError):
        return Problem(403, "read-only", "No changes of rows", str(error))
    if isinstance(error, UnsupportedIndexError):
        return Problem(422, "unsupported", "Rows cannot be changed", str(error))
    if isinstance(error, NoDocumentsError):
        return Problem(422, "no-documents", "The index takes no documents", str(error))
    if isinstance(error, NoEmbedderError):
        return Problem(422, "no-embedder", "Documents cannot be embedded here", str(error))
    if isinstance(error, EmbeddingError):
        wait_s = max(error.retry_after_s, _EMBEDDER_S)
        return Problem(503, "embedder-failed", "The embedder failed", str(error), retry_after_s=wait_s)
    if isinstance(error, DocumentStoreError):
        return Problem(507, "documents", "The texts cannot be used", str(error))
    if isinstance(error, BuildError):
        return Problem(409, "index-busy", "The index was not changed", str(error))
    if isinstance(error, StoreError):
        words = "the control store cannot be read or written; GET /healthz and the log say why"
        return Problem(507, "store", "Control store unavailable", words)
    if isinstance(error, CorruptIndexError):
        words = "a file of the index is damaged; hybridindex verify and the log name it"
        return Problem(507, "damaged-index", "A file of the index is damaged", words)
    if isinstance(error, ProfileError):
        return Problem(409, "no-profile", "No usable profile", "there is no profile that this needs; see the log")
    return Problem(
        500, "internal", "Internal error", "the request failed inside the daemon; see the log, under this request id"
    )
