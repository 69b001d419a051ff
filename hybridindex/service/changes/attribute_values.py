"""Attributes as JSON has them, as columns of the kinds that the index has: JSON knows neither dates nor integers."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridindex.errors import InvalidInputError
from hybridindex.index.attributes.columns import need, schema_of

__all__ = ["columns_of"]


def columns_of(given: Mapping[str, Sequence[Any]], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Columns by name, as :meth:`hybridindex.api.Index.add` takes them. Dates are texts of ISO 8601, in UTC where they
    name no zone.

    Args:
        given: a list of values each; None is a missing value.
        kinds: what the index has, by name.

    Raises:
        InvalidInputError: names the column. A name that the index has not is left to whoever takes the columns.
    """
    pa = need("pyarrow")
    schema = schema_of(kinds)
    columns: dict[str, Any] = {}
    for name, values in given.items():
        if name not in kinds:
            columns[name] = values
            continue
        if kinds[name] == "timestamp":
            found = [_timestamp(name, value) for value in values]
        else:
            found = [_of_kind(name, kinds[name], value) for value in values]
        try:
            columns[name] = pa.array(found, type=schema.field(name).type)
        except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidInputError(f"attributes hold a value in {name!r} that is no {kinds[name]}: {error}") from None
    return columns


#: What JSON has for a kind. Arrow would take more, and change it.
_IN_JSON: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int or (type(value) is float and value.is_integer()),
    "float": lambda value: type(value) in (int, float),
    "string": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "list of strings": lambda value: (
        isinstance(value, list | tuple) and all(each is None or isinstance(each, str) for each in value)
    ),
}


def _of_kind(name: str, kind: str, value: Any) -> Any:
    if value is None:
        return None
    if not _IN_JSON[kind](value):
        raise InvalidInputError(f"attributes hold {str(value)[:40]!r} in {name!r} that is no {kind}")
    return int(value) if kind == "int" else value


def _timestamp(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        found = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"attributes hold {str(value)[:40]!r} in {name!r}; expected a date of ISO 8601, as 2024-05-01T12:00:00"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)
