"""What a build reads its vectors from: an array, a memory map, a ``.npy`` file, or chunks that are spooled first.

Covers reading rows and ids by position in bounded memory, and the checks on them. Does not train, assign or encode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.index.storage.commit import Progress
from hybridindex.index.storage.generation import GenerationWriter, OutFile, as_path
from hybridindex.types import F32, I64

__all__ = [
    "MAX_DIM",
    "MAX_SQUARED_NORM",
    "VectorSource",
    "check_ids_argument",
    "find_unusable",
    "open_source",
]

MAX_DIM = 4096

#: So that the squared distance of two vectors, at most four times this, is far from float32's 3.4e38: faiss ends the
#: process where a distance is infinite.
MAX_SQUARED_NORM = 1e37 / 4
#: Above this, a squared norm summed in float32 is taken again in float64.
_SURE_SQUARED_NORM = 0.99 * MAX_SQUARED_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSource:
    """Rows by position: (n, dim) float32 and their ids (n,) int64."""

    #: (n, dim) float32: in the caller's memory, or mapped.
    vectors: F32
    #: (n,) integers; ``None`` means 0..n-1.
    given_ids: Any
    #: Spool files to drop when the source is no longer needed.
    scratch: tuple[OutFile, ...] = ()
    #: Largest absolute value that the codec can hold; ``None``: all that pass the check of norms.
    max_abs: float | None = None

    @property
    def n(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop, C-contiguous, checked to be usable; a view where the source allows it."""
        x = np.ascontiguousarray(self.vectors[start:stop])
        _check_finite(x, start)
        self._check_fits(x, start)
        return x

    def sample(self, rows: I64, chunk_rows: int) -> F32:
        """The rows at the given increasing positions (m,): (m, dim) float32, a copy, checked to be usable."""
        out = np.empty((len(rows), self.dim), dtype=np.float32)
        for start in range(0, len(rows), chunk_rows):
            part = rows[start : start + chunk_rows]
            x = self.vectors[part]
            _check_finite(x, part)
            self._check_fits(x, part)
            out[start : start + chunk_rows] = x
        return out

    def _check_fits(self, x: F32, rows: int | I64) -> None:
        if self.max_abs is None or not x.size or max(float(x.max()), -float(x.min())) <= self.max_abs:
            return
        local = int(np.argmax((np.abs(x) > self.max_abs).any(axis=1)))
        raise InvalidInputError(
            f"vectors[{_row(rows, local)}] holds {np.abs(x[local]).max():.4g}; the codec holds up to {self.max_abs:g}: "
            "scale the vectors, or take codec 'bf16'"
        )

    def ids(self, start: int, stop: int) -> I64:
        """Ids of rows start..stop."""
        if self.given_ids is None:
            return np.arange(start, stop, dtype=np.int64)
        return np.asarray(self.given_ids[start:stop], dtype=np.int64)


def open_source(vectors: Any, ids: Any, writer: GenerationWriter, progress: Progress) -> VectorSource:
    """Make a source of whatever the caller gave; chunks are spooled into the generation being written.

    Raises:
        InvalidInputError: wrong type, dtype, shape or dimension; NaN, infinity or too long a vector in a chunk.
    """
    if isinstance(vectors, str | Path):
        vectors = _map_npy(as_path(vectors, "vectors"))
    if isinstance(vectors, np.ndarray):
        _check_matrix(vectors, "vectors")
        return VectorSource(vectors=vectors, given_ids=check_ids_argument(ids, len(vectors)))
    if not isinstance(vectors, Iterable) or isinstance(vectors, bytes | dict) or hasattr(vectors, "__array__"):
        raise InvalidInputError(
            f"vectors is a {type(vectors).__name__}; expected a float32 numpy array (n, dim), the path of a .npy file, "
            "or an iterable of such arrays or of (vectors, ids) pairs"
        )
    return _spool(vectors, ids, writer, progress)


def check_ids_argument(ids: Any, n: int) -> Any:
    """``ids`` as an integer array of n elements, or ``None``.

    Raises:
        InvalidInputError: wrong dtype, shape or length, or a negative id.
    """
    if ids is None:
        return None
    try:
        array = ids if isinstance(ids, np.ndarray) else np.asarray(ids)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"ids is no array of integers ({error}); expected ({n},) int64") from error
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise InvalidInputError(f"ids has dtype {array.dtype}; expected int64")
    if array.ndim != 1 or len(array) != n:
        raise InvalidInputError(f"ids has shape {array.shape}; expected ({n},), one per vector")
    for start in range(0, n, 1 << 20):
        part = array[start : start + (1 << 20)]
        if part.size and int(part.min()) < 0:
            row = start + int(np.argmax(part < 0))
            raise InvalidInputError(f"ids[{row}] is {int(array[row])}; expected ids of 0 or more (-1 means 'none')")
    return array


