"""Values come back as they were, or not at all."""

from __future__ import annotations

import dataclasses
import io
import math
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, RefreshError
from hybridindex.refresh.pipe_codec import PipeCodec, read_frame, write_frame


class Colour(StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    one: Any
    two: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    one: int


CODEC = PipeCodec((Pair, Colour))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.just(Colour.RED),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text(), inner)
        | st.builds(Pair, one=inner, two=inner)
        | st.lists(st.builds(Pair, one=SCALARS, two=SCALARS), min_size=2).map(tuple)
    ),
    max_leaves=20,
)


class OneByte(io.RawIOBase):
    """A pipe that takes and gives a byte at a time."""

    def __init__(self, data=b""):
        self.data, self.at = bytearray(data), 0

    def write(self, data):
        self.data += data[:1]
        return 1

    def readinto(self, view):
        part = self.data[self.at : self.at + 1]
        view[: len(part)] = part
        self.at += len(part)
        return len(part)


def frame_of(value, known=None):
    stream = OneByte()
    write_frame(stream, CODEC.encode(value, known))
    return stream


def back(value, known=None):
    return CODEC.decode(*read_frame(frame_of(value, known)), known)


@given(VALUES)
def test_values_come_back_with_their_types(value):
    found = back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_numbers_that_json_does_not_know_come_back():
    found = back((math.inf, -math.inf, math.nan, np.float64(0.1), np.int32(7), np.bool_(True)))
    assert found[:2] == (math.inf, -math.inf)
    assert math.isnan(found[2])
    assert found[3:] == (0.1, 7, True)


@pytest.mark.parametrize("dtype", ["int16", "float32", "float64", "bool", "uint8", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3,), (7, 9), (2, 3, 4)])
def test_arrays_come_back_whatever_their_order(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    found = back([array, array.T, array])
    for one, other in zip(found, (array, array.T, array), strict=True):
        assert one.dtype == array.dtype
        assert np.array_equal(one, other)
        assert one.shape == other.shape


def test_what_both_sides_know_goes_by_its_name():
    big = Pair(one=np.zeros(1000), two=1)
    assert len(frame_of((big, big), {"big": big}).data) < 200
    found = back((big, 2), {"big": big})
    assert found[0] is big
    with pytest.raises(RefreshError, match="big"):
        CODEC.decode(*read_frame(frame_of(big, {"big": big})))


@pytest.mark.parametrize("value", [Stranger(one=1), object(), b"x", {1, 2}, np.array([None]), (Stranger(one=1),) * 3])
def test_other_classes_do_not_travel(value):
    with pytest.raises(InvalidInputError, match="cannot travel"):
        CODEC.encode({"value": value})


def test_a_class_that_the_reader_does_not_name_is_not_made():
    written = PipeCodec((Stranger,)).encode(Stranger(one=1))
    stream = OneByte(b"".join(written))
    with pytest.raises(RefreshError, match="Stranger"):
        CODEC.decode(*read_frame(stream))


def test_damaged_frames_are_refused():
    data = bytes(frame_of(Pair(one=np.arange(5), two=(1, 2))).data)
    assert read_frame(OneByte()) is None
    for end in range(1, len(data)):
        with pytest.raises(RefreshError, match="ended after"):
            read_frame(OneByte(data[:end]))
    with pytest.raises(RefreshError, match="no frame"):
        read_frame(OneByte(b"GET / HTTP/1.1\r\nHost: x\r\n"))
    with pytest.raises(RefreshError, match="no frame"):
        read_frame(OneByte(data[:4] + b"\xff" * 16))
    text, body = read_frame(OneByte(data))
    for wrong in (text[:-1], b"[]", text.replace(b"<i8", b"|O8"), text.replace(b"Pair", b"Peer")):
        with pytest.raises(RefreshError, match="damaged frame"):
            CODEC.decode(wrong, body)
    with pytest.raises(RefreshError, match="damaged frame"):
        CODEC.decode(text, body[:8])
    rows = bytes(frame_of((Pair(one=1, two="x"),) * 2).data)
    text, body = read_frame(OneByte(rows))
    for wrong in (
        text.replace(b'["x", "x"]', b'["x"]'),
        text.replace(b'["x", "x"]', b"7"),
        text.replace(b"[2]", b"[3]"),
    ):
        assert wrong != text
        with pytest.raises(RefreshError, match="damaged frame"):
            CODEC.decode(wrong, body)
