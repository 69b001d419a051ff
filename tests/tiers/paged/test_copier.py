"""Copies: bytes arrive in any pages, buffers are reused no earlier than allowed, failures free nothing too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import DeviceError, InvalidInputError
from hybridindex.paging import PageGeometry
from hybridindex.tiers.paged import staging
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier, Write, open_copier
from hybridindex.tiers.paged.pinned import PinnedMemory
from hybridindex.tiers.paged.staging import Placed, merge_runs
from tests.tiers.late_stream import LateStream

GEOMETRY = PageGeometry(code_size=4, rows_per_page=2)
N_PAGES = 20
SEND_PAGES = 4


def open_late(stream=None, ticks=()):
    arena = PageArena(torch.device("cpu"), GEOMETRY, N_PAGES)
    times = iter(ticks)
    return arena, Copier(
        arena, stream, staging_bytes=3 * SEND_PAGES * GEOMETRY.page_bytes, clock=lambda: next(times, 0.0)
    )


def codes_of(n_rows, seed=0):
    return np.random.default_rng(seed).integers(1, 256, (n_rows, 4), dtype=np.uint8)


def read(arena, pages, n_rows):
    return arena.data.numpy()[pages].reshape(-1, 4)[:n_rows]


@given(data=st.data(), late=st.booleans(), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_what_was_sent_arrives_through_any_pages(data, late, sizes):
    """Several sends in flight, more than there are buffers; each list's pages in any order; some lists pinned."""
    arena, copier = open_late(LateStream() if late else None)
    pinned = PinnedMemory(GEOMETRY, page_locked=False, block_bytes=6 * GEOMETRY.page_bytes)
    free = data.draw(st.permutations(range(N_PAGES)))
    expected, tickets, held = [], [], {}
    for number, size in enumerate(sizes):
        n_pages = -(-size // 2)
        if n_pages > len(free):
            break
        pages, free = np.array(free[:n_pages], np.int32), free[n_pages:]
        codes = codes_of(size, number)
        expected.append((pages, codes))
        writes = [Write(pages, codes)]
        if data.draw(st.booleans()):
            held[number] = codes
            pinned.hold(list(held), [-(-len(c) // 2) for c in held.values()], held.__getitem__, lambda: False)
            writes, left = [], pages
            for n, part in pinned.find(number).cut(0, n_pages):
                writes.append(Write(left[:n], part))
                left = left[n:]
        tickets.append(copier.send(writes))
    for ticket in tickets:
        copier.finish(ticket)
    for pages, codes in expected:
        np.testing.assert_array_equal(read(arena, pages, len(codes)), codes)
    assert copier.stats.nbytes == sum(len(pages) for pages, _ in expected) * GEOMETRY.page_bytes
    assert copier.stats.sends == len(expected)
    assert copier.staging_bytes <= 3 * SEND_PAGES * GEOMETRY.page_bytes


@pytest.mark.parametrize("late", [False, True])
def test_rows_are_put_where_they_belong_and_nothing_else_changes(late):
    arena, copier = open_late(LateStream() if late else None)
    before = codes_of(2 * N_PAGES).reshape(N_PAGES, -1)
    arena.data.numpy()[:] = before
    # More than once round the ring; pages share buffers.
    for step in range(5):
        places = [(8 * 3 + 4, codes_of(1, step).reshape(-1)), (8 * (5 + step), codes_of(2, 9 + step).reshape(-1))]
        copier.put(places)
        for at, source in places:
            before.reshape(-1)[at : at + len(source)] = source
        np.testing.assert_array_equal(arena.data.numpy(), before)
    assert copier.stats.nbytes == 5 * 12
    assert copier.stats.sends == 5


def test_pages_that_a_failed_copy_may_still_write_are_kept():
    arena, copier = open_late(LateStream())
    pages = arena.pages.allocate(2)
    copier.keep(pages)
    copier.keep(pages[:0])
    assert copier.kept_pages == 2
    copier.check_invariants()
    copier.probe()
    assert copier.kept_pages == 0
    assert arena.pages.n_free == N_PAGES


PAGE = 32


def merged(*placed):
    """Copies by the extension and by numpy: first page on the device, first page on the host, pages."""
    parts = [
        Placed(np.array(pages, np.int32), 1000 + PAGE * slot, *(region or [1000])) for pages, slot, *region in placed
    ]
    made = merge_runs(parts, 5000, PAGE)
    pages = np.concatenate([part.pages for part in parts])
    counts = np.array([len(part.pages) for part in parts])
    sources = np.array([part.source for part in parts])
    regions = np.array([part.region for part in parts])
    other = staging.merge_pages(pages, counts, sources, regions, 5000, PAGE, max(PAGE, staging._MOST_COPIED))
    np.testing.assert_array_equal(other, made)
    targets, sources, nbytes = made
    return ((targets - 5000) // PAGE).tolist(), ((sources - 1000) // PAGE).tolist(), (nbytes // PAGE).tolist()


def test_runs_that_continue_on_both_sides_are_one_copy():
    assert merged(([2, 3], 0), ([4], 2), ([5, 6], 3)) == ([2], [0], [5])
    assert merged(([2, 3], 0), ([7], 2)) == ([2, 7], [0, 2], [2, 1])
    # Neighbours on the device that are none on the host.
    assert merged(([2, 3], 0), ([4], 5)) == ([2, 4], [0, 5], [2, 1])
    assert merged(([4, 2, 3], 0)) == ([4, 2], [0, 1], [1, 2])
    # Neighbours on both sides, in two allocations.
    assert merged(([2, 3], 0, 1000), ([4], 2, 1064)) == ([2, 4], [0, 2], [2, 1])
    assert merged(([2, 3], 0, 1000), ([4], 2, 1000), ([5], 3, 1096)) == ([2, 5], [0, 3], [3, 1])


def test_no_copy_is_so_long_that_a_query_would_wait_for_it(monkeypatch):
    monkeypatch.setattr(staging, "_MOST_COPIED", 3 * PAGE)
    placed = [([0, 1], 0), ([2, 3], 2), (list(range(4, 12)), 4)]
    assert merged(*placed) == ([0, 3, 6, 9], [0, 3, 6, 9], [3, 3, 3, 3])
    # Never less than a page.
    monkeypatch.setattr(staging, "_MOST_COPIED", 1)
    assert merged(([4, 5], 0)) == ([4, 5], [0, 1], [1, 1])


@given(data=st.data(), most=st.integers(1, 5))
def test_numpy_merges_as_the_extension_does(data, most):
    pages = data.draw(st.permutations(range(12)))
    cuts = sorted({*data.draw(st.lists(st.integers(1, 11), max_size=4)), 12})
    parts = [pages[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    slots = [data.draw(st.integers(0, 3)) + 20 * number for number in range(len(parts))]
    if data.draw(st.booleans()):  # one after the other
        slots = np.cumsum([0, *map(len, parts)])[:-1].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_MOST_COPIED", most * PAGE)
        targets, sources, counts = merged(*zip(parts, slots, strict=True))
    assert max(counts) <= most
    every = [(t + i, s + i) for t, s, n in zip(targets, sources, counts, strict=True) for i in range(n)]
    assert every == [(page, slot + i) for part, slot in zip(parts, slots, strict=True) for i, page in enumerate(part)]


def test_lists_of_one_send_share_a_buffer_and_a_copy():
    arena, copier = open_late(LateStream())
    ticket = copier.send([Write(arena.pages.allocate(2), codes_of(3)), Write(arena.pages.allocate(1), codes_of(2))])
    copier.finish(ticket)
    assert copier.stats.runs == 1
    assert copier.stats.samples == ((3 * GEOMETRY.page_bytes, 0.5),)
    assert copier.stats.busy_s == 0.5


def test_a_wait_for_a_buffer_is_counted_and_timed():
    _, copier = open_late(LateStream(), ticks=[10.0, 12.5])
    for page in range(4):  # the fourth needs the first one's buffer
        copier.send([Write(np.array([page], np.int32), codes_of(2))])
    assert (copier.stats.waits, copier.stats.wait_s) == (1, 2.5)


def test_pages_of_a_send_on_its_way_are_kept_until_a_later_copy_is_known_done():
    stream = LateStream()
    arena, copier = open_late(stream)
    pages = arena.pages.allocate(3)
    stream.break_after = 1
    ticket = copier.send([Write(pages[[0, 2]], codes_of(4))])
    with pytest.raises(RuntimeError, match="the launch failed"):
        copier.finish(ticket)
    assert stream.pending
    copier.give_back([pages], [ticket])
    assert (copier.kept_pages, arena.pages.n_free) == (3, N_PAGES - 3)
    copier.check_invariants()
    stream.lost = True
    with pytest.raises(RuntimeError, match="lost"):
        copier.probe()
    assert copier.kept_pages == 3
    stream.lost = False
    copier.probe()
    assert not stream.pending
    assert (copier.kept_pages, arena.pages.n_free) == (0, N_PAGES)


def test_many_trials_of_a_lost_device_take_one_page():
    stream = LateStream()
    arena, copier = open_late(stream)
    for _ in range(N_PAGES + 5):
        stream.break_after = 1
        with pytest.raises(RuntimeError):
            copier.probe()
    assert arena.pages.n_free == N_PAGES - 1
    copier.probe()
    assert arena.pages.n_free == N_PAGES


def test_pages_of_a_send_that_never_started_are_free_at_once(monkeypatch):
    def no_room(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    arena, copier = open_late(LateStream())
    pages = arena.pages.allocate(2)
    monkeypatch.setattr(torch, "empty", no_room)
    ticket = copier.send([Write(pages, codes_of(4))])
    with pytest.raises(DeviceError, match="no 96 bytes of page-locked memory"):
        copier.finish(ticket)
    copier.give_back([pages], [ticket])
    assert arena.pages.n_free == N_PAGES


@pytest.mark.parametrize("stream", [None, LateStream()], ids=["stand-in", "stream"])
def test_a_device_that_gives_back_other_bytes_does_not_work(stream, monkeypatch):
    arena, copier = open_late(stream)
    copier.probe()
    reading = copier.read_back
    monkeypatch.setattr(copier, "read_back", lambda pages: reading(pages) ^ 1)
    with pytest.raises(DeviceError, match="different bytes"):
        copier.probe()
    assert arena.pages.n_free == N_PAGES


def test_a_full_arena_cannot_be_tried():
    arena, copier = open_late()
    arena.pages.allocate(N_PAGES)
    with pytest.raises(DeviceError, match="none of its pages is free"):
        copier.probe()


def test_a_ring_below_three_pages_is_refused():
    arena = PageArena(torch.device("cpu"), GEOMETRY, N_PAGES)
    with pytest.raises(InvalidInputError, match="staging_bytes is 23; expected at least 24"):
        Copier(arena, None, staging_bytes=23)


def test_the_stand_in_takes_no_staging_memory():
    arena = PageArena(torch.device("cpu"), GEOMETRY, N_PAGES)
    copier = open_copier(arena)
    copier.finish(copier.send([Write(arena.pages.allocate(2), codes_of(4))]))
    assert copier.staging_bytes == 0
    assert copier.stats.nbytes == 2 * GEOMETRY.page_bytes


def test_closing_waits_for_copies_and_survives_a_lost_device(caplog):
    stream = LateStream()
    arena, copier = open_late(stream)
    copier.send([Write(arena.pages.allocate(1), codes_of(2))])
    copier.close()
    assert not stream.pending
    stream.lost = True
    copier.close()
    assert "was lost before its last copies ended" in caplog.text
