"""Copies of added rows between extents: as numpy does them, and nothing outside of the buffers."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import _native
from hybridindex.index.live.extents import (
    move_extents,
    move_extents_reference,
    put_rows,
    put_rows_reference,
    touch_ahead,
)
from tests.examples import examples

NBYTES = 4096


def rubbish(seed):
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


def whole(rows, code_size):
    """A capacity behind which words are aligned."""
    granule = 8 // np.gcd(8, code_size)
    return int(-(-rows // granule) * granule)


@examples(60)
@given(data=st.data(), code_size=st.sampled_from([1, 3, 8, 12]), same=st.booleans())
def test_what_moves_and_what_goes(data, code_size, same):
    before, after, gone, starts, at, to = [], [], [], [0], 0, 2048 if same else 0
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(st.integers(0, 9))
        capacity = whole(size + data.draw(st.integers(0, 5)), code_size)
        going = sorted(data.draw(st.sets(st.integers(0, size - 1)))) if size else []
        room = whole(size - len(going) + data.draw(st.integers(0, 5)), code_size)
        before.append((size, capacity, at))
        after.append((size - len(going), room, to))
        gone += going
        starts.append(len(gone))
        at += -(-capacity * (code_size + 16) // 8) * 8
        to += -(-room * (code_size + 16) // 8) * 8
    given = [np.array(each, dtype=np.int64).reshape(-1, 3) for each in (before, after)]
    given += [np.array(starts), np.array(gone, dtype=np.int64)]
    found, expected, old = rubbish(1), rubbish(1), rubbish(2)
    move_extents(found if same else old, found, code_size, *given)
    move_extents_reference(expected if same else old, expected, code_size, *given)
    np.testing.assert_array_equal(found, expected)


def test_rows_are_put_in_their_order():
    rng = np.random.default_rng(0)
    codes, order = rng.integers(0, 256, (20, 7), dtype=np.uint8), rng.permutation(20)
    at = rng.permutation(100)[:20] * 7 + 3
    found, expected = rubbish(1), rubbish(1)
    put_rows(found, codes, order, at)
    put_rows_reference(expected, codes, order, at)
    np.testing.assert_array_equal(found, expected)


GOOD = (np.array([[3, 8, 64]]), np.array([[2, 8, 512]]), np.array([0, 1]), np.array([1]))


@pytest.mark.parametrize(
    ("which", "bad", "error", "words"),
    [
        (0, [[3, 2, 64]], IndexError, "leaves the buffer"),
        (0, [[-1, 8, 64]], IndexError, "leaves the buffer"),
        (0, [[3, 8, 60]], IndexError, "not aligned"),
        (0, [[3, 7, 64]], IndexError, "not aligned"),
        (0, [[3, 8, NBYTES - 8]], IndexError, "leaves the buffer"),
        (0, [[3, 1 << 60, 64]], IndexError, "leaves the buffer"),
        (1, [[2, 8, NBYTES]], IndexError, "leaves the buffer"),
        (1, [[2, 8, -8]], IndexError, "leaves the buffer"),
        (1, [[3, 8, 512]], ValueError, "does not have the rows that are left"),
        (3, [3], IndexError, "do not ascend within it"),
        (3, [-1], IndexError, "do not ascend within it"),
        (2, [0, 0], ValueError, "length of gone"),
        (2, [1, 1], ValueError, "length of gone"),
        (2, [0], ValueError, r"\(n \+ 1,\)"),
        (0, [[3, 8]], ValueError, r"\(n, 3\)"),
    ],
)
def test_moves_beyond_a_buffer_are_refused(which, bad, error, words):
    given = list(GOOD)
    data = rubbish(0)
    _native.move_extents(data, data, 3, *given)
    given[which] = np.array(bad, dtype=np.int64)
    before = data.copy()
    with pytest.raises(error, match=words):
        _native.move_extents(data, data, 3, *given)
    np.testing.assert_array_equal(data, before)


def test_rows_that_go_ascend():
    data = rubbish(0)
    with pytest.raises(IndexError, match="do not ascend"):
        _native.move_extents(data, data, 3, GOOD[0], np.array([[1, 8, 512]]), np.array([0, 2]), np.array([2, 1]))


@pytest.mark.parametrize(
    ("order", "at"), [([2, 0], [0, 8]), ([0, -1], [0, 8]), ([0, 1], [0, NBYTES - 6]), ([0, 1], [0, -1])]
)
def test_rows_beyond_a_buffer_are_refused(order, at):
    data, codes = rubbish(0), np.zeros((2, 7), np.uint8)
    before = data.copy()
    with pytest.raises(IndexError, match=r"row [01] is none of the codes, or leaves"):
        _native.put_rows(data, codes, np.array(order), np.array(at))
    np.testing.assert_array_equal(data, before)
    with pytest.raises(ValueError, match="agree on n"):
        _native.put_rows(data, codes, np.array([0]), np.array([0, 8]))
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        _native.put_rows(data[1:], codes, np.array([0, 1]), np.array([0, 8]))
    with pytest.raises(ValueError, match="code_size"):
        _native.move_extents(data, data, 0, *GOOD)


def resident(memory):
    """Which pages of whole pages the system has given."""
    pages = np.zeros(memory.nbytes // mmap.PAGESIZE, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    start, count = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    assert libc.mincore(start, count, ctypes.c_void_p(pages.ctypes.data)) == 0
    return pages & 1


def test_memory_is_there_before_it_is_written_to():
    memory = np.frombuffer(mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[3 * mmap.PAGESIZE] = 7
    touch_ahead(memory, 2 * mmap.PAGESIZE, 10 * mmap.PAGESIZE)
    assert resident(memory)[2:12].all()
    assert memory.sum(dtype=np.int64) == memory[3 * mmap.PAGESIZE] == 7


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 8), (0, -1), (NBYTES - 8, 16), (NBYTES + 1, 0), (0, 1 << 62)])
def test_memory_outside_is_not_touched(start, nbytes):
    with pytest.raises(IndexError, match="leave the buffer"):
        touch_ahead(rubbish(1), start, nbytes)
