"""What stands in an index directory, in words, and who serves it.

A daemon keeps an address file beside the generations (:mod:`hybridindex.service.daemon_address` writes it), and a lock
that ends with its process: without the lock, an address file is a dead daemon's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from hybridindex import filesystem
from hybridindex.errors import HybridIndexError
from hybridindex.index.storage.manifest import MANIFEST_FILE, parse_manifest
from hybridindex.processes import lock_file

__all__ = ["ADDRESS_FILE", "ADDRESS_LOCK", "RunningDaemon", "describe_standing", "find_daemon"]

ADDRESS_FILE, ADDRESS_LOCK = "daemon.json", "daemon.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemon:
    """The contents of the address file."""

    pid: int
    #: ``http://…`` and ``unix:…``, for the client; the best one first.
    urls: tuple[str, ...]
    #: The generation that it serves; None: it is older than this field.
    generation: int | None = None
    #: The index's name there; None: it is older than this field, and serves one.
    index: str | None = None

    def __str__(self) -> str:
        what = "" if self.generation is None else f" generation {self.generation}"
        at = f" at {self.urls[0]}" if self.urls else ""
        return f"the daemon with pid {self.pid} serves{what or ' it'}{at}"


def find_daemon(folder: Path) -> RunningDaemon | None:
    """The daemon that serves an index, or None."""
    lock = folder / ADDRESS_LOCK
    try:
        if not filesystem.exists(lock):
            return None
        probe = lock_file(lock, timeout_s=0)
        probe.acquire()
    except Timeout:
        try:
            data = json.loads(filesystem.read_bytes(folder / ADDRESS_FILE))
            return RunningDaemon(
                pid=int(data["pid"]),
                urls=tuple(str(u) for u in data["urls"]),
                generation=data.get("generation"),
                index=data.get("index"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # it is starting or stopping
    except OSError:
        return None
    probe.release()
    return None


def describe_standing(folder: Path, generation: Path | None) -> str:
    """An index, and who serves it. ``generation``: the current one's directory; None: it is damaged."""
    words = "it is damaged"
    if generation is not None:
        try:
            found = parse_manifest(filesystem.read_bytes(generation / MANIFEST_FILE), MANIFEST_FILE)
            rows = f"{found.count:,} x {found.dim}, {found.codec}, {found.metric}"
            words = f"generation {found.generation}, {rows}, built {found.created_at}"
        except HybridIndexError as error:
            words = f"{generation.name}, damaged ({error})"
    daemon = find_daemon(folder)
    return f"{words}; {daemon or 'no daemon serves it'}"
