"""The log of changes: what was acknowledged comes back, what was torn does not, and damage is neither."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import CorruptIndexError, UnsupportedIndexError
from hybridindex.index.log.change_log import render_log
from tests.examples import examples
from tests.index.live_logs import CODE_SIZE, ROWS, change, log_at, same

CHANGES = [
    change([5, 3]),
    change([], [(1 << 62), 2, 9], attributes=b"arrow"),
    change(range(100, 120), range(30, 37)),
    change([7]),
]


def written(path, changes=CHANGES, first=0):
    log = log_at(path, first)
    place, ends = log.read().place, []
    for each in changes:
        place = log.append([each], place)
        ends.append(place.end)
    return ends


def test_changes_come_back(tmp_path):
    path = tmp_path / "log"
    ends = written(path, first=10)
    found = log_at(path).read()
    assert all(same(a, b) for a, b in zip(found.changes, CHANGES, strict=True))
    assert (found.place.end, found.torn, found.place.number) == (ends[-1], 0, 14)
    assert found.place.end == path.stat().st_size
    none = log_at(tmp_path / "none", first=3).read()
    assert (none.changes, none.place.number) == ([], 3)


def test_several_at_once_and_what_was_written_later_alone(tmp_path):
    log = log_at(tmp_path / "log")
    place = log.append(CHANGES[:2], log.read().place)
    later = log.append(CHANGES[2:], place)
    found = log.read_on(place)
    assert all(same(a, b) for a, b in zip(found.changes, CHANGES[2:], strict=True))
    assert found.place == later == log.read().place
    assert log.read_on(later).changes == []


def test_a_rewritten_log_says_what_was_and_goes_on(tmp_path):
    path = tmp_path / "log"
    written(path)
    log = log_at(path)
    place = log.rewrite([CHANGES[0], CHANGES[1]], 4)
    assert place.number == 4
    place = log.append([CHANGES[2]], place)
    found = log.read()
    assert all(same(a, b) for a, b in zip(found.changes, CHANGES[:3], strict=True))
    assert (found.place, found.torn) == (place, 0)
    assert place.number == 5
    raw = path.read_bytes()
    # What it was written with was there as a whole.
    path.write_bytes(raw[:200])
    with pytest.raises(CorruptIndexError, match="in what it was written with"):
        log.read()


def test_a_log_that_ends_anywhere_holds_the_changes_before(tmp_path):
    path = tmp_path / "log"
    ends = written(path)
    raw = path.read_bytes()
    log = log_at(path)
    for cut in range(64, len(raw)):
        path.write_bytes(raw[:cut])
        found = log.read()
        whole = sum(end <= cut for end in ends)
        assert len(found.changes) == whole
        assert found.place.end == (ends[whole - 1] if whole else 64)
        assert found.torn == cut - found.place.end
        # The next one takes the place of what was torn.
        place = log.append([change([42])], found.place)
        again = log.read()
        assert (again.changes[-1].gone.tolist(), again.torn, len(again.changes)) == ([42], 0, whole + 1)
        assert again.place == place


@examples(300)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed_unless_it_looks_torn(tmp_path_factory, at, bit):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = written(path)
    raw = bytearray(path.read_bytes())
    at %= len(raw)
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    if at < ends[-2]:  # the head, or a change with others behind it
        with pytest.raises((CorruptIndexError, UnsupportedIndexError)):
            log_at(path).read()
    else:
        found = log_at(path).read()
        assert (len(found.changes), found.place.end) == (len(CHANGES) - 1, ends[-2])
        assert found.torn == len(raw) - ends[-2]


def test_a_change_of_another_log_is_none_of_this_one(tmp_path):
    """Each says what was before it: a record left behind by another writer is not read."""
    log, other = log_at(tmp_path / "a"), log_at(tmp_path / "b")
    place = log.append([change([1])], log.read().place)
    for each in (2, 3, 4):
        other.append([change([each])], other.read().place)
    with (tmp_path / "a").open("ab") as file:
        file.write((tmp_path / "b").read_bytes()[place.end :])
    assert log.read_on(place).changes == []
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes() + b"x" * 8 + (tmp_path / "b").read_bytes()[64:])
    with pytest.raises(CorruptIndexError, match="is damaged"):
        log.read()


def test_a_foreign_or_newer_log_is_refused(tmp_path):
    path = tmp_path / "log"
    written(path)
    with pytest.raises(CorruptIndexError, match="is of other rows"):
        log_at(path, rows="f" * 32).read()
    for raw in (b"x" * 100, b"HXCHANGE"):
        path.write_bytes(raw)
        with pytest.raises(CorruptIndexError, match="is not a log of changes"):
            log_at(path).read()


@pytest.mark.parametrize(("name", "number"), [("lists", -1), ("lists", 4), ("ids", -1)])
def test_rows_that_no_index_holds_are_damage_whatever_their_checksum(tmp_path, name, number):
    crafted = change(ids=[5, 6])
    getattr(crafted, name)[1] = number
    (tmp_path / "log").write_bytes(render_log([crafted], rows_xxh3_128=ROWS, code_size=CODE_SIZE, number=0))
    with pytest.raises(CorruptIndexError, match="change 1 has ids or lists that cannot be"):
        log_at(tmp_path / "log").read()


def test_damage_is_told_with_what_helps(tmp_path):
    path = tmp_path / "log"
    ends = written(path)
    raw = bytearray(path.read_bytes())
    raw[ends[0] + 70] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptIndexError, match=f"truncate -s {ends[0]} log"):
        log_at(path).read()


def test_lengths_that_no_file_has_are_no_change(tmp_path):
    path = tmp_path / "log"
    log = log_at(path)
    place = log.append([change([1])], log.read().place)
    raw = bytearray(path.read_bytes())
    raw[64 + 16 : 64 + 24] = np.uint64(1 << 62).tobytes()
    path.write_bytes(raw)
    assert log.read().changes == []
    assert place.number == 1
