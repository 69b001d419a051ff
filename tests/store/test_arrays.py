from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.store.arrays import decode_array, encode_array

DTYPES = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
)
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)))


def blob_of(image: bytes, *, claims: int | None = None) -> bytes:
    length = len(image) if claims is None else claims
    return b"HXA1" + length.to_bytes(8, "little") + zlib.compress(image)


def npy(array: npt.NDArray[Any], **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **options)
    return stream.getvalue()


@given(ARRAYS, st.booleans())
def test_round_trip_keeps_values_shape_and_type(array: npt.NDArray[Any], transpose: bool) -> None:
    given_array = array.T if transpose else array
    back = decode_array(encode_array(given_array))
    assert back.shape == given_array.shape
    assert back.dtype == given_array.dtype.newbyteorder("=")
    assert back.dtype.isnative
    assert back.flags.writeable
    np.testing.assert_array_equal(back, given_array)


@given(ARRAYS, st.data())
def test_damaged_blob_is_refused_or_means_the_same(array: npt.NDArray[Any], data: st.DataObject) -> None:
    blob = bytearray(encode_array(array))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    try:
        back = decode_array(bytes(blob))
    except StoreError as error:
        assert "corrupt" in str(error) or "limit" in str(error)  # noqa: PT017
    else:  # the few bits of a deflate stream that carry nothing
        np.testing.assert_array_equal(back, array)


@given(ARRAYS, st.data())
def test_short_or_long_blob_is_refused(array: npt.NDArray[Any], data: st.DataObject) -> None:
    blob = encode_array(array)
    cut = data.draw(st.integers(0, len(blob) - 1))
    with pytest.raises(StoreError, match="corrupt"):
        decode_array(blob[:cut])
    with pytest.raises(StoreError, match="corrupt"):
        decode_array(blob + b"x")


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([1j]),
        np.array(["2030-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda a: str(a.dtype),
)
def test_other_types_are_refused_by_name(array: npt.NDArray[Any]) -> None:
    with pytest.raises(InvalidInputError, match="list_bytes: dtype"):
        encode_array(array, name="list_bytes")


def test_lists_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="list is not a numpy array"):
        encode_array([1, 2])  # type: ignore[arg-type]


def test_stored_pickle_is_never_loaded() -> None:
    image = npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(StoreError, match="never stored"):
        decode_array(blob_of(image))


def test_bomb_is_refused_before_it_is_inflated() -> None:
    image = npy(np.zeros(1 << 20, np.uint8))
    with pytest.raises(StoreError, match="limit is 1000"):
        decode_array(blob_of(image), max_bytes=1000)
    with pytest.raises(StoreError, match="does not inflate to the 100 bytes"):
        decode_array(blob_of(image, claims=100), max_bytes=1000)


def test_shape_that_lies_costs_no_memory() -> None:
    image = npy(np.zeros(4, np.int64)).replace(b"(4,), }                ", b"(400000000000000,), }  ", 1)
    assert b"400000000000000" in image
    with pytest.raises(StoreError, match="does not match 32 bytes"):
        decode_array(blob_of(image))


def test_a_deep_header_is_refused() -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"-" * 5000 + b"1}\n"
    with pytest.raises(StoreError, match="array: corrupt blob"):
        decode_array(blob_of(np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header))


def test_expected_type_and_shape_are_checked() -> None:
    blob = encode_array(np.zeros((3, 2), np.int32))
    assert decode_array(blob, dtype="int32", shape=(None, 2)).shape == (3, 2)
    with pytest.raises(StoreError, match="probes: stored dtype is int32, expected int64"):
        decode_array(blob, name="probes", dtype="int64")
    for shape in ((3,), (3, 3), (3, 2, 1)):
        with pytest.raises(StoreError, match="stored shape is"):
            decode_array(blob, shape=shape)
