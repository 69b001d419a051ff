"""What a collection holds: texts with their metadata, and which of the metadata the index can filter by."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np

from hybridindex.errors import DuplicateIdError, InvalidInputError
from hybridindex.index.attributes.columns import ATTRIBUTE_KINDS, need, schema_of
from hybridindex.rag.documents import Document
from hybridindex.types import F32

__all__ = [
    "Hit",
    "Item",
    "check_columns",
    "column_values",
    "matrix_of",
    "metadata_json",
    "moment_of",
    "python_number",
    "refuse_twice",
]

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A text and what belongs to it."""

    text: str
    #: Of the caller; unique. None: the row id alone names it.
    key: str | None = None
    #: Row of the index; None: that of the key, or a new one.
    id: int | None = None
    source: str = ""
    #: What it is a part of: a document, a file. Parts of one can be found and deleted together.
    ref: str = ""
    #: Of the text, for who compares versions; empty: none.
    digest: bytes = b""
    #: Anything that JSON can say. Keys that are columns of the index are filtered there.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Row of the passage that follows in the same document.
    successor: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError: no text, or half of a surrogate pair, which no encoding of text has."""
        for name in ("text", "key", "source", "ref"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "key"):
                raise InvalidInputError(f"{name} is {value!r}; expected a text")
            try:
                (value or "").encode()
            except UnicodeError:
                raise InvalidInputError(f"{name} holds half of a surrogate pair, which is not text") from None

    def document(self, row: int) -> Document:
        """What a document store keeps of it, as row ``row`` of the index."""
        return Document(id=row, text=self.text, source=self.source, successor=self.successor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One result of a search."""

    item: Item
    #: As the index has it: larger is nearer for "ip", smaller for "l2".
    score: float
    nprobe_used: int


def check_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Raises InvalidInputError: a kind that no attribute has; names the column."""
    for name, kind in columns.items():
        if kind not in ATTRIBUTE_KINDS:
            raise InvalidInputError(f"column {name!r} is {kind!r}; expected one of {', '.join(ATTRIBUTE_KINDS)}")
    return dict(columns)


def column_values(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], *, refuse: bool = True) -> Any:
    """A pyarrow table with a record for each row: the metadata that are columns; None where there are no columns.

    Args:
        refuse: False: a value of another kind than its column is left out.

    Raises:
        InvalidInputError: a value of another kind than its column; names both.
    """
    if not columns:
        return None
    pa = need("pyarrow")
    schema = schema_of(columns)
    arrays = []
    for each in schema:
        kind = columns[each.name]
        values = [_fitting(each.name, kind, row.get(each.name), refuse=refuse) for row in rows]
        arrays.append(pa.array(values, type=each.type))
    return pa.table(arrays, schema=schema)


def _fitting(name: str, kind: str, value: Any, *, refuse: bool) -> Any:
    if value is None:
        return None
    value = python_number(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "int" and is_number and isinstance(value, int) and value in _INT64:
        return value
    if kind == "float" and is_number and (isinstance(value, float) or abs(value) <= sys.float_info.max):
        return float(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "timestamp" and (moment := moment_of(value)) is not None:
        return moment
    if kind == "list of strings" and isinstance(value, list | tuple | set) and all(isinstance(v, str) for v in value):
        return list(value)
    if not refuse:
        return None
    raise InvalidInputError(f"metadata {name!r} is {value!r}; the index has a column of that name, which holds {kind}")


def python_number(value: Any) -> Any:
    """A number of numpy as one of Python; all else as it is."""
    return value.item() if isinstance(value, np.integer | np.floating | np.bool_) else value


def moment_of(value: Any) -> datetime | None:
    """A time with a zone (UTC where it has none); None where it is no time."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        return None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """
    Raises:
        InvalidInputError: JSON cannot say it; names the key.
    """
    try:
        said = json.dumps(dict(metadata), ensure_ascii=False, allow_nan=True, default=_plain)
        said.encode()
    except UnicodeError:
        raise InvalidInputError("metadata hold half of a surrogate pair, which is not text") from None
    except (TypeError, ValueError, RecursionError) as error:
        for key, value in metadata.items():
            try:
                json.dumps({key: value}, default=_plain)
            except (TypeError, ValueError, RecursionError):
                raise InvalidInputError(f"metadata {key!r} is {type(value).__name__}, not JSON: {error}") from None
        raise InvalidInputError(f"metadata is not JSON: {error}") from None
    return said


def _plain(value: Any) -> Any:
    """Of what JSON has no word for: times as ISO 8601, decimals as numbers, sets as lists, numpy's numbers as
    numbers."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        return float(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "item") and not isinstance(found := value.item(), type(value)):
        if isinstance(found, float) and not math.isfinite(found):
            raise TypeError(f"{value!r} is not a JSON number")
        return found
    raise TypeError(f"a {type(value).__name__} is not JSON")


def matrix_of(vectors: Any, n: int) -> F32:
    """(n, d) float32. Raises InvalidInputError: they are something else."""
    try:
        found = np.ascontiguousarray(vectors, dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"vectors are not numbers: {error}") from None
    if n == 0 and not found.size:
        return found.reshape(0, 0)
    if found.ndim != 2 or len(found) != n or not found.shape[1]:
        raise InvalidInputError(f"vectors have shape {found.shape}; expected ({n}, d), one for each item")
    if not np.isfinite(found).all():
        raise InvalidInputError("vectors hold NaN or infinity; expected finite numbers")
    return found


def refuse_twice(what: str, values: Sequence[Any]) -> None:
    """Raises DuplicateIdError: names the first that comes twice."""
    if len(set(values)) < len(values):
        seen: set[Any] = set()
        twice = next(value for value in values if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        raise DuplicateIdError(f"{what} {twice!r} is given twice; expected each once")
