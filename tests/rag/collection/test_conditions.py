"""Filters of frameworks as conditions: what they mean is what plain Python says of the same values."""

from __future__ import annotations

import operator
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.index.attributes.where import matching
from hybridindex.rag.collection.conditions import Compare, Together, from_dict, where_of
from hybridindex.rag.collection.items import column_values

COLUMNS = {
    "n": "int",
    "x": "float",
    "s": "string",
    "b": "bool",
    "t": "timestamp",
    "l": "list of strings",
    'a "b" c': "int",
}
AT = datetime(2024, 1, 2, 3, tzinfo=UTC)
ROWS = [
    {},
    {"n": 1, "x": 0.5, "s": "it's", "b": True, "t": AT, "l": ["a", "it's"], 'a "b" c': 3},
    {"n": -2, "x": -1e30, "s": 'say "no" \\ %', "b": False, "t": "2023-05-06", "l": []},
    {"n": 1 << 40, "x": 1e-9, "s": "", "l": ["b"]},
    {"n": 0, "s": "ünï\n--", "l": ["a", "b"], "b": True},
]
TABLE = column_values(COLUMNS, ROWS)
VALUES = {
    "n": st.sampled_from([1, -2, 0, 7, 1 << 40, 0.5]),
    "x": st.sampled_from([0.5, -1e30, 1e-9, 0, 3]),
    "s": st.sampled_from(["it's", 'say "no" \\ %', "", "ünï\n--", "'; --"]),
    "b": st.booleans(),
    "t": st.sampled_from([AT, "2023-05-06", "2024-01-02T04:00:00+01:00"]),
    'a "b" c': st.sampled_from([3, 4]),
}
_ORDERED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def means(condition, row):
    if isinstance(condition, Together):
        met = [means(part, row) for part in condition.parts]
        return {"and": all(met), "or": any(met), "not": not all(met)}[condition.how]
    value, asked = plain(row.get(condition.name)), condition.value
    if condition.operator in ("in", "not in"):
        return (value in [plain(each) for each in asked]) == (condition.operator == "in")
    if condition.operator == "has":
        return value is not None and asked in value
    if condition.operator == "missing":
        return (value is None) == asked
    if condition.operator == "empty":
        return (value in (None, "", [])) == asked
    if condition.operator in ("=", "<>"):
        return (value == plain(asked)) == (condition.operator == "=")
    return value is not None and _ORDERED[condition.operator](value, plain(asked))


def plain(value):
    if isinstance(value, str) and value[:4] in ("2023", "2024"):
        value = datetime.fromisoformat(value)
        value = value if value.tzinfo else value.replace(tzinfo=UTC)
    return value


@st.composite
def compares(draw):
    name = draw(st.sampled_from(sorted(VALUES)))
    how = draw(st.sampled_from(["=", "<>", "in", "not in", "missing", "empty", *([] if name in "bs" else _ORDERED)]))
    if how in ("missing", "empty"):
        return Compare(name, how, draw(st.booleans()))
    if how in ("in", "not in"):
        return Compare(name, how, draw(st.lists(st.none() | VALUES[name], max_size=3)))
    return Compare(name, how, draw(VALUES[name] if how in _ORDERED else st.none() | VALUES[name]))


conditions = st.recursive(
    compares()
    | st.builds(Compare, st.just("l"), st.just("has"), st.sampled_from(["a", "b", "it's"]))
    | st.builds(Compare, st.just("l"), st.just("empty"), st.booleans()),
    lambda inner: st.builds(
        Together, st.sampled_from(["and", "or", "not"]), st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@given(conditions)
def test_a_condition_means_what_it_says(condition):
    text = where_of(condition, COLUMNS)
    found = matching(text, {name: TABLE[name].combine_chunks() for name in TABLE.column_names})
    assert found.tolist() == [means(condition, row) for row in ROWS], text


def test_dictionaries_are_the_same_in_short():
    for asked, expected in (
        ({"n": 1}, Compare("n", "=", 1)),
        ({"n": {"$gte": 1, "$lt": 2}}, Together("and", (Compare("n", ">=", 1), Compare("n", "<", 2)))),
        ({"n": {"$between": [1, 2]}}, Together("and", (Compare("n", ">=", 1), Compare("n", "<=", 2)))),
        ({"$or": [{"n": 1}, {"s": {"$in": ["a"]}}]}, Together("or", (Compare("n", "=", 1), Compare("s", "in", ["a"])))),
        ({"$not": [{"n": 1}]}, Together("not", (Compare("n", "=", 1),))),
        ({"s": {"$exists": False}}, Compare("s", "missing", True)),
    ):
        assert from_dict(asked) in (expected, Together("and", (expected,)))
    assert where_of(from_dict({}), COLUMNS) is None


def test_what_is_nested_too_deeply_is_an_error():
    asked = {"n": 1}
    for _ in range(200):
        asked = {"$not": asked}
    with pytest.raises(InvalidInputError, match="too deeply"):
        from_dict(asked)


def test_values_that_fit_no_column():
    assert column_values({}, ROWS) is None
    for row, complaint in (
        ({"n": 0.5}, "'n' is 0.5; the index has a column of that name, which holds int"),
        ({"n": True}, "holds int"),
        ({"n": 1 << 70}, "holds int"),
        ({"t": "today"}, "holds timestamp"),
        ({"l": "a"}, "holds list of strings"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            column_values(COLUMNS, [row])
    assert column_values({"x": "float"}, [{"x": 1}, {}]).column("x").to_pylist() == [1.0, None]
    assert isinstance(TABLE, pa.Table)


def test_numbers_of_numpy_are_numbers():
    row = {"n": np.int32(7), "x": np.float32(0.5), "b": np.bool_(True)}
    assert (
        column_values(COLUMNS, [row]).to_pylist() == column_values(COLUMNS, [{"n": 7, "x": 0.5, "b": True}]).to_pylist()
    )
    for name, value in row.items():
        assert where_of(Compare(name, "=", value), COLUMNS) == where_of(Compare(name, "=", value.item()), COLUMNS)
    with pytest.raises(InvalidInputError, match=r"'n' is 0\.5"):
        column_values(COLUMNS, [{"n": np.float64(0.5)}])
