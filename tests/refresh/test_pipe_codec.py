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
from hybridindex.refresh import pipe_codec
from hybridindex.refresh.pipe_codec import PipeCodec, read_frame, write_frame


class Colour(StrEnum):
    RED = "red"

    def __reduce_ex__(self, _):
        """As of Python 3.11.2, whatever this one does."""
        return getattr, (type(self), self.name)


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
    return CODEC.decode(read_frame(frame_of(value, known)), known)


@given(VALUES)
def test_values_come_back_with_their_types(value):
    found = back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_odd_numbers_come_back():
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


def test_a_map_of_a_file_comes_back_as_an_array(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9))
    found = back([np.load(tmp_path / "a.npy", mmap_mode="r")])[0]
    assert type(found) is np.ndarray
    assert found.tolist() == list(range(9))


def test_what_both_sides_know_goes_by_its_name():
    big = Pair(one=np.zeros(1000), two=1)
    assert len(frame_of((big, big), {"big": big}).data) < 200
    found = back((big, 2), {"big": big})
    assert found[0] is big
    with pytest.raises(RefreshError, match="big"):
        CODEC.decode(read_frame(frame_of(big, {"big": big})))


class Spy:
    """Its pickle calls a function when it is read."""

    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("value", [Stranger(one=1), Spy(), np.array([Stranger(one=1)]), (Stranger(one=1),) * 3])
def test_a_class_that_the_reader_does_not_name_is_not_made(value, capsys):
    frame = read_frame(frame_of({"value": value}))
    with pytest.raises(RefreshError, match=r"damaged frame.*(Stranger|print) may not travel"):
        CODEC.decode(frame)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["numpy\nload", "numpy.lib.npyio\nDataSource", "os\nsystem", "numpy_x\nndarray"])
def test_no_function_of_a_library_is_named(name):
    with pytest.raises(RefreshError, match="may not travel"):
        CODEC.decode([bytearray(f"c{name}\n.".encode())])


def test_the_largest_frame_is_a_limit_of_both_sides(monkeypatch):
    frame = bytes(frame_of(np.zeros(1000)).data)
    monkeypatch.setattr(pipe_codec, "MAX_FRAME_BYTES", 8000)
    with pytest.raises(InvalidInputError, match="larger than 8,000"):
        CODEC.encode(np.zeros(1000))
    with pytest.raises(RefreshError, match="not a frame: it claims 8,"):
        read_frame(OneByte(frame))


def test_damaged_frames_are_refused():
    data = bytes(frame_of(Pair(one=np.arange(5), two=(1, 2))).data)
    assert read_frame(OneByte()) is None
    for end in range(1, len(data)):
        with pytest.raises(RefreshError, match="ended after"):
            read_frame(OneByte(data[:end]))
    with pytest.raises(RefreshError, match="not a frame"):
        read_frame(OneByte(b"GET / HTTP/1.1\r\nHost: x\r\n"))
    with pytest.raises(RefreshError, match="not a frame"):
        read_frame(OneByte(data[:4] + b"\xff" * 16))
    with pytest.raises(RefreshError, match="not a frame"):
        read_frame(OneByte(data[:4] + bytes(4)))
    with pytest.raises(RefreshError, match=r"claims [\d,]{20,} bytes"):
        read_frame(OneByte(data[:8] + b"\xff" * 16))
    text, body = read_frame(OneByte(data))
    for wrong in ([text[:-1], body], [b"[]", body], [text.replace(b"Pair", b"Peer"), body], [text], [text, body[:8]]):
        with pytest.raises(RefreshError, match="damaged frame"):
            CODEC.decode(wrong)
