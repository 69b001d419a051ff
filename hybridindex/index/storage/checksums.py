"""xxh3_128 digests of files and buffers, streamed. Detects damage, not tampering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from hybridindex.filesystem import file_digest

__all__ = ["digest_bytes", "digest_file"]


def digest_bytes(data: bytes | memoryview) -> str:
    """32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def digest_file(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Digest of a whole file in constant memory; ``progress`` gets the number of bytes read so far.

    Raises:
        FileError: the file cannot be read.
    """
    return file_digest(path, xxhash.xxh3_128, progress=progress)
