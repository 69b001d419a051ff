"""Names of other files inside a faiss file: of lists that faiss keeps in a file of their own (``OnDiskInvertedLists``).

faiss opens whatever name stands there while it reads the index, so that a crafted file would have any file of this
machine read into an index. Therefore the names are looked for in the bytes, before faiss reads them.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from hybridindex import filesystem

__all__ = ["on_disk_names"]

#: What such lists begin with; then nlist, code_size, and three vectors: extents, free slots, the name.
_MARK = b"ilod"
_LENGTH = struct.Struct("<Q")
_ITEM_BYTES = (24, 16, 1)


def on_disk_names(file: Path) -> list[str]:
    """The names in ``file``, in the order in which they stand there.

    Raises:
        FileError: it cannot be read.
    """
    if not filesystem.stat(file).st_size:
        return []
    with filesystem.map_file(file) as data:
        found = []
        at = data.find(_MARK)
        while at >= 0:
            if (name := _name_at(data, at + len(_MARK) + 2 * _LENGTH.size)) is not None:
                found.append(name)
            at = data.find(_MARK, at + 1)
        return found


def _name_at(data: mmap.mmap, at: int) -> str | None:
    """The name behind a mark; None where the lengths lead beyond the file: such bytes are vectors, or damaged."""
    begin = at
    for item_bytes in _ITEM_BYTES:
        if at + _LENGTH.size > len(data):
            return None
        begin = at + _LENGTH.size
        at = begin + item_bytes * _LENGTH.unpack_from(data, at)[0]
    return data[begin:at].decode(errors="surrogateescape") if at <= len(data) else None
