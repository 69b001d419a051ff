"""The daemon's routes for both clients: calls as HTTP requests, answers as results and errors. Without connections."""

from __future__ import annotations

import contextlib
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

import numpy as np

from hybridindex.answer_codec import ANSWER_TYPE, ROWS_TYPE, decode_answer, encode_rows
from hybridindex.client.columns import json_columns
from hybridindex.config import check_ids
from hybridindex.errors import (
    AccessDeniedError,
    BuildError,
    BusyWritingError,
    CorruptIndexError,
    DamagedListsError,
    DeadlineExceededError,
    DeviceError,
    DocumentStoreError,
    DuplicateIdError,
    EmbeddingError,
    HybridIndexError,
    IncompleteAnswerError,
    InfeasiblePlanError,
    InvalidInputError,
    NoDocumentsError,
    NoEmbedderError,
    NotHeldError,
    OverloadedError,
    PlanConflictError,
    PlanningError,
    ProfileError,
    ReloadError,
    ServiceError,
    UnknownSessionError,
    UnsupportedIndexError,
)
from hybridindex.types import F32, I64, SearchResult

__all__ = [
    "Address",
    "Call",
    "add_documents_call",
    "apply_plan_call",
    "check_index",
    "close_session_call",
    "compact_call",
    "count_of",
    "delete_call",
    "delete_documents_call",
    "drain_call",
    "error_of",
    "ids_of",
    "indexes_call",
    "lookahead_call",
    "not_an_address",
    "open_session_call",
    "plan_call",
    "plans_call",
    "read_answer",
    "recent_call",
    "reload_call",
    "repartition_call",
    "rows_call",
    "search_call",
    "session_call",
    "status_call",
]

T = TypeVar("T")

#: Options of a search that a query string is too short for.
_ID_LISTS = ("allow_ids", "deny_ids")

