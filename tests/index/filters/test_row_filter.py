"""Filters: which rows they leave, and that those of late are kept, but never beyond what they were made from."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index.changes.write import delete
from hybridindex.index.filters import row_filter
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.router import Router
from hybridindex.tiers.host import filtered_scanner
from tests.clustered import clustered, small_index

N, NLIST = 700, 8


@pytest.fixture
def index(tmp_path):
    with small_index(tmp_path / "i", n=N, nlist=NLIST) as index:
        yield index


def ids_left(index, made):
    bits = np.unpackbits(made.mask, bitorder="little")
    assert not bits[N:].any()
    assert len(made.mask) % 8 == 0
    left = [index.list_ids(each)[bits[made.first[each] : made.first[each + 1]] != 0] for each in range(NLIST)]
    assert made.counts.tolist() == [len(part) for part in left]
    assert made.total == sum(map(len, left))
    return set(np.concatenate(left).tolist())


def test_allowed_ids_without_the_denied_ones_are_left(index):
    filters = RowFilters(index)
    some, few = np.array([3, 5, 5, 8, 699, 700, -1]), np.array([5, 12, 9000])
    assert ids_left(index, filters.make(some, None)) == {3, 5, 8, 699}
    assert ids_left(index, filters.make(None, few)) == set(range(N)) - {5, 12}
    assert ids_left(index, filters.make(some, few)) == {3, 8, 699}
    assert ids_left(index, filters.make(some[:0], None)) == set()
    assert ids_left(index, filters.make(None, some[:0])) == set(range(N))


def test_the_same_ids_make_a_filter_once(index, monkeypatch):
    filters = RowFilters(index)
    some = np.arange(10)
    first = filters.make(some, None)
    assert filters.make(some.copy(), None) is first
    for other in (filters.make(None, some), filters.make(some, some[:0]), filters.make(some[:9], None)):
        assert other is not first
    # The one that was asked for longest ago goes.
    monkeypatch.setattr(row_filter, "_KEPT_BYTES", 4 * first.nbytes)
    assert filters.make(some, None) is first
    made = [filters.make(some + i, None) for i in range(1, 4)]
    assert filters.make(some, None) is first
    assert filters.make(some + 3, None) is made[2]
    monkeypatch.setattr(row_filter, "_KEPT_BYTES", 0)
    assert filters.make(some, None) is first
    filters.make(some + 9, None)
    assert filters.make(some, None) is not first


def test_the_ids_of_a_damaged_list_count_as_left_until_it_is_good_again(index):
    filters = RowFilters(index)
    mine, others = index.list_ids(1).copy(), index.list_ids(4)[:3].copy()
    before = filters.make(others, None)
    index.integrity.quarantine([1])
    during = filters.make(others, None)
    assert during is not before
    assert during.counts[1] == index.list_sizes[1]
    assert during.counts[4] == 3
    assert during.seen == index.integrity.seen != before.seen
    index.integrity.lift([1])
    after = filters.make(others, None)
    assert ids_left(index, after) == set(others.tolist())
    assert ids_left(index, filters.make(mine, None)) == set(mine.tolist())


def test_deleted_rows_stay_away_when_their_list_is_good_again(index):
    filters = RowFilters(index)
    gone = index.list_ids(1)[:5].copy()
    delete(index, gone)
    deleted = index.live.current().deleted
    everything = filters.make(None, None)
    index.integrity.quarantine([1])
    filters.without(filters.renewed(everything), deleted)
    index.integrity.lift([1])
    left = filters.without(filters.renewed(everything), deleted)
    assert ids_left(index, left) == set(range(N)) - set(gone.tolist())
    assert left.counts[1] == index.list_sizes[1] - 5
    assert filters.without(filters.renewed(everything), deleted) is left
    assert filters.without(everything, None) is everything


def test_no_two_filters_are_spelt_alike(index):
    filters = RowFilters(index)
    some = np.arange(45)
    made = [filters.make(a, d) for a in (None, some[:0], some, some[:44]) for d in (None, some[:0], some, some[:44])]
    assert len({id(each) for each in made}) == len(made)
    spelt = row_filter._spelt
    assert spelt(None) + spelt(b"") + spelt(None) != spelt(b"") + spelt(None) + spelt(None)


def test_filters_that_are_held_are_counted(index, monkeypatch):
    monkeypatch.setattr(filtered_scanner, "_KEPT_BYTES", 4000)
    monkeypatch.setattr(row_filter, "_KEPT_BYTES", 4000)
    delete(index, [0])
    with Router(index) as router:
        for i in range(60):
            router.search(clustered(1), 3, 4, allow_ids=[i])
        scanner = router._served.engine._filtered._scanner
        assert sum(wanted.nbytes + at.nbytes for wanted, at in scanner._kept.items()) <= 4000
        assert len(scanner._kept) < 60
        assert len(router._served.searcher._filters._without) < 60
