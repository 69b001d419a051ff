"""Copies of added rows between extents: what a writer does most. The extension does it without the interpreter, so that
searches need not wait for it; numpy says what it does, and stands in where it was not built.
"""

from __future__ import annotations

import numpy as np

from hybridindex.extension import native
from hybridindex.types import I64, U8

__all__ = ["move_extents", "move_extents_reference", "put_rows", "put_rows_reference", "touch_ahead"]

#: Beside each row's code: its id, and its number among all that were ever added.
_WORDS_BESIDE = 2


def move_extents(old: U8, new: U8, code_size: int, before: I64, after: I64, gone_starts: I64, gone: I64) -> None:
    """Copies the rows of extents into others, in their order, but for those that go.

    Args:
        old, new: (b,) buffers, aligned to 8 bytes; the same, or two.
        before, after: (m, 3) int64 size, capacity, byte offset.
        gone_starts, gone: (m + 1,) and (g,) int64: rows of extent i that go are ``gone[gone_starts[i] :
            gone_starts[i + 1]]``, ascending.
    """
    copy = move_extents_reference if native is None else native.move_extents
    copy(old, new, code_size, *map(np.ascontiguousarray, (before, after, gone_starts, gone)))


def put_rows(data: U8, codes: U8, order: I64, at: I64) -> None:
    """Puts row ``order[i]`` of (n, code_size) codes at byte ``at[i]`` of a buffer."""
    put = put_rows_reference if native is None else native.put_rows
    put(data, *map(np.ascontiguousarray, (codes, order, at)))


def touch_ahead(data: U8, start: int, nbytes: int) -> None:
    """Has the system give the memory of these bytes of a buffer now, beside threads that write there; nothing without
    the extension."""
    if native is not None:
        native.touch_ahead(data, start, nbytes)


def move_extents_reference(
    old: U8, new: U8, code_size: int, before: I64, after: I64, gone_starts: I64, gone: I64
) -> None:
    """:func:`move_extents` in numpy."""
    words, here = old.view(np.int64), new.view(np.int64)
    for number, (size, rows, offset) in enumerate(before.tolist()):
        left = np.delete(np.arange(size), gone[gone_starts[number] : gone_starts[number + 1]])
        kept, capacity, to = after[number].tolist()
        codes = old[offset : offset + size * code_size].reshape(-1, code_size)
        new[to : to + kept * code_size] = codes[left].reshape(-1)
        for beside in range(_WORDS_BESIDE):
            target = (to + capacity * code_size) // 8 + beside * capacity
            here[target : target + kept] = words[(offset + rows * code_size) // 8 + beside * rows + left]


def put_rows_reference(data: U8, codes: U8, order: I64, at: I64) -> None:
    """:func:`put_rows` in numpy."""
    for row, start in zip(order.tolist(), at.tolist(), strict=True):
        data[start : start + codes.shape[1]] = codes[row]
