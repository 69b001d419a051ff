"""New memory in huge pages, where it is large."""

import mmap

import numpy as np
import pytest

from hybridindex.index.storage import huge_pages
from hybridindex.index.storage.huge_pages import empty_in_huge_pages

HUGE = 2 << 20


@pytest.mark.parametrize("nbytes", [1, 63, 4096, HUGE - 1, HUGE, HUGE + 1, 5 * HUGE + 3])
def test_new_memory_is_aligned_and_can_be_written(nbytes):
    memory = empty_in_huge_pages(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.dtype == np.uint8
    assert memory.ctypes.data % (HUGE if nbytes >= HUGE else 64) == 0
    memory[:] = 7
    assert (memory == 7).all()


def test_memory_lives_as_long_as_a_part_of_it():
    part = empty_in_huge_pages(3 * HUGE)[HUGE : HUGE + 8]
    part[:] = 5
    others = [empty_in_huge_pages(3 * HUGE) for _ in range(4)]
    for other in others:
        other[:] = 9
    assert (part == 5).all()


def test_a_lack_of_memory_is_said_as_one(monkeypatch):
    def refused(*_args, **_kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages.mmap, "mmap", refused)
    assert huge_pages.mmap is mmap
    with pytest.raises(MemoryError, match="no room for 2097152 bytes"):
        empty_in_huge_pages(HUGE)
    assert len(empty_in_huge_pages(HUGE - 1)) == HUGE - 1
