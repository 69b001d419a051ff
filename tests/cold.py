"""Files out of memory, and which of their pages are in it."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import U8

__all__ = ["PAGE", "forget_lists", "in_memory"]

PAGE = os.sysconf("SC_PAGE_SIZE")


def in_memory(data: U8) -> npt.NDArray[np.bool_]:
    """(pages,) of a map: whether a page is in the page cache."""
    found = np.zeros(-(-len(data) // PAGE), np.uint8)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data))
    assert libc.mincore(*place, found.ctypes.data_as(ctypes.c_void_p)) == 0
    return (found & 1).astype(bool)


def forget_lists(index: IVFIndex) -> bool:
    """Drops what is cached of the lists of an open index; False where the file system keeps files in memory."""
    gc.collect()  # maps of those that were closed
    fd = os.open(index.integrity.file, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    data = index.mapped_lists()
    index.integrity.mapped.read_again(0, len(data))
    return not in_memory(data).any()
