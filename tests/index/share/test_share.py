"""What a share holds, where it takes lists from, and how much room it takes."""

from __future__ import annotations

import ctypes
import itertools
import logging
import shutil
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    IndexExistsError,
    InvalidInputError,
    NotHeldError,
    UnsupportedIndexError,
)
from hybridindex.index import open_index, verify, write_layout
from hybridindex.index.share.ranges import mask_of, ranges_of
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.index.storage.manifest import DIGESTS_FILE, LISTS_FILE, MODEL_FILE, SHARE_FILE
from tests.clustered import NLIST, clustered, small_index
from tests.index.share.shares import Pair, Wrong, bytes_of, share_of


def held(pair: Pair) -> list[int]:
    return np.flatnonzero(pair.share.held).tolist()


def flipped(part: bytes) -> bytes:
    return part[:-1] + bytes([part[-1] ^ 1])


@pytest.mark.parametrize("lists", [[], [0], [NLIST - 1], [0, 1, 2, 5, 9, 10], list(range(NLIST))])
def test_ranges_say_what_masks_do(lists):
    mask = np.isin(np.arange(NLIST), lists)
    ranges = ranges_of(mask)
    assert [list_id for start, stop in ranges for list_id in range(start, stop)] == lists
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert np.array_equal(mask_of(ranges, NLIST), mask)


@pytest.mark.parametrize(
    "ranges",
    [None, 3, [3], [[1]], [[1, 2, 3]], [["0", "1"]], [[0.0, 1.0]], [[True, 2]], [[-1, 2]], [[2, 2]], [[0, NLIST + 1]]],
)
def test_other_ranges_are_refused(ranges):
    with pytest.raises(InvalidInputError, match="lists"):
        mask_of(ranges, NLIST)


def test_a_share_is_the_index_without_its_lists(make):
    pair = make(codec="sq8")
    index, whole = pair.index, pair.whole
    assert (index.fingerprint, index.generation, index.nlist) == (whole.fingerprint, whole.generation, whole.nlist)
    assert pair.file.stat().st_size == whole.integrity.file.stat().st_size
    assert held(pair) == []
    assert pair.share.held_bytes == 0
    assert whole.share is None


def test_it_keeps_the_generation_of_the_index(tmp_path):
    small_index(tmp_path / "i").close()
    hx.build(clustered(500, seed=3), tmp_path / "i", nlist=4, replace=True).close()
    create_share(tmp_path / "s", FolderSource(tmp_path / "i"))
    with open_index(tmp_path / "s") as index:
        assert (index.generation, index.integrity.folder.name) == (2, "gen-000002")


@pytest.mark.parametrize(("codec", "metric"), [("flat", "l2"), ("sq8", "ip"), ("pq6", "l2"), ("pqfs6", "ip")])
def test_lists_come_and_go(make, codec, metric):
    pair = make(codec=codec, metric=metric)
    share = pair.share
    assert share.hold([3, 4, 9, 3], pair.source) == bytes_of(pair.whole, [3, 4, 9]) == share.held_bytes
    assert share.hold([4, 9], pair.source) == 0
    assert held(pair) == [3, 4, 9]
    for list_id in (3, 4, 9):
        assert np.array_equal(pair.index.stored_codes(list_id), pair.whole.stored_codes(list_id))
        assert np.array_equal(pair.index.list_ids(list_id), pair.whole.list_ids(list_id))
    assert share.drop([4, 5]) == bytes_of(pair.whole, [4])
    assert share.drop([4, 5]) == 0
    assert held(pair) == [3, 9]
    with open_index(pair.path) as again:
        assert np.array_equal(share_of(again).held, share.held)
    assert verify(pair.path) == pair.index.manifest
    share.hold(range(NLIST), pair.source)
    assert share.held.all()
    assert pair.index.integrity.quarantined is None


def test_a_share_is_a_source_for_others(make, tmp_path):
    pair = make(codec="pq6")
    pair.share.hold([1, 2, 7], pair.source)
    source = FolderSource(pair.path)
    assert source.files() == pair.source.files()
    create_share(tmp_path / "second", source)
    with open_index(tmp_path / "second") as second:
        assert share_of(second).hold([1, 7], source) == bytes_of(pair.whole, [1, 7])
        with pytest.raises(NotHeldError) as refused:
            share_of(second).hold([2, 3, 4], source)
        assert refused.value.lists == (3, 4)
        assert np.flatnonzero(share_of(second).held).tolist() == [1, 7]


def test_peers_read_proven_lists(make):
    pair = make()
    pair.share.hold([1, 2], pair.source)
    expected = list(pair.source.read([2, 1]))
    assert list(pair.share.read([2, 1])) == expected
    with pytest.raises(NotHeldError, match=r"list 3$") as refused:
        pair.share.read([1, 3])
    assert refused.value.lists == (3,)
    reading = pair.share.read([1, 2])
    assert next(reading) == expected[1]
    pair.share.drop([2])
    with pytest.raises(NotHeldError, match=r"list 2$"):
        next(reading)


