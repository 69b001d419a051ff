"""What a build reads its vectors from: an array, a memory map, a file, or chunks that are spooled first.

Covers reading rows and ids by position in bounded memory, and the checks on them. Does not train, assign or encode.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.index.inputs.batches import Batches
from hybridindex.index.inputs.elements import ELEMENTS, as_float32, holds_vectors
from hybridindex.index.inputs.files import open_file
from hybridindex.index.storage.commit import Progress
from hybridindex.index.storage.generation import GenerationWriter, OutFile, as_path
from hybridindex.types import F32, I64, VectorFile

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

    #: (n, dim) of any element that a build takes: in the caller's memory, or mapped.
    vectors: np.ndarray[Any, Any]
    #: (n,) integers; ``None`` means 0..n-1.
    given_ids: Any
    #: Where rows come from, for messages: a file, or "" for an argument.
    origin: str = ""
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
        x = _usable(self.vectors[start:stop], start, self.origin)
        self._check_fits(x, start)
        return x

    def sample(self, rows: I64, chunk_rows: int) -> F32:
        """The rows at the given increasing positions (m,): (m, dim) float32, a copy, checked to be usable."""
        out = np.empty((len(rows), self.dim), dtype=np.float32)
        for start in range(0, len(rows), chunk_rows):
            part = rows[start : start + chunk_rows]
            x = _usable(self.vectors[part], part, self.origin)
            self._check_fits(x, part)
            out[start : start + chunk_rows] = x
        return out

    def _check_fits(self, x: F32, rows: int | I64) -> None:
        if self.max_abs is None or not x.size or max(float(x.max()), -float(x.min())) <= self.max_abs:
            return
        local = int(np.argmax((np.abs(x) > self.max_abs).any(axis=1)))
        raise InvalidInputError(
            f"{_row(rows, local, self.origin)} holds {np.abs(x[local]).max():.4g}; the codec holds up to "
            f"{self.max_abs:g}: scale the vectors, or take codec 'bf16'"
        )

    def ids(self, start: int, stop: int) -> I64:
        """Ids of rows start..stop."""
        if self.given_ids is None:
            return np.arange(start, stop, dtype=np.int64)
        return np.asarray(self.given_ids[start:stop], dtype=np.int64)


def open_source(vectors: Any, ids: Any, writer: GenerationWriter, progress: Progress) -> VectorSource:
    """Make a source of whatever the caller gave; what cannot be mapped is spooled into the generation being written.

    Raises:
        InvalidInputError: wrong type, dtype, shape or dimension; NaN, infinity or too long a vector in a chunk.
        MissingDependencyError: the package that reads a file's format is not installed.
    """
    if isinstance(vectors, str | Path):
        vectors = VectorFile(vectors)
    origin = ""
    if isinstance(vectors, VectorFile):
        path = as_path(vectors.path, "vectors")
        origin, vectors = str(path), open_file(path, vectors)
    if isinstance(vectors, np.ndarray):
        _check_matrix(vectors, origin or "vectors")
        return VectorSource(vectors=vectors, given_ids=check_ids_argument(ids, len(vectors)), origin=origin)
    if isinstance(vectors, Batches):
        with closing(vectors.batches) as batches:
            return _spool(batches, ids, writer, progress, origin=origin, total=vectors.count)
    if not isinstance(vectors, Iterable) or isinstance(vectors, bytes | dict) or hasattr(vectors, "__array__"):
        raise InvalidInputError(
            f"vectors is a {type(vectors).__name__}; expected a numpy array (n, dim), the path of a file, or an "
            "iterable of such arrays or of (vectors, ids) pairs"
        )
    return _spool(vectors, ids, writer, progress)


def check_ids_argument(ids: Any, n: int, *, first_row: int = 0, origin: str = "") -> Any:
    """``ids`` as an integer array of n elements, or ``None``. The rest is for messages.

    Raises:
        InvalidInputError: wrong dtype, shape or length, or a negative id.
    """
    if ids is None:
        return None
    try:
        array = ids if isinstance(ids, np.ndarray) else np.asarray(ids, dtype=None if len(ids) else np.int64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"ids is not an array of integers ({error}); expected ({n},) int64") from error
    if array.dtype != np.int64 and (array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64)):
        raise InvalidInputError(f"ids has dtype {array.dtype}; expected int64")
    if array.ndim != 1 or len(array) != n:
        raise InvalidInputError(f"ids has shape {array.shape}; expected ({n},), one per vector")
    for start in range(0, n, 1 << 20):
        part = array[start : start + (1 << 20)]
        if part.size and int(part.min()) < 0:
            row = start + int(np.argmax(part < 0))
            name = f"{origin}, row {first_row + row}: its id" if origin else f"ids[{row}]"
            raise InvalidInputError(f"{name} is {int(array[row])}; expected ids of 0 or more (-1 means 'none')")
    return array


def _check_matrix(x: Any, name: str, dim: int | None = None) -> None:
    if not isinstance(x, np.ndarray):
        raise InvalidInputError(f"{name} is a {type(x).__name__}; expected a numpy array (n, dim)")
    if not holds_vectors(x.dtype):
        raise InvalidInputError(f"{name} has dtype {x.dtype}; expected {ELEMENTS}")
    if x.ndim != 2:
        raise InvalidInputError(f"{name} has shape {x.shape}; expected two dimensions (n, dim)")
    if dim is not None and x.shape[1] != dim:
        raise InvalidInputError(f"{name} has dim {x.shape[1]}; expected {dim} like the chunks before it")
    if not 1 <= x.shape[1] <= MAX_DIM:
        raise InvalidInputError(f"{name} has dim {x.shape[1]}; expected 1 to {MAX_DIM}")


def _usable(raw: np.ndarray[Any, Any], rows: int | I64, origin: str) -> F32:
    """``raw`` as float32. Refuses NaN, infinity and too long a vector. ``rows``: position of the first, or of all."""
    x = as_float32(raw)
    if (found := find_unusable(x)) is not None:
        local, fault = found
        if raw.dtype == np.float64 and np.isfinite(raw[local]).all() and not np.isfinite(x[local]).all():
            fault = f"holds {np.abs(raw[local]).max():.4g}, which float32 cannot hold"
        raise InvalidInputError(f"{_row(rows, local, origin)} {fault}")
    return x


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


def _row(rows: int | I64, local: int, origin: str) -> str:
    row = rows + local if isinstance(rows, int) else int(rows[local])
    return f"{origin}, row {row}," if origin else f"vectors[{row}]"


def _spool(
    chunks: Iterable[Any],
    ids: Any,
    writer: GenerationWriter,
    progress: Progress,
    *,
    origin: str = "",
    total: int | None = None,
) -> VectorSource:
    """Copies chunks into scratch files. ``origin``: the file that they come from. ``total``: rows, where known."""
    rows_file, ids_file = writer.open_file("spool.f32"), writer.open_file("spool.i64")
    n, dim, paired = 0, None, None
    progress("spool", 0, total)
    for number, item in enumerate(chunks):
        is_pair = isinstance(item, tuple)
        if is_pair and len(item) != 2:
            raise InvalidInputError(f"chunk {number} is a tuple of {len(item)}; expected (vectors, ids)")
        x, chunk_ids = item if is_pair else (item, None)
        name = origin or f"chunk {number}"
        _check_matrix(x, name, dim)
        if paired is not None and paired != is_pair:
            raise InvalidInputError(f"{name}: ids must come with every chunk or with none")
        if is_pair and ids is not None:
            raise InvalidInputError(f"ids was given and {origin or 'the chunks'} brings ids as well; expected one")
        dim, paired = int(x.shape[1]), is_pair
        rows_file.append(_usable(x, n, origin))
        if is_pair and chunk_ids is None:
            raise InvalidInputError(f"{name}: its ids are None; expected ({len(x)},) int64")
        if is_pair:
            checked = check_ids_argument(chunk_ids, len(x), first_row=n, origin=origin)
            ids_file.append(np.ascontiguousarray(checked, dtype=np.int64))
        n += len(x)
        progress("spool", n, total)
    if n == 0 or dim is None:
        raise InvalidInputError(f"{origin or 'vectors'} yielded no rows; expected at least one")
    vectors = filesystem.map_array(rows_file.path, np.float32, (n, dim))
    given = filesystem.map_array(ids_file.path, np.int64, (n,)) if paired else check_ids_argument(ids, n)
    return VectorSource(vectors=vectors, given_ids=given, origin=origin, scratch=(rows_file, ids_file))
