"""Opening a file of vectors by its ending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.inputs.batches import Batches
from hybridindex.index.inputs.columns import open_arrow, open_parquet
from hybridindex.index.inputs.hdf5 import open_hdf5
from hybridindex.index.inputs.matrices import VECS, map_npy, map_vecs
from hybridindex.types import VectorFile

__all__ = ["open_file"]

_COLUMNS: dict[str, Callable[[Path, VectorFile], Batches]] = {
    ".parquet": open_parquet,
    ".arrow": open_arrow,
    ".feather": open_arrow,
    ".ipc": open_arrow,
    ".h5": open_hdf5,
    ".hdf5": open_hdf5,
}


def open_file(path: Path, file: VectorFile) -> np.ndarray[Any, Any] | Batches:
    """A mapped array, or batches of a file that has to be read in order. An unknown ending is taken for ``.npy``.

    Raises:
        InvalidInputError: the file cannot be read, or an option does not fit its format; names the file.
        MissingDependencyError: the package that reads the format is not installed.
    """
    ending = path.suffix.lower()
    if file.dtype not in (None, "bf16"):
        raise InvalidInputError(f"dtype is {file.dtype!r}; expected 'bf16' or none")
    if file.dtype is not None and ending in (*VECS, *_COLUMNS):
        raise InvalidInputError(f"dtype is {file.dtype!r}, and {path} is not a .npy file; expected no dtype")
    if ending in _COLUMNS:
        return _COLUMNS[ending](path, file)
    for name, value in (("column", file.column), ("ids_column", file.ids_column)):
        if value is not None:
            raise InvalidInputError(
                f"{name} is {value!r}, and {path} has no columns; expected a {', '.join(_COLUMNS)} file"
            )
    return map_vecs(path) if ending in VECS else map_npy(path, file.dtype)