@pytest.mark.parametrize("lists", [[-1], [NLIST], [0, 10**9]])
def test_lists_that_are_not_there_are_refused(make, lists):
    pair = make()
    for call in (pair.share.drop, pair.share.read, lambda wrong: pair.share.hold(wrong, pair.source)):
        with pytest.raises(InvalidInputError, match=str(lists[-1])):
            call(lists)
    with pytest.raises(InvalidInputError, match="0 to 31"):
        pair.source.read(lists)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: (given[0], flipped(given[1]), given[2]), "codes of list 5"),
        (lambda given: (given[0], given[1], flipped(given[2])), "ids of list 5"),
        (lambda given: (given[0], given[1][:-1], given[2]), "bytes of codes for list 5"),
        (lambda given: (given[0], given[1], given[2] + b"\0"), "bytes of ids for list 5"),
        (lambda given: (given[0] + 1, given[1], given[2]), "list 6, which was not asked for"),
    ],
)
def test_what_a_source_gives_is_proven(make, change, said):
    pair = make()
    with pytest.raises(CorruptIndexError, match=said):
        pair.share.hold([5], Wrong(pair.source, change))
    assert held(pair) == []
    with open_index(pair.path) as again:
        assert not share_of(again).held.any()
    pair.share.hold([5], pair.source)
    assert held(pair) == [5]


def test_a_source_that_gives_less_is_named(make):
    pair = make()

    class Short(FolderSource):
        def read(self, lists):
            return super().read(lists[:1])

    with pytest.raises(NotHeldError) as refused:
        pair.share.hold([5, 6, 8], Short(pair.whole.path))
    assert refused.value.lists == (6, 8)
    assert held(pair) == [5]


@pytest.mark.parametrize("name", ["manifest.json", MODEL_FILE, "lists.idx.npy", DIGESTS_FILE])
def test_files_of_a_source_are_proven(make, tmp_path, name):
    pair = make()
    files = pair.source.files()

    class Damaged:
        def __init__(self, files):
            self.files = lambda: files

        def read(self, lists):
            raise AssertionError

    for wrong in ({**files, name: flipped(files[name])}, {n: c for n, c in files.items() if n != name}):
        with pytest.raises((CorruptIndexError, UnsupportedIndexError), match=name):
            create_share(tmp_path / "s", Damaged(wrong))
        assert not (tmp_path / "s").exists()


def test_digests_of_an_older_index_are_computed(tmp_path):
    small_index(tmp_path / "i").close()
    expected = FolderSource(tmp_path / "i").files()
    (tmp_path / "i" / "gen-000001" / DIGESTS_FILE).unlink()
    assert FolderSource(tmp_path / "i").files() == expected
    lists = tmp_path / "i" / "gen-000001" / LISTS_FILE
    lists.write_bytes(flipped(lists.read_bytes()))
    with pytest.raises(CorruptIndexError, match=LISTS_FILE):
        FolderSource(tmp_path / "i").files()


def test_changed_rows_are_compacted_first(tmp_path):
    small_index(tmp_path / "i").close()
    with hx.open(tmp_path / "i") as index:
        index.delete([3])
    with pytest.raises(UnsupportedIndexError, match="compact it first"):
        create_share(tmp_path / "s", FolderSource(tmp_path / "i"))
    assert not (tmp_path / "s").exists()
    with hx.open(tmp_path / "i") as index:
        index.compact()
    create_share(tmp_path / "s", FolderSource(tmp_path / "i"))
    with open_index(tmp_path / "s") as share, open_index(tmp_path / "i") as whole:
        assert share.fingerprint == whole.fingerprint


def test_lists_in_blocks_are_refused(tmp_path):
    with small_index(tmp_path / "i") as index:
        write_layout(index, tmp_path / "blocks", "blocks16")
    with pytest.raises(UnsupportedIndexError, match="blocks16"):
        create_share(tmp_path / "s", FolderSource(tmp_path / "blocks"))
    small_index(tmp_path / "fast", codec="faiss:PQ6x4fsr").close()
    with pytest.raises(UnsupportedIndexError, match="residuals"):
        create_share(tmp_path / "s", FolderSource(tmp_path / "fast"))


def test_nothing_is_written_over(make):
    pair = make()
    for path in (pair.path, pair.whole.path):
        with pytest.raises(IndexExistsError):
            create_share(path, pair.source)


def makes_holes(probe):
    """Whether its file system gives room back from within a file, asked without the library."""
    probe.write_bytes(bytes(1 << 20))
    with open(probe, "r+b") as file:
        begin, length = ctypes.c_long(0), ctypes.c_long(1 << 20)
        keep_size_and_punch = 3
        return ctypes.CDLL(None).fallocate(file.fileno(), keep_size_and_punch, begin, length) == 0


