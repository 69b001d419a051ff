"""Files out of memory, and which of their pages are in it."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import U8

__all__ = ["PAGE", "forget", "forget_lists", "in_memory"]

PAGE = os.sysconf("SC_PAGE_SIZE")


def in_memory(data: U8) -> npt.NDArray[np.bool_]:
    """(pages,) of a map: whether a page is in the page cache."""
    found = np.zeros(-(-len(data) // PAGE), np.uint8)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data))
    assert libc.mincore(*place, found.ctypes.data_as(ctypes.c_void_p)) == 0
    return (found & 1).astype(bool)


def forget(file: Path) -> None:
    """Drops what is cached of a file that nobody has read through a map. Skips where files are memory themselves."""
    with tempfile.NamedTemporaryFile(dir=file.parent) as scratch:
        scratch.write(bytes(4 * PAGE))
        _drop(scratch.name)
        if in_memory(np.memmap(scratch.name, np.uint8, "r")).any():
            pytest.skip(f"{file.parent} keeps its files in memory (tmpfs): set TMPDIR to a folder on a disk")
    _drop(file)


def _drop(file: Path | str) -> None:
    fd = os.open(file, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def forget_lists(index: IVFIndex) -> None:
    """Drops what is cached of the lists of an open index: none of their pages is in memory then."""
    gc.collect()  # maps of those that were closed
    forget(Path(index.integrity.file))
    data = index.mapped_lists()
    index.integrity.mapped.read_again(0, len(data))
    assert not in_memory(data).any(), "pages of a file that nobody reads stay in memory"