def _map_npy(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InvalidInputError(f"vectors {str(path)!r} cannot be read: {error}") from error
    except (EOFError, ValueError) as error:
        raise InvalidInputError(f"vectors {str(path)!r} is not a .npy file of float32: {error}") from error


def _check_matrix(x: Any, name: str, dim: int | None = None) -> None:
    if not isinstance(x, np.ndarray):
        raise InvalidInputError(f"{name} is a {type(x).__name__}; expected a float32 numpy array (n, dim)")
    if x.dtype != np.float32:
        raise InvalidInputError(
            f"{name} has dtype {x.dtype}; expected float32 (convert with .astype(np.float32): the index would not keep "
            "more precision)"
        )
    if x.ndim != 2:
        raise InvalidInputError(f"{name} has shape {x.shape}; expected two dimensions (n, dim)")
    if dim is not None and x.shape[1] != dim:
        raise InvalidInputError(f"{name} has dim {x.shape[1]}; expected {dim} like the chunks before it")
    if not 1 <= x.shape[1] <= MAX_DIM:
        raise InvalidInputError(f"{name} has dim {x.shape[1]}; expected 1 to {MAX_DIM}")


def _check_finite(x: F32, rows: int | I64) -> None:
    """Refuses NaN, infinity and too long a vector. ``rows``: position of the first row, or of every row."""
    if (found := find_unusable(x)) is not None:
        local, fault = found
        raise InvalidInputError(f"vectors[{_row(rows, local)}] {fault}")


def find_unusable(x: F32) -> tuple[int, str] | None:
    """The first row of (n, dim) float32 that holds NaN or infinity or is too long, and what is wrong with it."""
    # The usual answer, in one small pass: this runs for every search.
    if native is not None and native.first_row_beyond(x, _SURE_SQUARED_NORM) == len(x):
        return None
    # NaN and infinity survive the sum, and compare as False.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        sure = np.einsum("ij,ij->i", x, x) <= _SURE_SQUARED_NORM
    if sure.all():
        return None
    for local in np.flatnonzero(~sure).tolist():
        row = x[local].astype(np.float64)
        if not np.isfinite(row).all():
            return local, "holds NaN or infinity; expected finite values"
        if row @ row > MAX_SQUARED_NORM:
            return local, (
                f"has length {np.sqrt(row @ row):.3g}; expected at most {np.sqrt(MAX_SQUARED_NORM):.3g}: squared "
                "distances would not fit float32"
            )
    return None


def _row(rows: int | I64, local: int) -> int:
    return rows + local if isinstance(rows, int) else int(rows[local])


def _spool(chunks: Iterable[Any], ids: Any, writer: GenerationWriter, progress: Progress) -> VectorSource:
    rows_file, ids_file = writer.open_file("spool.f32"), writer.open_file("spool.i64")
    n, dim, paired = 0, None, None
    progress("spool", 0, None)
    for number, item in enumerate(chunks):
        is_pair = isinstance(item, tuple)
        if is_pair and len(item) != 2:
            raise InvalidInputError(f"chunk {number} is a tuple of {len(item)}; expected (vectors, ids)")
        x, chunk_ids = item if is_pair else (item, None)
        _check_matrix(x, f"chunk {number}", dim)
        if paired is not None and paired != is_pair:
            raise InvalidInputError(f"chunk {number}: ids must come with every chunk or with none")
        if is_pair and ids is not None:
            raise InvalidInputError("ids was given and the chunks bring ids as well; expected one of them")
        dim, paired = int(x.shape[1]), is_pair
        x = np.ascontiguousarray(x)
        _check_finite(x, n)
        rows_file.append(x)
        if is_pair and chunk_ids is None:
            raise InvalidInputError(f"chunk {number}: its ids are None; expected ({len(x)},) int64")
        if is_pair:
            ids_file.append(np.ascontiguousarray(check_ids_argument(chunk_ids, len(x)), dtype=np.int64))
        n += len(x)
        progress("spool", n, None)
    if n == 0 or dim is None:
        raise InvalidInputError("vectors yielded no rows; expected at least one")
    vectors = np.memmap(rows_file.path, dtype=np.float32, mode="r", shape=(n, dim))
    given = np.memmap(ids_file.path, dtype=np.int64, mode="r", shape=(n,)) if paired else check_ids_argument(ids, n)
    return VectorSource(vectors=vectors, given_ids=given, scratch=(rows_file, ids_file))