def test_only_held_lists_take_room(make, tmp_path):
    pair = make(n=20000, dim=24)
    nbytes = pair.share.hold(range(0, NLIST, 3), pair.source)
    if not makes_holes(tmp_path / "probe"):
        pytest.skip(f"the file system of {tmp_path} makes no holes")

    def taken() -> int:
        return pair.file.stat().st_blocks * 512

    n_held = len(range(0, NLIST, 3))
    # Whole pages, two of which a list may share with others at its ends.
    assert nbytes <= taken() <= nbytes + n_held * 2 * 4096
    pair.share.drop(range(0, NLIST, 6))
    left = pair.share.held_bytes
    assert 0 < left < nbytes
    assert left <= taken() <= left + n_held * 2 * 4096
    pair.share.drop(range(NLIST))
    assert taken() == 0


def test_zeros_take_the_place_of_lists_where_there_are_no_holes(make, monkeypatch):
    pair = make()
    monkeypatch.setattr("hybridindex.filesystem.File.punch", lambda *_: False)
    pair.share.hold([3, 4, 5], pair.source)
    pair.share.drop([4])
    assert not pair.index.stored_codes(4).any()
    with open_index(pair.path) as again:
        assert np.flatnonzero(share_of(again).held).tolist() == [3, 5]


def test_progress_pace_and_stop(make, monkeypatch):
    pair = make()
    told: list[tuple[int, int]] = []
    stop = threading.Event()

    def progress(n_lists: int, n_bytes: int) -> None:
        told.append((n_lists, n_bytes))
        if len(told) == 3:
            stop.set()

    lists = [9, 2, 7, 5, 1]
    written = pair.share.hold(lists, pair.source, bytes_per_s=1e9, progress=progress, stop=stop)
    assert written == bytes_of(pair.whole, [9, 2, 7])
    assert held(pair) == [2, 7, 9]
    assert told == [(5 - n, bytes_of(pair.whole, lists[n:])) for n in (1, 2, 3)]
    waited: list[float] = []

    class Noted(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return False

    written = pair.share.hold([5, 1], pair.source, bytes_per_s=10.0, stop=Noted())
    assert written / 10 * 0.9 < waited[-1] <= written / 10


@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_list_is_not_held_after_opening(make, caplog, part):
    caplog.set_level(logging.CRITICAL, logger="hybridindex")
    pair = make()
    pair.share.hold([3, 4, 9], pair.source)
    stop = int(pair.index.integrity.spans[4, part, 1])
    with pair.file.open("r+b") as file:
        file.seek(stop - 1)
        byte = file.read(1)
        file.seek(stop - 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptIndexError, match=r"list 4, which the share holds"):
        verify(pair.path)
    pair.index.close()
    with open_index(pair.path) as again:
        share = share_of(again)
        assert np.flatnonzero(share.held).tolist() == [3, 9]
        assert again.integrity.damaged_lists() == []
        assert share.hold([3, 4, 9], pair.source) == bytes_of(pair.whole, [4])
        assert share.held[4]
    verify(pair.path)


@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_damaged_record_is_refused(make, length):
    pair = make()
    record = pair.file.parent / SHARE_FILE
    record.write_bytes(record.read_bytes()[:length])
    source = FolderSource(pair.path)
    for prove in (lambda: open_index(pair.path), lambda: verify(pair.path), lambda: source.read([0])):
        with pytest.raises((CorruptIndexError, UnsupportedIndexError), match=SHARE_FILE):
            prove()


def test_a_record_of_another_index_is_refused(make):
    pair, other = make(), make(n=2000)
    shutil.copy(other.file.parent / SHARE_FILE, pair.file.parent / SHARE_FILE)
    with pytest.raises(CorruptIndexError, match="another index"):
        open_index(pair.path)
    (other.file.parent / DIGESTS_FILE).unlink()
    with pytest.raises(CorruptIndexError, match=DIGESTS_FILE):
        open_index(other.path, verify="quick")


def test_one_at_a_time_changes_a_share(make):
    pair = make()
    with open_index(pair.path) as second:
        pair.share.hold([1, 2], pair.source)
        with pytest.raises(BuildError, match="open already"):
            share_of(second).hold([3], pair.source)
        pair.index.close()
        with pytest.raises(BuildError, match="open it again"):
            share_of(second).hold([3], pair.source)
        assert not share_of(second).held.any()
    with open_index(pair.path) as third:
        share_of(third).hold([3], pair.source)
        assert np.flatnonzero(share_of(third).held).tolist() == [1, 2, 3]
    for change in (lambda: pair.share.hold([4], pair.source), lambda: pair.share.drop([1])):
        with pytest.raises(InvalidInputError, match="was closed"):
            change()
