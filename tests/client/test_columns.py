"""Attributes of any table as JSON."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from hybridindex.client.columns import json_columns
from hybridindex.client.messages import rows_call
from hybridindex.errors import InvalidInputError

WHEN = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)


def test_columns_of_numpy_and_python():
    found = json_columns(
        {
            "n": np.array([1, 2]),
            "x": np.array([0.5, np.nan]),
            "b": np.array([True, False]),
            "t": [WHEN, None],
            "d": np.array(["2024-05-01", "NaT"], dtype="datetime64[D]"),
            "tags": [["a"], np.array(["b", "c"])],
        }
    )
    assert found == {
        "n": [1, 2],
        "x": [0.5, None],
        "b": [True, False],
        "t": ["2024-05-01T12:00:00+00:00", None],
        "d": ["2024-05-01T00:00:00.000000Z", None],
        "tags": [["a"], ["b", "c"]],
    }
    json.dumps(found, allow_nan=False)


def test_tables_of_pyarrow_and_pandas():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"n": [1, None], "t": pa.array([WHEN, None], pa.timestamp("us", "UTC")), "s": ["a", "b"]})
    expected = {"n": [1, None], "t": ["2024-05-01T12:00:00+00:00", None], "s": ["a", "b"]}
    assert json_columns(table) == expected
    assert json_columns(table.to_batches()[0]) == expected
    assert json_columns({"n": table["n"]}) == {"n": [1, None]}
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"n": [1.0, float("nan")], "t": [pd.Timestamp(WHEN), pd.NaT], "s": ["a", "b"]})
    assert json_columns(frame) == expected


@pytest.mark.parametrize("wrong", [[1, 2], 5, "text"])
def test_what_is_no_table_is_refused(wrong):
    with pytest.raises(InvalidInputError, match="expected a pyarrow Table"):
        json_columns(wrong)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("expected a float32 array", {"vectors": [[1.0]]}),
        ("expected a float32 array", {"vectors": np.zeros((1, 2))}),
        ("expected as many", {"ids": [1, 2]}),
        ("values that JSON cannot", {"attributes": {"a": [object()]}}),
        ("values that JSON cannot", {"attributes": {"a": [float("inf")]}}),
        ("visible ASCII", {"key": ""}),
        ("visible ASCII", {"key": "x" * 129}),
    ],
)
def test_rows_that_cannot_be_sent(words, given):
    asked = {"vectors": np.zeros((1, 2), dtype=np.float32), "ids": None, "attributes": None, **given}
    with pytest.raises(InvalidInputError, match=words):
        rows_call(**asked, replaces=False)


def test_each_call_has_a_key_of_its_own():
    made = [rows_call(np.zeros(2, dtype=np.float32), [1], None, replaces=True) for _ in range(2)]
    assert made[0].headers["idempotency-key"] != made[1].headers["idempotency-key"]
    assert made[0].content == made[1].content
