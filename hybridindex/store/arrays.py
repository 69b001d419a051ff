"""NumPy arrays as blobs: ``.npy`` bytes under zlib, behind a short header. Never pickle.

Blob = magic ``HXA1`` + uint64 little-endian length of the ``.npy`` part + zlib stream of the ``.npy`` part. Reading
checks the magic, the length against a limit *before* anything is inflated, the zlib checksum, and the header's dtype
and shape against the bytes that are really there: a damaged or hostile blob costs one error and little memory.

Only booleans, integers and floats of at most 8 bytes are stored: what has one meaning on every machine.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError, StoreError

__all__ = ["MAX_ARRAY_BYTES", "decode_array", "encode_array"]

#: Largest ``.npy`` image of one array. SQLite's own limit for a blob is 1e9 bytes, PostgreSQL's 1 GiB.
MAX_ARRAY_BYTES: Final = 900_000_000

_MAGIC: Final = b"HXA1"
_HEADER: Final = struct.Struct("<4sQ")
_KINDS: Final = "biuf"
_LEVEL: Final = 1


def _storable(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _KINDS and dtype.itemsize <= 8 and not dtype.hasobject


def encode_array(array: npt.NDArray[Any], *, name: str = "array") -> bytes:
    """Pack ``array`` (any shape, bool/int/uint/float up to 8 bytes) into a blob.

    Raises:
        InvalidInputError: not an array, a dtype that is not stored, or more than ``MAX_ARRAY_BYTES``.
    """
    if not isinstance(array, np.ndarray):
        raise InvalidInputError(f"{name}: {type(array).__name__} is not a numpy array")
    if not _storable(array.dtype):
        raise InvalidInputError(
            f"{name}: dtype {array.dtype} cannot be stored; use bool, int, uint or float of ≤ 8 bytes"
        )
    if array.nbytes > MAX_ARRAY_BYTES - 4096:
        raise InvalidInputError(f"{name}: {array.nbytes} bytes; one array of a store holds at most {MAX_ARRAY_BYTES}")
    image = io.BytesIO()
    np.lib.format.write_array(image, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
    return _HEADER.pack(_MAGIC, image.tell()) + zlib.compress(image.getbuffer(), _LEVEL)


def decode_array(
    blob: bytes,
    *,
    name: str = "array",
    dtype: npt.DTypeLike | None = None,
    shape: tuple[int | None, ...] | None = None,
    max_bytes: int = MAX_ARRAY_BYTES,
) -> npt.NDArray[Any]:
    """Unpack a blob into a new array of native byte order; ``None`` in ``shape`` accepts any length of that axis.

    Raises:
        StoreError: the blob is damaged, larger than ``max_bytes``, or holds another dtype or shape than asked for.
    """
    array = _parse_npy(_inflate(blob, name, max_bytes), name)
    if dtype is not None and array.dtype != np.dtype(dtype):
        raise StoreError(f"{name}: stored dtype is {array.dtype}, expected {np.dtype(dtype)}")
    if shape is not None and not _fits(array.shape, shape):
        raise StoreError(f"{name}: stored shape is {array.shape}, expected {shape}")
    return array


def _fits(actual: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(actual) == len(wanted) and all(w is None or a == w for a, w in zip(actual, wanted, strict=True))


def _inflate(blob: bytes, name: str, max_bytes: int) -> bytearray:
    if len(blob) < _HEADER.size:
        raise StoreError(f"{name}: corrupt blob, {len(blob)} bytes are shorter than the header")
    magic, length = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        raise StoreError(f"{name}: corrupt blob, it begins with {magic!r} instead of {_MAGIC!r}")
    if length > max_bytes:
        raise StoreError(f"{name}: the blob claims {length} bytes, the limit is {max_bytes}")
    inflater = zlib.decompressobj()
    try:
        # One byte more than claimed is enough to see a lie; the rest is never inflated.
        image = bytearray(inflater.decompress(memoryview(blob)[_HEADER.size :], length + 1))
    except zlib.error as error:
        raise StoreError(f"{name}: corrupt blob, {error}") from error
    if len(image) != length or not inflater.eof or inflater.unused_data:
        raise StoreError(f"{name}: corrupt blob, it does not inflate to the {length} bytes that it claims")
    return image


def _parse_npy(image: bytearray, name: str) -> npt.NDArray[Any]:
    # The header is parsed apart from the data: ``np.load`` would allocate whatever shape the header claims.
    stream = io.BytesIO(image)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("unknown .npy version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        if not _storable(dtype):
            raise ValueError(f"dtype {dtype} is never stored")
        offset, count = stream.tell(), math.prod(shape)
        if fortran or any(n < 0 for n in shape) or count * dtype.itemsize != len(image) - offset:
            raise ValueError(f"shape {shape} of {dtype} does not match {len(image) - offset} bytes")
        flat = np.frombuffer(image, dtype=dtype, count=count, offset=offset) if count else np.empty(0, dtype)
        return flat.reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    except Exception as error:  # numpy parses the header as Python, and raises what the parser does
        raise StoreError(f"{name}: corrupt blob, {error}") from error
