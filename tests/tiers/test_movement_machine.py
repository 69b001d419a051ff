"""Movement under everything at once: whoever leases a snapshot reads the right bytes, and no page is lost.

Allocator, arena, copier, loads, residency, leases and recovery together, single steps in any order under a stream that
copies as late as it may; then the whole tier with its own thread, readers and writers. The parts alone:
``test_arena.py``, ``test_residency.py``, ``test_copier.py``, ``test_loading.py``.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from hybridindex.errors import DeviceError
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.copy_queue import CopyQueue
from hybridindex.tiers.contract.device_health import DeviceHealth, Probe
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.paged.loading import ListLoad, LoadPath
from hybridindex.tiers.paged.pinned import PinnedMemory
from tests.clustered import NLIST, small_index
from tests.examples import examples
from tests.tiers.late_stream import LateStream

PAGE_BYTES = 1024
N_PAGES = 48
SEND_PAGES = 4
LISTS = st.lists(st.integers(0, NLIST - 1), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("movement") / "i", n=1500) as index:
        yield index


def read_list(arena, pages, nbytes):
    return arena.data.numpy()[pages].reshape(-1)[:nbytes]


def read_pinned(found, nbytes):
    parts = [part.block[part.slot : part.slot + n].reshape(-1) for n, part in found.cut(0, 1 << 30)]
    return torch.cat(parts).numpy()[:nbytes] if parts else np.empty(0, np.uint8)


class Lists:
    """An index's lists, of which reading one fails on demand."""

    def __init__(self, index):
        self.index = index
        self.list_sizes, self.nlist, self.piece_bytes = index.list_sizes, index.nlist, index.piece_bytes
        self.integrity = index.integrity
        self.unreadable_after = None

    def piece_codes(self, list_id):
        if self.unreadable_after is not None:
            self.unreadable_after -= 1
            if self.unreadable_after < 0:
                self.unreadable_after = None
                raise OSError("the file cannot be read")
        return self.index.piece_codes(list_id)


