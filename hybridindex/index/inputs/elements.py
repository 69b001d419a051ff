"""Which numbers vectors may be given in, and those numbers as float32. Pure functions of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridindex.types import F32

__all__ = ["ELEMENTS", "as_float32", "holds_vectors"]

#: In words.
ELEMENTS = "float32, float16, bfloat16, float64 or uint8"
_NATIVE = tuple(np.dtype(name) for name in ("float32", "float16", "float64", "uint8"))


def holds_vectors(dtype: np.dtype[Any]) -> bool:
    """Whether elements of ``dtype`` are numbers that :func:`as_float32` takes."""
    return dtype in _NATIVE or _is_bfloat16(dtype)


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    # numpy has no bfloat16: that of ml_dtypes has the name, and becomes two bytes without a meaning in a .npy file.
    return dtype.itemsize == 2 and (dtype.name == "bfloat16" or dtype == np.dtype("V2"))


def as_float32(x: np.ndarray[Any, Any]) -> F32:
    """``x`` in float32, C-contiguous; itself where it is that already.

    Of float64, digits are rounded, and what is too large becomes infinite. All other elements keep their value.
    """
    if x.dtype == np.float32:
        return np.ascontiguousarray(x, dtype=np.float32)
    if _is_bfloat16(x.dtype):
        # The upper half of a float32.
        bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
        return np.left_shift(bits, 16, out=bits).view(np.float32)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x, dtype=np.float32)
