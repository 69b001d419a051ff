"""xxh3_128 digests of files and buffers, streamed. Detects damage, not tampering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from hybridindex.errors import naming

__all__ = ["digest_bytes", "digest_file"]

_CHUNK_BYTES = 8 << 20


def digest_bytes(data: bytes) -> str:
    """32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def digest_file(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Digest of a whole file in constant memory; ``progress`` gets the number of bytes read so far.

    Raises:
        OSError: the file cannot be read; names it.
    """
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    done = 0
    with naming(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            done += count
            if progress is not None:
                progress(done)
    return str(state.hexdigest())