class MovementMachine(RuleBasedStateMachine):
    """One device whose mover takes a step when the machine says so."""

    index = None
    leases = Bundle("leases")
    loads = Bundle("loads")

    def __init__(self):
        super().__init__()
        self.lists = Lists(self.index)
        self.codes = [self.index.list_codes(i).reshape(-1) for i in range(NLIST)]
        geometry = PageGeometry.for_code_size(self.index.code_size, PAGE_BYTES)
        self.arena = PageArena(torch.device("cpu"), geometry, N_PAGES)
        self.stream = LateStream()
        self.copier = Copier(self.arena, self.stream, staging_bytes=3 * SEND_PAGES * geometry.page_bytes)
        self.pinned = PinnedMemory(
            geometry, page_locked=False, block_bytes=8 * geometry.page_bytes, limit_bytes=16 * geometry.page_bytes
        )
        self.store = ResidencyStore(NLIST, lambda _device, pages: self.arena.pages.free(pages))
        self.health = DeviceHealth()
        self.path = LoadPath(
            index=self.lists,
            arena=self.arena,
            copier=self.copier,
            pinned=self.pinned,
            ordinal=0,
            usable=lambda: self.health.failure is None,
        )
        self.moves = CopyQueue()
        self.running = []
        self.cancelled = set()
        self.open = []

    # What callers do

    @rule(target=loads, lists=LISTS, share=st.sampled_from([None, 0.5, 1.0]), n_steps=st.integers(0, 6))
    def start_load(self, lists, share, n_steps):
        load = ListLoad(
            lists,
            self.store,
            self.path,
            cancelled=lambda: load in self.cancelled,
            depth=0 if share == 0.5 else self.copier.depth,
        )
        self.moves.put(load, share)
        self.running.append(load)
        self.step(n_steps)
        return load

    @rule(load=consumes(loads), n_steps=st.integers(0, 1))
    def cancel(self, load, n_steps):
        self.cancelled.add(load)
        self.step(n_steps)

    @rule(drops=st.lists(st.integers(0, NLIST - 1), max_size=12, unique=True))
    def drop(self, drops):
        self.store.publish({}, drops=drops)

    @rule(target=leases)
    def lease(self):
        lease = self.store.lease()
        self.open.append(lease)
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease):
        self.open.remove(lease)
        lease.release()

    @rule(lists=LISTS)
    def pin_instead(self, lists):
        """Lists in page-locked memory change while copies from it are on their way."""
        lists = list(dict.fromkeys(lists))
        counts = self.arena.geometry.pages_for(self.index.list_sizes[lists]).tolist()
        self.pinned.hold(lists, counts, self.index.list_codes, lambda: False)

    # What the mover and the device do

    @precondition(lambda self: len(self.moves))
    @rule(n_steps=st.integers(1, 8))
    def step(self, n_steps):
        for _ in range(n_steps):
            move, _rest_s = self.moves.next(0.0, hurry=True)
            if move is None:
                return
            try:
                more = move.step()
            except (RuntimeError, OSError, DeviceError) as error:
                more = False
                self.health.fail(error, 0.0)
                move.abort(error)
            self.moves.stepped(move, more=more, busy_s=0.0, now_s=0.0)
            if not more and move in self.running:
                self.running.remove(move)
                self.check_report(move)

    @rule(n=st.integers(1, 3))
    def copies_happen(self, n):
        self.stream.progress(n)

    @precondition(lambda self: self.running)
    @rule(after=st.integers(0, 2))
    def the_next_launch_fails(self, after):
        self.stream.break_after = after
        self.step(1)

    @precondition(lambda self: self.running)
    @rule(after=st.integers(0, 2))
    def a_list_cannot_be_read(self, after):
        self.lists.unreadable_after = after
        self.step(1)

    @precondition(lambda self: self.running)
    @rule()
    def the_device_is_lost(self):
        self.stream.lost = True
        self.step(1)

    @precondition(lambda self: self.running)
    @rule()
    def a_scan_fails(self):
        self.health.fail(RuntimeError("a scan failed"), 0.0)
        self.store.publish({}, drops=self.store.current.resident_lists().tolist())

    @precondition(lambda self: self.health.failure is not None or self.stream.lost)
    @rule(answers=st.sampled_from([True, True, False]), n_steps=st.integers(1, 4))
    def recover(self, answers, n_steps):
        self.stream.lost = not answers
        if self.health.begin_probe():
            self.moves.put(
                Probe(self.copier.probe, lambda error: self.health.end_probe(works=error is None, now_s=0.0))
            )
        self.step(n_steps)

    # What must hold

    def check_report(self, load):
        if load.future.exception() is not None:
            return
        report = load.future.result()
        sizes = self.index.list_sizes
        page_counts = self.arena.geometry.pages_for(sizes)
        assert report.nbytes == page_counts[list(report.loaded)].sum() * self.arena.geometry.page_bytes
        assert set(report.loaded).isdisjoint(report.skipped)
        assert all(page_counts[i] > N_PAGES for i in report.too_large)

    @invariant()
    def leased_lists_hold_their_own_bytes(self):
        for snapshot in [self.store.current, *(lease.residency for lease in self.open)]:
            for list_id in snapshot.resident_lists():
                codes = self.codes[list_id]
                assert np.array_equal(read_list(self.arena, snapshot.list_pages[list_id], len(codes)), codes)

    @invariant()
    def copies_on_their_way_go_to_pages_that_nobody_else_has(self):
        page_bytes, first = self.arena.geometry.page_bytes, self.arena.data.data_ptr()
        written = [
            np.arange(copy.target - first, copy.target - first + copy.nbytes, page_bytes) // page_bytes
            for copy in self.stream.pending
        ]
        if written:
            own = [*self.copier._kept, *(pages for load in self.running for pages in load.held_pages())]
            assert np.isin(np.concatenate(written), np.concatenate([*own, np.empty(0, int)])).all()

    @invariant()
    def every_page_is_free_or_has_one_owner(self):
        self.arena.pages.check_invariants()
        self.store.check_invariants()
        self.copier.check_invariants()
        current = self.store.current
        owned = [self.arena.pages.free_pages(), *self.copier._kept]
        owned += [current.list_pages[i] for i in current.resident_lists()]
        owned += [pages for _, gone in self.store._retired for _, pages in gone]
        for load in self.running:
            owned += load.held_pages()
        assert np.array_equal(np.sort(np.concatenate(owned)), np.arange(N_PAGES))

    @invariant()
    def pinned_lists_hold_their_own_bytes(self):
        self.pinned.check_invariants()
        for list_id in range(NLIST):
            if (found := self.pinned.find(list_id)) is not None:
                assert np.array_equal(read_pinned(found, len(self.codes[list_id])), self.codes[list_id])

    @invariant()
    def loads_that_are_over_claim_no_pages(self):
        for load in self.running:
            assert load.unclaimed_pages >= 0
            assert not (load.future.done() and load.unclaimed_pages)

    def teardown(self):
        """At the end, with a device that answers, every page comes back."""
        if self.index is None:
            return
        self.stream.lost, self.stream.break_after, self.lists.unreadable_after = False, None, None
        self.cancelled.update(self.running)
        self.step(10_000)
        # A trial needs a page, and leases may hold them all.
        for lease in self.open:
            lease.release()
        self.recover(True, 10_000)
        assert self.health.failure is None
        self.store.publish({}, drops=range(NLIST))
        assert self.arena.pages.n_free == N_PAGES


