"""What the simulation found, each in its smallest form."""

from __future__ import annotations

import contextlib
import errno
import random
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np
import pytest

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, HybridIndexError, SupersededError
from hybridindex.index import open_index
from hybridindex.index.changes.claim import claim_of
from hybridindex.index.changes.compact import compact
from hybridindex.index.live import store
from hybridindex.index.log.change_log import LogFile
from tests.faults import FaultyDisk, of
from tests.index.live_logs import change, log_at
from tests.simulation.changes.disk import SimDisk

ROWS = np.random.default_rng(3).standard_normal((60, 4)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    hx.build(ROWS, tmp_path / "idx", nlist=3, metric="l2", attributes={"tag": list(range(60))}).close()
    return tmp_path / "idx"


def found(index, query):
    """The id of a row that is there; -1: it is not."""
    result = index.search(ROWS[query], 1, nprobe=index.nlist)
    return int(result.ids[0, 0]) if result.distances[0, 0] < 1e-6 else -1


def elsewhere(path):
    """Open as in another process: it shares nothing."""
    with mock.patch.object(store, "_shared", WeakValueDictionary()):
        return open_index(path)


def ids_of(ivf):
    live = ivf.live.read_now()
    ids = np.concatenate([ivf.list_ids(each) for each in range(ivf.nlist)])
    if live is not None and live.deleted is not None:
        ids = ids[~live.deleted.contains(ids)]
    return sorted([*ids.tolist(), *([] if live is None or live.added is None else live.added.ids.tolist())])


def test_a_disk_that_kept_the_second_of_two_records_written_at_once(tmp_path):
    log = log_at(tmp_path / "log")
    first = log.append([change([1])], log.read().place)
    log.append([change([2]), change([3])], first)
    raw = bytearray((tmp_path / "log").read_bytes())
    raw[first.end : first.end + 64] = bytes(64)
    (tmp_path / "log").write_bytes(raw)
    assert [each.gone.tolist() for each in log.read().changes] == [[1]]
    # One that was synced before the next was written: damage.
    (tmp_path / "log").unlink()
    place = first = log.append([change([1])], log.read().place)
    for each in (2, 3):
        place = log.append([change([each])], place)
    raw = bytearray((tmp_path / "log").read_bytes())
    raw[first.end : first.end + 64] = bytes(64)
    (tmp_path / "log").write_bytes(raw)
    with pytest.raises(CorruptIndexError, match="behind change 1"):
        log.read()


def test_a_change_that_was_made_is_no_error(path):
    with hx.open(path) as index:
        index.delete([1])
        # The look at the file after the write.
        written = []

        def disk(call):
            written.append(call.name)
            if call.name == "stat" and call.path.endswith("changes.log") and "sync" in written:
                raise OSError(errno.EIO, "")

        with filesystem.watched_by(disk):
            assert index.delete([2]) == 1
        assert index.delete([2]) == 0
        assert index.n_deleted == 2


def test_a_first_change_that_failed_is_not_there(path):
    with hx.open(path) as index:
        disk = FaultyDisk(counts=of("sync_folder", path="gen-000001"), allowed=0, number=errno.EIO, sticks=False)
        with filesystem.watched_by(disk), pytest.raises(HybridIndexError):
            index.delete([1])
        assert index.n_deleted == 0
        assert found(index, 1) == 1
    with hx.open(path) as again:
        assert again.n_deleted == 0


@pytest.mark.parametrize("sticks", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_sync_that_failed_takes_no_later_change_with_it(path, sticks, seed):
    """The system forgets what it could not write: what is read back may be on no disk."""
    disk, failing = SimDisk(path), set[str]()

    def watch(call):
        if not disk.is_ours(call):
            return
        if call.name in failing:
            if sticks:
                failing.add("truncate")
            disk.forget_writes(call.path)
            raise OSError(errno.EIO, "")
        disk.see(call)

    with disk.known(), filesystem.watched_by(watch), hx.open(path) as index:
        first = index.add(ROWS[:1] + 9)
        failing.add("sync")
        with pytest.raises(HybridIndexError):
            index.add(ROWS[:2] + 10)
        failing.clear()
        last = index.add(ROWS[:1] + 11)
    disk.cut_power(random.Random(seed))
    with hx.open(path) as index:
        assert {first[0], last[0]} <= {*ids_of(index.ivf)}


@pytest.mark.parametrize("seed", range(6))
def test_a_sync_that_failed_in_a_process_that_ended(path, seed):
    disk, failing = SimDisk(path), set[str]()

    def watch(call):
        if disk.is_ours(call):
            if call.name in failing:
                failing.add("truncate")
                disk.forget_writes(call.path)
                raise OSError(errno.EIO, "")
            disk.see(call)

    with disk.known(), filesystem.watched_by(watch):
        with hx.open(path) as index:
            index.add(ROWS[:1] + 9)
            failing.add("sync")
            with pytest.raises(HybridIndexError):
                index.add(ROWS[:2] + 10)
        failing.clear()
        # What it could not take back is read by the next one, which builds on it.
        with mock.patch.object(store, "_shared", WeakValueDictionary()), hx.open(path) as index:
            last = index.add(ROWS[:1] + 11)
            there = ids_of(index.ivf)
    disk.cut_power(random.Random(seed))
    with hx.open(path) as index:
        assert last[0] in ids_of(index.ivf)
        assert ids_of(index.ivf) == there


def test_a_claim_stays_the_one_when_its_folder_cannot_be_looked_at(path):
    claim = claim_of(path)
    for allowed in range(3):
        disk = FaultyDisk(counts=of("stat", path="idx"), allowed=allowed, number=errno.EIO, sticks=False)
        with filesystem.watched_by(disk), contextlib.suppress(HybridIndexError):
            claim_of(path)
    assert claim_of(path) is claim


def test_what_another_process_left_is_synced_before_the_first_change(path):
    with hx.open(path) as index:
        index.delete([1])
    with mock.patch.object(store, "_shared", WeakValueDictionary()), hx.open(path) as index:
        calls = []
        with filesystem.watched_by(lambda call: calls.append((call.name, call.path.rsplit("/", 1)[1]))):
            index.delete([2])
            n = len(calls)
            index.delete([3])
    first, second = calls[:n], calls[n:]
    assert first.count(("sync", "changes.log")) == 2
    assert {("sync_folder", "gen-000001"), ("sync_folder", "idx")} <= {*first}
    assert second.count(("sync", "changes.log")) == 1
    assert "sync_folder" not in {name for name, _ in second}


def test_a_reader_elsewhere_follows_a_compacted_index_whose_log_was_written_anew(path):
    with hx.open(path) as index, elsewhere(path) as reader:
        index.add(ROWS[:3] + 5)
        reader.live.read_now()
        index.compact()
        index.delete([1, 2])
        index.add(ROWS[:2] + 7)
        index.ivf.live.rewrite(least_bytes=0)
        index.delete([4])
        assert ids_of(reader) == ids_of(index.ivf)
        # And on.
        index.upsert(ROWS[:1], [9])
        index.ivf.live.rewrite(least_bytes=0)
        index.delete([10])
        assert ids_of(reader) == ids_of(index.ivf)


def test_what_another_process_compacted_is_not_compacted_again_from_before(path):
    with hx.open(path) as index, hx.Index(elsewhere(path)) as other:
        index.delete([1])
        other.delete([2])
        # The other one waits for the lock, as it would for the claim, with what it has open.
        stale = other.ivf
        index.compact()
        index.delete([3])
        with pytest.raises(SupersededError):
            compact(stale)
        other.delete([4])
        assert other.compact()
        assert ids_of(index.ivf) == ids_of(other.ivf) == sorted({*range(60)} - {1, 2, 3, 4})


def test_two_generations_back_all_changes_are_seen(path):
    with hx.open(path) as index:
        oldest = index.ivf
        for number in range(3):
            index.add(ROWS[:1] + number)
            index.compact()
        index.delete([1])
        assert ids_of(oldest) == ids_of(index.ivf)


def test_a_log_in_the_place_of_another_with_its_number(path):
    def state(log, real=LogFile.state):
        inode, *rest = real(log)
        return (bool(inode), *rest)

    with mock.patch.object(LogFile, "state", state), hx.open(path) as index, elsewhere(path) as other:
        index.delete([1])
        other.live.read_now()
        index.delete([2])
        index.ivf.live.rewrite(least_bytes=0)
        index.add(np.repeat(ROWS[:1], 30, axis=0))
        assert ids_of(other) == ids_of(index.ivf)


def test_the_log_stays_as_it_is_while_lists_are_written(path):
    with hx.open(path) as index:
        old = index.ivf
        index.delete([1])

        def progress(stage, done, total):
            if stage == "checksum" and not done_once:
                done_once.append(index.delete([2]))
                assert not old.live.rewrite(least_bytes=0)
                index.delete([3])

        done_once = []
        assert index.compact(progress)
        assert done_once == [1]
        assert ids_of(index.ivf) == sorted({*range(60)} - {1, 2, 3})


def test_attributes_that_cannot_be_read_now_are_not_lost(path):
    disk = FaultyDisk(counts=of("read", path="attributes.json"), allowed=0, number=errno.EIO)
    with filesystem.watched_by(disk):
        index = hx.open(path)
        assert index.ivf.attributes is None
        index.delete([1])
        with pytest.raises(CorruptIndexError, match="would lose its attributes"):
            index.compact()
    with index:
        assert index.compact()
        assert index.delete(where="tag < 5") == 4
