"""The mappings of one ``lists.bin``: whether their bytes can be read, and how single bytes are replaced under readers.

Scans read mapped bytes where they lie, ours and faiss's own mapping. So good bytes are put in the place of damaged ones
as private pages at the same addresses: a page at a time is the old one or the new one, and no scan looks anything up.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.extension import native
from hybridindex.index.storage.huge_pages import worth_huge_pages
from hybridindex.types import I64, U8

__all__ = ["MappedLists"]

_log = logging.getLogger(__name__)

#: linux/mman.h; Python names neither.
_MADV_POPULATE_READ = 22
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE_FIXED = 3
_PAGE = mmap.PAGESIZE


class MappedLists:
    """Owner of a descriptor of the mapped file and, where the extension is there, of the watch for its SIGBUS.

    Reading from any thread; one thread at a time replaces.
    """

    def __init__(self, file: Path, data: U8, other_addresses: Sequence[int], marks: I64) -> None:
        """
        Args:
            file: what is mapped.
            data: our mapping, whole pages of memory but for the last.
            other_addresses: of further mappings of the same bytes.
            marks: (1,) int64, counted up when bytes turn out to be gone while they are read.
        """
        self.file = file
        self._data = data
        self._addresses = [int(data.ctypes.data), *other_addresses]
        self._marks = marks
        with filesystem.performing("open", file):
            self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        #: Like what watches tell: nobody could read it when bytes beside it were replaced.
        self._zeroed: list[tuple[int, int]] = []
        self._close = weakref.finalize(self, os.close, self._fd)
        #: Who reads single rows; while there are any, a fault reads no page but its own.
        self._readers: set[object] = set()
        self._watches: list[Any] = []
        if native is not None:
            self._watches = [native.Watch(at, len(data), self._fd, str(file), marks) for at in self._addresses]
        if not all(watch.watching for watch in self._watches):
            _log.warning("%s is not watched: too many indexes are open; if it is cut, the process ends", file)

    def close(self) -> None:
        """Ends the watch. What is mapped stays so."""
        self._watches = []
        self._close()
        self._fd = -1

    # Reading

    def take_gone(self) -> list[tuple[int, int]]:
        """Parts [start, stop) that could not be read since this was asked last: a mapping holds zeros there, also where
        bytes had been replaced."""
        taken = [part for watch in self._watches for part in watch.take_gone()] + self._zeroed
        self._zeroed = []
        return taken

    def count(self) -> None:
        """One more change of what may be read."""
        if native is not None:
            native.count(self._marks)
        else:
            self._marks[0] += 1

    def length(self) -> int:
        """Bytes that the file has now; 0 where that cannot be asked."""
        if self._fd < 0:  # closed: nobody asks for the bytes
            return len(self._data)
        try:
            return os.fstat(self._fd).st_size
        except OSError:
            return 0

    def read_single_rows(self, reader: object) -> None:
        """Until ``reader`` ends it, pages are read one by one: neither in huge pages nor with those beside them."""
        self._readers.add(reader)
        self._advise()

    def end_single_rows(self, reader: object) -> None:
        """Harmless where it has not begun, or has ended."""
        self._readers.discard(reader)
        self._advise()

    def _advise(self) -> None:
        """Advice only: where the system does not take it, nothing changes."""
        huge = mmap.MADV_HUGEPAGE if worth_huge_pages(len(self._data)) else None
        for advice in (mmap.MADV_RANDOM, mmap.MADV_NOHUGEPAGE) if self._readers else (mmap.MADV_NORMAL, huge):
            if advice is not None:
                _libc().madvise(self._addresses[0], len(self._data), advice)

    @property
    def tells_memory(self) -> bool:
        """Whether the system says which pages are in memory: to the file's owner and to root, for sure."""
        try:
            return os.geteuid() in (0, os.fstat(self._fd).st_uid)
        except OSError:
            return False

    def ask_for(self, start: int, stop: int) -> None:
        """Who will read all of bytes [start, stop) does not wait for page after page, while others read single rows."""
        if self._readers:
            first = start // _PAGE * _PAGE
            _libc().madvise(self._addresses[0] + first, stop - first, mmap.MADV_WILLNEED)

    def readable(self, start: int, stop: int) -> bool:
        """Reads bytes [start, stop) into memory; False where that fails. Other threads may run meanwhile."""
        self.ask_for(start, stop)
        first = start // _PAGE * _PAGE
        code = _libc().madvise(self._addresses[0] + first, stop - first, _MADV_POPULATE_READ)
        # An older kernel cannot say.
        return code == 0 or ctypes.get_errno() == errno.EINVAL

    def read_again(self, start: int, stop: int) -> None:
        """Lets the next reader of bytes [start, stop) get them from the disk, as far as the system lets go of them."""
        first, last = start // _PAGE * _PAGE, min(-(-stop // _PAGE) * _PAGE, len(self._data))
        for address in self._addresses:
            _libc().madvise(address + first, last - first, mmap.MADV_DONTNEED)
        with suppress(OSError):
            os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)

    def read_file(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of what has the file's name now, which may be another one; fewer beyond its end.

        Raises:
            OSError: it cannot be read.
        """
        with filesystem.File(self.file, "r") as file, filesystem.performing("read", self.file):
            parts = []
            while start < stop and (part := os.pread(file.fileno(), stop - start, start)):
                parts.append(part)
                start += len(part)
            return b"".join(parts)

    # Replacing

    def replace(self, start: int, content: bytes) -> None:
        """Puts ``content`` at ``start``, in private memory: whole pages, whose other bytes stay, or are gone where they
        cannot be read.

        Raises:
            OSError: there is no memory.
        """
        first = start // _PAGE * _PAGE
        stop = start + len(content)
        # A copy of a page ends where the mapping ends.
        last = min(-(-stop // _PAGE) * _PAGE, len(self._data))
        pages = self._read(first, start) + content + self._read(stop, last)
        for address in self._addresses:
            _put_pages(address + first, pages)

    def _read(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        if self.readable(start, stop):
            return self._data[start:stop].tobytes()
        self._zeroed.append((start, stop))
        self.count()
        return bytes(stop - start)

    def map_again(self) -> None:
        """Maps the file anew at the same addresses: all that was replaced, or gone, is the file's again.

        Raises:
            OSError: it cannot be mapped.
        """
        for watch in self._watches:
            watch.clear()
        self._zeroed = []
        for address in self._addresses:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _mapped(_libc().mmap(address, len(self._data), mmap.PROT_READ, flags, self._fd, 0))
        self._advise()

    def is_mapped_file(self) -> bool:
        """Whether the file's name still is that of the file that is mapped."""
        with suppress(OSError):
            return os.path.samestat(filesystem.stat(self.file), os.fstat(self._fd))
        return False


def _put_pages(address: int, pages: bytes) -> None:
    libc = _libc()
    length = -(-len(pages) // _PAGE) * _PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fresh = _mapped(libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))
    ctypes.memmove(fresh, pages, len(pages))
    libc.mprotect(fresh, length, mmap.PROT_READ)
    # At once for every reader.
    try:
        _mapped(libc.mremap(fresh, length, length, _MREMAP_MAYMOVE_FIXED, address))
    except OSError:
        libc.munmap(fresh, length)
        raise


def _mapped(address: int) -> int:
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return address


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype, libc.mremap.restype = pointer, pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, ctypes.c_int, pointer]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    libc.mprotect.argtypes = [pointer, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc
