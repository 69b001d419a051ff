"""Parses request bodies and writes results. Limits are checked before memory is allocated.

A search body is JSON, little-endian float32 values (``application/octet-stream`` with ``?n=&d=``), or a ``.npy`` file
(``application/x-npy``). The query string holds the options of the last two. Answers are JSON, or the layout of
:mod:`hybridindex.answer_codec` where ``Accept`` names it or ``application/octet-stream``.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Set
from itertools import chain
from typing import Any

import numpy as np

from hybridindex.answer_codec import ANSWER_TYPE
from hybridindex.errors import InvalidInputError
from hybridindex.service.config import Limits
from hybridindex.types import F32, SearchResult

__all__ = [
    "BodyError",
    "accepts_binary",
    "check_known",
    "check_shape",
    "parse_json_object",
    "parse_number",
    "parsed_bytes",
    "read_npy",
    "read_raw",
    "read_rows",
    "short",
    "to_json_answer",
]

_NPY_HEADER = 10_000
#: Numbers in a query string: no count has twenty digits.
_DIGITS, _DECIMAL = re.compile(r"[0-9]{1,19}"), re.compile(r"[0-9.eE+-]{1,40}")


class BodyError(InvalidInputError):
    """A bad body or option, with its HTTP status."""

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        self.status = status


def short(value: Any) -> str:
    """A value for an error text."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_number(name: str, text: str) -> int | float:
    """A number in a query string. Raises BodyError."""
    # int() takes signs, spaces and underscores, and is slow for very long strings.
    try:
        if _DECIMAL.fullmatch(text):
            return int(text) if _DIGITS.fullmatch(text) else float(text)
    except ValueError:
        pass
    raise BodyError(name, f"is {short(text)}; expected a number")


def check_known(given: Mapping[str, Any], known: Set[str]) -> None:
    """Raises BodyError: a key or option is not known."""
    if unknown := given.keys() - known:
        raise BodyError(short(min(unknown)), f"is not known here; expected {', '.join(sorted(known)) or 'none'}")


def parsed_bytes(body: bytes) -> int:
    """Most bytes that the values of a JSON body take in Python, its text included."""
    # Text, and the strings in it: one byte a character, or four, and then in parts, too.
    text = (2 if body.isascii() and b"\\" not in body else 12) * len(body)
    # Beside it: a number and its place, a string, an empty list, a dictionary with one pair, each pair.
    sizes = {b",": 48, b'"': 32, b"[": 128, b"{": 256, b":": 192}
    return text + sum(size * body.count(mark) for mark, size in sizes.items())


def _refuse_constant(name: str) -> Any:
    raise BodyError("body", f"holds {name}, which is not a JSON number")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BodyError(short(twice), "is given twice; expected each key once")
    return found


def parse_json_object(body: bytes, known: Set[str], nullable: Set[str] = frozenset()) -> dict[str, Any]:
    """A JSON object with known keys only; an empty body is an empty object. ``nullable``: keys whose null is none.

    Raises:
        BodyError: not JSON, not an object, NaN or infinity, an unknown key, one given twice, or null.
    """
    if not body:
        return {}
    try:
        data = json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_each_once)
    except BodyError:
        raise
    except (ValueError, RecursionError) as error:
        raise BodyError("body", f"is not JSON ({short(str(error))})") from None
    if not isinstance(data, dict):
        raise BodyError("body", f"is a JSON {type(data).__name__}; expected an object")
    check_known(data, known)
    for name, value in data.items():
        if value is None and name not in nullable:
            raise BodyError(name, "is null; expected a value, or no such key")
    return {name: value for name, value in data.items() if value is not None}


def read_rows(value: Any, most: int, dim: int, field: str = "queries") -> F32:
    """Numbers of a JSON body as (n, dim) float32, with ``most`` rows. Raises BodyError."""
    if not isinstance(value, list) or not value:
        raise BodyError(field, f"is {short(value)}; expected a list of {dim} numbers, or a list of such lists")
    rows = value if isinstance(value[0], list) else [value]
    check_shape(len(rows), len(rows[0]) if isinstance(rows[0], list) else 0, most, dim, field)
    try:
        plain = {int, float}.issuperset(map(type, chain.from_iterable(rows)))
        with np.errstate(over="ignore"):
            array = np.array(rows, dtype=np.float32) if plain else None
    except OverflowError:
        raise BodyError(field, "holds a number that is larger than any float32") from None
    except (TypeError, ValueError):
        raise BodyError(field, f"has rows of different lengths; expected {dim} numbers each") from None
    if array is None:
        raise BodyError(field, f"holds something other than numbers; expected (n, {dim}) of them")
    return array


def check_shape(n: int, d: int, most: int, dim: int, field: str = "queries") -> None:
    """Raises BodyError: too many rows, none, or of another dimension."""
    if not 1 <= n <= most:
        raise BodyError(field, f"has {n} rows; expected 1..{most}")
    if d != dim:
        raise BodyError(field, f"has rows of {d} numbers; this index has dimension {dim}")


def read_raw(body: bytes, options: Mapping[str, str], limits: Limits, dim: int) -> F32:
    """Octets as (n, dim) float32; ``n`` and ``d`` stand in the query string. Raises BodyError."""
    d = parse_number("d", options.get("d", str(dim)))
    if not isinstance(d, int) or not 1 <= d <= 1 << 20:
        raise BodyError("d", f"is {short(d)}; expected an integer 1..{1 << 20}")
    default = str(len(body) // (4 * d))
    n = parse_number("n", options.get("n", default))
    if not isinstance(n, int) or n < 1:
        raise BodyError("n", f"is {n}; expected 1..{limits.max_queries}")
    check_shape(n, d, limits.max_queries, dim)
    if len(body) != n * d * 4:
        raise BodyError("body", f"has {len(body)} bytes; {n} x {d} float32 make {n * d * 4}")
    # The router needs native order. On a little-endian machine this copies nothing.
    return np.frombuffer(body, dtype="<f4").reshape(n, d).astype(np.float32, copy=False)


def read_npy(body: bytes, most: int, dim: int, field: str = "queries") -> F32:
    """A ``.npy`` file as (n, dim) float32, with ``most`` rows. Raises BodyError."""
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
        raise BodyError("body", f"is not a .npy file ({short(str(error))})") from None
    if dtype.kind != "f" or dtype.itemsize != 4:
        raise BodyError(field, f"has dtype {short(str(dtype))}; expected float32")
    if fortran or len(shape) not in (1, 2) or not all(type(s) is int for s in shape):
        raise BodyError(field, f"has shape {short(shape)}; expected ({dim},) or (n, {dim}) in C order")
    n, d = (1, shape[0]) if len(shape) == 1 else shape
    check_shape(n, d, most, dim, field)
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
    answer = {
        "ids": result.ids.tolist(),
        "distances": distances,
        "nprobe_used": result.nprobe_used.tolist(),
        "hit_rate": result.hit_rate.tolist(),
    }
    return answer if result.coverage is None else {**answer, "coverage": result.coverage.tolist()}
