"""Mapped bytes are replaced where they lie, for every mapping at once, and come back from the file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.extension import native
from hybridindex.index.storage import mapped_lists
from hybridindex.index.storage.huge_pages import map_file
from hybridindex.index.storage.mapped_lists import MappedLists

PAGE = mmap.PAGESIZE
SIZE = 5 * PAGE + 64


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lists.bin"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


@pytest.fixture
def mapped(file):
    """(the mappings, what both show)."""
    ours, other = map_file(file), map_file(file)
    lists = MappedLists(file, ours, [int(other.ctypes.data)], np.zeros(1, dtype=np.int64))
    yield lists, (ours, other)
    lists.close()
    lists.close()


@pytest.mark.parametrize(("start", "length"), [(10, 20), (PAGE - 3, 6), (PAGE, PAGE), (100, 3 * PAGE), (SIZE - 9, 9)])
def test_bytes_are_replaced_in_all_mappings_and_their_neighbours_stay(mapped, file, start, length):
    lists, views = mapped
    expected = bytearray(file.read_bytes())
    expected[start : start + length] = b"\xaa" * length
    lists.replace(start, b"\xaa" * length)
    for view in views:
        assert view.tobytes() == bytes(expected)
    lists.map_again()
    for view in views:
        assert view.tobytes() == file.read_bytes()


def wants_huge_pages(view):
    """What the system noted of the mapping that holds ``view``."""
    address, inside = int(view.ctypes.data), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            if inside:
                return "hg" in line.split()
        elif "-" in (span := line.split()[0]) and not span.endswith(":"):
            start, stop = (int(part, 16) for part in span.split("-"))
            inside = start <= address < stop
    raise AssertionError("it is not mapped")


def system_takes_advice(path):
    """Whether a map of ``path`` may be in huge pages, asked without the library."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            return False
        view = np.frombuffer(mapped, np.uint8)
        try:
            return wants_huge_pages(view)
        finally:
            del view


def test_a_file_that_is_mapped_again_comes_in_huge_pages_as_before(file):
    os.truncate(file, 2 << 20)
    if not system_takes_advice(file):
        pytest.skip("this kernel gives maps of files no huge pages, whoever asks: there is nothing to keep")
    view = map_file(file)
    assert wants_huge_pages(view)
    lists = MappedLists(file, view, [], np.zeros(1, dtype=np.int64))
    lists.replace(PAGE, b"good")
    lists.map_again()
    assert wants_huge_pages(view)
    lists.close()


def test_what_lies_beyond_the_end_of_a_cut_file_is_gone(mapped, file):
    lists, views = mapped
    good = file.read_bytes()
    assert lists.readable(0, SIZE)
    os.truncate(file, 2 * PAGE)
    assert lists.length() == 2 * PAGE
    assert lists.take_gone() == []
    assert lists.readable(0, 2 * PAGE)
    assert not lists.readable(2 * PAGE, SIZE)
    # Bytes are put there all the same; what cannot be read beside them is told.
    lists.replace(2 * PAGE - 10, b"\2" * 20)
    for view in views:
        assert view[2 * PAGE - 11 : 2 * PAGE + 11].tobytes() == good[2 * PAGE - 11 : 2 * PAGE - 10] + b"\2" * 20 + b"\0"
    assert lists.take_gone() == [(2 * PAGE + 10, 3 * PAGE)]
    file.write_bytes(good)
    lists.map_again()
    assert lists.take_gone() == []
    assert views[1].tobytes() == good


def test_what_was_read_beyond_the_end_is_told_once_for_each_mapping(mapped, file):
    lists, views = mapped
    os.truncate(file, 2 * PAGE)
    assert not views[1][3 * PAGE :].any()
    assert lists.take_gone() == [(3 * PAGE, SIZE)]
    assert lists.take_gone() == []
    assert not views[0][2 * PAGE :].any()
    assert lists.take_gone() == [(2 * PAGE, SIZE)]


def test_pages_that_cannot_be_read_are_told_apart(tmp_path):
    """Single pages of a disk that fails: the watch is told of a file that is long enough."""
    n_pages = 300
    path, long = tmp_path / "cut", tmp_path / "long"
    for file in (path, long):
        file.write_bytes(b"\1" * (n_pages * PAGE))
    view, marks = map_file(path), np.zeros(1, dtype=np.int64)
    with long.open() as opened:
        watch = native.Watch(int(view.ctypes.data), len(view), opened.fileno(), "cut", marks)
        os.truncate(path, 0)
        for page in (7, 2):
            assert view[page * PAGE] == 0
        assert marks[0] == 2
        assert sorted(watch.take_gone()) == [(2 * PAGE, 3 * PAGE), (7 * PAGE, 8 * PAGE)]
        # More than there is room for: nothing is missing.
        pages = range(10, n_pages, 2)
        for page in pages:
            assert view[page * PAGE] == 0
        found = watch.take_gone()
        assert all(any(start <= page * PAGE < stop for start, stop in found) for page in pages)
        del watch


def test_a_name_that_leads_to_another_file_is_noticed(mapped, file, tmp_path):
    lists, _ = mapped
    assert lists.is_mapped_file()
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", file)
    assert not lists.is_mapped_file()
    assert lists.read_file(2, 100) == b"her"
    assert lists.length() == SIZE
    file.unlink()
    assert not lists.is_mapped_file()
    with pytest.raises(FileNotFoundError):
        lists.read_file(0, 1)


def test_too_many_mappings_are_told(file, monkeypatch, caplog):
    full = SimpleNamespace(Watch=lambda *_: SimpleNamespace(watching=False, take_gone=list))
    monkeypatch.setattr(mapped_lists, "native", full)
    lists = MappedLists(file, map_file(file), [], np.zeros(1, dtype=np.int64))
    assert "is not watched" in caplog.text
    assert lists.take_gone() == []
    lists.close()
