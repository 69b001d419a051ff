"""Filters of other frameworks as conditions of ours: ``{"year": {"$gte": 2020}}`` to ``"year" >= 2020``.

What a framework asks becomes a small tree (:class:`Compare`, :class:`Together`), and the tree a text for ``where=``. A
comparison with a missing value is not met, and its opposite is: ``!=`` and ``not in`` find rows without a value, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridindex.errors import InvalidInputError
from hybridindex.rag.collection.items import moment_of, python_number

__all__ = ["Compare", "Condition", "Operator", "Together", "from_dict", "where_of"]

#: "has": of a list, one of its texts. "missing": no value; its value says whether that is wanted. "empty": as
#: "missing", or no text, or no texts of a list.
Operator = Literal["=", "<>", "<", "<=", ">", ">=", "in", "not in", "has", "like", "ilike", "missing", "empty"]

_OPPOSITE: dict[str, str] = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_ORDERED = ("<", "<=", ">", ">=")
_MOST_LEVELS = 50
#: LangChain's names.
_OF_DICT: dict[str, Operator] = {
    "$eq": "=",
    "$ne": "<>",
    "$lt": "<",
    "$lte": "<=",
    "$gt": ">",
    "$gte": ">=",
    "$in": "in",
    "$nin": "not in",
    "$like": "like",
    "$ilike": "ilike",
    "$contains": "has",
}


@dataclass(frozen=True, slots=True)
class Compare:
    """A column against a value, or against several."""

    name: str
    operator: Operator
    value: Any


@dataclass(frozen=True, slots=True)
class Together:
    """All of the parts, any of them, or not all of them."""

    how: Literal["and", "or", "not"]
    parts: tuple[Condition, ...]


Condition = Compare | Together


def from_dict(found: Any, _level: int = 0) -> Condition:
    """A filter in LangChain's form: ``{"lang": "en", "year": {"$gte": 2020}, "$or": [...]}``.

    Raises:
        InvalidInputError: names what is no part of it.
    """
    if _level > _MOST_LEVELS:
        raise InvalidInputError(f"filter is nested too deeply; expected at most {_MOST_LEVELS} levels")
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"filter is {found!r}; expected a dictionary, as {{'year': {{'$gte': 2020}}}}")
    parts: list[Condition] = []
    for name, value in found.items():
        if name in ("$and", "$or"):
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise InvalidInputError(f"filter has {name} of {value!r}; expected a list of filters")
            inner = tuple(from_dict(each, _level + 1) for each in value)
            parts.append(Together("and" if name == "$and" else "or", inner))
        elif name == "$not":
            given = [value] if isinstance(value, Mapping) else value
            if not isinstance(given, Sequence) or isinstance(given, str) or not given:
                raise InvalidInputError(f"filter has $not of {value!r}; expected a filter, or a list of filters")
            parts.append(Together("not", tuple(from_dict(each, _level + 1) for each in given)))
        elif not isinstance(name, str) or name.startswith("$"):
            raise InvalidInputError(f"filter has {name!r}; expected the name of a column, or one of $and, $or, $not")
        elif isinstance(value, Mapping):
            parts.extend(_of_column(name, value, _level))
        else:
            parts.append(Compare(name, "=", value))
    return parts[0] if len(parts) == 1 else Together("and", tuple(parts))


def _of_column(name: str, asked: Mapping[str, Any], level: int) -> list[Condition]:
    parts: list[Condition] = []
    for operator, value in asked.items():
        if operator == "$not" and isinstance(value, Mapping):
            parts.append(Together("not", (from_dict({name: value}, level + 1),)))
        elif operator == "$exists" and isinstance(value, bool):
            parts.append(Compare(name, "missing", not value))
        elif operator == "$between" and isinstance(value, Sequence) and len(value) == 2:
            parts += [Compare(name, ">=", value[0]), Compare(name, "<=", value[1])]
        elif operator in _OF_DICT:
            parts.append(Compare(name, _OF_DICT[operator], value))
        else:
            known = ", ".join([*_OF_DICT, "$between", "$exists", "$not"])
            raise InvalidInputError(f"filter asks {operator!r} of {value!r} for {name!r}; expected one of {known}")
    return parts


def where_of(condition: Condition, columns: Mapping[str, str]) -> str | None:
    """The text of a condition for ``where=``; None where it asks nothing.

    Args:
        columns: name and kind of each attribute of the index.

    Raises:
        InvalidInputError: it names no column, or compares what cannot be compared; says which columns there are.
    """
    if isinstance(condition, Together) and condition.how != "not" and not condition.parts:
        return None
    return _Writer(columns).of(condition, negated=False, level=0)


class _Writer:
    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = columns

    def of(self, condition: Condition, *, negated: bool, level: int) -> str:
        if level > _MOST_LEVELS:
            raise InvalidInputError(f"filter is nested too deeply; expected at most {_MOST_LEVELS} levels")
        if isinstance(condition, Compare):
            return self._compare(condition, negated)
        negated ^= condition.how == "not"
        # Not all of them: one of them not.
        all_of = (condition.how in ("and", "not")) != negated
        parts = [self.of(part, negated=negated, level=level + 1) for part in condition.parts]
        if not parts:
            raise InvalidInputError(f"filter has {condition.how!r} of nothing; expected one condition at least")
        return f"({(' AND ' if all_of else ' OR ').join(parts)})" if len(parts) > 1 else parts[0]

    def _compare(self, asked: Compare, negated: bool) -> str:
        if asked.name not in self._columns:
            known = ", ".join(f"{name} ({kind})" for name, kind in self._columns.items()) or "none"
            raise InvalidInputError(
                f"filter names {asked.name!r}, which is not a column of the index, so searches cannot filter by it; "
                f"its columns are: {known}"
            )
        name, kind, operator, value = _quoted(asked.name), self._columns[asked.name], asked.operator, asked.value
        if operator == "missing":
            return f"{name} IS NULL" if bool(value) != negated else f"{name} IS NOT NULL"
        if operator == "empty":
            negated ^= not value
            of_nothing = {"string": f"{name} {{}} ''", "list of strings": f"array_length({name}) {{}} 0"}.get(kind)
            if of_nothing is None:
                return f"{name} IS NOT NULL" if negated else f"{name} IS NULL"
            return of_nothing.format("<>") if negated else f"({name} IS NULL OR {of_nothing.format('=')})"
        if operator in ("in", "not in"):
            if not isinstance(value, list | tuple | set | frozenset):
                raise InvalidInputError(f"filter asks whether {asked.name!r} is in {value!r}; expected a list")
            return self._among(asked.name, kind, list(value), outside=(operator == "not in") != negated)
        if value is None:
            if operator not in ("=", "<>"):
                raise InvalidInputError(f"filter asks {operator} None of {asked.name!r}; expected a value")
            return f"{name} IS NULL" if (operator == "=") != negated else f"{name} IS NOT NULL"
        if kind == "list of strings":
            if operator in _ORDERED or operator in ("like", "ilike"):
                raise InvalidInputError(f"filter asks {operator} of {asked.name!r}, a list of strings")
            return self._among(asked.name, kind, [value], outside=(operator == "<>") != negated)
        if operator == "has":
            raise InvalidInputError(
                f"filter asks what {asked.name!r} contains, and it is {kind}, not a list of strings"
            )
        if operator in ("like", "ilike"):
            found = f"{name} {operator.upper()} {self._value(asked.name, kind, value)}"
            return f"(NOT {found} OR {name} IS NULL)" if negated else found
        written = _OPPOSITE[operator] if negated else operator
        found = f"{name} {written} {self._value(asked.name, kind, value)}"
        # What is missing is not equal, not less and not greater: of a negation, that is wanted.
        return f"({found} OR {name} IS NULL)" if negated != (operator == "<>") else found

    def _among(self, name: str, kind: str, values: list[Any], *, outside: bool) -> str:
        quoted = _quoted(name)
        known = [self._value(name, kind, value) for value in values if value is not None]
        parts = []
        if kind == "list of strings":
            parts += [f"array_contains({quoted}, {value})" for value in known]
        elif known:
            parts.append(f"{quoted} IN ({', '.join(known)})")
        with_missing = None in values
        if not parts and not with_missing:
            # Nothing is in an empty list.
            return f"({quoted} IS NULL {'OR' if outside else 'AND'} {quoted} IS NOT NULL)"
        if not outside:
            found = [*parts, *([f"{quoted} IS NULL"] if with_missing else [])]
            return f"({' OR '.join(found)})" if len(found) > 1 else found[0]
        without = " AND ".join(f"NOT {part}" for part in parts)
        if with_missing:
            return f"({without} AND {quoted} IS NOT NULL)" if without else f"{quoted} IS NOT NULL"
        return f"({without} OR {quoted} IS NULL)" if len(parts) == 1 else f"(({without}) OR {quoted} IS NULL)"

    def _value(self, name: str, kind: str, value: Any) -> str:
        value = python_number(value)
        if kind in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidInputError(f"filter compares {name!r} with {value}; expected a finite number")
            return f"{value:d}" if isinstance(value, int) else _decimal(value)
        if kind == "bool" and isinstance(value, bool):
            return "TRUE" if value else "FALSE"
        if kind in ("string", "list of strings") and isinstance(value, str):
            return _text(value)
        if kind == "timestamp" and (moment := moment_of(value)) is not None:
            return f"TIMESTAMP {_text(moment.isoformat())}"
        raise InvalidInputError(f"filter compares {name!r}, which holds {kind}, with {value!r}")


def _decimal(value: float) -> str:
    """Without an exponent where that is short."""
    return format(value, "f") if value == round(value, 6) and abs(value) < 1e15 else repr(value)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
