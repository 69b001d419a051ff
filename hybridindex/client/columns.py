"""Attributes as JSON: lists of values from whatever tables users have, without their packages."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError

__all__ = ["json_columns"]


def json_columns(table: Any) -> dict[str, list[Any]]:
    """Name -> values. Dates become texts of ISO 8601; NaN and what is missing become None.

    Args:
        table: a mapping of names to columns, a pyarrow Table or RecordBatch, or a pandas DataFrame.

    Raises:
        InvalidInputError: it is something else.
    """
    if hasattr(table, "to_pydict"):
        table = table.to_pydict()
    elif type(table).__module__.partition(".")[0] == "pandas":
        table = {name: table[name] for name in table.columns}
    if not isinstance(table, Mapping):
        raise InvalidInputError(
            f"attributes are a {type(table).__name__}; expected a pyarrow Table, a DataFrame or a mapping of columns"
        )
    return {str(name): [_plain(value) for value in column] for name, column in table.items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "as_py"):  # a scalar of pyarrow
        value = value.as_py()
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else f"{value.astype('datetime64[us]')}Z"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, datetime.date):  # datetimes are dates
        # pandas' NaT says that it is one, and is no day.
        return None if value != value else value.isoformat()
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(each) for each in value]
    return value
