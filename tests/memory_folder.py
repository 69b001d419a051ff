"""A temporary folder for what is written often and need not outlive the process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["memory_folder"]


@contextmanager
def memory_folder() -> Iterator[Path]:
    """In memory where the system has that: no sync waits for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="hybridindex-tests-", dir=memory if memory.is_dir() else None) as made:
        yield Path(made)
