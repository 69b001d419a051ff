"""A file system that is really full soon. Needs the right to mount one; without it who asks is skipped."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["small_disk"]


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """``folder``, made here, as a file system of that size of its own."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    # Root of a container may not, either. Any other failure is one.
    if done.returncode and (os.geteuid() != 0 or "permission denied" in done.stderr):
        pytest.skip("a file system that is really full has to be mounted, and this user may not mount")
    assert done.returncode == 0, done.stderr
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
