"""HDF5: a dataset of vectors, and one of ids, a part at a time. Needs h5py."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, MissingDependencyError, cannot_read, how_to_install
from hybridindex.index.inputs.batches import BATCH_BYTES, Batch, Batches
from hybridindex.index.inputs.elements import ELEMENTS, holds_vectors
from hybridindex.types import VectorFile

__all__ = ["open_hdf5"]


def open_hdf5(path: Path, file: VectorFile) -> Batches:
    """The rows of a file's dataset.

    Raises:
        InvalidInputError: no HDF5 file, or a dataset that is missing or holds something else; names the file.
        MissingDependencyError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError(f"h5py is needed to read {path}: {how_to_install('formats')}") from error
    with contextlib.ExitStack() as owned, _readable(path):
        opened = owned.enter_context(h5py.File(path, "r"))
        vectors = _own(opened, _vectors_of(h5py, opened, path, file.column), path)
        ids = None if file.ids_column is None else _ids_of(h5py, opened, path, file.ids_column, len(vectors))
        kept = owned.pop_all()

    def batches() -> Generator[Batch]:
        rows = max(1, BATCH_BYTES // max(1, vectors.shape[1] * vectors.dtype.itemsize))
        with kept, _readable(path):
            for start in range(0, len(vectors), rows):
                part = slice(start, start + rows)
                yield vectors[part] if ids is None else (vectors[part], ids[part])

    return Batches(count=len(vectors), batches=batches())


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        with filesystem.performing("parse", path):
            yield
    except FileError as error:
        raise cannot_read(error, "vectors", path) from error
    except (OSError, RuntimeError, KeyError) as error:
        raise InvalidInputError(f"vectors {str(path)!r} cannot be read as HDF5: {error}") from error


def _own(opened: Any, dataset: Any, path: Path) -> Any:
    """A dataset of the file ``opened``. Raises InvalidInputError where its numbers lie in other files: a crafted file
    could name any file of this machine."""
    if dataset.file.filename != opened.filename or dataset.external or dataset.is_virtual:
        raise InvalidInputError(f"{path}: dataset {dataset.name!r} keeps its numbers in other files; expected none")
    return dataset


def _vectors_of(h5py: Any, opened: Any, path: Path, name: str | None) -> Any:
    there: dict[str, Any] = {}
    opened.visititems(lambda inner, item: there.update({inner: item}) if isinstance(item, h5py.Dataset) else None)
    fits = [inner for inner, item in there.items() if item.ndim == 2 and holds_vectors(item.dtype)]
    shown = ", ".join(f"{inner} {item.shape} {item.dtype}" for inner, item in there.items()) or "none"
    if name is None:
        if len(fits) != 1:
            raise InvalidInputError(
                f"{path} has {len(fits)} datasets of vectors; name one (column=, --column): {shown}"
            )
        return there[fits[0]]
    if name.strip("/") not in fits:
        raise InvalidInputError(f"{path} has no dataset {name!r} (n, dim) of {ELEMENTS}; its datasets: {shown}")
    return there[name.strip("/")]


def _ids_of(h5py: Any, opened: Any, path: Path, name: str, n: int) -> Any:
    ids = opened.get(name)
    if not isinstance(ids, h5py.Dataset):
        raise InvalidInputError(f"{path} has no dataset {name!r} of ids")
    if ids.dtype.kind not in "iu" or ids.shape != (n,):
        raise InvalidInputError(f"{path}: dataset {name!r} of ids is {ids.shape} {ids.dtype}; expected ({n},) integers")
    return _own(opened, ids, path)
