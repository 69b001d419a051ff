"""Attributes in JSON are of the kind that the index has, or refused: none becomes another value."""

from __future__ import annotations

import datetime

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.service.changes.attribute_values import columns_of

KINDS = {
    "n": "int",
    "x": "float",
    "text": "string",
    "open": "bool",
    "tags": "list of strings",
    "at": "timestamp",
}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("n", [1, None, 2.0, -(2**63)], [1, None, 2, -(2**63)]),
        ("x", [1, 2.5, None], [1.0, 2.5, None]),
        ("text", ["", None, "é"], ["", None, "é"]),
        ("open", [True, None, False], [True, None, False]),
        ("tags", [["a", "b"], [], None], [["a", "b"], [], None]),
    ],
)
def test_what_fits_stays_as_it_is(name, values, expected):
    assert columns_of({name: values}, KINDS)[name].to_pylist() == expected


def test_dates_are_of_utc_where_they_name_no_zone():
    (found,) = columns_of({"at": ["2024-05-01T12:00:00+02:00"]}, KINDS)["at"].to_pylist()
    assert found == datetime.datetime(2024, 5, 1, 10, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2021.5),
        ("n", True),
        ("n", "2021"),
        ("n", 2**63),
        ("n", 1e300),
        ("x", True),
        ("x", "1"),
        ("text", 5),
        ("open", 1),
        ("open", "true"),
        ("tags", "ab"),
        ("tags", [1]),
        ("tags", {"a": 1}),
        ("at", 5),
        ("at", "yesterday"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, value):
    with pytest.raises(InvalidInputError, match=f"in '{name}'"):
        columns_of({name: [value]}, KINDS)
