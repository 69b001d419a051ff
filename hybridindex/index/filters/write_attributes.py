"""Giving the rows of an index attributes, in the place of earlier ones, safely on disk.

The file is written under a temporary name, synced and renamed; then ``attributes.json``, which is the commit. A crash
leaves the old attributes or the new ones, and files that the next call removes. The rows are only read.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.config import check_ids
from hybridindex.errors import BuildError, FileError, InvalidInputError
from hybridindex.index.attributes.columns import as_attributes, describe, in_row_order, need
from hybridindex.index.attributes.stored import (
    SPEC_FILE,
    AttributeSpec,
    arrow_name,
    find_attributes,
    render_spec,
)
from hybridindex.index.filters.row_numbers import RowNumbers
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.storage.additions import adding_to_generation, remove_additions
from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.generation import log_lock
from hybridindex.index.storage.manifest import LISTS_FILE
from hybridindex.types import I64

__all__ = ["copy_attributes", "look_again", "remove_attributes", "write_attributes", "write_ordered"]

_BEING_WRITTEN = "attributes.arrow.new"
#: That a message names.
_MOST_NAMED = 5


def write_attributes(index: IVFIndex, table: Any, ids: Any = None) -> AttributeSpec:
    """Gives the rows of an open index attributes, in the place of all earlier ones. Routers that are open see them at
    their next search.

    Args:
        table: a pyarrow Table or RecordBatch, a DataFrame, or a mapping of names to columns; see
            :mod:`hybridindex.index.attributes.columns`. Rows of the index that it has none for get missing values.
        ids: (n,) integers, the id of each row of the table; None: 0 .. n - 1.

    Raises:
        InvalidInputError: names the column, or ids that the index does not have or that come twice.
        MissingDependencyError: pyarrow is not installed.
        BuildError: another process is writing, or the generation was removed. DiskFullError: no room. NotWritableError.
        In each case what was there before stays, unless the last sync of the folder failed: then the new attributes
        are there, and may not survive a power cut.
    """
    index = index.rows
    index.mapped_model()  # is it open?
    given = as_attributes(table)
    live = index.live.read_now()
    if live is not None and live.added is not None:
        raise InvalidInputError(
            f"{live.added.count} rows of {index.path} were added since its lists were written, and have attributes of "
            "their own; compact it first (hybridindex compact)"
        )
    number = index.live.number
    with index.integrity.all_whole():
        ordered = in_row_order(given, _places(index, given, ids))
        folder = index.integrity.folder
        with _known_after_failure(index), adding_to_generation(index.path, folder), log_lock(index.path):
            if index.live.file.read().place.number != number:
                raise BuildError(f"{index.path} was changed meanwhile; try again")
            try:
                spec = _write(index, folder, ordered)
            finally:
                _remove_strays(folder)
    index.attributes, index.attributes_problem = find_attributes(folder, index.manifest)
    return spec


def look_again(index: IVFIndex) -> str:
    """Has an open index know the attributes that are on disk now: others may have given or removed some since.

    Returns:
        Why they cannot be read; empty: they can, or there are none. What the index knew then stays: the disk may fail
        for a moment, and searches have the columns in memory.
    """
    index = index.rows
    folder, known = index.integrity.folder, index.attributes
    found, problem = find_attributes(folder, index.manifest, index.attributes_problem)
    if found is None and known is not None and (problem or not filesystem.is_dir(folder)):
        return problem  # no problem: its generation was removed, with the files of what it knows
    if found is not None and known is not None and known.is_read and known.spec == found.spec:
        found = known  # reading the same columns again takes long
    index.attributes, index.attributes_problem = found, problem
    return problem


@contextmanager
def _known_after_failure(index: IVFIndex) -> Iterator[None]:
    """Where the block fails, the index knows what is on disk then: a sync may fail when the files are changed."""
    try:
        yield
    except BaseException:
        with suppress(FileError):
            look_again(index)
        raise


def write_ordered(index: IVFIndex, table: Any) -> None:
    """Gives an open index attributes, a record of the table for each row, in the order of the lists.

    Raises:
        BuildError: the generation was removed. DiskFullError: no room.
    """
    folder = index.integrity.folder
    with adding_to_generation(index.path, folder):
        _write(index, folder, table)
    index.attributes, index.attributes_problem = find_attributes(folder, index.manifest)


def copy_attributes(index: IVFIndex, copy: IVFIndex) -> None:
    """Gives a copy the attributes of its original, which has some."""
    assert index.attributes is not None
    write_ordered(copy, need("pyarrow").table(index.attributes.columns))


def remove_attributes(index: IVFIndex) -> int:
    """Removes the attributes of an open index, damaged ones too; returns their bytes.

    Raises:
        InvalidInputError: the index is closed. BuildError: another process is writing, the generation was
            removed, or something cannot be removed.
    """
    index = index.rows
    index.mapped_model()
    folder = index.integrity.folder
    with _known_after_failure(index), adding_to_generation(index.path, folder):
        nbytes = remove_additions(folder, SPEC_FILE, "attributes*")
    index.attributes, index.attributes_problem = None, ""
    return nbytes


def _places(index: IVFIndex, table: Any, ids: Any) -> I64:
    """(count,) int64: the row of the table that each row of the index gets, or -1."""
    numbers = RowNumbers(index)
    given = np.arange(len(table)) if ids is None else check_ids("ids", ids)
    if len(given) != len(table):
        raise InvalidInputError(f"ids are {len(given)} and attributes have {len(table)} rows; expected one id a row")
    distinct, counts = np.unique(given, return_counts=True)
    if len(distinct) < len(given):
        raise InvalidInputError(f"ids come twice: {_named(distinct[counts > 1])}")
    places = np.full(numbers.count, -1, dtype=np.int64)
    # An id may have several rows.
    rows_of, starts = numbers.of_each(given)
    absent = given[np.diff(starts) == 0]
    if len(absent):
        raise InvalidInputError(f"the index has no rows of {len(absent)} of the ids: {_named(absent)}")
    places[rows_of] = np.repeat(np.arange(len(given)), np.diff(starts))
    return places


def _named(ids: I64) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    return ", ".join(map(str, ids[:_MOST_NAMED].tolist())) + more


def _write(index: IVFIndex, folder: Path, table: Any) -> AttributeSpec:
    pa, ipc = need("pyarrow"), need("pyarrow.ipc")
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    new = folder / _BEING_WRITTEN
    file = filesystem.File(new, "w+", permissions=0o644)
    try:
        file.write_at(sink.getvalue(), 0)
        file.sync()
    finally:
        file.close()
    digest = digest_file(new)
    spec = AttributeSpec(
        generation=index.generation,
        count=index.count,
        rows_xxh3_128=index.manifest.files[LISTS_FILE].xxh3_128,
        columns=describe(table),
        file=arrow_name(digest),
        file_bytes=filesystem.stat(new).st_size,
        file_xxh3_128=digest,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
    )
    filesystem.replace(new, folder / spec.file)
    filesystem.sync_folder(folder)
    filesystem.replace_file(folder / SPEC_FILE, render_spec(spec))
    return spec


def _remove_strays(folder: Path) -> None:
    """What ``attributes.json`` does not name."""
    with suppress(FileError):  # a later call finds them
        said = filesystem.read_bytes(folder / SPEC_FILE) if filesystem.exists(folder / SPEC_FILE) else b""
        for file in filesystem.list_folder(folder, "attributes*"):
            if file.name != SPEC_FILE and file.name.encode() not in said:
                filesystem.discard(file)
