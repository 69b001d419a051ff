"""Plain data to JSON values and back.

- numpy scalars become Python numbers; tuples become lists (and stay lists);
- NaN and the infinities, which JSON does not know and PostgreSQL refuses, become ``{"$float": "nan" | "inf" | "-inf"}``
  and come back as floats; keys that begin with ``$`` are reserved for this;
- keys must be strings; arrays, bytes, sets, dates and other objects are refused by the path at which they stand.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.store.checks import is_storable_text

__all__ = ["from_json", "to_json", "to_json_object"]

_FLOAT: Final = "$float"
_NAMES: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DEPTH: Final = 64


def to_json_object(value: object, where: str) -> dict[str, Any]:
    """Like :func:`to_json` for a mapping at the top."""
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{where}: {type(value).__name__} given, a mapping is needed")
    result: dict[str, Any] = to_json(value, where)
    return result


def to_json(value: object, where: str, *, _depth: int = 0) -> Any:
    """A copy of ``value`` made of what strict JSON can say.

    Raises:
        InvalidInputError: something that is not stored, named by its path below ``where``.
    """
    if _depth > _MAX_DEPTH:
        raise InvalidInputError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) >= 1 << 64:
            raise InvalidInputError(f"{where}: an integer of more than 64 bits cannot be stored")
        return int(value)
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, Mapping):
        return {_key(k, where): to_json(v, f"{where}.{k}", _depth=_depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v, f"{where}[{i}]", _depth=_depth + 1) for i, v in enumerate(value)]
    hint = "; arrays go into the record's arrays" if isinstance(value, np.ndarray) else ""
    raise InvalidInputError(f"{where}: {type(value).__name__} cannot be stored as JSON{hint}")


def _text(value: str, where: str) -> str:
    if not is_storable_text(value):
        raise InvalidInputError(f"{where}: {value!r} holds a NUL or a lone surrogate, which text columns cannot hold")
    return str(value)


def _key(key: object, where: str) -> str:
    if not isinstance(key, str) or key.startswith("$"):
        raise InvalidInputError(f"{where}: key {key!r} must be a string that does not begin with '$'")
    return _text(key, where)


def from_json(value: Any) -> Any:
    """Undo :func:`to_json` (tuples stay lists).

    Raises:
        StoreError: a ``$`` key that this version does not know.
    """
    if isinstance(value, dict):
        if _FLOAT in value or any(k.startswith("$") for k in value):
            name = value.get(_FLOAT)
            if len(value) != 1 or not isinstance(name, str) or name not in _NAMES:
                raise StoreError(f"stored JSON holds the unknown marker {value!r}")
            return _NAMES[name]
        return {k: from_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_json(v) for v in value]
    return value
