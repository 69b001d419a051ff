"""Rows that stay on disk: what is asked for comes into memory, and nothing beside it."""

from __future__ import annotations

import ctypes
import gc
import resource
import time

import numpy as np
import pytest

from hybridindex.index.storage.mapped_lists import MappedLists
from hybridindex.tiers.host.rows_on_disk import RowsOnDisk
from tests.clustered import small_index
from tests.coded import with_codes
from tests.cold import PAGE, forget_lists, in_memory

WAIT_S = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Rows of 256 bytes in lists of some pages."""
    path = tmp_path_factory.mktemp("rows") / "i"
    with with_codes(small_index(path, n=40_000, dim=64)) as found:
        yield found


@pytest.fixture
def cold(index):
    """A reader of single rows, and none of them in memory."""
    rows = RowsOnDisk(index)
    forget_lists(index)
    yield rows
    rows.close()


def pages_of(index, positions, rows=True):
    """The pages of rows and ids, by the layout of docs/index-format.md."""
    pages = set()
    for position in positions[positions >= 0].tolist():
        _, capacity, offset = index.extents()[position >> 32].tolist()
        row, size = position & 0xFFFFFFFF, index.code_size
        id_at = offset + capacity * size + 8 * row
        at = offset + row * size
        if rows:
            pages |= set(range(at // PAGE, (at + size - 1) // PAGE + 1))
        pages.add(id_at // PAGE)
    return sorted(pages)


def some_positions(index, n, r, seed=0):
    rng = np.random.default_rng(seed)
    lists = rng.integers(index.nlist, size=(n, r))
    found = (lists << 32) | rng.integers(np.maximum(index.list_sizes[lists], 1))
    return np.where((index.list_sizes[lists] > 0) & (rng.random((n, r)) < 0.9), found, -1)


def read(data, pages):
    """One byte of each."""
    data[np.asarray(pages) * PAGE].max(initial=0)


def arrive(data, pages):
    """What was asked for comes, though nobody reads it."""
    until = time.monotonic() + WAIT_S
    while not in_memory(data)[pages].all():
        assert time.monotonic() < until, "the pages that were asked for do not come"


@pytest.mark.parametrize("rows", [True, False])
def test_the_pages_of_the_rows_come_and_no_others(index, cold, rows):
    positions, data = some_positions(index, 3, 20), index.mapped_lists()
    expected = pages_of(index, positions, rows)
    assert 0 < len(expected) < len(data) // PAGE // 4
    assert cold.ask_for(positions, rows=rows) == len(expected)
    arrive(data, expected)
    np.testing.assert_array_equal(np.flatnonzero(in_memory(data)), expected)


def test_what_is_in_memory_is_not_asked_for_again(index, cold):
    first, second = some_positions(index, 2, 30), some_positions(index, 2, 30, seed=1)
    n_first = cold.ask_for(first)
    arrive(index.mapped_lists(), pages_of(index, first))
    assert cold.ask_for(first) == 0
    fresh = set(pages_of(index, second)) - set(pages_of(index, first))
    assert cold.ask_for(second) == len(fresh)
    assert cold.take_pages() == n_first + len(fresh)
    assert cold.take_pages() == 0


def test_all_are_asked_for_where_the_system_does_not_say_what_is_in_memory(index, cold, monkeypatch):
    monkeypatch.setattr(MappedLists, "tells_memory", False)
    blind = RowsOnDisk(index)
    positions = some_positions(index, 2, 30)
    expected = pages_of(index, positions)
    assert [blind.ask_for(positions) for _ in range(2)] == [len(expected)] * 2
    blind.close()


def test_a_position_that_is_no_row_is_refused(index, cold):
    for position in (-2, index.nlist << 32, int(index.list_sizes[0])):
        with pytest.raises(IndexError, match=f"position {position} is no row"):
            cold.ask_for(np.array([[position]]))


def test_a_fault_reads_one_page_while_somebody_reads_single_rows(index, cold):
    data = index.mapped_lists()
    second = RowsOnDisk(index)
    second.close()
    second.close()
    read(data, [5])
    assert np.flatnonzero(in_memory(data)).tolist() == [5]
    cold.close()
    index.integrity.mapped.read_again(0, len(data))
    read(data, [5])
    assert in_memory(data).sum() > 1


def test_a_mapping_that_is_made_anew_still_reads_single_rows(index, cold):
    data = index.mapped_lists()
    index.integrity.mapped.map_again()
    read(data, [7])
    assert np.flatnonzero(in_memory(data)).tolist() == [7]


def test_who_reads_a_whole_list_does_not_wait_for_page_after_page(index, cold):
    data, largest = index.mapped_lists(), int(index.list_sizes.argmax())
    view = index.by_codes()
    codes = view.piece_codes(index.nlist + largest)
    start = int(index.extents()[largest, 2])
    pages = np.arange(start // PAGE, (start + codes.nbytes - 1) // PAGE + 1)
    assert len(pages) > 3
    arrive(data, pages)


def locked_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmLck:"))


needs_locked_memory = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] in range(1 << 20),
    reason="no more than 1 MiB of memory may be locked here: raise ulimit -l",
)


@needs_locked_memory
def test_codes_are_locked_as_long_as_they_are_held(tmp_path):
    with with_codes(small_index(tmp_path / "i", n=3000)) as index:
        before = locked_bytes()
        codes = index.rabitq
        codes.lock()
        codes.lock()
        assert locked_bytes() - before >= codes.data.nbytes - 2 * PAGE
    del codes
    gc.collect()
    assert locked_bytes() == before


def test_a_limit_on_locked_memory_is_said_once(tmp_path, monkeypatch, caplog):
    class Refusing:
        def mlock(self, *_):
            ctypes.set_errno(12)
            return -1

    with with_codes(small_index(tmp_path / "i", n=500)) as index:
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda *_args, **_options: Refusing())
            index.rabitq.lock()
            index.rabitq.lock()
        assert caplog.text.count("are not locked in memory (Cannot allocate memory)") == 1
        assert "ulimit -l" in caplog.text
