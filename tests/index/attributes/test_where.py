"""Conditions on attributes: what they mean, held against sqlite; and that nothing else means anything."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.index.attributes.where import MAX_WHERE_CHARACTERS, matching
from tests.examples import examples

N = 60


def columns(seed=0):
    rng = np.random.default_rng(seed)

    def holes(values):
        return [None if rng.random() < 0.2 else value for value in values]

    texts = [["a", "ab", "b", "B%", "it's", "_"][i] for i in rng.integers(0, 6, N)]
    tags = [[["x", "y", "z"][j] for j in rng.integers(0, 3, rng.integers(0, 4))] for _ in range(N)]
    moments = [datetime.fromtimestamp(1.6e9 + 86400 * int(i), UTC) for i in rng.integers(0, 5, N)]
    return {
        "year": pa.array(holes(rng.integers(-3, 4, N).tolist()), pa.int64()),
        "score": pa.array(holes((rng.integers(-4, 5, N) / 2).tolist()), pa.float64()),
        "lang": pa.array(holes(texts), pa.string()),
        "open": pa.array(holes((rng.random(N) < 0.5).tolist()), pa.bool_()),
        "at": pa.array(holes(moments), pa.timestamp("us", "UTC")),
        "tags": pa.array(holes(tags), pa.list_(pa.string())),
        "odd name": pa.array(range(N), pa.int64()),
    }


COLUMNS = columns()


def by_sqlite(text, columns):
    plain = {name: column.to_pylist() for name, column in columns.items() if name in ("year", "score", "lang", "open")}
    with closing(sqlite3.connect(":memory:")) as store, store:
        store.execute("PRAGMA case_sensitive_like = ON")
        store.execute(f"CREATE TABLE t ({', '.join(plain)})")
        store.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(plain))})", zip(*plain.values(), strict=True))
        found = store.execute(f"SELECT rowid FROM t WHERE {text}").fetchall()
    return [row - 1 for (row,) in found]


numbers = st.sampled_from(["-3", "0", "2", "1.5", "-0.5", "1e0", "NULL"])
texts = st.sampled_from(["'a'", "'ab'", "'it''s'", "'B%'", "NULL"])
operators = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
leaves = st.one_of(
    st.tuples(st.sampled_from(["year", "score"]), operators, numbers).map(" ".join),
    st.tuples(numbers, operators, st.sampled_from(["year", "score"])).map(" ".join),
    st.tuples(st.just("lang"), operators, texts).map(" ".join),
    st.sampled_from(
        ["year < score", "score >= year", "year = year", "open", "NOT open", "open IS TRUE", "open IS FALSE"]
    ),
    st.tuples(st.sampled_from(["year", "lang", "open"]), st.sampled_from(["IS NULL", "IS NOT NULL"])).map(" ".join),
    st.tuples(numbers, numbers).map(lambda ends: f"year BETWEEN {ends[0]} AND {ends[1]}"),
    st.tuples(numbers, numbers).map(lambda ends: f"score NOT BETWEEN {ends[0]} AND {ends[1]}"),
    st.tuples(st.sampled_from(["year", "score"]), st.sampled_from(["IN", "NOT IN"]), st.lists(numbers, min_size=1)).map(
        lambda said: f"{said[0]} {said[1]} ({', '.join(said[2])})"
    ),
    st.lists(texts, min_size=1).map(lambda said: f"lang IN ({', '.join(said)})"),
    st.sampled_from(["lang LIKE 'a%'", "lang NOT LIKE '_b'", "lang LIKE '%'", "lang LIKE 'A%'"]),
)
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(lambda said: f"({said[0]} {said[1]} {said[2]})"),
        inner.map(lambda said: f"NOT ({said})"),
    ),
    max_leaves=6,
)


@examples(300)
@given(text=conditions, seed=st.integers(0, 5))
def test_a_condition_means_what_it_means_in_sql(text, seed):
    data = columns(seed)
    assert np.flatnonzero(matching(text, data)).tolist() == by_sqlite(text, data), text


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("at > '2020-09-15'", lambda row: row["at"] is not None and row["at"] > datetime(2020, 9, 15, tzinfo=UTC)),
        (
            "at >= CAST('2020-09-14T12:26:40+00:00' AS TIMESTAMP);",
            lambda row: row["at"] and row["at"].timestamp() >= 1600086400,
        ),
        ("array_length(tags) = 0", lambda row: row["tags"] is not None and len(row["tags"]) == 0),
        ("2 > array_length(tags)", lambda row: row["tags"] is not None and len(row["tags"]) < 2),
        ("year >= +3", lambda row: row["year"] is not None and row["year"] >= 3),
        ("at >= TIMESTAMP '2020-09-14T12:26:40+00:00'", lambda row: row["at"] and row["at"].timestamp() >= 1600086400),
        ("at < DATE '2020-09-15' AND at IS NOT NULL", lambda row: row["at"] and row["at"].day < 15),
        ("'x' = ANY(tags)", lambda row: row["tags"] and "x" in row["tags"]),
        ("ANY(tags) = 'x'", lambda row: row["tags"] and "x" in row["tags"]),
        (
            "array_contains(tags, 'y') AND NOT array_contains(tags, 'z')",
            lambda row: row["tags"] and "y" in row["tags"] and "z" not in row["tags"],
        ),
        ("NOT array_contains(tags, 'y')", lambda row: row["tags"] is not None and "y" not in row["tags"]),
        ("tags IS NULL", lambda row: row["tags"] is None),
        ("lang ILIKE 'A%'", lambda row: row["lang"] and row["lang"].lower().startswith("a")),
        ('"odd name" < 7', lambda row: row["odd name"] < 7),
        ("TRUE", lambda row: True),
        ("year = 9223372036854775808", lambda row: False),
        ("year < 99999999999999999999", lambda row: row["year"] is not None),
        (" AND ".join(["year <> 2"] * 250), lambda row: row["year"] is not None and row["year"] != 2),
        ("year > -9007199254740993.5", lambda row: row["year"] is not None),
        ("year = .5 OR year IN (0.5, 1.0, 1e300)", lambda row: row["year"] == 1),
        ("year >= 0.5", lambda row: row["year"] is not None and row["year"] >= 1),
        ("year <= -0.5", lambda row: row["year"] is not None and row["year"] <= -1),
        ("year <> 0.5", lambda row: row["year"] is not None),
        ("year > 1e400", lambda row: False),
        ("score < 9007199254740993", lambda row: row["score"] is not None),
        ("score IN (9007199254740993, -0.0)", lambda row: row["score"] == 0),
        (f"score < {'9' * 400}", lambda row: row["score"] is not None),
    ],
)
def test_what_sqlite_does_not_know(text, meaning):
    rows = [{name: column[i].as_py() for name, column in COLUMNS.items()} for i in range(N)]
    assert matching(text, COLUMNS).tolist() == [bool(meaning(row)) for row in rows]


def test_nan_is_a_value_that_compares_as_in_ieee_754():
    price = {"price": pa.array([1.0, 9.0, np.nan, None])}
    for text, met in (
        ("price > 5", [False, True, False, False]),
        ("NOT price > 5", [True, False, True, False]),
        ("price <> 5", [True, True, True, False]),
        ("price IS NULL", [False, False, False, True]),
    ):
        assert matching(text, price).tolist() == met


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one condition"),
        ("year = 1; DROP TABLE t", "expected one condition"),
        ("year =", "does not parse"),
        ("year = = 2", "does not parse"),
        ("country = 'de'", "names 'country', which is not an attribute; expected one of at, lang, odd name, open"),
        ("lang = en", "names 'en'.*put texts in single quotes"),
        ("t.year = 1", "t.year"),
        ("year = '1'", "expected a value for year, which is int"),
        ("lang = 1", "expected a value for lang, which is string"),
        ("lang = -'a'", "expected a value for lang"),
        ("open = 1", "expected a value for open, which is bool"),
        ("year = TRUE", "expected a value for year"),
        ("year", "a condition: year is int"),
        ("lang < year", "columns of one kind"),
        ("tags = 'x'", "array_contains\\(tags, value\\)"),
        ("tags IN ('x')", "array_contains"),
        ("array_contains(lang, 'x')", "a column of lists: lang is string"),
        ("array_contains(tags, 5)", "expected a value for tags"),
        ("array_length(lang) = 1", "a column of lists: lang is string"),
        ("array_length(tags) = 'x'", "expected a value for tags"),
        ("array_length(tags)", "expected =, <>"),
        ("year LIKE 'a'", "LIKE of a column of strings: year is int"),
        ("at > 'yesterday'", "compares at, a timestamp, with 'yesterday'"),
        ("at > 5", "expected a value for at, which is timestamp"),
        ("year + 1 = 2", "year \\+ 1"),
        ("1 = 1", "a column on one side"),
        ("year IN (SELECT 1)", "expected"),
        ("(SELECT 1) = 1", "expected =, <>"),
        ("EXISTS (SELECT 1)", "expected"),
        ("year IN UNNEST(tags)", "expected"),
        ("read_csv('/etc/passwd') = 1", "expected =, <>"),
        ("CASE WHEN open THEN open END", "expected"),
        ("year::text = 'a'", "a column on one side"),
        ("year = $1", "not an attribute"),
        ("year = ?", "expected =, <>"),
        ("lang LIKE 'a!%' ESCAPE '!'", "expected"),
        ("year = 0x1F", "expected"),
        ("year IS DISTINCT FROM 1", "expected"),
        ("SELECT 1", "expected"),
        ("open OR pg_sleep(10)", "expected"),
        ("x" * (MAX_WHERE_CHARACTERS + 1), "has 65537 characters; expected at most 65536"),
        (7, "where is a int"),
        (" AND ".join(["year <> 2"] * 300), "where has too many comparisons"),
        (" AND ".join(["lang LIKE 'a%'"] * 9), "where has too many comparisons"),
        ("array_contains(tags, 'x', 'y')", "expected"),
        ("at > CAST('2020-01-01' AS int)", "expected a value for at"),
        ("lang = '\ud800'", "cannot be compared"),
    ],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(InvalidInputError, match=message):
        matching(text, COLUMNS)


@pytest.mark.parametrize("of", ["DECIMAL(", "DATE(", "ARRAY[", "TIMESTAMP (", "IF - ", "- IF ", "STRUCT<", "MAP<"])
def test_what_would_take_the_parser_twice_as_long_with_each_word_is_refused_at_once(of):
    started = time.monotonic()
    with pytest.raises(InvalidInputError):
        matching("year = " + of * 60 + "1" + {"(": ")", "[": "]", "<": ">"}.get(of.strip()[-1], "") * 60, COLUMNS)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"a\b", 1), (r"a\b%", 1), (r"%\b", 1), (r"a\\b", 1), (r"a\\b%", 1), (r"%\\b", 1), (r"%a\\b%", 1),
        ("ab\\", None), ("ab", 0), (r"a\%", 2), (r"%\%%", 2), (r"a\_", None), ("a_", (0, 2)), (r"_\\_", 1), ("a\n%", 3),
        ("a%c", 3), ("", None), ("%", (0, 1, 2, 3)), ("%%", (0, 1, 2, 3)), ("%%%b", (0, 1)), ("a.", None),
    ],
)  # fmt: skip
def test_a_backslash_means_the_same_wherever_it_stands(pattern, found):
    columns = {"s": pa.array(["ab", "a\\b", "a%", "a\nbc", None])}
    expected = [] if found is None else [found] if isinstance(found, int) else list(found)
    assert np.flatnonzero(matching(f"s LIKE '{pattern}'", columns)).tolist() == expected


def test_columns_may_have_names_that_begin_statements():
    names = ("comment", "set", "values", "order", "date", "text", "key", "index", "end", "language", "type")
    for name in names:
        columns = {name: pa.array([1, 2])}
        assert matching(f"{name} = 1 AND NOT {name} IN (2)", columns).tolist() == [True, False]


@pytest.mark.parametrize(
    "text", ["(" * 3000 + "open" + ")" * 3000, "NOT " * 3000 + "open", "(" * 20000, "-" * 999 + "1 < year"]
)
def test_what_is_nested_deeply_is_refused_soon(text):
    started = time.monotonic()
    with pytest.raises(InvalidInputError):
        matching(text, COLUMNS)
    assert time.monotonic() - started < 60
