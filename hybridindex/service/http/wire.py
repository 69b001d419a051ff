"""Parses request bodies and writes results. Limits are checked before memory is allocated.

A search body is JSON, little-endian float32 values (``application/octet-stream`` with ``?n=&d=``), or a ``.npy`` file
(``application/x-npy``). The query string holds the options of the last two. Answers are JSON, or the layout of
:mod:`hybridindex.answer_codec` where ``Accept`` names it or ``application/octet-stream``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridindex.answer_codec import ANSWER_TYPE
from hybridindex.errors import InvalidInputError
from hybridindex.service.config import Limits
from hybridindex.service.search_request import SearchRequest
from hybridindex.types import F32, SearchResult

__all__ = [
    "MIN_BANDWIDTH_SHARE",
    "MOST_BYTES",
    "BodyError",
    "LookaheadRequest",
    "accepts_binary",
    "parse_json_object",
    "parse_lookahead",
    "parse_search",
    "to_bytes",
    "to_json_answer",
]

_OPTIONS = {"k", "nprobe", "deadline_ms", "min_nprobe"}
_NPY_HEADER = 10_000
#: Largest number of bytes in an option: an exabyte.
MOST_BYTES = 10**18
#: Smallest share of the copy time for a change of the plan.
MIN_BANDWIDTH_SHARE = 0.01
#: Numbers in a query string: no count has twenty digits.
_DIGITS, _DECIMAL = re.compile(r"[0-9]{1,19}"), re.compile(r"[0-9.eE+-]{1,40}")


class BodyError(InvalidInputError):
    """A bad body or option, with its HTTP status."""

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadRequest:
    """Draft queries whose lists are to be copied to devices."""

    #: (n, d) float32.
    queries: F32
    nprobe: int | None = None
    budget_bytes: int | None = None
    window_ms: float | None = None


def parse_search(
    body: bytes, content_type: str, options: Mapping[str, str], limits: Limits, dim: int, nlist: int
) -> SearchRequest:
    """Parses a body and a query string.

    Args:
        content_type: media type without parameters, lower case.
        dim: of the index's vectors.

    Raises:
        BodyError: names the field.
    """
    queries, given = _parse(body, content_type, options, limits, dim, _OPTIONS)
    k = _count("k", given.get("k", 10), limits.max_k)
    if len(queries) * k > limits.max_answer_rows:
        raise BodyError(
            "k", f"is {k} for {len(queries)} queries; expected at most {limits.max_answer_rows} answers in all"
        )
    return SearchRequest(
        queries=queries,
        k=k,
        nprobe=_nprobe("nprobe", given, limits, nlist),
        deadline_ms=_milliseconds("deadline_ms", given),
        min_nprobe=_nprobe("min_nprobe", given, limits, nlist),
    )


def parse_lookahead(
    body: bytes, content_type: str, options: Mapping[str, str], limits: Limits, dim: int, nlist: int
) -> LookaheadRequest:
    """As :func:`parse_search`."""
    queries, given = _parse(body, content_type, options, limits, dim, {"nprobe", "budget_bytes", "window_ms"})
    budget = given.get("budget_bytes")
    return LookaheadRequest(
        queries=queries,
        budget_bytes=None if budget is None else to_bytes("budget_bytes", budget),
        nprobe=_nprobe("nprobe", given, limits, nlist),
        window_ms=_milliseconds("window_ms", given),
    )


def _milliseconds(name: str, given: Mapping[str, Any]) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < value <= 86_400_000:
        raise BodyError(name, f"is {value!r}; expected a positive number of milliseconds, a day at most")
    return float(value)


def _parse(
    body: bytes, content_type: str, options: Mapping[str, str], limits: Limits, dim: int, known: set[str]
) -> tuple[F32, dict[str, Any]]:
    if content_type == "application/json":
        data = parse_json_object(body, {"queries", *known})
        if "queries" not in data:
            raise BodyError("queries", "is missing; expected a list of numbers, or a list of such lists")
        if options:
            raise BodyError(_short(next(iter(options))), "stands in the query string; with JSON it belongs in the body")
        return _from_json(data.pop("queries"), limits, dim), data
    allowed = known | ({"n", "d"} if content_type == "application/octet-stream" else set())
    if content_type not in ("application/octet-stream", "application/x-npy"):
        raise BodyError(
            "Content-Type",
            f"is {_short(content_type)}; expected application/json, application/octet-stream or application/x-npy",
            415,
        )
    if unknown := set(options) - allowed:
        raise BodyError(_short(min(unknown)), f"is not known here; expected one of {', '.join(sorted(allowed))}")
    is_raw = content_type == "application/octet-stream"
    queries = _from_raw(body, options, limits, dim) if is_raw else _from_npy(body, limits, dim)
    return queries, {name: _parse_number(name, options[name]) for name in known if name in options}


def _nprobe(name: str, given: Mapping[str, Any], limits: Limits, nlist: int) -> int | None:
    value = given.get(name)
    return None if value is None else _count(name, value, min(nlist, limits.max_nprobe or nlist))


def _whole(value: Any) -> Any:
    """8.0 is the integer 8 to JSON Schema, and to languages that know one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value


def to_bytes(name: str, value: Any) -> int:
    """A number of bytes from a body or query string.

    Raises:
        BodyError: not an integer from 0 to :data:`MOST_BYTES`.
    """
    count = _whole(value)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_BYTES:
        raise BodyError(name, f"is {_short(value)}; expected whole bytes, 0..{MOST_BYTES}")
    return count


