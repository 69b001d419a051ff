"""How much memory requests may take together where nobody says."""

from __future__ import annotations

import contextlib
import os

from hybridindex import filesystem

__all__ = ["LEAST_REQUEST_MEMORY", "default_request_memory"]

#: Least budget that can be told.
LEAST_REQUEST_MEMORY = 256 << 20
_MOST_BY_DEFAULT = 8 << 30


def default_request_memory() -> int:
    """An eighth of this machine's memory, or of what a container may have of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
        total = min(total, int(filesystem.read_text("/sys/fs/cgroup/memory.max")))
    return min(max(total // 8, LEAST_REQUEST_MEMORY), _MOST_BY_DEFAULT)