#: Errors of problems that their status does not tell apart. None is an OverloadedError: asking again soon is no use.
_NAMED: dict[str, type[HybridIndexError]] = {
    "damaged-index": CorruptIndexError,
    "damaged-lists": DamagedListsError,
    "device-failed": DeviceError,
    "documents": DocumentStoreError,
    "duplicate-id": DuplicateIdError,
    "embedder-failed": EmbeddingError,
    "idempotency-key": InvalidInputError,
    "incomplete-answer": IncompleteAnswerError,
    "index-busy": BuildError,
    "infeasible-plan": InfeasiblePlanError,
    "no-documents": NoDocumentsError,
    "no-embedder": NoEmbedderError,
    "no-plan": PlanningError,
    "not-held": NotHeldError,
    "plan-conflict": PlanConflictError,
    "reload-failed": ReloadError,
    "unknown-session": UnknownSessionError,
    "unsupported": UnsupportedIndexError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A daemon's base URL, and its socket path where it is not TCP."""

    url: str
    uds: str | None = None

    @classmethod
    def parse(cls, address: str) -> Address:
        """``http://…``, ``https://…`` or ``unix:/path``.

        Raises:
            InvalidInputError: it is something else, has no host or an impossible port, or holds a password, which is
                not shown.
        """
        if address.startswith("unix:") and len(address) > 5:
            return cls(url="http://daemon", uds=address[5:])
        # Of what cannot be read as an address, any part before an @ may be a password.
        refused, may_be_shown = "", "@" not in address
        try:
            parts = urlsplit(address)
            _ = parts.port
            if not parts.hostname or parts.hostname.split() != [parts.hostname]:
                refused = "it names no host"
            elif "?" in address or "#" in address:
                # What follows may be secret, too.
                address, refused = re.split("[?#]", address)[0], "it goes on with a query or a fragment"
            may_be_shown = may_be_shown or (not refused and "@" not in parts.netloc)
        except ValueError as error:
            refused = str(error)
        if not may_be_shown:
            raise InvalidInputError(
                "url holds a user's name or a password, or an @ where a host is expected; give the address alone, and "
                "the key with --key or HYBRIDINDEX_KEY, or as key= in Python"
            )
        if refused or not address.startswith(("http://", "https://")):
            raise not_an_address(address, refused)
        return cls(url=address.rstrip("/"))


def not_an_address(url: str, why: str = "") -> InvalidInputError:
    """The error of what is no daemon's address."""
    shown = repr(url if len(url) <= 200 else f"{url[:200]}…")
    reason = f" ({why[:100]})" if why else ""
    return InvalidInputError(f"url is {shown}{reason}; expected http://…, https://… or unix:/path/to/socket")


def check_index(index: str | None) -> str | None:
    """Raises InvalidInputError where ``index`` can be no index's name."""
    if index is not None and not (isinstance(index, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", index)):
        raise InvalidInputError(f"index is {index!r}; expected a name that the daemon's indexes() lists")
    return index


def object_of(body: bytes) -> dict[str, Any]:
    """Raises ServiceError where the answer is not a JSON object."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"the daemon's answer is not JSON ({error})") from error
    if not isinstance(said, dict):
        raise ServiceError(f"the daemon's answer is not a JSON object but a {type(said).__name__}")
    return said


def _field_of(answer: Mapping[str, Any], names: tuple[str, ...], read: Callable[[Any], T]) -> T:
    """What an answer holds under ``names``, one within the other. Raises ServiceError where it is not there, or
    ``read`` raises ValueError or one of its kind."""
    value: Any = answer
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            raise ServiceError(f"the daemon's answer lacks {'.'.join(names)}; is there a daemon at that address?")
        value = value[name]
    try:
        return read(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServiceError(f"the daemon's answer has {'.'.join(names)} that cannot be read: {error}") from None


def _of_type(kind: type[T]) -> Callable[[Any], T]:
    def read(value: Any) -> T:
        if type(value) is not kind:
            raise TypeError(f"it is a {type(value).__name__}; expected {kind.__name__}")
        return value

    return read


def count_of(answer: dict[str, Any], *names: str) -> int:
    """The number that an answer holds under ``names``. Raises ServiceError where there is none."""
    return _field_of(answer, names, _of_type(int))


def result_of(body: bytes) -> SearchResult:
    """Raises ServiceError where the answer is no result."""
    try:
        return decode_answer(body)
    except InvalidInputError as error:
        raise ServiceError(f"the daemon's answer cannot be read: {error}") from error


def nothing(_body: bytes) -> None:
    """For answers without content, which their ``status`` tells from those of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request and the reader of its answer. ``repeatable``: sent twice, it has the effect of sending it once."""

    method: str
    path: str
    read: Callable[[bytes], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    #: It means all indexes of the daemon.
    of_daemon: bool = False
    #: It changes the plan or the generation: lists travel, or a process of low priority plans, before the answer.
    is_change: bool = False
    #: The only one that a daemon answers with; None: the answer itself tells.
    status: int | None = None

    def path_of(self, index: str | None) -> str:
        """Where one ``index`` of several is meant; None: the first."""
        return self.path if index is None or self.of_daemon else f"/v1/indexes/{index}{self.path.removeprefix('/v1')}"


def read_answer(call: Call[T], status: int, body: bytes) -> T:
    """What a daemon answered. Raises ServiceError where no daemon answers so."""
    if call.status not in (None, status):
        raise ServiceError(
            f"the address answered {status} to {call.method} {call.path}; a daemon answers {call.status}: is it a "
            "daemon that answers there?"
        )
    return call.read(body)


def _with_json(asked: Call[T], body: Mapping[str, Any]) -> Call[T]:
    """Keys whose value is None are left out."""
    content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    return replace(asked, content=content, headers={"content-type": "application/json"})


def status_call() -> Call[dict[str, Any]]:
    return Call(method="GET", path="/v1/status", read=object_of)


def plan_call(plan_id: int | str | None) -> Call[dict[str, Any]]:
    """None: the plan in force."""
    path = "/v1/plan" if plan_id is None else f"/v1/plans/{quote(str(plan_id), safe='')}"
    return Call(method="GET", path=path, read=object_of)


def plans_call() -> Call[dict[str, Any]]:
    return Call(method="GET", path="/v1/plans", read=object_of)


def repartition_call(*, apply: bool, changes: Mapping[str, Any]) -> Call[dict[str, Any]]:
    asked = Call(method="POST", path="/v1/repartition", read=object_of, repeatable=not apply, is_change=True)
    return _with_json(asked, {"apply": apply, **changes})


def apply_plan_call(plan: int | str, *, dry_run: bool, options: Mapping[str, Any]) -> Call[dict[str, Any]]:
    path = f"/v1/plans/{quote(str(plan), safe='')}/apply"
    asked = Call(method="POST", path=path, read=object_of, repeatable=dry_run, is_change=True)
    return _with_json(asked, {"dry_run": dry_run, **options})


def reload_call() -> Call[dict[str, Any]]:
    """Sent twice, it finds that generation serving."""
    return Call(method="POST", path="/v1/reload", read=object_of, is_change=True)


def delete_call(ids: Any, where: str | None, *, key: str | None = None) -> Call[dict[str, Any]]:
    """Sent twice, it deletes once. ``key``: the same for all attempts; None: one of its own.

    Raises:
        InvalidInputError: ids are no integers, or ``key`` can be none.
    """
    asked = Call(method="POST", path="/v1/vectors/delete", read=object_of, is_change=True)
    asked = _with_json(asked, {"ids": None if ids is None else check_ids("ids", ids).tolist(), "where": where})
    return replace(asked, headers={**asked.headers, "idempotency-key": _key_of(key)})


def rows_call(
    vectors: Any, ids: Any, attributes: Any, *, replaces: bool, key: str | None = None
) -> Call[dict[str, Any]]:
    """Adds rows, or replaces those of these ids. Sent twice, it adds once.

    Args:
        vectors: (d,) or (n, d) float32.
        ids: (n,) integers; None: to be numbered.
        attributes: a mapping of names to columns, a pyarrow Table or RecordBatch, or a DataFrame.
        key: the same for all attempts; None: one of its own.

    Raises:
        InvalidInputError: something cannot be sent.
    """
    if not isinstance(vectors, np.ndarray) or vectors.dtype != np.float32 or vectors.ndim not in (1, 2):
        what = f"{vectors.dtype} {vectors.shape}" if isinstance(vectors, np.ndarray) else type(vectors).__name__
        raise InvalidInputError(f"vectors is {what}; expected a float32 array (d,) or (n, d)")
    rows = np.atleast_2d(vectors)
    numbers = None if ids is None else check_ids("ids", ids)
    if numbers is not None and len(numbers) != len(rows):
        raise InvalidInputError(f"ids has {len(numbers)} numbers, and vectors {len(rows)} rows; expected as many")
    more: dict[str, Any] = {"mode": "upsert" if replaces else "add"}
    if attributes is not None:
        more["attributes"] = json_columns(attributes)
    try:
        said = json.dumps(more, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"attributes hold values that JSON cannot represent ({error})") from None
    return Call(
        method="POST",
        path="/v1/vectors",
        read=object_of,
        content=encode_rows(rows, numbers, said),
        headers={"content-type": ROWS_TYPE, "idempotency-key": _key_of(key)},
    )


def ids_of(answer: dict[str, Any], ids: Any) -> I64:
    """Of rows that were added: those that were given, or those that the daemon chose. Raises ServiceError where the
    answer has none."""

    def read(chosen: Any) -> I64:
        if chosen is None and ids is not None:
            return check_ids("ids", ids)
        return check_ids("ids", chosen)

    return _field_of(answer, ("ids",), read)


def add_documents_call(
    documents: Iterable[Mapping[str, Any]], *, words: int | None, key: str | None
) -> Call[dict[str, Any]]:
    """Adds documents, or replaces those of the same sources. Sent twice, it does so once.

    Args:
        documents: each with ``source`` and ``text``, and maybe ``title``, ``format`` and ``metadata``.
        words: most words of a chunk.
        key: the same for all attempts; None: one of its own.

    Raises:
        InvalidInputError: something cannot be sent.
    """
    given = [dict(each) if isinstance(each, Mapping) else each for each in documents]
    for number, each in enumerate(given):
        if not isinstance(each, dict):
            raise InvalidInputError(f"documents[{number}] is a {type(each).__name__}; expected a mapping")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"documents hold values that JSON cannot represent ({error})") from None
    asked = Call(method="POST", path="/v1/documents", read=_documents_of, is_change=True)
    asked = _with_json(asked, {"documents": given, "words": words})
    return replace(asked, headers={**asked.headers, "idempotency-key": _key_of(key)})


def _documents_of(body: bytes) -> dict[str, Any]:
    answer = object_of(body)
    _field_of(answer, ("sources",), _of_type(dict))
    return answer


def delete_documents_call(sources: Iterable[str], *, key: str | None) -> Call[dict[str, Any]]:
    """Removes documents by their sources. Sent twice, it does so once. ``key``: as of :func:`add_documents_call`."""
    if isinstance(sources, str):
        raise InvalidInputError(f"sources is {sources!r}; expected a list of texts")
    asked = Call(method="POST", path="/v1/documents/delete", read=object_of, is_change=True)
    asked = _with_json(asked, {"sources": list(sources)})
    return replace(asked, headers={**asked.headers, "idempotency-key": _key_of(key)})


def compact_call(*, wait: bool) -> Call[dict[str, Any]]:
    """Sent twice, it finds nothing to do."""
    return _with_json(Call(method="POST", path="/v1/compact", read=object_of, is_change=True), {"wait": wait})


def _key_of(given: str | None) -> str:
    if given is None:
        return uuid.uuid4().hex
    if not isinstance(given, str) or not re.fullmatch("[!-~]{1,128}", given):
        raise InvalidInputError(f"idempotency_key is {given!r}; expected 1..128 visible ASCII characters")
    return given


def drain_call() -> Call[None]:
    return Call(method="POST", path="/v1/drain", read=nothing, of_daemon=True, status=202)


def indexes_call() -> Call[dict[str, Any]]:
    return Call(method="GET", path="/v1/indexes", read=object_of, of_daemon=True)


def open_session_call(*, lookahead_bytes: int | None, window_ms: float | None) -> Call[str]:
    """The answer is the session's name. Sent twice, it opens two sessions."""
    asked = Call(method="POST", path="/v1/sessions", read=_session_of, repeatable=False)
    return _with_json(asked, {"lookahead_bytes": lookahead_bytes, "window_ms": window_ms})


def _session_of(body: bytes) -> str:
    return _field_of(object_of(body), ("session",), _of_type(str))


def session_call(session: str) -> Call[dict[str, Any]]:
    """What lookahead did."""
    return Call(method="GET", path=_path_of(session), read=object_of)


def close_session_call(session: str) -> Call[None]:
    return Call(method="DELETE", path=_path_of(session), read=nothing, status=204)


def _path_of(session: str) -> str:
    return f"/v1/sessions/{quote(session, safe='')}"


def _queries_call(path: str, queries: Any, options: Mapping[str, Any], read: Callable[[bytes], T]) -> Call[T]:
    if not isinstance(queries, np.ndarray) or queries.dtype != np.float32 or queries.ndim not in (1, 2):
        what = f"{queries.dtype} {queries.shape}" if isinstance(queries, np.ndarray) else type(queries).__name__
        raise InvalidInputError(f"queries is {what}; expected a float32 array (d,) or (n, d)")
    rows = np.atleast_2d(queries)
    params = {"n": len(rows), "d": rows.shape[1], **{k: v for k, v in options.items() if v is not None}}
    return Call(
        method="POST",
        path=path,
        read=read,
        params=params,
        content=rows.astype("<f4", copy=False).tobytes(),
        headers={"content-type": "application/octet-stream", "accept": ANSWER_TYPE},
    )


def _plain(value: Any) -> Any:
    """A number of numpy as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _in_json(call: Call[T], rows: F32, long: Mapping[str, Any]) -> Call[T]:
    """The same with its options in the body, for what a query string is too short for."""
    given = {name: value for name, value in call.params.items() if name not in ("n", "d")}
    try:
        body = json.dumps({"queries": rows.tolist(), **given, **long}, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        raise InvalidInputError("queries or options hold NaN, infinity, or something that is not a number") from None
    headers = {**call.headers, "content-type": "application/json"}
    return replace(call, params={}, content=body.encode(), headers=headers)


def search_call(queries: Any, session: str | None, **options: Any) -> Call[SearchResult]:
    """``queries``: (d,) or (n, d) float32.

    Raises:
        InvalidInputError: ``queries`` is something else, or ids are no integers.
    """
    path = "/v1/search" if session is None else f"{_path_of(session)}/search"
    long = {name: check_ids(name, ids).tolist() for name in _ID_LISTS if (ids := options.pop(name, None)) is not None}
    if (where := options.pop("where", None)) is not None:
        if not isinstance(where, str):
            raise InvalidInputError(f"where is a {type(where).__name__}; expected a text")
        long["where"] = where
    call = _queries_call(path, queries, options, result_of)
    return _in_json(call, np.atleast_2d(queries), long) if long else call


def lookahead_call(drafts: Any, session: str, **options: Any) -> Call[None]:
    """As :func:`search_call`. Sent twice, it moves the lists once."""
    return replace(_queries_call(f"{_path_of(session)}/lookahead", drafts, options, nothing), status=202)


def recent_call(queries: Any) -> Call[dict[str, Any]]:
    """As :func:`search_call`. Sent twice, the queries would count twice."""
    return replace(_queries_call("/v1/queries/recent", queries, {}, object_of), repeatable=False)


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> HybridIndexError | None:
    """The error of an answer, or None. A redirect is one: no daemon sends any, and requests with a key follow none."""
    if status < 300:
        return None
    if status < 400:
        return ServiceError(f"the daemon's address answered {status}{_leads_to(headers)}")
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    detail = str(problem.get("detail") or f"the daemon answered {status}")
    named = _NAMED.get(str(problem.get("type", "")).rpartition(":")[2])
    if named is not None:
        return named(detail)
    if str(problem.get("type", "")).endswith(":busy-writing"):
        return BusyWritingError(detail, retry_after_s=_wait_s(headers))
    if status in (429, 503):
        return OverloadedError(detail, retry_after_s=_wait_s(headers), own_share=status == 429)
    kinds: dict[int, type[HybridIndexError]] = {
        400: InvalidInputError,
        401: AccessDeniedError,
        403: AccessDeniedError,
        408: DeadlineExceededError,
        409: ProfileError,
        413: InvalidInputError,
        415: InvalidInputError,
        504: DeadlineExceededError,
    }
    if status not in kinds:
        detail = f"{detail} (status {status}, request {problem.get('request_id', 'unknown')})"
    return kinds.get(status, ServiceError)(detail)


def _leads_to(headers: Mapping[str, str]) -> str:
    """Where a redirect leads, without what may be secret: a name, a password, a query."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(headers.get("location", ""))
        host = parts.netloc.rpartition("@")[2]
        where = (f"{parts.scheme}://{host}" if host and parts.scheme else host and f"//{host}") + parts.path
        # Of what cannot be read as an address, any part before an @ may be a password.
        if where and "@" not in where and parts.scheme in ("", "http", "https"):
            return f", which leads to {where[:200]}; give that address"
    return "; expected an answer of a daemon"


def _wait_s(headers: Mapping[str, str]) -> float:
    """Retry-After-Ms or Retry-After in seconds; 1 where neither is a number."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            seconds = unit_s * float(headers[name])
            if math.isfinite(seconds):
                return max(0.0, seconds)
    return 1.0
