"""Residency: a page is given back after its last reader and not before."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged.arena import PageAllocator
from tests.examples import examples

NLIST = 12


class ResidencyMachine(RuleBasedStateMachine):
    """Loads and drops under readers; every leased snapshot's pages stay allocated."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(30)
        self.store = ResidencyStore(NLIST, lambda _device, pages: self.pages.free(pages))
        self.open = []
        #: What the current snapshot must say: list -> pages; and what each leased one must.
        self.named = {}
        self.leased = {}

    @rule(
        sizes=st.dictionaries(st.integers(0, NLIST - 1), st.integers(1, 4), max_size=3),
        drops=st.lists(st.integers(0, NLIST - 1), max_size=4),
    )
    def publish(self, sizes, drops):
        loads = {list_id: pages for list_id, n in sizes.items() if (pages := self.pages.allocate(n)) is not None}
        self.store.publish({list_id: (0, pages) for list_id, pages in loads.items()}, drops=drops)
        kept = {list_id: pages for list_id, pages in self.named.items() if list_id not in drops}
        self.named = {list_id: pages.tolist() for list_id, pages in loads.items()} | kept

    @rule(n=st.integers(0, 3), which=st.integers(0, NLIST - 1), load=st.integers(0, NLIST - 1))
    def grow(self, n, which, load):
        """A list that is resident gets pages behind its own, while another one comes."""
        if which not in self.named or (pages := self.pages.allocate(n) if n else np.empty(0, np.int32)) is None:
            return
        loads = {}
        if load not in self.named and (more := self.pages.allocate(1)) is not None:
            loads = {load: (0, more)}
        self.store.publish(loads, grown={which: pages})
        self.named = self.named | {which: self.named[which] + pages.tolist()}
        self.named |= {each: own.tolist() for each, (_, own) in loads.items()}

    @rule(target=leases)
    def lease(self):
        lease = self.store.lease()
        self.open.append(lease)
        self.leased[lease] = self.named
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease):
        self.open.remove(lease)
        lease.release()

    @invariant()
    def snapshots_say_what_was_published(self):
        for snapshot, named in [
            (self.store.current, self.named),
            *((lease.residency, self.leased[lease]) for lease in self.open),
        ]:
            assert {i: p.tolist() for i, p in enumerate(snapshot.list_pages) if p is not None} == named
            assert snapshot.resident_lists().tolist() == sorted(named)
            every = snapshot.pages_of(snapshot.resident_lists())
            assert every.tolist() == [page for _, pages in sorted(named.items()) for page in pages]

    @invariant()
    def no_page_of_a_leased_snapshot_is_free(self):
        self.store.check_invariants()
        self.pages.check_invariants()
        free = set(self.pages.free_pages().tolist())
        for snapshot in [self.store.current, *(lease.residency for lease in self.open)]:
            for list_id in snapshot.resident_lists():
                assert free.isdisjoint(snapshot.list_pages[list_id].tolist())

    @invariant()
    def without_readers_only_resident_pages_are_taken(self):
        if not self.open:
            current = self.store.current
            used = sum(len(current.list_pages[i]) for i in current.resident_lists())
            assert self.pages.n_free == 30 - used


ResidencyMachine.TestCase.settings = examples(60, stateful_step_count=40)
test_residency = ResidencyMachine.TestCase


def test_snapshots_are_immutable_and_versions_grow():
    store = ResidencyStore(3, lambda *_: None)
    before = store.current
    after = store.publish({1: (0, np.array([0], np.int32))})
    assert after.version > before.version
    assert before.n_resident == 0
    assert after.list_device.tolist() == [-1, 0, -1]
    assert not after.list_device.flags.writeable


def test_nobody_waits_for_a_lease_while_the_next_snapshot_is_built():
    store = ResidencyStore(3, lambda *_: None)
    store.publish({1: (0, np.array([0], np.int32))})
    seen = []

    def lease():
        with store.lease() as snapshot:
            seen.append(snapshot.version)

    def drops():
        reader = threading.Thread(target=lease, daemon=True)
        reader.start()
        reader.join(300)
        yield 1

    store.publish({}, drops=drops())
    assert seen == [1]
    assert store.n_leases == 0


def test_pages_of_several_devices_go_back_to_their_own():
    freed = []
    store = ResidencyStore(4, lambda device, pages: freed.append((device, pages.tolist())))
    loads = {i: (i % 2, np.array([10 * i, 10 * i + 1], np.int32)) for i in range(4)}
    store.publish(loads)
    lease = store.lease()
    store.publish({}, drops=[3, 0, 1, 0])
    assert freed == []
    lease.release()
    assert sorted(freed) == [(0, [0, 1]), (1, [10, 11, 30, 31])]
    assert store.current.holds(2, 0, loads[2][1])
    assert not store.current.holds(2, 1, loads[2][1])
    assert not store.current.holds(2, 0, loads[0][1])
    assert not store.current.holds(0, -1, loads[0][1])


def test_pages_count_as_free_when_they_were_given_back_and_not_before():
    begun, go_on = threading.Event(), threading.Event()

    def slow(_device, _pages):
        begun.set()
        assert go_on.wait(300)

    store = ResidencyStore(3, slow)
    store.publish({1: (0, np.array([0], np.int32))})
    dropper = threading.Thread(target=store.publish, args=({}, [1]))
    dropper.start()
    assert begun.wait(300)
    assert not store.wait_reclaimed(store.current.version, 0)
    go_on.set()
    assert store.wait_reclaimed(store.current.version, 30)
    dropper.join(300)


def test_who_listens_is_told_what_came():
    store, told = ResidencyStore(3, lambda *_: None), []
    store.listeners.append(told.append)
    loads = {1: (0, np.array([0], np.int32))}
    store.publish(loads)
    store.publish({}, drops=[1])
    assert told == [loads, {}]


def test_second_copy_of_a_list_gives_its_pages_back():
    freed = []
    store = ResidencyStore(3, lambda device, pages: freed.append((device, pages.tolist())))
    store.publish({1: (0, np.array([0], np.int32))})
    store.publish({1: (1, np.array([7], np.int32))})
    assert store.current.list_device[1] == 0
    assert freed == [(1, [7])]


def test_readers_and_writers_on_many_threads():
    """Readers check, while leased, that nobody overwrote what their snapshot names."""
    pages = PageAllocator(64)
    stamp = np.full(64, -1)
    store = ResidencyStore(NLIST, lambda _device, freed: pages.free(freed))
    stop = threading.Event()
    torn = []

    def write(seed):
        rng = np.random.default_rng(seed)
        for _ in range(400):
            list_id = int(rng.integers(NLIST))
            store.publish({}, drops=[list_id])
            taken = pages.allocate(int(rng.integers(1, 4)))
            if taken is not None:
                stamp[taken] = list_id
                store.publish({list_id: (0, taken)})

    def read():
        while not stop.is_set():
            with store.lease() as snapshot:
                for list_id in snapshot.resident_lists():
                    if not (stamp[snapshot.list_pages[list_id]] == list_id).all():
                        torn.append(list_id)

    readers = [threading.Thread(target=read) for _ in range(3)]
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert torn == []
    store.check_invariants()
    pages.check_invariants()
    current = store.current
    assert pages.n_free == 64 - sum(len(current.list_pages[i]) for i in current.resident_lists())
