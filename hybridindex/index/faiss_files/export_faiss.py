"""Exporting an index as a self-contained faiss file, list by list, without loading it.

A faiss IVF file ends with its inverted lists. So the empty model is serialised with its final vector count, its empty
lists are cut off the end, and ours are written instead.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, UnsupportedIndexError, cannot_write
from hybridindex.index.faiss_model import empty_lists, peel, require_faiss
from hybridindex.index.live.left_rows import LeftRows
from hybridindex.index.storage.commit import Progress, no_progress
from hybridindex.index.storage.generation import OutFile, as_path, unusable_path

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["to_faiss"]

_BLOCK = 32


def to_faiss(index: IVFIndex, file: str | Path, *, progress: Progress | None = None) -> None:
    """Write ``file`` so that ``faiss.read_index`` gives the same index, pre-transforms and normalisation included.

    The file appears under its name only when it is complete. It has the rows that are there now.

    Raises:
        CorruptIndexError: lists are damaged, or turned out to be while they were read.
        UnsupportedIndexError: this faiss stores lists in a way we do not know; or rows in blocks were deleted.
        InvalidInputError: ``file`` is a directory, or no name of a file.
        NotWritableError: there is no such directory, or it may not be written to.
        DiskFullError: no room.
    """
    file = as_path(file, "file")
    report = progress or no_progress
    blocks = index.manifest.layout == "pqfs32"
    live = index.live.read_now()
    if live is not None and blocks:
        raise UnsupportedIndexError(
            f"rows of {index.path} were deleted; codec {index.codec!r} keeps rows in blocks, where none can be left out"
        )
    rows = None if live is None else LeftRows(index, live)
    sizes = index.list_sizes if rows is None else rows.sizes
    head = _head(index, int(sizes.sum()))
    part = _open_part(file)
    try:
        part.append(head)
        if not blocks:
            part.append(b"full" + struct.pack("<Q", index.nlist))
            part.append(np.ascontiguousarray(sizes))
        with index.integrity.all_whole():
            for list_id in range(index.nlist):
                if rows is None:
                    codes, ids = index.stored_codes(list_id), index.list_ids(list_id)
                else:
                    codes, ids, _ = rows.of(list_id)
                if blocks:
                    part.append(struct.pack("<Q", len(ids)))
                    part.append(ids)
                    part.append(struct.pack("<Q", codes.nbytes))
                    part.append(codes)
                else:
                    part.append(codes)
                    part.append(ids)
                if list_id % 256 == 0 or list_id + 1 == index.nlist:
                    report("export", list_id + 1, index.nlist)
        part.sync()
        part.close()
        filesystem.replace(part.path, file)
        filesystem.sync_folder(file.parent)
    except BaseException as error:
        with suppress(FileError):
            part.close()
        gone = filesystem.discard(part.path)
        if isinstance(error, FileError) and str(error.filename).startswith(str(file.parent)):  # not the callback's
            left = "nothing was left behind" if gone else f"{part.path} is left: remove it"
            raise cannot_write(error, file, left) from error
        raise


def _open_part(file: Path) -> OutFile:
    try:
        if filesystem.is_dir(file):
            raise InvalidInputError(f"file {str(file)!r} is a directory; expected the name of a file")
        return OutFile(file.with_name(file.name + ".part"))
    except FileError as error:
        raise unusable_path(error, file) from error


def _head(index: IVFIndex, count: int) -> bytes:
    """Everything of the faiss file of ``count`` rows up to the sizes of the lists."""
    faiss = require_faiss()
    outer: Any = faiss.deserialize_index(np.array(index.mapped_model()))
    ivf = peel(outer)[0].ivf
    empty_lists(ivf)
    ivf.nprobe = index.nprobe
    ivf.ntotal = outer.ntotal = count
    raw: bytes = faiss.serialize_index(outer).tobytes()
    if index.manifest.layout == "pqfs32":
        kept = b"ilbl" + struct.pack("<4Q", index.nlist, int(ivf.invlists.code_size), _BLOCK, _BLOCK * index.code_size)
        tail = bytes(16 * index.nlist)
    else:
        kept = b"ilar" + struct.pack("<2Q", index.nlist, index.code_size)
        tail = b"sprs" + bytes(8)
    if not raw.endswith(kept + tail):
        raise UnsupportedIndexError(
            f"faiss {faiss.__version__} stores the lists of {type(ivf).__name__} in a way that is not known here"
        )
    return raw[: len(raw) - len(tail)]
