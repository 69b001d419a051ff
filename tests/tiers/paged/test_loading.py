"""One load, step by step: what goes into which buffer, when it is published, what a report says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier
from hybridindex.tiers.paged.loading import ListLoad, LoadPath
from hybridindex.tiers.paged.pinned import PinnedMemory
from tests.clustered import NLIST, small_index
from tests.tiers.late_stream import LateStream
from tests.tiers.options import hold_lists

SEND_PAGES = 4


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("loading") / "i", n=1500) as index:
        yield index


class Bench:
    """A device with a late stream; pages of 10 rows, 4 pages a buffer."""

    def __init__(self, index, n_pages=400):
        self.index = index
        self.geometry = PageGeometry.for_code_size(index.code_size, 1024)
        self.arena = PageArena(torch.device("cpu"), self.geometry, n_pages)
        self.stream = LateStream()
        self.copier = Copier(self.arena, self.stream, staging_bytes=3 * SEND_PAGES * self.geometry.page_bytes)
        self.pinned = PinnedMemory(self.geometry, page_locked=False)
        self.store = ResidencyStore(NLIST, lambda _device, pages: self.arena.pages.free(pages))
        self.usable, self.cancelled = True, False

    def load(self, lists, depth=3):
        return ListLoad(
            lists,
            self.store,
            LoadPath(
                index=self.index,
                arena=self.arena,
                copier=self.copier,
                pinned=self.pinned,
                ordinal=0,
                usable=lambda: self.usable,
            ),
            cancelled=lambda: self.cancelled,
            depth=depth,
        )

    def run(self, lists, **options):
        load = self.load(lists, **options)
        while load.step():
            pass
        return load.future.result(0)

    def pages_of(self, list_id):
        return int(self.geometry.pages_for(self.index.list_sizes[list_id]))

    def holds(self, list_id):
        codes = self.index.list_codes(list_id).reshape(-1)
        pages = self.store.current.list_pages[list_id]
        return np.array_equal(self.arena.data.numpy()[pages].reshape(-1)[: len(codes)], codes)


@pytest.fixture
def bench(index):
    return Bench(index)


@pytest.fixture
def large(index):
    """A list of more than two buffers."""
    return int(np.argmax(index.list_sizes))


def test_what_it_is_about_to_take_is_known_at_any_time(bench, large):
    """Lists that are there take nothing; those that are put down on the way give their claims up."""
    bench.run([3])
    lists = [3, large, 5, large, 7]
    own = [bench.pages_of(i) for i in (large, 5, 7)]
    free = bench.arena.pages.n_free
    load = bench.load(lists)
    assert load.unclaimed_pages == sum(own)
    claims = []
    while load.step():
        claims.append(load.unclaimed_pages)
        assert free - bench.arena.pages.n_free == sum(own) - load.unclaimed_pages
    assert claims == sorted(claims, reverse=True)
    assert (load.unclaimed_pages, bench.load(lists).unclaimed_pages) == (0, 0)


def test_a_load_that_failed_claims_nothing(bench, large):
    load = bench.load([large, *range(NLIST)])
    load.step()
    assert load.unclaimed_pages > 0
    load.abort(RuntimeError("gone"))
    assert load.unclaimed_pages == 0


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("pinned_of", [0, 2, 1])
def test_all_lists_arrive_whole_in_few_sends(bench, index, depth, pinned_of):
    """None are pinned, or every second one, or all."""
    hold_lists(bench.pinned, index, range(0, NLIST, pinned_of) if pinned_of else [])
    report = bench.run(range(NLIST), depth=depth)
    full = np.flatnonzero(index.list_sizes)
    assert report.loaded == tuple(full.tolist())
    assert all(bench.holds(list_id) for list_id in full)
    n_pages = sum(bench.pages_of(i) for i in full)
    sends = {
        # No buffer bounds what is pinned, but a paced move rests often.
        pages: -(-n_pages // pages)
        for pages in (SEND_PAGES, bench.copier.most_pages)
    }
    assert len(set(sends.values())) == 2
    if pinned_of == 2 and depth:
        assert sends[bench.copier.most_pages] < bench.copier.stats.sends < sends[SEND_PAGES]
    else:
        pages = bench.copier.most_pages if pinned_of and depth else SEND_PAGES
        assert bench.copier.stats.sends == sends[pages], "a buffer went out before it was full"
    assert report.nbytes == n_pages * bench.geometry.page_bytes == bench.copier.stats.nbytes


def test_a_pinned_list_on_its_way_is_not_overwritten_by_another(bench, index):
    first, second = np.argsort(-index.list_sizes)[:2].tolist()
    n_pages, page_bytes = bench.pages_of(first), bench.geometry.page_bytes
    assert n_pages > SEND_PAGES, "a part is on its way, the rest waits for its buffer"
    # Room for one of them, a page in each place.
    limit_bytes = (n_pages + 1) * page_bytes - 1
    bench.pinned = PinnedMemory(bench.geometry, page_locked=False, block_bytes=page_bytes, limit_bytes=limit_bytes)

    def hold(list_id):
        return bench.pinned.hold([list_id], [bench.pages_of(list_id)], index.list_codes, lambda: False)

    assert hold(first).pinned == (first,)
    load = bench.load([first])
    load.step()
    assert bench.stream.pending
    assert hold(second).late == (second,)
    while load.step():
        hold(second)
    assert bench.holds(first)
    assert hold(second).pinned == (second,)


def test_a_list_is_published_when_its_last_buffer_has_landed_and_not_before(bench, large):
    assert bench.pages_of(large) > 2 * SEND_PAGES
    load = bench.load([large])
    while bench.stream.n_launched == 0 or load._sending is not None:
        load.step()
    bench.stream.progress(bench.stream.n_launched - bench.stream.n_done - 1)
    assert bench.store.current.n_resident == 0
    assert not load.step()
    assert bench.store.current.n_resident == 1
    assert bench.holds(large)


def test_cancelled_between_two_buffers_of_a_list_its_pages_are_free_once_nothing_writes_them(bench, large, index):
    small = int(np.flatnonzero(index.list_sizes)[-1])
    assert small != large
    load = bench.load([large, small])
    load.step()
    bench.cancelled = True
    n_free = bench.arena.pages.n_free
    load._send()
    load._land(3)
    assert bench.stream.pending
    assert bench.arena.pages.n_free == n_free
    assert not load.step()
    assert load.future.result(0).skipped == (large, small)
    assert load.future.result(0).loaded == ()
    assert bench.arena.pages.n_free == bench.arena.pages.n_pages


def test_a_list_larger_than_the_arena_is_told_apart_from_one_that_found_no_room(index, large):
    bench = Bench(index, n_pages=Bench(index).pages_of(large) - 1)
    others = [int(i) for i in np.flatnonzero(index.list_sizes) if i != large]
    report = bench.run([large, *others])
    assert report.too_large == (large,)
    assert report.skipped
    assert large not in report.skipped
    assert {*report.loaded, *report.skipped} == set(others)


def test_a_list_that_another_load_brought_first_is_present_and_its_copy_is_given_back(bench, index):
    list_id = int(np.flatnonzero(index.list_sizes)[0])
    slow = bench.load([list_id])
    slow.step()
    assert bench.run([list_id]).loaded == (list_id,)
    n_free = bench.arena.pages.n_free
    while slow.step():
        pass
    report = slow.future.result(0)
    assert (report.loaded, report.present, report.nbytes) == ((), (list_id,), 0)
    assert bench.arena.pages.n_free == n_free + bench.pages_of(list_id)
    bench.store.check_invariants()


def test_a_device_that_failed_meanwhile_publishes_nothing_and_keeps_no_page(bench, index):
    full = np.flatnonzero(index.list_sizes).tolist()
    smallest_first = sorted(full, key=bench.pages_of)
    assert bench.pages_of(smallest_first[0]) <= SEND_PAGES
    load = bench.load(smallest_first)
    load.step()
    bench.usable = False
    while load.step():
        pass
    report = load.future.result(0)
    assert report.loaded == ()
    assert sorted(report.skipped) == full
    assert bench.store.current.n_resident == 0
    assert bench.arena.pages.n_free == bench.arena.pages.n_pages


def test_a_list_named_twice_moves_once(bench, index):
    list_id = int(np.flatnonzero(index.list_sizes)[0])
    report = bench.run([list_id, list_id])
    assert (report.loaded, report.present) == ((list_id,), (list_id,))


def test_a_list_whose_damage_is_found_as_it_is_taken_is_not_published(bench, index, monkeypatch):
    list_id = int(np.flatnonzero(index.list_sizes)[0])
    integrity = index.integrity
    load = bench.load([list_id])
    allocate = bench.arena.pages.allocate_each

    def found_meanwhile(counts):
        integrity.quarantine([list_id])
        return allocate(counts)

    monkeypatch.setattr(bench.arena.pages, "allocate_each", found_meanwhile)
    try:
        while load.step():
            pass
    finally:
        integrity.lift([list_id])
    assert load.future.result(0).skipped == (list_id,)
    assert bench.store.current.n_resident == 0
    assert bench.arena.pages.n_free == bench.arena.pages.n_pages
