"""Reading lists into the page cache before they are searched: a scan that reads from disk takes tens of times as long.

Nothing is locked: what the system needs for something else it may drop again. What is read is also mapped in, so that
no search has to.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridindex import filesystem
from hybridindex.index.ivf import IVFIndex
from hybridindex.types import I64, U8

__all__ = ["Warmed", "available_bytes", "warm_lists"]

_log = logging.getLogger(__name__)

#: linux/mman.h; since Linux 5.14.
_MADV_POPULATE_READ = 22
#: Read at a time: searches of another router and an interrupt come between. A multiple of a huge page.
_STEP_BYTES = 32 << 20
_PROGRESS_S = 5.0
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What became of one call of :func:`warm_lists`."""

    #: Of the lists that are in memory now, and of all that are held, as they lie in the file.
    nbytes: int
    total_bytes: int
    seconds: float
    #: (m,) int64: the lists that are in memory now.
    lists: I64


def available_bytes() -> int:
    """Memory that could be used without swapping, as the system estimates it; a container's limit counts."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    found += [int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    found += [int(line) for line in _lines("/sys/fs/cgroup/memory.max") if line.isdecimal()]
    return min(found)


def _lines(file: str) -> list[str]:
    try:
        return filesystem.read_text(file).splitlines()
    except OSError:
        return []


def warm_lists(index: IVFIndex, most_bytes: int, order: I64 | None = None) -> Warmed:
    """Reads lists that are held into memory; returns when they are there.

    Args:
        most_bytes: what does not fit stays on disk, and the log says so.
        order: list ids, those first that are wanted most; None: as they lie in the file.
    """
    started = told_s = time.monotonic()
    data = index.mapped_lists()
    _, capacity, offset = index.extents().T
    stops = offset + capacity * (index.code_size + 8)
    lists = np.argsort(offset, kind="stable") if order is None else order
    ranges, total = [(0, len(data))], len(data)
    absent = index.integrity.absent
    if absent is not None:
        lists = lists[~absent[lists]]
        total = int((stops - offset)[~absent].sum())
    if total > most_bytes or absent is not None:
        lists = lists[np.cumsum((stops - offset)[lists]) <= most_bytes]
        ranges = _ranges(offset[lists], stops[lists])
    wanted = sum(stop - start for start, stop in ranges)
    done = reached = 0
    for start, stop in _steps(ranges):
        if not _populate(data, start, stop):
            break
        done += stop - start
        reached = stop
        if time.monotonic() - told_s >= _PROGRESS_S:
            told_s = time.monotonic()
            _log.info("%s: %.1f of %.1f GiB are in memory", index.path, done / 2**30, wanted / 2**30)
    warmed = Warmed(
        nbytes=done, total_bytes=total, seconds=time.monotonic() - started, lists=lists[stops[lists] <= reached]
    )
    if done >= total:
        _log.info("%s: all %d bytes of its lists are in memory after %.2f s", index.path, done, warmed.seconds)
    elif most_bytes > 0:
        _log.warning(
            "%s: %d of the %d bytes of its lists were read into memory; first searches of the others read from disk",
            index.path,
            done,
            total,
        )
    return warmed


def _ranges(starts: I64, stops: I64) -> list[tuple[int, int]]:
    """Bytes [start, stop) of the file that hold these extents, in order, none twice."""
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(zip(starts.tolist(), stops.tolist(), strict=True)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], stop
        elif stop > start:
            ranges.append((start, stop))
    return ranges


def _steps(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        for first in range(start, stop, _STEP_BYTES):
            yield first, min(stop, first + _STEP_BYTES)


def _populate(data: U8, start: int, stop: int) -> bool:
    """Reads bytes [start, stop) of a map; False where they cannot be read. Others may run meanwhile."""
    # As a foreign function: it lets go of the interpreter.
    libc = ctypes.CDLL(None, use_errno=True)
    first = start // _PAGE * _PAGE
    address, length = ctypes.c_void_p(data.ctypes.data + first), ctypes.c_size_t(stop - first)
    if libc.madvise(address, length, _MADV_POPULATE_READ) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # which an older kernel says
            _log.warning("lists cannot be read into memory: %s", os.strerror(code))
            return False
    # Under a hypervisor a page is the machine's only when a core has read it.
    data[first:stop:_PAGE].max(initial=0)
    return True
