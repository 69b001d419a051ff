"""Files that are one matrix, mapped: ``.npy``, and ``.fvecs`` and ``.bvecs``, whose rows begin with their dimension.

Rows can be read at any place, so nothing is copied before a build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, cannot_read

__all__ = ["VECS", "map_npy", "map_vecs", "why_no_npy"]

_HEADER_BYTES = 4
_CHECKED_BYTES = 16 << 20
#: Suffix -> elements.
VECS: dict[str, type[np.generic]] = {".fvecs": np.float32, ".bvecs": np.uint8}


def why_no_npy(path: Path, error: Exception) -> str:
    """What is wrong with a file that numpy cannot read. It takes every file without the magic bytes for a pickle, and
    advises to trust it."""
    with filesystem.File(path, "r") as file:
        begins = file.read_at(0, len(MAGIC_PREFIX))
    return str(error) if not begins or begins == MAGIC_PREFIX else f"it begins with {begins!r}"


def map_npy(path: Path, dtype: str | None = None) -> np.ndarray[Any, Any]:
    """The array of a ``.npy`` file; with ``dtype`` "bf16", bits of bfloat16 as two bytes without a meaning.

    Raises:
        InvalidInputError: missing, no ``.npy`` file, truncated, or with ``dtype`` of other elements than uint16.
    """
    try:
        with filesystem.performing("map", path):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileError as error:
        raise cannot_read(error, "vectors", path) from error
    except Exception as error:  # numpy parses the header as Python, and raises what the parser does
        raise InvalidInputError(
            f"vectors {str(path)!r} is not a readable .npy file of numbers ({why_no_npy(path, error)}); expected that, "
            "or a file with the ending of its format (.fvecs, .bvecs, .parquet, .arrow, .feather, .h5, .hdf5)"
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InvalidInputError(f"vectors {str(path)!r} is an archive; expected one array in a .npy file")
    if dtype is None:
        return array
    if array.dtype != np.uint16:
        raise InvalidInputError(f"dtype is 'bf16', but {path} holds {array.dtype}; expected the bits as uint16")
    return array.view("V2")


def map_vecs(path: Path) -> np.ndarray[Any, Any]:
    """The (n, dim) elements of a ``.fvecs`` (float32) or ``.bvecs`` (uint8) file: a view that skips the dimensions.

    Raises:
        InvalidInputError: missing, empty, truncated, or rows of several dimensions; names the row.
    """
    element = np.dtype(VECS[path.suffix.lower()])
    try:
        data = filesystem.map_array(path, np.uint8)
    except FileError as error:
        raise cannot_read(error, "vectors", path) from error
    except ValueError as error:  # nothing to map
        raise InvalidInputError(f"{path} is empty; expected rows that begin with their dimension") from error
    dim = int(data[:_HEADER_BYTES].view("<i4")[0]) if len(data) >= _HEADER_BYTES else 0
    if dim < 1:
        raise InvalidInputError(f"{path}, row 0, says that it has dimension {dim}; expected 1 or more")
    row_bytes = _HEADER_BYTES + dim * element.itemsize
    n, rest = divmod(len(data), row_bytes)
    rows = data[: n * row_bytes].reshape(n, row_bytes)
    step = max(1, _CHECKED_BYTES // row_bytes)
    for start in range(0, n, step):
        dims = np.ascontiguousarray(rows[start : start + step, :_HEADER_BYTES]).view("<i4")[:, 0]
        if (other := dims != dim).any():
            row = int(np.argmax(other))
            raise InvalidInputError(
                f"{path}, row {start + row}, has dimension {dims[row]}; expected {dim} as in the rows before it"
            )
    if rest:
        raise InvalidInputError(
            f"{path} is truncated: row {n} has {rest} of {row_bytes} bytes; expected a whole row of dimension {dim}"
        )
    return rows[:, _HEADER_BYTES:].view(element)
