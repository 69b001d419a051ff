"""Digests of single lists, so that damage can be found, named and mended list by list while the others serve.

They lie in a table beside the files of a generation, in no manifest. It says itself which ``lists.bin`` it is of::

    lists.xxh3.npy    uint64 (nlist + 2, 2)
        row 0         XXH3-128 of lists.bin: high, low
        row 1 + l     XXH3-64 of the codes of list l, and of its ids
        last row      XXH3-128 of the bytes of all rows before: high, low

Padding has no digest: nothing reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from hybridindex import filesystem
from hybridindex.errors import FileError, MissingFileError
from hybridindex.index.storage.layout import BLOCK, Layout
from hybridindex.types import I64

__all__ = [
    "U64",
    "damaged_among",
    "damaged_lists",
    "digest_lists",
    "digest_part",
    "list_spans",
    "read_digests",
    "render_digests",
]

_log = logging.getLogger(__name__)

U64 = npt.NDArray[np.uint64]

_CHUNK_BYTES = 8 << 20
_LOW = (1 << 64) - 1


def list_spans(table: I64, code_size: int, layout: Layout) -> I64:
    """Where the bytes of each list lie that mean something: (nlist, 2, 2) int64, [start, stop) of codes and of ids."""
    size, capacity, offset = table.T
    block = BLOCK[layout]
    ids = offset + capacity * code_size
    codes_stop = offset + -(-size // block) * block * code_size
    return np.stack([np.stack([offset, codes_stop], axis=1), np.stack([ids, ids + 8 * size], axis=1)], axis=1)


def digest_part(part: memoryview | bytes) -> int:
    """XXH3-64 of the codes, or of the ids, of a list."""
    return int(xxhash.xxh3_64_intdigest(part))


def digest_lists(path: Path, spans: I64, *, progress: Callable[[int], None] | None = None) -> tuple[str, U64]:
    """Reads a ``lists.bin`` once: the digest of the whole file, as in a manifest, and (nlist, 2) uint64 of its lists.

    Constant memory; ``progress`` gets the number of bytes read so far.

    Raises:
        OSError: the file cannot be read; names it.
    """
    starts, stops = spans[:, :, 0].reshape(-1).tolist(), spans[:, :, 1].reshape(-1).tolist()
    found = np.full(len(starts), digest_part(b""), dtype=np.uint64)
    whole, running = xxhash.xxh3_128(), xxhash.xxh3_64()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    at = number = 0
    with filesystem.File(path, "r") as file:
        while count := file.readinto(buffer):
            whole.update(buffer[:count])
            end = at + count
            while number < len(starts) and starts[number] < end:
                running.update(buffer[max(starts[number], at) - at : min(stops[number], end) - at])
                if stops[number] > end:
                    break
                found[number] = running.intdigest()
                running.reset()
                number += 1
            at = end
            if progress is not None:
                progress(at)
    return str(whole.hexdigest()), found.reshape(-1, 2)


def render_digests(lists_digest: str, digests: U64) -> bytes:
    """The bytes of the table; ``lists_digest``: of the whole ``lists.bin``, as in the manifest."""
    rows = np.concatenate([_halves(lists_digest), digests.astype("<u8")])
    return filesystem.array_bytes(np.concatenate([rows, _halves(xxhash.xxh3_128_hexdigest(rows.tobytes()))]))


def read_digests(path: Path, lists_digest: str, nlist: int) -> U64 | None:
    """The (nlist, 2) uint64 digests in a table, where it is whole and of the ``lists.bin`` with that digest; else None.

    An index that an older version wrote has no table. That one cannot be read is logged.
    """
    try:
        rows = filesystem.read_array(path)
    except (MissingFileError, ValueError, EOFError):
        return None
    except FileError as error:
        _log.warning("the digests of single lists are not used: %s", error)
        return None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.dtype("<u8") or rows.shape != (nlist + 2, 2):
        return None
    own = _halves(xxhash.xxh3_128_hexdigest(rows[:-1].tobytes()))
    if not np.array_equal(rows[-1:], own) or not np.array_equal(rows[:1], _halves(lists_digest)):
        return None
    digests: U64 = rows[1:-1].astype(np.uint64)
    return digests


def damaged_lists(path: Path, spans: I64, digests: U64) -> list[int]:
    """The lists of a ``lists.bin`` that differ from their digests, ascending. Raises OSError."""
    _, found = digest_lists(path, spans)
    return np.flatnonzero((found != digests).any(axis=1)).tolist()


def damaged_among(path: Path, spans: I64, digests: U64, lists: Iterable[int]) -> list[int]:
    """Those of ``lists`` whose bytes in a ``lists.bin`` differ from their digests. No other byte is read. Raises
    OSError."""
    found = []
    with filesystem.File(path, "r") as file:
        for list_id in lists:
            running = xxhash.xxh3_64()
            for part, (start, stop) in enumerate(spans[list_id].tolist()):
                running.reset()
                for first in range(start, stop, _CHUNK_BYTES):
                    running.update(file.read_at(first, min(stop, first + _CHUNK_BYTES) - first))
                if running.intdigest() != int(digests[list_id, part]):
                    found.append(list_id)
                    break
    return found


def _halves(digest: str) -> U64:
    value = int(digest, 16)
    return np.array([[value >> 64, value & _LOW]], dtype="<u8")
