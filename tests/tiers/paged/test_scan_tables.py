"""The tables of the device scan against a naive reference: every (query, row) pair has one slot and is read once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import _native as native
from hybridindex.errors import OutOfBudgetError
from hybridindex.tiers.paged.tables.scan_tables import (
    ALIGNED,
    GROUP,
    Cutting,
    NumpyTables,
    Selection,
    Tile,
    make_tables,
    pairs_of_probes,
)
from tests.examples import examples

SIZES = np.array([0, 1, 4, 5, 23, 40, 0, 17, 8, 3], dtype=np.int64)
ROWS_PER_PAGE = 4


def scattered_pages(sizes, rng):
    """Where each list's pages stand in a log, and the log: page numbers in no order, with gaps that nobody owns."""
    n_pages = -(-sizes // ROWS_PER_PAGE)
    log = rng.permutation(1000)[: n_pages.sum() + 7].astype(np.int32)
    return np.cumsum(n_pages) - n_pages + 7, log


def cutting(room, *, k=1, dim=8):
    return Cutting(
        selection=Selection.of(k),
        room=room,
        query_bytes=4 * dim,
        pair_bytes=0,
        rows_per_page=ROWS_PER_PAGE,
        longest_list=int(SIZES.max()),
    )


def tiles_of(probes, sizes, cut):
    """The pairs of each tile."""
    tables = NumpyTables(ROWS_PER_PAGE, GROUP)
    tables.take(probes, sizes, cut.longest_stretch(1))
    ends = [0, *tables.tiles(*cut.costs)]
    return [tables._pairs.part(start, end) for start, end in itertools.pairwise(ends)]


def compared(tables, pairs):
    """What the kernels would do with the tables: slot -> (query, page, row in page, row in stretch)."""
    done = {}
    for number, (page, stretch) in enumerate(zip(tables.page, tables.stretch, strict=True)):
        inner = number - tables.first_item[stretch]
        row, group = inner // tables.groups[stretch] * ROWS_PER_PAGE, inner % tables.groups[stretch]
        first = tables.member[stretch] + group * GROUP
        for member in range(first, min(first + GROUP, tables.member_end[stretch])):
            for i in range(min(ROWS_PER_PAGE, tables.rows[stretch] - row)):
                slot = int(tables.slot[member] + row + i)
                assert slot not in done, "a row is compared twice with a query"
                done[slot] = (int(tables.query[member]) + tables.first_query, int(page), i)
    assert sorted(done) == list(range(tables.n_slots))
    return done


@examples(120)
@given(
    n=st.integers(1, 40),
    p=st.integers(1, 10),
    room=st.sampled_from([4_000, 6_000, 20_000, 1 << 20]),
    heavy_from=st.sampled_from([2, 5, 1 << 30]),
    seed=st.integers(0, 10_000),
)
def test_every_probed_row_is_compared_once_with_its_query(n, p, room, heavy_from, seed):
    rng = np.random.default_rng(seed)
    probes = np.argsort(rng.random((n, len(SIZES))), axis=1)[:, :p].astype(np.int64)
    probes[rng.random(probes.shape) < 0.3] = -1
    list_log, log = scattered_pages(SIZES, rng)
    cut = cutting(room)

    found = []
    for part in tiles_of(probes, SIZES, cut):
        tables = make_tables(part, list_log, log, ROWS_PER_PAGE, heavy_from)
        counts = tables.member_end - tables.member
        is_light = np.arange(len(tables.page)) < tables.n_light
        np.testing.assert_array_equal(is_light, counts[tables.stretch] < heavy_from)
        for slot, what in compared(tables, part).items():
            assert tables.query_slot[what[0] - tables.first_query] <= slot
            assert slot < tables.query_slot[what[0] - tables.first_query + 1]
            pair = np.searchsorted(tables.pair_slot, slot, side="right") - 1
            row = part.first_row[pair] + slot - tables.pair_slot[pair]
            found.append((*what, int(part.list[pair]), int(row)))

    expected = [
        (q, int(log[list_log[i] + row // ROWS_PER_PAGE]), row % ROWS_PER_PAGE, int(i), row)
        for q in range(n)
        for i in probes[q]
        if i >= 0
        for row in range(SIZES[i])
    ]
    assert sorted(found) == sorted(expected)


@examples(120)
@given(
    n=st.integers(1, 60),
    p=st.integers(1, 10),
    room=st.sampled_from([20_000, 40_000, 100_000]),
    seed=st.integers(0, 10_000),
)
def test_a_page_is_read_once_where_the_queries_fit(n, p, room, seed):
    """Queries of which a tile could hold twice as many share it; only a list that no tile can hold is read again."""
    rng = np.random.default_rng(seed)
    probes = np.argsort(rng.random((n, len(SIZES))), axis=1)[:, :p].astype(np.int64)
    cut = cutting(room)
    per_row, per_item, per_pair, per_query, limit = cut.costs
    tiles = tiles_of(probes, SIZES, cut)
    at_once = 1 + limit // 2 // per_query
    left = limit - (min(n, at_once) - 1) * per_query
    one = np.ceil(SIZES * per_row) + -(-SIZES // ROWS_PER_PAGE) * per_item + per_pair
    met = [set(part.list[part.query // at_once == block]) for part in tiles for block in range(-(-n // at_once))]
    assert n > at_once or len(met) == len(tiles)
    if (one > left).any():
        return
    for list_id in np.flatnonzero(SIZES).tolist():
        blocks = {q // at_once for q in np.flatnonzero((probes == list_id).any(axis=1)).tolist()}
        read = sum(list_id in lists for lists in met)
        fits = (probes == list_id).any(axis=1).sum() * one[list_id] <= left
        assert read >= len(blocks)
        if fits:
            assert read == len(blocks)


@pytest.mark.parametrize("sizes", [SIZES, np.ones(10, np.int64), np.full(10, 390)], ids=["mixed", "tiny", "long"])
@pytest.mark.parametrize("pair_bytes", [0, 64])
def test_what_a_tile_takes_fits_the_scratch(sizes, pair_bytes):
    probes = np.tile(np.arange(len(sizes)), (300, 1))
    room = 24_000
    cut = replace(cutting(room), longest_list=int(sizes.max()), pair_bytes=pair_bytes)
    tiles = tiles_of(probes, sizes, cut)
    assert len(tiles) > 1
    for part in tiles:
        tables = make_tables(part, *scattered_pages(sizes, np.random.default_rng(0)), ROWS_PER_PAGE, 9)
        numbers = 2 * len(tables.page) + 5 * len(tables.list) + 2 * len(tables.query) + tables.n_slots
        starts = cut.selection.starts(tables.query_slot)
        places = starts[1][-1] + (starts[2][-1] if len(starts) > 2 else 0)
        own = cut.query_bytes * tables.n_queries + pair_bytes * len(tables.list)
        assert 4 * numbers + 8 * places + own <= room


def test_items_of_one_page_follow_each_other():
    probes = np.full((2 * GROUP + 1, 1), 5)
    tables = make_tables(
        pairs_of_probes(probes, SIZES, ROWS_PER_PAGE, 100), *scattered_pages(SIZES, np.random.default_rng(0)), 4, 99
    )
    assert len(tables.page) == 3 * 10
    assert (tables.page.reshape(10, 3) == tables.page[::3, None]).all()


def test_a_list_too_long_for_the_scratch_is_scanned_in_stretches():
    pairs = pairs_of_probes(np.array([[5, 4]]), SIZES, ROWS_PER_PAGE, 3)
    assert pairs.list.tolist() == [5, 5, 5, 5, 4, 4]
    assert pairs.first_page.tolist() == [0, 3, 6, 9, 0, 3]
    assert pairs.rows.tolist() == [12, 12, 12, 4, 12, 11]


def test_scratch_below_one_page_is_refused():
    with pytest.raises(OutOfBudgetError, match="scratch of 3,000 bytes is too small for k 2048"):
        cutting(3000, k=2048).longest_stretch(2048)


@given(counts=st.lists(st.integers(0, 30_000), min_size=1, max_size=20), k=st.integers(1, 2048))
def test_selection_ends_with_one_chunk_for_every_query(counts, k):
    selection = Selection.of(k)
    assert k <= selection.kept < selection.chunk
    starts = selection.starts(np.append(0, np.cumsum(counts)))
    for before, after in itertools.pairwise(starts):
        chunks = np.maximum(1, -(-np.diff(before) // selection.chunk))
        np.testing.assert_array_equal(np.diff(after), chunks * selection.kept)
    np.testing.assert_array_equal(starts[-1], np.arange(len(counts) + 1) * selection.kept)
    # What a tile may take: two levels at once, and what was promised for them.
    cut = cutting(0, k=k, dim=0)
    below = starts[2][-1] if len(starts) > 2 else 0
    taken = 4 * sum(counts) + 8 * (starts[1][-1] + below) + 4 * sum(len(level) - 1 for level in starts)
    assert taken <= len(counts) * cut._per_query + sum(counts) * cut._per_row


def stretches_of(tile, words):
    """Every stretch of a staged tile, in whatever order: its weight, rows, items (page, group) and members."""
    page, stretch, first, groups, rows, member, end, query, slot = (words[at:] for at in tile.at)
    n_stretches = int(stretch[: tile.n_items].max()) + 1
    found = []
    for number in range(n_stretches):
        items = [item for item in range(tile.n_items) if stretch[item] == number]
        assert items == list(range(first[number], first[number] + len(items))), "items of a stretch lie apart"
        members = range(member[number], end[number])
        found.append(
            (
                items[0] < tile.n_light,
                int(groups[number]),
                int(rows[number]),
                page[items].tolist(),
                [(int(query[one]), int(slot[one])) for one in members],
            )
        )
    return found


@examples(120)
@given(
    n=st.integers(1, 40),
    p=st.integers(1, 10),
    k=st.sampled_from([1, 17, 300]),
    room=st.sampled_from([9_000, 20_000, 1 << 20]),
    heavy_from=st.sampled_from([2, 5, 1 << 30]),
    seed=st.integers(0, 10_000),
)
def test_the_extension_makes_the_tables_that_numpy_makes(n, p, k, room, heavy_from, seed):
    rng = np.random.default_rng(seed)
    cut = cutting(room, k=k)
    try:
        pages = min(cut.longest_stretch(k), int(rng.integers(1, 12)))
    except OutOfBudgetError:
        return
    own, reference = native.ScanTables(ROWS_PER_PAGE, GROUP), NumpyTables(ROWS_PER_PAGE, GROUP)
    # One after the other, as what was there before must not matter.
    for _ in range(2):
        probes = np.argsort(rng.random((n, len(SIZES))), axis=1)[:, :p].astype(np.int64)
        probes[rng.random(probes.shape) < 0.3] = -1
        n_pairs = reference.take(probes, SIZES, pages)
        assert own.take(probes, SIZES, pages) == n_pairs
        list_log, log = scattered_pages(SIZES, rng)
        ends = reference.tiles(*cut.costs)
        assert own.tiles(*cut.costs) == ends
        assert ends[-1:] == [n_pairs][: len(ends)]
        for start, end in itertools.pairwise([0, *ends]):
            what = (start, end, list_log, log, heavy_from, cut.selection.chunk, cut.selection.kept)
            few = np.full(8, -7, dtype=np.int32)
            wanted = np.full(1 << 14, -7, dtype=np.int32)
            words = wanted.copy()
            without_room = own.write(*what, few)
            assert (few == -7).all(), "written where there is no room"
            expected, made = reference.write(*what, wanted), Tile._make(own.write(*what, words))
            assert made == without_room == expected
            assert (words[made.used :] == -7).all(), "written behind its end"
            assert all(at % ALIGNED == 0 for at in (*made.at, *made.starts))
            for at in made.starts:
                np.testing.assert_array_equal(words[at:][: made.n_queries + 1], wanted[at:][: made.n_queries + 1])
            assert sorted(stretches_of(made, words)) == sorted(stretches_of(expected, wanted))
            for one, other in zip(own.pairs(), reference.pairs(), strict=True):
                np.testing.assert_array_equal(one, other)
            # Of each member and stretch, what belongs to it.
            page, _, first, _, _, member, _, query, slot = (words[at:] for at in made.at)
            lists, probed = own.stretch_lists(), own.member_probes()
            assert len(probed) == end - start
            flat, (_, _, first_row, _, slots) = probes.ravel(), own.pairs()
            assert (probed // p == query[: len(probed)] + made.first_query).all()
            at_pair = np.searchsorted(slots, slot[: len(probed)])
            for number, i in enumerate(lists.tolist()):
                assert flat[probed[member[number]]] == i
                assert page[first[number]] == log[list_log[i] + first_row[at_pair[member[number]]] // ROWS_PER_PAGE]
            compare_answers(rng, own, reference, made, words)


def compare_answers(rng, own, reference, tile, words):
    """Random keys of every query: the same rows, by the extension and by numpy."""
    k, kept, keep_max = int(rng.integers(1, 17)), 16, bool(rng.integers(2))
    slots = words[tile.starts[0] :][: tile.n_queries + 1].astype(np.int64)
    keys = np.full((tile.n_queries, kept), np.iinfo(np.int64).max)
    for row, (first, last) in enumerate(itertools.pairwise(slots.tolist())):
        several = rng.permutation(np.arange(first, last))[: int(rng.integers(0, kept + 1))]
        keys[row, : len(several)] = rng.integers(-(1 << 31), 1 << 31, len(several)) << 32 | several
    keys = rng.permuted(keys, axis=1)
    results = []
    for tables in (own, reference):
        distances, positions = np.empty((tile.n_queries, k), np.float32), np.empty((tile.n_queries, k), np.int64)
        results.append((tables.answers(keys.copy(), keep_max, distances, positions), distances, positions))
    assert results[0][0] == results[1][0] == (results[0][2] >= 0).sum()
    np.testing.assert_array_equal(results[0][1], results[1][1])
    np.testing.assert_array_equal(results[0][2], results[1][2])


def test_the_extension_refuses_what_would_leave_its_arrays():
    tables = native.ScanTables(ROWS_PER_PAGE, GROUP)
    sizes, out = np.array([5, 9], dtype=np.int64), np.empty(4096, dtype=np.int32)
    log, pages = np.array([0, 2], dtype=np.int64), np.arange(5, dtype=np.int32)
    for wrong in (2, -2):
        with pytest.raises(IndexError, match=f"probe {wrong} is no list id"):
            tables.take(np.array([[wrong]]), sizes, 9)
    assert tables.take(np.array([[0, 1]]), sizes, 9) == 2
    for start, end in ((-1, 1), (1, 1), (0, 3)):
        with pytest.raises(IndexError, match="no such pairs"):
            tables.write(start, end, log, pages, 9, 2048, 16, out)
    assert tables.tiles(1.0, 1, 1, 1, 100) == [2]
    cut = native.ScanTables(ROWS_PER_PAGE, GROUP)
    cut.take(np.array([[0, 1]]), sizes, 9)
    assert cut.tiles(1.0, 1, 1, 1, 14) == [1, 2]
    with pytest.raises(ValueError, match="cut before"):
        cut.tiles(1.0, 1, 1, 1, 14)
    with pytest.raises(IndexError, match="a stretch is too long"):
        tables.tiles(1.0, 1, 1, 1, 4)
    with pytest.raises(ValueError, match="every list"):
        tables.write(0, 2, log[:1], pages, 9, 2048, 16, out)
    with pytest.raises(IndexError, match="list 1 has no such pages"):
        tables.write(0, 2, log, pages[:4], 9, 2048, 16, out)
    with pytest.raises(ValueError, match="half of its candidates"):
        tables.write(0, 2, log, pages, 9, 16, 16, out)
    tables.write(0, 2, log, pages, 9, 2048, 16, out)
    distances, positions = np.empty((1, 2), np.float32), np.empty((1, 2), np.int64)
    for slot in (14, 1 << 31):
        with pytest.raises(IndexError, match="not asked for"):
            tables.answers(np.array([[slot, 3]]), True, distances, positions)
    with pytest.raises(IndexError, match="more queries"):
        tables.answers(np.zeros((2, 2), np.int64), True, np.empty((2, 2), np.float32), np.empty((2, 2), np.int64))
    with pytest.raises(ValueError, match="at least 1"):
        native.ScanTables(0, GROUP)


def test_the_first_list_that_a_device_does_not_hold():
    sizes, device = np.array([5, 0, 9], dtype=np.int64), np.array([1, -1, 0], dtype=np.int16)
    for probes, expected in ([[0, 1, -1, 0]], -1), ([[0, 1], [1, 2]], 3), ([[3]], 0), ([[-2]], 0), ([[]], -1):
        probed = np.array(probes, dtype=np.int64).reshape(len(probes), -1)
        # Of an index with codes, there are rows beside the lists.
        for there in (device, np.append(device, device)):
            assert native.first_absent(probed, sizes, there, 1) == expected