def _count(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BodyError(name, f"is {_short(value)}; expected an integer 1..{most}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _parse_number(name: str, text: str) -> int | float:
    # int() takes signs, spaces and underscores, and is slow for very long strings.
    if not (_DECIMAL if name.endswith("_ms") else _DIGITS).fullmatch(text):
        raise BodyError(name, f"is {_short(text)}; expected a number")
    try:
        return float(text) if name.endswith("_ms") else int(text)
    except ValueError:
        raise BodyError(name, f"is {_short(text)}; expected a number") from None


def _refuse_constant(name: str) -> Any:
    raise BodyError("body", f"holds {name}, which is no JSON number")


def parse_json_object(body: bytes, known: set[str]) -> dict[str, Any]:
    """A JSON object with known keys only; an empty body is an empty object.

    Raises:
        BodyError: not JSON, not an object, NaN or infinity, an unknown key, or null.
    """
    if not body:
        return {}
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
    except BodyError:
        raise
    except (ValueError, RecursionError) as error:
        raise BodyError("body", f"is not JSON ({_short(str(error))})") from None
    if not isinstance(data, dict):
        raise BodyError("body", f"is a JSON {type(data).__name__}; expected an object")
    unknown = sorted(set(data) - known)
    if unknown:
        raise BodyError(_short(unknown[0]), f"is not known here; expected {', '.join(sorted(known)) or 'no key'}")
    for name, value in data.items():
        if value is None:
            raise BodyError(name, "is null; expected a value, or no such key")
        data[name] = _whole(value)
    return data


def _from_json(value: Any, limits: Limits, dim: int) -> F32:
    if not isinstance(value, list) or not value:
        raise BodyError("queries", f"is {_short(value)}; expected a list of {dim} numbers, or a list of such lists")
    rows = value if isinstance(value[0], list) else [value]
    _check_shape(len(rows), len(rows[0]) if isinstance(rows[0], list) else 0, limits, dim)
    try:
        array = np.array(rows)
    except (ValueError, OverflowError):
        raise BodyError("queries", f"has rows of different lengths; expected {dim} numbers each") from None
    if array.dtype.kind not in "iuf" or array.ndim != 2:
        raise BodyError("queries", f"holds something else than numbers; expected (n, {dim}) of them")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _check_shape(n: int, d: int, limits: Limits, dim: int) -> None:
    if not 1 <= n <= limits.max_queries:
        raise BodyError("queries", f"has {n} rows; expected 1..{limits.max_queries}")
    if d != dim:
        raise BodyError("queries", f"has rows of {d} numbers; this index has dimension {dim}")


def _from_raw(body: bytes, options: Mapping[str, str], limits: Limits, dim: int) -> F32:
    d = _count("d", _parse_number("d", options.get("d", str(dim))), 1 << 20)
    default = str(len(body) // (4 * d))
    n = _parse_number("n", options.get("n", default))
    if not isinstance(n, int) or n < 1:
        raise BodyError("n", f"is {n}; expected 1..{limits.max_queries}")
    _check_shape(n, d, limits, dim)
    if len(body) != n * d * 4:
        raise BodyError("body", f"has {len(body)} bytes; {n} x {d} float32 make {n * d * 4}")
    # The router needs native order. On a little-endian machine this copies nothing.
    return np.frombuffer(body, dtype="<f4").reshape(n, d).astype(np.float32, copy=False)


def _from_npy(body: bytes, limits: Limits, dim: int) -> F32:
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=_NPY_HEADER)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream, max_header_size=_NPY_HEADER)
        else:
            raise BodyError("body", f"is .npy version {version[0]}.{version[1]}; expected 1.0 or 2.0")
    except BodyError:
        raise
    except Exception as error:  # noqa: BLE001 - its parser evaluates a literal: hostile headers raise all sorts
        raise BodyError("body", f"is not a .npy file ({_short(str(error))})") from None
    if dtype.kind != "f" or dtype.itemsize != 4:
        raise BodyError("queries", f"has dtype {_short(str(dtype))}; expected float32")
    if fortran or len(shape) not in (1, 2) or not all(isinstance(s, int) for s in shape):
        raise BodyError("queries", f"has shape {_short(shape)}; expected ({dim},) or (n, {dim}) in C order")
    n, d = (1, shape[0]) if len(shape) == 1 else shape
    _check_shape(n, d, limits, dim)
    at = stream.tell()
    if len(body) - at != n * d * 4:
        raise BodyError("body", f"has {len(body) - at} bytes after its header; {n} x {d} float32 make {n * d * 4}")
    return np.frombuffer(body, dtype=dtype, offset=at).reshape(n, d).astype(np.float32, copy=False)


def accepts_binary(accept: str) -> bool:
    """Whether ``Accept`` names a binary type; JSON is the default."""
    types = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    return bool(types & {ANSWER_TYPE, "application/octet-stream"})


def to_json_answer(result: SearchResult) -> dict[str, Any]:
    """A result as JSON values. The infinite distance of an empty place becomes null."""
    finite = np.isfinite(result.distances)
    distances = result.distances.tolist()
    if not finite.all():
        distances = [
            [d if ok else None for d, ok in zip(*row, strict=True)] for row in zip(distances, finite, strict=True)
        ]
    return {
        "ids": result.ids.tolist(),
        "distances": distances,
        "nprobe_used": result.nprobe_used.tolist(),
        "hit_rate": result.hit_rate.tolist(),
    }
