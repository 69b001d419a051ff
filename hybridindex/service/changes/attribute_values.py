"""Attributes as JSON has them, as columns of the kinds that the index has: JSON knows neither dates nor integers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
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
        found = [_timestamp(name, value) for value in values] if kinds[name] == "timestamp" else values
        if kinds[name] == "int":
            found = [int(v) if isinstance(v, float) and v.is_integer() else v for v in found]
        try:
            columns[name] = pa.array(found, type=schema.field(name).type)
        except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidInputError(f"attributes hold a value in {name!r} that is no {kinds[name]}: {error}") from None
    return columns


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
