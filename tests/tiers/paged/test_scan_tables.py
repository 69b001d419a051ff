"""The tables of the device scan against a naive reference: every (query, row) pair has one slot and is read once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import OutOfBudgetError
from hybridindex.tiers.paged.scan_tables import GROUP, Cutting, Selection, make_tables, pairs_of_probes
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
    pairs = pairs_of_probes(probes, SIZES, ROWS_PER_PAGE, cut.longest_stretch(1))

    found = []
    ends = [0]
    for start, end in cut.tiles(pairs):
        assert start == ends[-1]
        ends.append(end)
        part = pairs.part(start, end)
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
    assert ends[-1] == len(pairs)

    expected = [
        (q, int(log[list_log[i] + row // ROWS_PER_PAGE]), row % ROWS_PER_PAGE, int(i), row)
        for q in range(n)
        for i in probes[q]
        if i >= 0
        for row in range(SIZES[i])
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("sizes", [SIZES, np.ones(10, np.int64), np.full(10, 390)], ids=["mixed", "tiny", "long"])
@pytest.mark.parametrize("pair_bytes", [0, 64])
def test_what_a_tile_takes_fits_the_scratch(sizes, pair_bytes):
    probes = np.tile(np.arange(len(sizes)), (300, 1))
    room = 24_000
    cut = replace(cutting(room), longest_list=int(sizes.max()), pair_bytes=pair_bytes)
    pairs = pairs_of_probes(probes, sizes, ROWS_PER_PAGE, cut.longest_stretch(1))
    tiles = list(cut.tiles(pairs))
    assert len(tiles) > 1
    for start, end in tiles:
        tables = make_tables(
            pairs.part(start, end), *scattered_pages(sizes, np.random.default_rng(0)), ROWS_PER_PAGE, 9
        )
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
