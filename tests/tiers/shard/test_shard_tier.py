"""The shard tier: budget, building beside or instead, leases, failure and recovery, closing."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridindex.errors import DeviceError, InvalidInputError, OutOfBudgetError, RouterClosedError
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.shard import builder as shard_builder
from hybridindex.tiers.shard import shard_tier
from hybridindex.tiers.shard.scanner import ShardSource, StandInShard
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import NLIST, clustered, small_index
from tests.examples import examples
from tests.oracle import check_answer

BUDGET = 4 << 20


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("shard") / "i", codec="pq8") as index:
        yield index


def open_tier(index, **options):
    options = {"budget_bytes": BUDGET, "wanted_bytes": 0, **options}
    tier = ShardTier(index, "cpu", 0, **options)
    owner = tier.pages
    return tier, ResidencyStore(NLIST, lambda _device, pages: owner.free(pages))


def budget_for(index, n_shards, lists=range(NLIST)):
    """The smallest budget that has room for so many shards of these lists."""
    tier, _ = open_tier(index)
    with closing(tier):
        # Scratch is an eighth of the budget.
        model = tier.fixed_bytes - tier.scratch_bytes
        shard = model + int(tier._builder.list_bytes[list(lists)].sum())
    return -(-8 * n_shards * shard // (8 - n_shards)) + 8 * n_shards


def check_scan(index, tier, store, lists):
    queries = index.transform(clustered(5, seed=4))
    probes, coarse = index.quantize(queries, NLIST)
    probes[~np.isin(probes, lists)] = -1
    with store.lease() as residency:
        distances, ids = tier.scanner(residency).scan(queries, probes, coarse, 10)
    check_answer(index, queries, probes, 10, distances, ids)


# Loading


def test_what_was_loaded_is_scanned_and_the_rest_is_not(index):
    tier, store = open_tier(index)
    with closing(tier):
        report = tier.load([3, 5, 3, 7], store).result(300)
        assert report.loaded == (3, 5, 7)
        assert report.nbytes == int(tier._builder.list_bytes[[3, 5, 7]].sum())
        assert store.current.resident_lists(0).tolist() == [3, 5, 7]
        check_scan(index, tier, store, [3, 5, 7])
        assert tier.used_bytes == tier.fixed_bytes + report.nbytes
        tier.check_invariants()
        store.check_invariants()


def test_another_load_keeps_what_is_there(index):
    tier, store = open_tier(index)
    with closing(tier):
        tier.load([3, 5], store).result(300)
        report = tier.load([5, 9], store).result(300)
        assert (report.loaded, report.present) == ((9,), (5,))
        check_scan(index, tier, store, [3, 5, 9])
        assert tier.pages.n_shards == 1


def test_a_load_of_what_is_there_builds_nothing(index, monkeypatch):
    tier, store = open_tier(index)
    with closing(tier):
        tier.load([3, 5], store).result(300)
        monkeypatch.setattr(shard_builder, "ShardSource", None)
        assert tier.load([5, 3], store).result(300).present == (5, 3)
        assert tier.failure is None


def test_dropped_lists_are_not_in_the_next_shard(index):
    tier, store = open_tier(index)
    with closing(tier):
        tier.load([3, 5], store).result(300)
        store.publish({}, drops=[3])
        tier.load([9], store).result(300)
        assert store.current.resident_lists(0).tolist() == [5, 9]
        assert tier.used_bytes == tier.fixed_bytes + int(tier._builder.list_bytes[[5, 9]].sum())


# Budget


def test_lists_that_do_not_fit_are_skipped_and_the_next_one_is_tried(index):
    by_size = np.argsort(index.list_sizes)
    smallest, largest = int(by_size[0]), int(by_size[-1])
    tier, store = open_tier(index, budget_bytes=budget_for(index, 1, [smallest]))
    with closing(tier):
        report = tier.load([largest, smallest], store).result(300)
        assert report.loaded == (smallest,)
        assert report.too_large == (largest,)
        assert tier.load([int(by_size[1])], store).result(300).loaded == ()
        tier.check_invariants()


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.one_of(st.integers(0, 60_000), st.integers(60_000, 300_000)),
    loads=st.lists(st.lists(st.integers(0, NLIST - 1), max_size=12), min_size=1, max_size=4),
)
def test_the_budget_is_never_exceeded_and_every_list_is_accounted_for(index, budget, loads):
    tier, store = open_tier(index, budget_bytes=budget)
    peak = 0
    reserve = tier.pages.reserve

    def watched(nbytes):
        nonlocal peak
        slot = reserve(nbytes)
        peak = max(peak, tier.used_bytes)
        return slot

    tier.pages.reserve = watched
    with closing(tier):
        for lists in loads:
            report = tier.load(lists, store).result(300)
            parts = [*report.loaded, *report.skipped, *report.present, *report.too_large]
            assert sorted(parts) == sorted(set(lists))
            if report.loaded:
                check_scan(index, tier, store, report.loaded)
        assert peak <= budget or not tier.usable
        tier.check_invariants()
        store.check_invariants()
    assert tier.used_bytes == 0


def test_what_does_not_fit_beside_what_is_there_leaves_it_there(index):
    tier, store = open_tier(index, budget_bytes=budget_for(index, 1, [3, 5]))
    with closing(tier):
        assert tier.load([3, 5], store).result(300).skipped == ()
        version = store.current.version
        assert tier.load([9], store).result(300).skipped == (9,)
        assert store.current.version == version
        check_scan(index, tier, store, [3, 5])


def test_a_budget_below_the_tables_says_so(index):
    tier, store = open_tier(index, budget_bytes=10_000)
    with closing(tier):
        assert "budget of 10,000 bytes" in tier.disabled_reason
        assert not tier.usable
        assert tier.load([1], store).result(300).loaded == ()
        with store.lease() as residency, pytest.raises(DeviceError, match="10,000"):
            tier.scanner(residency)


def test_more_than_the_device_has_free_is_refused_with_both_numbers(index, monkeypatch):
    monkeypatch.setattr(shard_tier, "available_bytes", lambda _device: 600_000)
    with pytest.raises(OutOfBudgetError, match=r"600,000 are free"):
        open_tier(index, wanted_bytes=1 << 20)
    open_tier(index)[0].close()


def test_a_tier_without_room_serves_after_the_first_trial_that_finds_it(index, monkeypatch, caplog):
    now, free = [100.0], [600_000]
    monkeypatch.setattr(shard_tier, "available_bytes", lambda _device: free[0])
    tier, store = open_tier(index, wanted_bytes=1 << 20, without_room="retry", clock=lambda: now[0])
    with closing(tier):
        assert tier.load([3], store).result(300).loaded == ()
        assert [tier.retry_due(at) for at in (100.9, 101.0)] == [False, True]
        assert not tier.recover().result(300), "there is still no room"
        free[0] = None
        assert tier.recover().result(300)
        free[0] = 0
        tier.fail(RuntimeError("something else"))
        assert tier.recover().result(300), "its memory was taken before"
        assert caplog.text.count("600,000 are free") == 1
        assert tier.load([3], store).result(300).loaded == (3,)
        check_scan(index, tier, store, [3])


# The old shard and the new one


def test_the_old_shard_lives_until_its_last_lease_ends(index):
    tier, store = open_tier(index)
    with closing(tier):
        tier.load([3, 5], store).result(300)
        lease = store.lease()
        tier.load([9], store).result(300)
        assert tier.pages.n_shards == 2
        queries = index.transform(clustered(3, seed=8))
        probes = np.tile(np.array([[3, 5]]), (3, 1))
        coarse = _coarse(index, queries, probes)
        distances, ids = tier.scanner(lease.residency).scan(queries, probes, coarse, 4)
        check_answer(index, queries, probes, 4, distances, ids)
        lease.release()
        assert tier.pages.n_shards == 1
        check_scan(index, tier, store, [3, 5, 9])


def _coarse(index, queries, probes):
    lists, distances = index.quantize(queries, NLIST)
    at = np.argsort(lists, axis=1)
    return np.take_along_axis(np.take_along_axis(distances, at, 1), probes, 1)


def test_with_room_for_both_the_old_shard_serves_until_the_new_one_is_there(index, monkeypatch):
    seen = []
    tier, store = open_tier(index, budget_bytes=budget_for(index, 2))
    copy = ShardSource.copy

    def watched(self, number):
        seen.append(store.current.n_resident)
        return copy(self, number)

    with closing(tier):
        tier.load(range(16), store).result(300)
        monkeypatch.setattr(ShardSource, "copy", watched)
        tier.load(range(NLIST), store).result(300)
        assert set(seen) == {16}
        assert store.current.n_resident == NLIST


def test_without_room_for_both_the_host_serves_until_the_new_one_is_there(index, monkeypatch):
    seen = []
    tier, store = open_tier(index, budget_bytes=budget_for(index, 1))
    copy = ShardSource.copy

    def watched(self, number):
        seen.append(store.current.n_resident)
        return copy(self, number)

    with closing(tier):
        tier.load(range(16), store).result(300)
        monkeypatch.setattr(ShardSource, "copy", watched)
        lease = store.lease()
        loading = tier.load(range(NLIST), store)
        # The budget is the old shard's until its reader is done.
        assert not seen
        check_scan_of(index, tier, lease.residency)
        lease.release()
        loading.result(300)
        assert set(seen) == {0}
        assert store.current.n_resident == NLIST
        tier.check_invariants()


def check_scan_of(index, tier, residency):
    queries = index.transform(clustered(3, seed=8))
    probes = np.tile(np.arange(4), (3, 1))
    distances, ids = tier.scanner(residency).scan(queries, probes, _coarse(index, queries, probes), 4)
    check_answer(index, queries, probes, 4, distances, ids)


def test_a_cancelled_load_publishes_nothing_and_keeps_what_was_there(index, monkeypatch):
    tier, store = open_tier(index)
    asked = iter([False, False, True])
    with closing(tier):
        tier.load([3], store).result(300)
        report = tier.load([5, 9], store, cancelled=lambda: next(asked)).result(300)
        assert (report.loaded, report.skipped) == ((), (5, 9))
        assert store.current.resident_lists(0).tolist() == [3]
        assert tier.pages.n_shards == 1


def test_a_list_that_another_device_brought_first_is_present(index):
    tier, store = open_tier(index)
    move = tier._builder._move

    def overtaken(source):
        store.publish({5: (1, np.array([0], np.int32))})
        return move(source)

    tier._builder._move = overtaken
    with closing(tier):
        report = tier.load([5, 9], store).result(300)
        assert (report.loaded, report.present) == ((9,), (5,))
        check_scan(index, tier, store, [9])


def test_shares_out_of_range_are_refused(index):
    tier, store = open_tier(index)
    with closing(tier):
        with pytest.raises(InvalidInputError, match="bandwidth_share"):
            tier.load([1], store, bandwidth_share=0.0)
        assert tier.load([1], store, bandwidth_share=0.9).result(300).loaded == (1,)


# Damage


def test_lists_in_quarantine_are_not_copied(index):
    tier, store = open_tier(index, budget_bytes=budget_for(index, 1, [3, 5, 9]))
    with closing(tier):
        tier.load([3, 5], store).result(300)
        index.integrity.quarantine([5, 7])
        try:
            report = tier.load([7, 9], store).result(300)
        finally:
            index.integrity.lift([5, 7])
        assert (report.loaded, report.skipped) == ((9,), (7,))
        assert store.current.resident_lists(0).tolist() == [3, 9]
        check_scan(index, tier, store, [3, 9])
        tier.check_invariants()


def test_a_shard_that_was_copied_while_damage_was_found_is_not_published(index, monkeypatch):
    tier, store = open_tier(index)
    copy = ShardSource.copy

    def found_meanwhile(source, number):
        index.integrity.quarantine([5])
        index.integrity.lift([5])
        return copy(source, number)

    with closing(tier):
        tier.load([3], store).result(300)
        monkeypatch.setattr(ShardSource, "copy", found_meanwhile)
        assert tier.load([5], store).result(300).skipped == (5,)
        monkeypatch.undo()
        assert store.current.resident_lists(0).tolist() == [3]
        assert tier.load([5], store).result(300).loaded == (5,)
        tier.check_invariants()


# Failure


def test_a_build_that_fails_marks_the_device_and_gives_its_bytes_back(index, monkeypatch, caplog):
    def broken(self, number):
        raise OSError("no memory")

    tier, store = open_tier(index)
    with closing(tier):
        tier.load([3], store).result(300)
        before = tier.used_bytes
        monkeypatch.setattr(ShardSource, "copy", broken)
        with pytest.raises(OSError, match="no memory"):
            tier.load([5], store).result(300)
        assert not tier.usable
        assert tier.n_failures == 1
        assert tier.used_bytes == before
        assert "no memory" in caplog.text
        with store.lease() as residency, pytest.raises(DeviceError, match="no memory"):
            tier.scanner(residency)
        monkeypatch.undo()
        store.publish({}, drops=[3])
        assert tier.recover().result(300)
        assert tier.load([3, 5], store).result(300).loaded == (3, 5)


def test_a_device_that_still_fails_is_not_recovered(index, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("still broken")

    now = 0.0
    tier, _ = open_tier(index, clock=lambda: now)
    with closing(tier):
        tier.fail(RuntimeError("it burns"))
        assert not tier.retry_due(0.5)
        assert tier.retry_due(1.0)
        monkeypatch.setattr(StandInShard, "search", broken)
        assert tier.recover().result(300) is False
        assert tier.failure is not None
        monkeypatch.undo()
        assert tier.recover().result(300) is True
        assert tier.recover().result(300) is True
        assert tier.used_bytes == 0


def test_a_device_that_faiss_refuses_is_disabled_with_its_words(index, monkeypatch):
    def refuses(self, *args):
        raise RuntimeError("Error in foo() at bar.cpp:3: Error: no such thing")

    monkeypatch.setattr(StandInShard, "__init__", refuses)
    tier, _ = open_tier(index)
    with closing(tier):
        assert not tier.usable
        assert "no such thing" in tier.disabled_reason


def test_a_shard_that_failed_meanwhile_is_not_published(index):
    tier, store = open_tier(index)
    move = tier._builder._move

    def fails(source):
        shard = move(source)
        tier.fail(RuntimeError("it burns"))
        return shard

    tier._builder._move = fails
    with closing(tier):
        assert tier.load([3], store).result(300).skipped == (3,)
        assert store.current.n_resident == 0
        assert tier.used_bytes == 0


# Closing


def test_a_load_that_rests_ends_at_once_when_hurried(index):
    clock = itertools.count(0.0, 1000.0)  # a build seems to take so long that the rest would last for days
    tier, store = open_tier(index, clock=lambda: next(clock))
    rest, resting = tier._builder._rest, threading.Event()

    def noted(seconds):
        resting.set()
        rest(seconds)

    tier._builder._rest = noted
    with closing(tier):
        load = tier.load([3, 5], store, bandwidth_share=0.001)
        assert resting.wait(300)
        tier.hurry()
        assert sorted(load.result(300).loaded) == [3, 5]


def test_closing_lets_every_shard_go(index, monkeypatch):
    closed, close = [], StandInShard.close

    def noted(shard):
        closed.append(shard)
        close(shard)

    monkeypatch.setattr(StandInShard, "close", noted)
    tier, store = open_tier(index)
    tier.load([3, 5], store).result(300)
    shards = [entry.shard for entry in tier._pages._entries.values()]
    lease = store.lease()  # what somebody still reads goes too: nobody scans any more
    tier.close()
    assert shards
    assert all(any(shard is each for each in closed) for shard in shards)
    lease.release()


def test_closing_ends_loads_and_refuses_more(index):
    tier, store = open_tier(index)
    entered, resume = threading.Event(), threading.Event()
    move = tier._builder._move

    def held(source):
        entered.set()
        assert resume.wait(300)
        return move(source)

    tier._builder._move = held
    first, second = tier.load([3], store), tier.load([5], store)
    assert entered.wait(300)
    closer = threading.Thread(target=tier.close)
    closer.start()
    while not tier._closed:
        pass
    resume.set()
    closer.join(300)
    assert first.result(0).skipped == (3,)
    assert second.result(0).skipped == (5,)
    assert tier.used_bytes == 0
    assert not tier._mover.is_alive()
    for call in (lambda: tier.load([1], store), tier.recover):
        with pytest.raises(RouterClosedError):
            call()
