"""Parquet and Arrow (IPC, Feather): a column of lists of numbers, and one of ids; a part of the file at a time.

Of Parquet, some thousand rows are decoded at a time; of an Arrow file, a record batch. Needs pyarrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, MissingDependencyError, cannot_read, how_to_install
from hybridindex.index.inputs.batches import Batch, Batches
from hybridindex.types import I64, VectorFile

__all__ = ["open_arrow", "open_parquet"]

#: 32 MiB of float32 at the largest dimension.
_ROWS = 2048


def open_parquet(path: Path, file: VectorFile) -> Batches:
    """The rows of a Parquet file.

    Raises:
        InvalidInputError: no Parquet file, or a column that is missing or holds something else; while batches are read
            nulls, rows of several dimensions and damage: names file and row.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = _require_pyarrow(path)
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as owned, _readable(pa, path):
        # In small reads: a row group can be larger than the memory.
        opened = owned.enter_context(pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False))
        columns = _choose(pa, path, opened.schema_arrow, file)
        owned.pop_all()

    def parts() -> Generator[Any]:
        with opened:
            yield from opened.iter_batches(_ROWS, columns=list(columns), use_threads=False)

    return Batches(count=opened.metadata.num_rows, batches=_rows(pa, path, parts(), columns))


def open_arrow(path: Path, file: VectorFile) -> Batches:
    """The rows of an Arrow IPC file (which Feather is) or stream. Raises as :func:`open_parquet`."""
    pa = _require_pyarrow(path)
    with contextlib.ExitStack() as owned, _readable(pa, path):
        source = owned.enter_context(pa.memory_map(str(path)))
        try:
            opened = owned.enter_context(pa.ipc.open_file(source))
        except pa.ArrowInvalid:
            source.seek(0)
            opened = owned.enter_context(pa.ipc.open_stream(source))
        columns = _choose(pa, path, opened.schema, file)
        mapped = owned.pop_all()

    def parts() -> Generator[Any]:
        with mapped:
            if hasattr(opened, "get_batch"):
                yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
            else:
                yield from opened

    return Batches(count=None, batches=_rows(pa, path, parts(), columns))


def _require_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingDependencyError(f"pyarrow is needed to read {path}: {how_to_install('formats')}") from error
    return pyarrow


@contextlib.contextmanager
def _readable(pa: Any, path: Path) -> Iterator[None]:
    try:
        with filesystem.performing("parse", path):
            yield
    except FileError as error:
        raise cannot_read(error, "vectors", path) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split())
        raise InvalidInputError(f"vectors {str(path)!r} cannot be read as {path.suffix}: {words[:200]}") from error


def _choose(pa: Any, path: Path, schema: Any, file: VectorFile) -> tuple[str, ...]:
    """The columns of vectors and ids; the latter only where it was asked for."""

    def column(name: str) -> Any:
        if schema.get_field_index(name) < 0:
            raise InvalidInputError(f"{path} has no column {name!r}, or several; expected one of {_shown(schema)}")
        return schema.field(name).type

    name = file.column
    if name is None:
        fits = [field.name for field in schema if _holds_vectors(pa, field.type)]
        if len(fits) != 1:
            raise InvalidInputError(
                f"{path} has {len(fits)} columns of vectors; name one (column=, --column) of {_shown(schema)}"
            )
        name = fits[0]
    elif not _holds_vectors(pa, column(name)):
        raise InvalidInputError(f"{path}: column {name!r} holds {column(name)}; expected lists of floats")
    if file.ids_column is None:
        return (name,)
    if not pa.types.is_integer(column(file.ids_column)):
        kind = column(file.ids_column)
        raise InvalidInputError(f"{path}: column {file.ids_column!r} of ids holds {kind}; expected integers")
    return name, file.ids_column


def _shown(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _stored(pa: Any, kind: Any) -> Any:
    """Of a tensor column, the list that it is stored as."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _holds_vectors(pa: Any, kind: Any) -> bool:
    kind, types = _stored(pa, kind), pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_floating(kind.value_type))


def _rows(pa: Any, path: Path, parts: Generator[Any], columns: tuple[str, ...]) -> Generator[Batch]:
    start, dim = 0, None
    with contextlib.closing(parts), _readable(pa, path):
        for part in parts:
            if not len(part):
                continue
            for name in columns:
                # Arrow takes a file's offsets as they are: wrong ones lead out of its memory.
                part.column(name).validate(full=True)
            x = _matrix(pa, part.column(columns[0]), start, f"{path}, column {columns[0]!r}", dim)
            ids = None if len(columns) == 1 else _ids(part.column(columns[1]), start, f"{path}, column {columns[1]!r}")
            start, dim = start + len(x), x.shape[1]
            yield x if ids is None else (x, ids)


def _matrix(pa: Any, lists: Any, start: int, where: str, dim: int | None) -> np.ndarray[Any, Any]:
    if isinstance(lists.type, pa.BaseExtensionType):
        lists = lists.storage
    _check_no_nulls(lists, start, where)
    fixed = pa.types.is_fixed_size_list(lists.type)
    lengths: I64 = np.full(len(lists), lists.type.list_size) if fixed else np.diff(lists.offsets.to_numpy())
    expected = int(lengths[0]) if dim is None else dim
    if (other := lengths != expected).any():
        row = int(np.argmax(other))
        raise InvalidInputError(
            f"{where}, row {start + row}, has dimension {lengths[row]}; expected {expected} as in the rows before it"
        )
    values = lists.flatten()
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))) // expected
        raise InvalidInputError(f"{where}, row {start + row}, holds a null; expected numbers")
    elements: np.ndarray[Any, Any] = values.to_numpy()
    return elements.reshape(len(lists), expected)


def _ids(ids: Any, start: int, where: str) -> np.ndarray[Any, Any]:
    _check_no_nulls(ids, start, where)
    found: np.ndarray[Any, Any] = ids.to_numpy()
    return found


def _check_no_nulls(values: Any, start: int, where: str) -> None:
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise InvalidInputError(f"{where}, row {start + row}, is null; expected a value in every row")
