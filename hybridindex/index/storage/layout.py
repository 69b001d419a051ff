"""Where lists lie in ``lists.bin``, and how rows become blocks of 16. Pure numpy; no I/O.

``lists.bin`` holds one *extent* per list, each starting at a multiple of 64 bytes::

    capacity * code_size bytes of codes | capacity int64 ids

``capacity >= size`` is chosen so that the ids start at a multiple of 8 bytes. The table of extents is a (nlist, 3)
int64 array with the columns size, capacity, offset. faiss's ``OnDiskInvertedLists`` maps exactly this.

Layouts of the codes of one list:

``rows``
    One code after the other.
``blocks16``
    For codes of ``d`` equal elements (flat: 4 bytes each, fp16: 2, sq8: 1). Sixteen vectors form a block; inside a
    block element 0 of the 16 vectors comes first, then element 1 of the 16, and so on (dimension-major), so that one
    vector register holds the same dimension of 16 vectors. The last block is padded with zero bytes; capacity is a
    multiple of 16.
``pqfs32``
    faiss's 4-bit fast-scan blocks of 32: see :mod:`hybridindex.index.storage.pqfs`. Capacity is a multiple of 32.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from hybridindex.errors import CorruptIndexError
from hybridindex.types import I64, U8

__all__ = [
    "ALIGNMENT",
    "BLOCK",
    "Layout",
    "check_extents",
    "element_bytes",
    "from_blocks16",
    "id_slots",
    "plan_extents",
    "to_blocks16",
    "total_bytes",
]

#: How the codes of one list are arranged: see above.
Layout = Literal["rows", "blocks16", "pqfs32"]

#: Extents start at multiples of this many bytes.
ALIGNMENT = 64
#: Vectors per block of each layout.
BLOCK: dict[Layout, int] = {"rows": 1, "blocks16": 16, "pqfs32": 32}


def plan_extents(sizes: I64, code_size: int, layout: Layout) -> I64:
    """Extents for lists of ``sizes`` (nlist,) vectors, list by list in order: (nlist, 3) int64."""
    granule = math.lcm(BLOCK[layout], 8 // math.gcd(8, code_size))
    sizes = np.asarray(sizes, dtype=np.int64)
    capacity = -(-sizes // granule) * granule
    nbytes = -(-capacity * (code_size + 8) // ALIGNMENT) * ALIGNMENT
    offset = np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.int64)
    return np.ascontiguousarray(np.stack([sizes, capacity, offset], axis=1))


def total_bytes(table: I64, code_size: int) -> int:
    """Length of ``lists.bin``; never 0, because an empty file cannot be mapped."""
    ends = table[:, 2] + table[:, 1] * (code_size + 8)
    return max(ALIGNMENT, -(-int(ends.max()) // ALIGNMENT) * ALIGNMENT)


def id_slots(table: I64, code_size: int) -> I64:
    """Position of each list's first id when ``lists.bin`` is seen as one int64 array: (nlist,) int64."""
    return (table[:, 2] + table[:, 1] * code_size) // 8


def check_extents(table: I64, *, nlist: int, count: int, code_size: int, layout: Layout, file_bytes: int) -> None:
    """Prove that the table cannot make a reader leave the file.

    Raises:
        CorruptIndexError: naming the first rule that is broken.
    """
    if file_bytes % ALIGNMENT:
        raise CorruptIndexError(f"lists.bin has {file_bytes} bytes; expected a multiple of {ALIGNMENT}")
    if table.dtype != np.int64 or table.shape != (nlist, 3):
        raise CorruptIndexError(f"lists.idx.npy is {table.dtype} {table.shape}; expected int64 ({nlist}, 3)")
    size, capacity, offset = table.T
    if (size < 0).any() or (capacity < size).any() or (offset < 0).any():
        raise CorruptIndexError("lists.idx.npy: a list has a negative size or offset, or is larger than its extent")
    if int(size.sum()) != count:
        raise CorruptIndexError(f"lists.idx.npy: lists hold {int(size.sum())} vectors; the manifest says {count}")
    # Bound the factors first, so that the products below cannot wrap around.
    if int(capacity.max()) * (code_size + 8) > file_bytes or int(offset.max()) > file_bytes:
        raise CorruptIndexError(f"lists.idx.npy: a list reaches beyond the {file_bytes} bytes of lists.bin")
    if (capacity % BLOCK[layout]).any() or (offset % ALIGNMENT).any() or (capacity * code_size % 8).any():
        raise CorruptIndexError("lists.idx.npy: an extent is not aligned")
    ends = offset + capacity * (code_size + 8)
    if (ends[:-1] > offset[1:]).any() or int(ends[-1]) > file_bytes:
        raise CorruptIndexError("lists.idx.npy: extents overlap or reach beyond lists.bin")


def element_bytes(codec: str) -> int | None:
    """Bytes of one vector element in ``blocks16``; ``None`` when the codec has no such layout."""
    return {"flat": 4, "fp16": 2, "sq8": 1}.get(codec)


def to_blocks16(rows: U8, element: int) -> U8:
    """Interleave rows (n, code_size) uint8 into (ceil(n/16), 16*code_size) uint8, zero padded."""
    n, code_size = rows.shape
    blocks = -(-n // 16)
    padded = np.zeros((blocks * 16, code_size), dtype=np.uint8)
    padded[:n] = rows
    split = padded.reshape(blocks, 16, code_size // element, element)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(blocks, 16 * code_size)


def from_blocks16(blocks: U8, n: int, element: int) -> U8:
    """Undo :func:`to_blocks16`: the first ``n`` rows, (n, code_size) uint8."""
    code_size = blocks.shape[1] // 16
    split = blocks.reshape(len(blocks), code_size // element, 16, element)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(-1, code_size)[:n]
