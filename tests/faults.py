"""Faults of the disk under the product's own calls: which call fails, how, and for how long."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridindex.filesystem import Call

__all__ = ["WRITES", "FaultyDisk", "of"]

#: Calls that write, or make what was written last.
WRITES = frozenset(
    {"create", "write", "truncate", "sync", "sync_folder", "make_folder", "link", "symlink", "rename", "replace"}
    | {"sqlite"}
)


def of(*names: str, path: str = "") -> Callable[[Call], bool]:
    """Calls of these names (any, if none is given) on paths, old or new, that end so."""
    return lambda call: (not names or call.name in names) and (call.path.endswith(path) or call.to.endswith(path))


@dataclass(slots=True, kw_only=True)
class FaultyDisk:
    """For ``filesystem.watched_by``: counts calls, and fails one of them, or all from one on."""

    #: Which calls count.
    counts: Callable[[Call], bool] = field(default_factory=of)
    #: So many pass before one fails; None: all pass.
    allowed: int | None = None
    #: None: a write takes half of its bytes, then all goes on.
    number: int | None = None
    #: It fails from then on; otherwise once.
    sticks: bool = True
    calls: list[Call] = field(default_factory=list)
    failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, call: Call) -> int | None:
        if not self.counts(call):
            return None
        with self._lock:
            at = len(self.calls)
            self.calls.append(call)
            if self.allowed is None or at < self.allowed or (at > self.allowed and not self.sticks):
                return None
            self.failed += 1
        if self.number is None:
            return max(1, len(call.data) // 2) if call.name == "write" else None
        raise OSError(self.number, os.strerror(self.number), call.path)
