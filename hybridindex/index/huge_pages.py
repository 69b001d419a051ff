"""Getting ``lists.bin`` into the page cache in huge pages. A scan reads many lists once each: with 4 KiB pages much of
its time goes into address translation (measured: docs/performance.md). Advice only: where the system does not take it,
nothing changes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

__all__ = ["drop_small_pages", "load_in_huge_pages"]

#: linux/mman.h; Python does not name it.
_MADV_POPULATE_READ = 22
_LEAST_BYTES = 2 << 20


def load_in_huge_pages(path: Path) -> None:
    """Reads the file into the page cache, in huge pages where the kernel can and it is not there yet."""
    nbytes = path.stat().st_size
    if not hasattr(mmap, "MADV_HUGEPAGE") or not _LEAST_BYTES <= nbytes <= _memory_bytes() // 2:
        return
    with (
        contextlib.suppress(OSError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as view,
    ):
        view.madvise(mmap.MADV_HUGEPAGE)
        view.madvise(_MADV_POPULATE_READ)


def drop_small_pages(fd: int) -> None:
    """Forgets the cached pages of a file that was written in pieces and synced: who reads it next gets large ones."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
