from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.store.jsondata import from_json, to_json, to_json_object

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=5)
KEYS = TEXT.filter(lambda k: not k.startswith("$"))
LEAVES = st.none() | st.booleans() | st.integers(1 - 2**64, 2**64 - 1) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=8)


@given(VALUES)
def test_round_trip_through_strict_json(value: Any) -> None:
    text = json.dumps(to_json(value, "x"), allow_nan=False)
    back = from_json(json.loads(text))
    assert back == value
    assert type(back) is type(value)


def test_nan_and_infinities_survive() -> None:
    back = from_json(json.loads(json.dumps(to_json([math.nan, math.inf, -math.inf], "x"), allow_nan=False)))
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("given_value", "stored"),
    [
        (np.int64(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.bool_(True), True),
        (np.float64("inf"), {"$float": "inf"}),
        ((1, (2, 3)), [1, [2, 3]]),
        (np.str_("a"), "a"),
        (Colour.RED, "red"),
    ],
)
def test_what_becomes_of_other_scalars(given_value: object, stored: object) -> None:
    result = to_json(given_value, "x")
    assert result == stored
    assert type(result) is type(stored)


@pytest.mark.parametrize("value", [np.zeros(2), b"x", {1, 2}, object(), 1j, "a\x00b", "\ud800", 1 << 64])
def test_what_is_not_stored_is_named_by_path(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"plan\.a\[1\]"):
        to_json_object({"a": [0, value]}, "plan")


@pytest.mark.parametrize("key", [1, None, "$float", "$x", "a\x00"])
def test_keys_are_plain_strings(key: object) -> None:
    with pytest.raises(InvalidInputError, match="plan"):
        to_json_object({key: 1}, "plan")


def test_top_is_a_mapping_and_depth_is_bounded() -> None:
    with pytest.raises(InvalidInputError, match="mapping"):
        to_json_object([1], "plan")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInputError, match="nested deeper"):
        to_json(loop, "plan")


def test_unknown_marker_is_an_error() -> None:
    for marker in ({"$float": "huge"}, {"$date": "today"}, {"$float": "nan", "x": 1}, {"$float": []}):
        with pytest.raises(StoreError, match="unknown marker"):
            from_json(marker)
