"""Getting ``lists.bin`` into the page cache in huge pages. A scan reads many lists once each: with 4 KiB pages much of
its time goes into address translation (measured: docs/performance.md). Advice only: where the system does not take it,
nothing changes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
from functools import cache
from pathlib import Path

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import FileError
from hybridindex.types import U8

__all__ = ["drop_small_pages", "empty_in_huge_pages", "load_in_huge_pages", "map_file", "reserves", "worth_huge_pages"]

#: linux/mman.h; Python does not name it.
_MADV_POPULATE_READ = 22
_MAP_NORESERVE = 0x4000
#: Whether the system counts memory that was asked for and never written to: 2, always.
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_LEAST_BYTES = _HUGE_PAGE = 2 << 20
#: What new memory begins at a multiple of: registers are read fastest there.
_ALIGNED = 64


def map_file(path: Path) -> U8:
    """The bytes of a non-empty file, mapped: (nbytes,) uint8, read-only. What is not cached yet comes in huge pages."""
    view = filesystem.map_file(path)
    if worth_huge_pages(len(view)):
        with contextlib.suppress(OSError):
            view.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(view, dtype=np.uint8)


def load_in_huge_pages(path: Path) -> None:
    """Reads the file into the page cache, in huge pages where the kernel can and it is not there yet."""
    if not worth_huge_pages(filesystem.stat(path).st_size):
        return
    with contextlib.suppress(OSError), filesystem.map_file(path) as view:
        view.madvise(mmap.MADV_HUGEPAGE)
        view.madvise(_MADV_POPULATE_READ)


def empty_in_huge_pages(nbytes: int, *, reserve: bool = False) -> U8:
    """New memory, (nbytes,) uint8, from a multiple of 64; in huge pages where it is large and the system gives some.

    Args:
        reserve: most of it may never be written to. See :func:`reserves`.

    Raises:
        MemoryError: the system has not that much.
    """
    if nbytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = np.empty(nbytes + _ALIGNED, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNED
        return memory[start : start + nbytes]
    # Whole huge pages, from the first one on.
    whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if reserve and reserves() else 0)
        view = mmap.mmap(-1, whole + _HUGE_PAGE, flags=flags)
    except OSError as error:
        raise MemoryError(f"no room for {nbytes} bytes") from error
    with contextlib.suppress(OSError):
        view.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(view, dtype=np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE
    return memory[start : start + nbytes]


@cache
def reserves() -> bool:
    """Whether memory that is never written to costs nothing but addresses, and there is no limit of these."""
    try:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return False
        return sys.platform == "linux" and filesystem.read_text(_OVERCOMMIT, encoding="ascii").strip() != "2"
    except FileError:
        return False


def drop_small_pages(fd: int) -> None:
    """Forgets the cached pages of a file that was written in pieces and synced: who reads it next gets large ones."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def worth_huge_pages(nbytes: int) -> bool:
    """Neither tiny nor so large that reading around each list would push other lists out."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return hasattr(mmap, "MADV_HUGEPAGE") and _LEAST_BYTES <= nbytes <= memory // 2
