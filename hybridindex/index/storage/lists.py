"""The table of extents as it lies on disk; and writing ``lists.bin``: streams of encoded rows into extents, and extents
of one layout into those of another.

Bounded memory: at most one chunk of rows at a time. Knows extents and files; not vectors or faiss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError
from hybridindex.index.storage.generation import OutFile, unreadable
from hybridindex.index.storage.layout import (
    BLOCK,
    Layout,
    check_extents,
    from_blocks16,
    plan_extents,
    to_blocks16,
    total_bytes,
)
from hybridindex.index.storage.manifest import LISTS_FILE, TABLE_FILE, Manifest
from hybridindex.index.storage.pqfs import pack_pqfs, unpack_pqfs
from hybridindex.types import I64, U8

__all__ = ["ExtentReader", "ExtentWriter", "read_table", "repack"]

_REPACK_BYTES = 8 << 20


def read_table(folder: Path, manifest: Manifest) -> I64:
    """The (nlist, 3) table of extents in the folder of a generation, proven to stay within ``lists.bin``.

    Raises:
        CorruptIndexError: damaged, or of another index. UnreadableIndexError: it cannot be read.
    """
    file = folder / TABLE_FILE
    try:
        table = filesystem.read_array(file)
    except OSError as error:
        raise unreadable(error, file) from error
    except (ValueError, EOFError) as error:
        raise CorruptIndexError(f"{file} cannot be read: {error}") from error
    check_extents(
        table,
        nlist=manifest.nlist,
        count=manifest.count,
        code_size=manifest.code_size,
        layout=manifest.layout,
        file_bytes=manifest.files[LISTS_FILE].size,
    )
    return np.ascontiguousarray(table)


class ExtentWriter:
    """Fills ``rows`` extents: every call appends some vectors to their lists, keeping their order. One thread."""

    def __init__(self, out: OutFile, sizes: I64, code_size: int) -> None:
        self.table = plan_extents(sizes, code_size, "rows")
        self._out = out
        self._code_size = code_size
        self._filled = np.zeros(len(sizes), dtype=np.int64)
        out.reserve(total_bytes(self.table, code_size))

    def add(self, lists: I64, codes: U8, ids: I64) -> None:
        """Append codes (n, code_size) and ids (n,) to ``lists`` (n,): a counting sort, list by list."""
        if not len(lists):
            return
        order = np.argsort(lists, kind="stable")
        lists, codes, ids = lists[order], codes[order], ids[order]
        starts = np.flatnonzero(np.diff(lists, prepend=-1))
        stops = np.append(starts[1:], len(lists))
        touched = lists[starts]
        size, capacity, offset = self.table[touched].T
        position = self._filled[touched]
        assert (position + stops - starts <= size).all(), "more vectors than were counted"
        code_at = (offset + position * self._code_size).tolist()
        id_at = (offset + capacity * self._code_size + position * 8).tolist()
        self._filled[touched] += stops - starts
        for start, stop, code_offset, id_offset in zip(starts.tolist(), stops.tolist(), code_at, id_at, strict=True):
            self._out.write(codes[start:stop], code_offset)
            self._out.write(ids[start:stop], id_offset)


class ExtentReader:
    """Rows of lists, whatever their layout; ``data`` is the mapped ``lists.bin`` (nbytes,) uint8. Thread-safe."""

    def __init__(self, data: U8, table: I64, *, code_size: int, layout: Layout, element: int | None) -> None:
        if layout == "blocks16" and element is None:
            raise CorruptIndexError("layout blocks16 does not exist for this codec")
        self._data, self._table = data, table
        self._code_size, self._layout, self._element = code_size, layout, element

    def size(self, list_id: int) -> int:
        return int(self._table[list_id, 0])

    def ids(self, list_id: int) -> I64:
        """(size,) int64, a view."""
        size, capacity, offset = (int(v) for v in self._table[list_id])
        start = offset + capacity * self._code_size
        return self._data[start : start + 8 * size].view(np.int64)

    def stored(self, list_id: int) -> U8:
        """The code bytes of a list as they lie there, padding of the last block included: a view."""
        size, _, offset = (int(v) for v in self._table[list_id])
        block = BLOCK[self._layout]
        return self._data[offset : offset + -(-size // block) * block * self._code_size]

    def rows(self, list_id: int, start: int, stop: int) -> U8:
        """Flat codes of vectors start..stop of a list, (stop-start, code_size) uint8; a view where layout is rows."""
        block = BLOCK[self._layout]
        first, last = start // block, -(-stop // block)
        stored = self.stored(list_id)[first * block * self._code_size : last * block * self._code_size]
        if self._layout == "rows":
            return stored.reshape(-1, self._code_size)
        blocks = stored.reshape(-1, block * self._code_size)
        if self._layout == "pqfs32":
            rows = unpack_pqfs(blocks, stop - first * block)
        else:
            rows = from_blocks16(blocks, stop - first * block, self._element or 1)
        return rows[start - first * block :]


def repack(
    source: ExtentReader,
    out: OutFile,
    *,
    sizes: I64,
    code_size: int,
    layout: Layout,
    element: int | None,
    progress: Callable[[int], None] | None = None,
) -> I64:
    """Write all lists of ``source`` in another layout; returns the new table (nlist, 3) int64."""
    table = plan_extents(sizes, code_size, layout)
    out.reserve(total_bytes(table, code_size))
    step = max(32, _REPACK_BYTES // code_size // 32 * 32)
    for list_id, (size, capacity, offset) in enumerate(table.tolist()):
        for start in range(0, size, step):
            rows = source.rows(list_id, start, min(start + step, size))
            out.write(_arrange(rows, layout, element), offset + start * code_size)
        if size:
            out.write(source.ids(list_id), offset + capacity * code_size)
        if progress is not None and (list_id % 256 == 0 or list_id + 1 == len(table)):
            progress(list_id + 1)
    return table


def _arrange(rows: U8, layout: Layout, element: int | None) -> U8:
    if layout == "pqfs32":
        return pack_pqfs(rows)
    if layout == "blocks16":
        assert element is not None, "callers ask for blocks16 only where the codec has elements"
        return to_blocks16(rows, element)
    return np.ascontiguousarray(rows)
