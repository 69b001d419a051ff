"""Lists in page-locked host memory: packed as pages, within a limit. On the stand-in in plain memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridindex.paging import PageGeometry
from hybridindex.tiers.pinned import PinnedMemory

#: Pages of 64 bytes, blocks of four.
GEOMETRY = PageGeometry(code_size=8, rows_per_page=8)
PAGE = 64


def codes(list_id, n_pages):
    """All rows but one of so many pages."""
    return np.full((8 * n_pages - 1, 8), list_id, dtype=np.uint8)


def pin(sizes, **options):
    """``sizes``: pages of each list."""
    memory = PinnedMemory(GEOMETRY, page_locked=False, block_bytes=4 * PAGE, **options)
    return memory, memory.add_all(range(len(sizes)), lambda i: codes(i, sizes[i]), lambda: False)


def check(memory, sizes, pinned):
    for list_id, n_pages in enumerate(sizes):
        found = memory.find(list_id)
        assert (found is not None) == (list_id in pinned)
        if found is not None:
            rows = found.block[found.slot : found.slot + n_pages].reshape(-1, 8)[: 8 * n_pages - 1]
            assert (rows.numpy() == list_id).all()


def test_lists_lie_side_by_side_and_a_large_one_has_a_block_of_its_own():
    sizes = [1, 2, 1, 6, 3]
    memory, report = pin(sizes)
    assert (report.pinned, report.left_out, report.reason) == ((0, 1, 2, 3, 4), (), "")
    assert memory.nbytes == report.nbytes == (4 + 6 + 4) * PAGE
    check(memory, sizes, report.pinned)
    assert memory.add_all([3], lambda i: codes(i, 6), lambda: False).nbytes == 0
    memory.clear()
    assert (memory.find(0), memory.nbytes) == (None, 0)


@pytest.mark.parametrize("page_locked", [False, True])
def test_the_limit_holds_with_what_torch_rounds_up_and_smaller_lists_fill_what_is_left(monkeypatch, page_locked):
    taken, empty = [], torch.empty

    def plain(shape, *, pin_memory, **options):
        taken.append(1 << (shape[0] * shape[1] - 1).bit_length())
        assert pin_memory == page_locked
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", plain)
    sizes = [3, 9, 2, 1, 1, 2, 1]
    memory = PinnedMemory(GEOMETRY, page_locked=page_locked, block_bytes=4 * PAGE, limit_bytes=7 * PAGE)
    report = memory.add_all(range(len(sizes)), lambda i: codes(i, sizes[i]), lambda: False)
    # Blocks of four pages, two and one: powers of two, the largest that the limit still has.
    assert (report.pinned, report.left_out) == ((0, 2, 3), (1, 4, 5, 6))
    assert sum(taken) == memory.nbytes == 7 * PAGE
    check(memory, sizes, report.pinned)


def test_a_limit_below_a_page_pins_nothing():
    memory, report = pin([1, 1], limit_bytes=PAGE - 1)
    assert (report.pinned, report.left_out, memory.nbytes) == ((), (0, 1), 0)


def test_pinning_ends_when_nobody_wants_it_any_more():
    memory = PinnedMemory(GEOMETRY, page_locked=False)
    report = memory.add_all([0, 1], lambda i: codes(i, 1), lambda: memory.find(0) is not None)
    assert (report.pinned, report.reason) == ((0,), "it was cancelled")
