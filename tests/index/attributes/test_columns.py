"""Attributes from the tables that users have."""

from __future__ import annotations

import datetime
import decimal
import sys

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from hybridindex.errors import InvalidInputError, MissingDependencyError
from hybridindex.index.attributes.columns import MAX_ATTRIBUTES, as_attributes, describe, in_row_order, read_table

DAY = datetime.date(2020, 1, 31)
KINDS = [
    ([1, None, 3], "int", [1, None, 3]),
    (np.array([1, 2, 3], np.uint8), "int", [1, 2, 3]),
    (np.array([0.5, 1, 2], np.float32), "float", [0.5, 1, 2]),
    ([decimal.Decimal("0.5"), None, None], "float", [0.5, None, None]),
    (["a", None, ""], "string", ["a", None, ""]),
    (pa.array(["a", "b", "a"]).dictionary_encode(), "string", ["a", "b", "a"]),
    (pa.array(["a", "b", "a"], pa.large_string()), "string", ["a", "b", "a"]),
    (pa.chunked_array([["a"], ["b", "a"]]), "string", ["a", "b", "a"]),
    ([True, None, False], "bool", [True, None, False]),
    ([DAY, None, DAY], "timestamp", [datetime.datetime(2020, 1, 31, tzinfo=datetime.UTC), None] * 2),
    (np.array(["2020-01-31", "NaT", "2020-01-31"], "datetime64[s]"), "timestamp", None),
    ([["a", "b"], None, []], "list of strings", [["a", "b"], None, []]),
]


@pytest.mark.parametrize(("given", "kind", "values"), KINDS, ids=lambda value: str(value)[:20])
def test_columns_become_one_of_a_few_kinds(given, kind, values):
    table = as_attributes({"it": given})
    assert describe(table) == {"it": kind}
    if values is not None:
        assert table["it"].to_pylist() == values[:3]


def test_every_table_will_do():
    columns = {"a": [1, 2], "b": ["x", "y"]}
    arrow = pa.table(columns)
    for given in (columns, arrow, arrow.to_batches()[0]):
        assert as_attributes(given).to_pydict() == columns
    assert as_attributes(pandas.DataFrame(columns, index=[7, 9])).to_pydict() == columns


def test_columns_of_a_data_frame_become_the_same_kinds():
    frame = pandas.DataFrame(
        {
            "i": [1, 2],
            "s": ["a", None],
            "c": pandas.Categorical(["x", "y"]),
            "t": pandas.to_datetime(["2020-01-31", None]),
            "l": [["a"], []],
            "f": [1.5, np.nan],
            "b": [True, False],
        }
    )
    table = as_attributes(frame)
    kinds = ["int", "string", "string", "timestamp", "list of strings", "float", "bool"]
    assert describe(table) == dict(zip("isctlfb", kinds, strict=True))
    assert table["t"].to_pylist() == [datetime.datetime(2020, 1, 31, tzinfo=datetime.UTC), None]
    assert table["f"].to_pylist() == [1.5, None]
    for kept in (frame["f"].to_numpy(), frame["f"].tolist()):
        assert as_attributes({"f": kept})["f"].null_count == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2], "attributes are a list; expected a pyarrow Table"),
        ({}, "have 0 columns; expected 1..256"),
        ({str(i): [1] for i in range(MAX_ATTRIBUTES + 1)}, "have 257 columns"),
        ({"a": [1, 2], "b": [1]}, "are no table"),
        ({"a": [1, "x"]}, "attribute 'a' is no column"),
        ({"a": [None]}, "attribute 'a' has no value at all"),
        ({"a": [{"b": 1}]}, "attribute 'a' is struct<b: int64>; expected one of int, float, string"),
        ({"a": [[1]]}, "attribute 'a' is list<item: int64>"),
        ({"a": [b"x"]}, "attribute 'a' is binary"),
        ({"a": np.array([1 << 63], np.uint64)}, "attribute 'a' is uint64 and does not fit int64"),
        ({"": [1]}, "an attribute is named ''"),
        ({"x" * 129: [1]}, "expected 1..128 characters"),
        (pa.table([[1], [2]], names=["a", "a"]), "two columns of one name"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
        (pandas.DataFrame({"a": [1, "x"]}), "attributes are no table"),
        (pandas.DataFrame({"a": [{"b": 1}]}), "attribute 'a' is struct"),
    ],
)
def test_what_is_no_table_is_refused(given, message):
    with pytest.raises(InvalidInputError, match=message):
        as_attributes(given)


def test_rows_are_put_in_order_and_what_is_not_there_is_missing():
    table = in_row_order(as_attributes({"a": [1, 2, 3], "b": ["x", "y", "z"]}), np.array([2, -1, 0, 0]))
    assert table.to_pydict() == {"a": [3, None, 1, 1], "b": ["z", None, "x", "x"]}


def test_files_are_read_by_their_ending(tmp_path):
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "t.arrow")
    pyarrow.csv.write_csv(table, tmp_path / "t.csv")
    (tmp_path / "t.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n')
    for name in ("t.parquet", "t.arrow", "t.csv", "t.jsonl"):
        assert read_table(tmp_path / name).to_pydict() == table.to_pydict()
    (tmp_path / "bad.parquet").write_text("no")
    for name, message in (
        ("t.txt", "expected a file with one of the endings"),
        ("none.csv", "cannot be read as .csv"),
        ("bad.parquet", "cannot be read as .parquet"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            read_table(tmp_path / name)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match="need pyarrow: "):
        as_attributes({"a": [1]})
