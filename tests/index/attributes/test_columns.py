"""Attributes from the tables that users have."""

from __future__ import annotations

import datetime
import decimal
import mmap
import sys
from types import SimpleNamespace

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from hybridindex.errors import InvalidInputError, MissingDependencyError
from hybridindex.index.attributes.columns import (
    MAX_ATTRIBUTES,
    as_attributes,
    describe,
    gathered,
    in_row_order,
    read_table,
)
from hybridindex.index.changes.compact import _attributes_in

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
        ({"a": [1, 2], "b": [1]}, "are not a table"),
        ({"a": [1, "x"]}, "attribute 'a' is not a column"),
        ({"a": [None]}, "attribute 'a' has no values"),
        ({"a": [{"b": 1}]}, "attribute 'a' is struct<b: int64>; expected one of int, float, string"),
        ({"a": [[1]]}, "attribute 'a' is list<item: int64>"),
        ({"a": [b"x"]}, "attribute 'a' is binary"),
        ({"a": np.array([1 << 63], np.uint64)}, "attribute 'a' is uint64 and does not fit int64"),
        ({"": [1]}, "an attribute is named ''"),
        ({"x" * 129: [1]}, "expected 1..128 characters"),
        (pa.table([[1], [2]], names=["a", "a"]), "two columns with the same name"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
        (pandas.DataFrame({"a": [1, "x"]}), "attributes are not a table"),
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


def texts_of(n, nbytes):
    """``n`` texts of as many bytes together, which take no memory before somebody reads them."""
    offsets = np.linspace(0, nbytes, n + 1).astype(np.int32)
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(mmap.mmap(-1, nbytes)))


def lists_of(n, nbytes):
    return pa.ListArray.from_arrays(pa.array(range(n + 1), pa.int32()), texts_of(n, nbytes))


@pytest.mark.parametrize("ending", ["arrow", "feather"])
def test_an_arrow_file_whose_texts_lead_out_of_its_memory_is_refused(tmp_path, ending):
    offsets = np.arange(101, dtype="<i4") * 4
    path = tmp_path / f"x.{ending}"
    pyarrow.feather.write_feather(pa.table({"a": ["text"] * 100}), path, compression="uncompressed")
    data = path.read_bytes()
    assert offsets.tobytes() in data
    path.write_bytes(data.replace(offsets.tobytes(), (offsets + (1 << 28)).tobytes()))
    with pytest.raises(InvalidInputError, match=rf"cannot be read as .{ending}: .*offset"):
        read_table(path)


@pytest.mark.parametrize("make", [texts_of, lists_of])
def test_texts_of_more_than_two_gib_are_refused_by_name(make):
    """Arrays of texts count bytes by 32 bits."""
    column = pa.chunked_array([make(64, 1 << 29)] * 4)
    for given in ({"short": [1] * 256, "long": column}, pa.table({"short": [1] * 256, "long": column})):
        with pytest.raises(InvalidInputError, match=r"attribute 'long' has more than 2 GiB of texts.*shorter values"):
            as_attributes(given)


def test_rows_are_gathered_from_several_tables():
    whole = as_attributes(
        {
            "s": ["a", None, "", "b", "c"],
            "l": [["x"], [], None, ["y", "z"], []],
            "i": [1, 2, None, 4, 5],
            "t": [DAY, None, DAY, DAY, None],
        }
    )
    parts = [whole.slice(0, 2), whole.slice(2, 0), pa.concat_tables([whole.slice(2, 1), whole.slice(3, 2)])]
    for at in ([4, 0, 2, 2, 1, 3], [3], []):
        rows = np.array(at, np.int64)
        found = gathered(parts, rows)
        assert found.schema == whole.schema
        assert found.to_pylist() == whole.take(pa.array(rows)).to_pylist()


def test_a_compaction_counts_texts_of_the_rows_that_stay():
    """Those that were deleted are not written, and do not stop it for good."""
    stored, came = ({"a": texts_of(64, 1_200 << 20)} for _ in range(2))
    attributes = SimpleNamespace(spec=SimpleNamespace(columns={"a": "string"}), columns=stored)
    index = SimpleNamespace(attributes=attributes, list_sizes=np.array([64]), count=64)
    added = SimpleNamespace(
        attributes=SimpleNamespace(table=lambda schema: pa.table(came, schema=schema)),
        sizes=np.array([64]),
        numbers=np.arange(64),
    )
    order = np.array([[0, 3], [0, 70]])
    assert (
        _attributes_in(index, order, added)["a"]
        .combine_chunks()
        .equals(pa.concat_arrays([stored["a"].take(pa.array([3])), came["a"].take(pa.array([6]))]))
    )