def test_any_order_of_moves_leases_and_failures(index, monkeypatch):
    from hypothesis.stateful import run_state_machine_as_test

    monkeypatch.setattr(MovementMachine, "index", index)
    run_state_machine_as_test(MovementMachine, settings=examples(80, stateful_step_count=40))


def test_readers_never_see_other_bytes_while_lists_come_and_go(index):
    """Two writers load and drop through the mover; three readers compare every byte of what they lease, twice."""
    codes = [index.list_codes(i).reshape(-1) for i in range(NLIST)]
    tier = DeviceTier(
        index,
        "cpu",
        0,
        budget_bytes=80 * PAGE_BYTES,
        wanted_bytes=64 * PAGE_BYTES,
        memory=PagedMemory(scratch_bytes=0, page_bytes=PAGE_BYTES),
    )
    store = ResidencyStore(NLIST, lambda _device, pages: tier.arena.pages.free(pages))
    writing = threading.Event()
    torn, errors, n_read = [], [], [0]

    def write(seed):
        rng = np.random.default_rng(seed)
        try:
            for number in range(250):
                lists = rng.permutation(NLIST)[:8]
                share = [None, 1.0][number % 2]
                stopped = number % 5 == 4
                tier.load(lists, store, cancelled=lambda stopped=stopped: stopped, bandwidth_share=share).result(300)
                store.publish({}, drops=rng.permutation(NLIST)[:12].tolist())
        except BaseException as error:
            errors.append(error)
            raise

    def read():
        while writing.is_set():
            with store.lease() as snapshot:
                for list_id in [*snapshot.resident_lists(), *snapshot.resident_lists()]:
                    n_read[0] += 1
                    found = read_list(tier.arena, snapshot.list_pages[list_id], len(codes[list_id]))
                    if not np.array_equal(found, codes[list_id]):
                        torn.append(int(list_id))

    writing.set()
    readers = [threading.Thread(target=read) for _ in range(3)]
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    writing.clear()
    for thread in readers:
        thread.join()
    assert errors == []
    assert torn == []
    assert n_read[0] > 0
    tier.check_invariants()
    store.check_invariants()
    store.publish({}, drops=range(NLIST))
    assert tier.used_bytes == 0
    tier.close()
