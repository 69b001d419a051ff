"""The log of deletions: what was acknowledged comes back, what was torn does not, and damage is neither."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, UnsupportedIndexError
from hybridindex.index.log.delete_log import append_record, read_records, render_log
from hybridindex.index.log.deleted import Deleted, DeletedIds
from tests.examples import examples

ROWS = "0123456789abcdef" * 2
RECORDS = [np.array([5, 3]), np.array([(1 << 63) - 1]), np.arange(100, 160), np.array([7])]


def written(path, records=RECORDS):
    end = 0
    ends = []
    for number, ids in enumerate(records, 1):
        end = append_record(path, ROWS, ids, end=end, number=number)
        ends.append(end)
    return ends


def test_records_come_back(tmp_path):
    path = tmp_path / "log"
    ends = written(path)
    found = read_records(path, ROWS)
    assert [each.tolist() for each in found.ids] == [each.tolist() for each in RECORDS]
    assert (found.end, found.torn) == (ends[-1], 0) == (path.stat().st_size, 0)
    assert read_records(tmp_path / "none", ROWS).ids == []
    path.write_bytes(render_log(ROWS, RECORDS[0]))
    assert [each.tolist() for each in read_records(path, ROWS).ids] == [[5, 3]]


def test_a_log_that_ends_anywhere_holds_the_records_before(tmp_path):
    path = tmp_path / "log"
    ends = written(path)
    raw = path.read_bytes()
    for cut in range(64, len(raw)):
        path.write_bytes(raw[:cut])
        found = read_records(path, ROWS)
        whole = sum(end <= cut for end in ends)
        assert len(found.ids) == whole
        assert found.end == (ends[whole - 1] if whole else 64)
        assert found.torn == cut - found.end
        # The next one takes the place of what was torn.
        end = append_record(path, ROWS, np.array([42]), end=found.end, number=whole + 1)
        again = read_records(path, ROWS)
        assert (again.ids[-1].tolist(), again.end, again.torn, len(again.ids)) == ([42], end, 0, whole + 1)


@examples(300)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed_unless_it_looks_torn(tmp_path_factory, at, bit):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = written(path)
    raw = bytearray(path.read_bytes())
    at %= len(raw)
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    if at < ends[-2]:  # the head, or a record with others behind it
        with pytest.raises((CorruptIndexError, UnsupportedIndexError)):
            read_records(path, ROWS)
    else:
        found = read_records(path, ROWS)
        assert (len(found.ids), found.end, found.torn) == (len(RECORDS) - 1, ends[-2], len(raw) - ends[-2])


def test_a_foreign_or_newer_log_is_refused(tmp_path):
    path = tmp_path / "log"
    written(path)
    with pytest.raises(CorruptIndexError, match="is of other rows"):
        read_records(path, "f" * 32)
    path.write_bytes(b"x" * 100)
    with pytest.raises(CorruptIndexError, match="is no log of deletions"):
        read_records(path, ROWS)
    path.write_bytes(b"HXDELLOG")
    with pytest.raises(CorruptIndexError, match="is no log of deletions"):
        read_records(path, ROWS)


def test_damage_is_told_with_what_helps(tmp_path):
    path = tmp_path / "log"
    ends = written(path)
    raw = bytearray(path.read_bytes())
    raw[ends[0] + 36] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptIndexError, match=f"truncate -s {ends[0]} log"):
        read_records(path, ROWS)


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_what_cannot_be_written_is_not_deleted(tmp_path, monkeypatch, call):
    deleted = DeletedIds(tmp_path, ROWS, keep_max=False)
    delete(deleted, [1, 2])
    before = deleted.path.read_bytes()

    def fails(*_args):
        raise FileError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.File, call, fails)
        with pytest.raises(FileError):
            delete(deleted, [3])
    assert deleted.path.read_bytes() == before
    assert deleted.current().ids.tolist() == [1, 2]
    delete(deleted, [4])
    assert deleted.current().ids.tolist() == [1, 2, 4]
    assert DeletedIds(tmp_path, ROWS, keep_max=False).current().ids.tolist() == [1, 2, 4]


def delete(deleted, ids):
    with deleted.appending() as (_, append):
        append(np.array(ids))


def test_others_see_what_was_deleted_and_what_was_taken_back(tmp_path, monkeypatch, caplog):
    writer, reader = DeletedIds(tmp_path, ROWS, keep_max=False), DeletedIds(tmp_path, ROWS, keep_max=False)
    assert writer.current() is reader.current() is None
    delete(writer, [9, 4])
    monkeypatch.setattr(reader, "_look_again_s", 0.0)
    assert reader.current().ids.tolist() == [4, 9]
    # A second writer appends behind the first.
    delete(reader, [1])
    delete(writer, [30])
    for each in (writer, reader):
        each._look_again_s = 0.0
        assert each.current().ids.tolist() == [1, 4, 9, 30]
        assert each.current().n_records == 3
    # What could not be synced was cut off again.
    raw = writer.path.read_bytes()
    writer.path.write_bytes(raw[:-40])
    reader._look_again_s = 0.0
    assert reader.current().ids.tolist() == [1, 4, 9]
    assert "no whole deletion" not in caplog.text
    writer.path.write_bytes(raw[:-1])
    reader._look_again_s = 0.0
    assert reader.current().ids.tolist() == [1, 4, 9]
    assert "the last 39 bytes are no whole deletion" in caplog.text
    # Damage while it serves: what is known stays, and the log says so, once.
    writer.path.write_bytes(raw[:100] + b"x" + raw[101:])
    for _ in range(3):
        reader._look_again_s = 0.0
        assert reader.current().ids.tolist() == [1, 4, 9]
    assert caplog.text.count("deletions of other processes are not seen") == 1


@examples(200)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 6), spare=st.integers(0, 5), keep_max=st.booleans())
def test_an_answer_without_deleted_rows(seed, k, spare, keep_max):
    rng = np.random.default_rng(seed)
    n, width = 3, k + spare
    ids = np.array([rng.permutation(20)[:width] for _ in range(n)])
    distances = np.sort(rng.integers(0, 9, (n, width)).astype(np.float32), axis=1)
    distances = -distances if keep_max else distances
    worst = -np.inf if keep_max else np.inf
    for row in range(n):
        empty = rng.integers(0, width + 1)
        ids[row, width - empty :], distances[row, width - empty :] = -1, worst
    gone = np.unique(rng.integers(0, 20, rng.integers(1, 12)))
    found = Deleted(ids=gone, n_records=1, keep_max=keep_max).leave_out(distances, ids, k)
    pairs = [list(zip(*row, strict=True)) for row in zip(distances.tolist(), ids.tolist(), strict=True)]
    left = [[(d, i) for d, i in row if i >= 0 and i not in gone] for row in pairs]
    short = [len(some) < k and ids[row, -1] >= 0 for row, some in enumerate(left)]
    if any(short):
        assert found is None
        return
    for row, some in enumerate(left):
        some = (some + [(worst, -1)] * k)[:k]
        assert list(zip(found[0][row].tolist(), found[1][row].tolist(), strict=True)) == some


def test_a_log_that_is_gone_brings_nothing_back(tmp_path, caplog):
    deleted = DeletedIds(tmp_path, ROWS, keep_max=False)
    delete(deleted, [1, 2])
    deleted.path.unlink()
    for _ in range(2):
        deleted._look_again_s = 0.0
        assert deleted.current().ids.tolist() == [1, 2]
    assert caplog.text.count("which says what was deleted, is gone") == 1
    for ask in (deleted.read_now, lambda: delete(deleted, [3])):
        with pytest.raises(CorruptIndexError, match="is gone"):
            ask()
    assert deleted.current().ids.tolist() == [1, 2]


def test_an_interrupted_deletion_leaves_the_next_one_its_own_number(tmp_path, monkeypatch):
    deleted = DeletedIds(tmp_path, ROWS, keep_max=False)
    delete(deleted, [1])

    def interrupted(*_args):
        raise KeyboardInterrupt

    for moment in ("_publish", "path"):
        with monkeypatch.context() as patch:
            if moment == "_publish":
                patch.setattr(deleted, "_publish", interrupted)
            else:
                patch.setattr("hybridindex.index.log.deleted.log_state", Once(interrupted))
            with pytest.raises(KeyboardInterrupt):
                delete(deleted, [2 if moment == "_publish" else 3])
    delete(deleted, [4])
    expected = [1, 2, 3, 4]
    assert deleted.current().ids.tolist() == expected
    assert DeletedIds(tmp_path, ROWS, keep_max=False).current().ids.tolist() == expected


class Once:
    """Fails at its second call: the first looks whether the log was changed."""

    def __init__(self, fail):
        self._calls, self._fail = 0, fail

    def __call__(self, path):
        self._calls += 1
        return self._fail() if self._calls == 2 else (path.stat().st_size, path.stat().st_mtime_ns)
