"""Conditions on attributes: ``lang = 'en' AND year >= 2020``.

sqlglot parses; only the kinds of its tree that stand in this file mean anything, everything else is refused. pyarrow
computes. No SQL engine runs, so that a condition from anywhere can read nothing but the columns that it is given. Words
in an order that no condition has never reach the parser: of some (types within types) its time doubles with each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.index.attributes.columns import ATTRIBUTE_KINDS, need

__all__ = ["MAX_WHERE_CHARACTERS", "matching"]

MAX_WHERE_CHARACTERS = 1 << 16
#: Conditions within conditions.
_MOST_DEPTH = 100
#: Passes over a column that one condition may take, and how many LIKE counts for.
_MOST_PASSES, _LIKE_PASSES = 256, 32
_INT64 = range(-(1 << 63), 1 << 63)
_TIMES = {"TIMESTAMP", "TIMESTAMPTZ", "DATETIME", "DATE"}
_EXPECTED = (
    "=, <>, <, <=, >, >=, BETWEEN, IN (...), LIKE, ILIKE, IS [NOT] NULL, IS TRUE, array_contains(column, value), "
    "value = ANY(column), array_length(column), AND, OR and NOT, of columns and plain values"
)
#: Of a comparison with its sides exchanged.
_MIRRORED = {"LT": "GT", "GT": "LT", "LTE": "GTE", "GTE": "LTE", "EQ": "EQ", "NEQ": "NEQ"}
_COMPARE = {
    "EQ": "equal",
    "NEQ": "not_equal",
    "LT": "less",
    "LTE": "less_equal",
    "GT": "greater",
    "GTE": "greater_equal",
}


#: Names of sqlglot's tokens: what joins values, and what are some; other values are words.
_JOINING = {*_COMPARE, "COMMA", "DOT", "ALIAS", "DCOLON", "AND", "OR", "NOT", "IN", "IS", "LIKE", "ILIKE", "BETWEEN"}
_SIGNS = {"DASH", "PLUS"}
_LITERALS, _NAMES = {"STRING", "NUMBER"}, {"VAR", "IDENTIFIER"}
#: Words behind which a parenthesis opens.
_CALLED = {"any", "array_contains", "array_has", "array_length", "cast"}


def matching(text: str, columns: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Of which rows a condition is true: (n,) bool. As in SQL, one that compares with a missing value is not.

    Args:
        columns: name -> pyarrow array of one of :data:`hybridindex.index.attributes.columns.ATTRIBUTE_KINDS`, all of
            one length.

    Raises:
        InvalidInputError: it does not parse, names no column, compares what cannot be compared, or holds anything else.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f"where is a {type(text).__name__}; expected a text, as lang = 'en' AND year >= 2020")
    if len(text) > MAX_WHERE_CHARACTERS:
        raise InvalidInputError(f"where has {len(text)} characters; expected at most {MAX_WHERE_CHARACTERS}")
    sqlglot = need("sqlglot")
    try:
        dialect = sqlglot.Dialect.get_or_raise(None)
        tokens = dialect.tokenize(text)
        _check_order(text, tokens)
        # Not as a statement, which begins with words that may name columns.
        trees = dialect.parser().parse_into(sqlglot.exp.Condition, tokens, text)
        if len(trees) != 1 or trees[0] is None:
            raise _refused(text, "one condition")
        found = _Condition(columns).of(trees[0], 0)
    except sqlglot.errors.SqlglotError as error:
        cause = error.__cause__ or error  # which tells of the condition, and not of its class
        first = str(cause).partition("\n")[0]
        raise InvalidInputError(f"where does not parse: {first}; expected {_EXPECTED}") from None
    except (need("pyarrow").ArrowException, OverflowError, UnicodeError) as error:
        raise InvalidInputError(f"where holds a value that cannot be compared: {error}") from None
    except RecursionError:
        # Which are more than one call of the parser's each.
        raise InvalidInputError(
            f"where is nested too deeply; expected at most {_MOST_DEPTH} levels (half as many for parentheses)"
        ) from None
    pc = need("pyarrow.compute")
    result: npt.NDArray[np.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return result


def _check_order(text: str, tokens: Sequence[Any]) -> None:
    """Raises InvalidInputError: there is a sign that no condition has, or two values with nothing between them."""
    if not tokens or any(token.token_type.name == "SEMICOLON" for token in tokens[:-1]):
        raise _refused(text, "one condition")
    #: Where the last token begins, what it is if it is a word, and whether it ends a value.
    start, word, has_ended = 0, "", False
    for token in tokens:
        kind, before = token.token_type.name, word
        is_word = kind in _NAMES or (kind not in _JOINING and token.text[:1].isalpha())
        word = token.text.lower() if is_word and kind not in _LITERALS else ""
        if kind in _LITERALS or word:
            # As TIMESTAMP '2020-01-31' is one.
            fits = not has_ended or (kind == "STRING" and before != "")
        elif kind == "L_PAREN":
            fits = not has_ended or before in _CALLED
        else:
            fits = kind in _JOINING or kind in ("R_PAREN", "SEMICOLON") or (kind in _SIGNS and not has_ended)
        if not fits:
            raise _refused(text[start:], _EXPECTED)
        start, has_ended = token.start, kind in _LITERALS or word != "" or kind == "R_PAREN"


def _refused(part: Any, expected: str) -> InvalidInputError:
    said = part if isinstance(part, str) else part.sql()
    shown = said if len(said) <= 80 else f"{said[:77]}..."
    return InvalidInputError(f"where holds {shown!r}; expected {expected}")


class _Condition:
    """Computes trees over the columns of one index: pyarrow arrays of true, false and null."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self._pa, self._pc = need("pyarrow"), need("pyarrow.compute")
        self._passes = 0
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "And": self._both,
            "Or": self._both,
            "Not": self._not,
            "Paren": lambda tree, depth: self.of(tree.this, depth),
            "Column": self._flag,
            "Boolean": lambda tree, _depth: self._constant(bool(tree.this)),
            "Between": self._between,
            "In": self._in,
            "Is": self._is,
            "Like": self._like,
            "ILike": self._like,
            "ArrayContains": self._array_contains,
            **dict.fromkeys(_COMPARE, self._compare),
        }

    def of(self, tree: Any, depth: int) -> Any:
        kind = type(tree).__name__
        if depth > _MOST_DEPTH:
            raise RecursionError
        if kind not in self._kinds:
            raise _refused(tree, _EXPECTED)
        if kind not in ("And", "Or", "Not", "Paren"):
            self._passes += _LIKE_PASSES if "Like" in kind else 1
            if self._passes > _MOST_PASSES:
                raise InvalidInputError(
                    f"where has too many comparisons; expected at most {_MOST_PASSES} of them; LIKE counts for "
                    f"{_LIKE_PASSES}: IN (...) is one, and allow_ids takes ids"
                )
        return self._kinds[kind](tree, depth + 1)

    def _only(self, tree: Any, *names: str) -> None:
        """Raises where a tree says more than its parts of these names."""
        if any(value for name, value in tree.args.items() if name not in names):
            raise _refused(tree, _EXPECTED)

    # What is true and false

    def _both(self, tree: Any, depth: int) -> Any:
        # A chain leans to the left, and may be long.
        kind, parts = type(tree), []
        while isinstance(tree, kind):
            self._only(tree, "this", "expression")
            parts.append(tree.expression)
            tree = tree.this
        combine = self._pc.and_kleene if kind.__name__ == "And" else self._pc.or_kleene
        found = self.of(tree, depth)
        for part in reversed(parts):
            found = combine(found, self.of(part, depth))
        return found

    def _not(self, tree: Any, depth: int) -> Any:
        self._only(tree, "this")
        return self._pc.invert(self.of(tree.this, depth))

    def _constant(self, value: bool) -> Any:
        n = len(next(iter(self._columns.values()), ()))
        return self._pa.array(np.full(n, value))

    def _flag(self, tree: Any, _depth: int) -> Any:
        name, column = self._column(tree)
        if not self._pa.types.is_boolean(column.type):
            raise _refused(tree, f"a condition: {name} is {self._kind(column)}")
        return column

    # What compares

    def _compare(self, tree: Any, _depth: int) -> Any:
        self._only(tree, "this", "expression")
        kind, left, right = type(tree).__name__, tree.this, tree.expression
        for list_side, value in ((right, left), (left, right)):
            if type(list_side).__name__ == "Any" and kind == "EQ":
                column = list_side.this
                return self._contains(column.this if type(column).__name__ == "Paren" else column, value)
        if type(right).__name__ == "ArraySize":
            kind, left, right = _MIRRORED[kind], right, left
        if type(left).__name__ == "ArraySize":
            name, lengths = self._lengths(left)
            return self._against(lengths, kind, self._value(right, name, lengths))
        if type(left).__name__ != "Column":
            if type(right).__name__ != "Column":
                raise _refused(tree, "a column on one side of a comparison, and on the other a plain value")
            kind, left, right = _MIRRORED[kind], right, left
        name, column = self._column(left)
        if type(right).__name__ == "Column":
            other_name, other = self._column(right)
            if column.type != other.type and not (_is_number(self._pa, column) and _is_number(self._pa, other)):
                raise _refused(
                    tree, f"columns of one kind: {name} is {self._kind(column)}, {other_name} {self._kind(other)}"
                )
            self._refuse_lists(tree, name, column)
            if column.type != other.type:
                column, other = (self._pc.cast(each, self._pa.float64(), safe=False) for each in (column, other))
            return getattr(self._pc, _COMPARE[kind])(column, other)
        self._refuse_lists(tree, name, column)
        return self._against(column, kind, self._value(right, name, column))

    def _lengths(self, tree: Any) -> tuple[str, Any]:
        """Of the lists of a column."""
        self._only(tree, "this")
        name, column = self._column(tree.this)
        if not self._pa.types.is_list(column.type):
            raise _refused(tree, f"a column of lists: {name} is {self._kind(column)}")
        return name, self._pc.cast(self._pc.list_value_length(column), self._pa.int64())

    def _against(self, column: Any, kind: str, value: Any) -> Any:
        """Compares a column with a value, or with None, which is missing."""
        if value is not None and self._pa.types.is_int64(column.type):
            whole = math.floor(value) if math.isfinite(value) else None
            if whole is None or whole not in _INT64 or whole != value:
                # No number of the column is equal: which are below?
                below = value > 0 if whole is None or whole not in _INT64 else None
                if kind in ("EQ", "NEQ") or below is not None:
                    always = {"EQ": False, "NEQ": True, "LT": below, "LTE": below}.get(kind, not below)
                    return self._where_there(column, bool(always))
                kind, value = ("LTE", whole) if kind in ("LT", "LTE") else ("GT", whole)
            else:
                value = whole
        elif value is not None and self._pa.types.is_float64(column.type):
            value = _as_float(value)
        return getattr(self._pc, _COMPARE[kind])(column, self._pa.scalar(value, column.type))

    def _where_there(self, column: Any, value: bool) -> Any:
        """That, or missing where the column is."""
        return self._pc.if_else(self._pc.is_null(column), self._pa.scalar(None, self._pa.bool_()), value)

    def _between(self, tree: Any, _depth: int) -> Any:
        self._only(tree, "this", "low", "high")
        name, column = self._column(tree.this)
        self._refuse_lists(tree, name, column)
        low, high = (self._value(tree.args[end], name, column) for end in ("low", "high"))
        return self._pc.and_kleene(self._against(column, "GTE", low), self._against(column, "LTE", high))

    def _in(self, tree: Any, _depth: int) -> Any:
        self._only(tree, "this", "expressions")
        name, column = self._column(tree.this)
        self._refuse_lists(tree, name, column)
        values = [self._value(each, name, column) for each in tree.expressions]
        known = [value for value in values if value is not None]
        if self._pa.types.is_int64(column.type):  # no fraction is in it
            known = [
                int(value) for value in known if math.isfinite(value) and value == int(value) and int(value) in _INT64
            ]
        elif self._pa.types.is_float64(column.type):  # 0 is -0, too
            known, column = [_as_float(value) + 0.0 for value in known], self._pc.add(column, 0.0)
        found = self._pc.is_in(column, value_set=self._pa.array(known, type=column.type))
        if None in values:  # what is not among the known ones may be equal to the missing one
            found = self._pc.if_else(found, True, self._pa.scalar(None, self._pa.bool_()))
        return self._pc.if_else(self._pc.is_null(column), self._pa.scalar(None, self._pa.bool_()), found)

    def _is(self, tree: Any, depth: int) -> Any:
        self._only(tree, "this", "expression")
        kind = type(tree.expression).__name__
        if kind == "Null":
            return self._pc.is_null(self._column(tree.this)[1])
        if kind == "Boolean":
            found = self._pc.fill_null(self.of(tree.this, depth), not tree.expression.this)
            return found if tree.expression.this else self._pc.invert(found)
        raise _refused(tree, _EXPECTED)

    def _like(self, tree: Any, _depth: int) -> Any:
        self._only(tree, "this", "expression", "negate")
        name, column = self._column(tree.this)
        if not self._pa.types.is_string(column.type):
            raise _refused(tree, f"LIKE of a column of strings: {name} is {self._kind(column)}")
        pattern = self._value(tree.expression, name, column)
        if pattern is None:
            return self._pa.nulls(len(column), self._pa.bool_())
        found = self._pc.match_substring_regex(column, _regex(pattern), ignore_case=type(tree).__name__ == "ILike")
        return self._pc.invert(found) if tree.args.get("negate") else found

    def _array_contains(self, tree: Any, _depth: int) -> Any:
        self._only(tree, "this", "expression")
        return self._contains(tree.this, tree.expression)

    def _contains(self, tree: Any, value: Any) -> Any:
        name, column = self._column(tree)
        if not self._pa.types.is_list(column.type):
            raise _refused(tree, f"a column of lists: {name} is {self._kind(column)}")
        wanted = self._value(value, name, self._pa.array([], self._pa.string()))
        if wanted is None:
            return self._pa.nulls(len(column), self._pa.bool_())
        # What is missing may have values beneath it, which one of the two calls would count.
        there = self._pc.is_valid(column)
        lists, rows = column.filter(there), np.flatnonzero(there.to_numpy(zero_copy_only=False))
        hits = self._pc.fill_null(self._pc.equal(self._pc.list_flatten(lists), wanted), False)
        of = self._pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
        found = np.zeros(len(column), dtype=np.bool_)
        found[rows[of[hits.to_numpy(zero_copy_only=False)]]] = True
        return self._pc.if_else(self._pc.is_null(column), self._pa.scalar(None, self._pa.bool_()), found)

    # Columns and values

    def _column(self, tree: Any) -> tuple[str, Any]:
        if type(tree).__name__ != "Column":
            raise _refused(tree, "a column here")
        self._only(tree, "this")
        name = tree.this.this
        if name not in self._columns:
            known = ", ".join(sorted(self._columns)) or "none"
            raise InvalidInputError(
                f"where names {name!r}, which is not an attribute; expected one of {known} (put texts in single quotes)"
            )
        return name, self._columns[name]

    def _kind(self, column: Any) -> str:
        return next(name for name, is_kind in ATTRIBUTE_KINDS.items() if is_kind(self._pa, column.type))

    def _refuse_lists(self, tree: Any, name: str, column: Any) -> None:
        if self._pa.types.is_list(column.type):
            raise _refused(tree, f"array_contains({name}, value): {name} is a list of strings")

    def _value(self, tree: Any, name: str, column: Any) -> Any:
        """What the column can be compared with: a number, a text, a bool or a time; None: missing."""
        types, kind, sign = self._pa.types, type(tree).__name__, 1
        while kind in ("Neg", "Paren"):
            sign, tree = (-sign if kind == "Neg" else sign), tree.this
            kind = type(tree).__name__
        if kind == "Null":
            return None
        if kind == "Boolean" and types.is_boolean(column.type):
            return bool(tree.this)
        if kind == "Cast" and types.is_timestamp(column.type) and tree.to.this.name in _TIMES:
            tree, kind = tree.this, type(tree.this).__name__
        if kind == "Literal" and tree.is_string and sign == 1:
            if types.is_string(column.type):
                return tree.this
            if types.is_timestamp(column.type):
                return _moment(tree.this, name)
        if kind == "Literal" and not tree.is_string and _is_number(self._pa, column):
            return sign * _number(tree)
        raise _refused(tree, f"a value for {name}, which is {self._kind(column)}")


def _regex(pattern: str) -> str:
    """A pattern of LIKE for RE2: Arrow's own takes a backslash in one way or another, by where it stands."""
    parts = re.findall(r"\\[%_\\]|[\s\S]", pattern)
    # What is found anywhere is found fast where it is a text, and slowly where it is any so many characters.
    bare = "_" not in parts
    first, last = bare and parts[:1] == ["%"], bare and len(parts) > 1 and parts[-1] == "%"
    of = {"%": ".*", "_": "."}
    said = [of.get(part) or re.escape(part[-1]) for part in parts[first : len(parts) - last]]
    return "(?s)" + "^" * (not first) + "".join(said) + "$" * (not last)


def _number(tree: Any) -> int | float:
    try:
        return int(tree.this) if tree.this.isdecimal() else float(tree.this)
    except ValueError:
        raise _refused(tree, "a number") from None


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_number(pa: Any, column: Any) -> bool:
    return bool(pa.types.is_int64(column.type) or pa.types.is_float64(column.type))


def _moment(text: str, name: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"where compares {name}, a timestamp, with {text[:80]!r}; expected a date, as 2020-01-31 or "
            "2020-01-31T10:00:00+01:00"
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
