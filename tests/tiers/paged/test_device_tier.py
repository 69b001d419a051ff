"""The tier around the movement: budget, failure and recovery, turns on the mover thread, closing."""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridindex.errors import DeviceBusyError, DeviceError, InvalidInputError, OutOfBudgetError, RouterClosedError
from hybridindex.index import build
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract import devices
from hybridindex.tiers.contract.address_range import HostRange
from hybridindex.tiers.contract.driver import free_bytes_outside
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged import device_tier as device
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.pinned import PinnedMemory
from tests.clustered import NLIST, clustered, small_index
from tests.oracle import check_answer
from tests.tiers.late_stream import LateStream
from tests.tiers.options import hold_lists, tier_options

BUDGET = 4 << 20


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("device") / "i") as index:
        yield index


def open_tier(index, **options):
    options = {"budget_bytes": BUDGET, "wanted_bytes": BUDGET, **options}
    tier = DeviceTier(index, "cpu", 0, **tier_options(**options))
    return tier, ResidencyStore(NLIST, lambda _device, pages: tier.arena.pages.free(pages))


def full_lists(index):
    return np.flatnonzero(index.list_sizes).tolist()


def check_scan(index, tier, store):
    queries = index.transform(clustered(5, seed=4))
    probes, coarse = index.quantize(queries, NLIST)
    with store.lease() as residency:
        distances, ids = tier.scanner(residency).scan(queries, probes, coarse, 10)
    check_answer(index, queries, probes, 10, distances, ids)


# Budget


def test_more_than_the_device_has_free_is_refused_with_both_numbers_before_anything_is_allocated(index, monkeypatch):
    def allocates(*args):
        raise AssertionError("allocated")

    monkeypatch.setattr(device, "available_bytes", lambda _device: 3_000_000)
    monkeypatch.setattr(PageArena, "take", allocates)
    with pytest.raises(OutOfBudgetError) as raised:
        open_tier(index)
    assert "3,000,000 are free" in str(raised.value)
    assert f"budget {BUDGET:,}" in str(raised.value)


def test_scratch_needs_room_too(index, monkeypatch):
    fits, _ = open_tier(index)
    with closing(fits):
        needed = fits.arena.nbytes + fits.scratch_bytes
    monkeypatch.setattr(device, "available_bytes", lambda _device: needed)
    open_tier(index)[0].close()
    monkeypatch.setattr(device, "available_bytes", lambda _device: needed - 1)
    with pytest.raises(OutOfBudgetError, match=f"{needed:,} bytes are needed"):
        open_tier(index)


def test_two_tiers_share_what_one_device_has_free(index, monkeypatch):
    opened = []
    monkeypatch.setattr(
        device, "available_bytes", lambda _device: 5_000_000 - sum(t.arena.nbytes + t.scratch_bytes for t in opened)
    )
    first, _ = open_tier(index)
    with closing(first):
        opened.append(first)
        left = 5_000_000 - first.arena.nbytes - first.scratch_bytes
        with pytest.raises(OutOfBudgetError, match=f"and {left:,} are free"):
            open_tier(index)
        second, _ = open_tier(index, budget_bytes=left, wanted_bytes=left)
        second.close()


def test_pages_and_scratch_are_the_budget_and_the_rest_is_reported_apart(index):
    tier, store = open_tier(index)
    with closing(tier):
        tier.load(range(NLIST), store).result(300)
        unused = tier.budget_bytes - tier.arena.nbytes - tier.scratch_bytes
        assert 0 <= unused < tier.geometry.page_bytes
        assert tier.context_bytes is None
        assert tier.host_bytes == 0
        tier.check_invariants()


def test_a_tier_without_room_takes_its_memory_at_the_first_trial_that_finds_it(index, monkeypatch, caplog):
    now, free = [100.0], [3_000_000]
    monkeypatch.setattr(device, "available_bytes", lambda _device: free[0])
    tier, store = open_tier(index, without_room="retry", clock=lambda: now[0])
    with closing(tier):
        assert tier.load(range(NLIST), store).result(300).loaded == ()
        assert (len(tier.arena.data), tier.used_bytes) == (0, 0)
        for now[0], due in ((100.9, False), (101.0, True)):
            assert tier.retry_due(now[0]) is due
        assert not tier.recover().result(300)
        for now[0], due in ((102.9, False), (103.0, True)):
            assert tier.retry_due(now[0]) is due
        free[0] = None
        with monkeypatch.context() as patch:
            patch.setattr(HostRange, "commit", refused)  # somebody was faster
            assert not tier.recover().result(300)
        assert tier.recover().result(300)
        assert (tier.n_failures, tier.n_probes) == (1, 3)
        assert caplog.text.count("3,000,000 are free") == 1
        assert tier.load(full_lists(index), store).result(300).loaded == tuple(full_lists(index))
        check_scan(index, tier, store)
        tier.check_invariants()


def refused(*_args, **_options):
    raise OutOfBudgetError("no room any more")


def test_a_tier_that_shall_not_try_again_is_never_due(index, monkeypatch):
    monkeypatch.setattr(device, "available_bytes", lambda _device: 3_000_000)
    tier, _ = open_tier(index, without_room="fail")
    with closing(tier):
        assert (tier.n_failures, tier.usable, tier.retry_due(1e12)) == (1, False, False)


@pytest.mark.parametrize("without_room", ["fail", "retry"])
def test_a_budget_above_the_device_s_memory_is_refused_whatever_is_done_without_room(index, monkeypatch, without_room):
    where, info = devices.resolve_device("cpu")
    monkeypatch.setattr(device, "resolve_device", lambda _name: (where, replace(info, total_bytes=4_000_000)))
    monkeypatch.setattr(device, "available_bytes", lambda _device: 3_000_000)
    with pytest.raises(OutOfBudgetError, match="3,000,000 are free"):
        open_tier(index, without_room=without_room)


def test_a_device_that_lets_nobody_in_is_asked_again(index, monkeypatch):
    where, info = devices.resolve_device("cpu")
    unknown = replace(info, stand_in=False, label="cuda:0")
    answers = [DeviceBusyError("busy"), DeviceBusyError("busy"), DeviceBusyError("busy"), (where, info)]

    def resolve(_name):
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers[0]

    monkeypatch.setattr(device, "resolve_device", resolve)
    monkeypatch.setattr(device, "busy_device", lambda _name: (where, unknown))
    tier, store = open_tier(index, without_room="retry")
    with closing(tier):
        assert (tier.label, tier.usable) == ("cuda:0", False)
        assert not tier.recover().result(300)
        assert tier.recover().result(300)
        assert tier.label == "cpu (stand-in)"
        tier.load(range(NLIST), store).result(300)
        check_scan(index, tier, store)
    answers.insert(0, DeviceBusyError("busy again"))
    with pytest.raises(DeviceBusyError, match="busy again"):
        open_tier(index)


def test_a_budget_above_a_busy_device_s_memory_is_refused_when_its_size_is_known(index, monkeypatch, caplog):
    """As at the opening, in the same words; nothing is tried again."""
    where, info = devices.resolve_device("cpu")
    answers = [DeviceBusyError("busy"), DeviceBusyError("busy"), (where, replace(info, total_bytes=4_000_000))]

    def resolve(_name):
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers[0]

    monkeypatch.setattr(device, "resolve_device", resolve)
    monkeypatch.setattr(device, "busy_device", lambda _name: (where, replace(info, stand_in=False)))
    monkeypatch.setattr(device, "available_bytes", lambda _device: 3_000_000)
    tier, store = open_tier(index, without_room="retry")
    with closing(tier):
        assert (tier.n_failures, tier.disabled_reason, tier.retry_due(1e12)) == (1, "", True)
        assert not tier.recover().result(300)
        assert f"budget {BUDGET:,}) and 3,000,000 are free" in tier.disabled_reason
        assert (tier.failure, tier.n_failures, tier.usable, tier.retry_due(1e12)) == (None, 1, False, False)
        assert caplog.text.count("3,000,000 are free; expected a budget within") == 1
        with pytest.raises(DeviceError, match="3,000,000 are free"):
            tier.scanner(store.current)
        assert tier.load(range(NLIST), store).result(300).loaded == ()


def test_a_gpu_without_memory_for_a_context_is_busy_and_not_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "_open_context", lambda _device: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(DeviceBusyError, match="'cuda:1' cannot be opened: out of memory"):
        devices.resolve_device("cuda:1")
    where, info = devices.busy_device("cuda:1")
    assert (where, info.label, info.stand_in) == (torch.device("cuda", 1), "cuda:1", False)


def test_without_the_drivers_library_nothing_is_claimed():
    assert free_bytes_outside("GPU-0", library="libno-such-driver.so") is None


# Failure and recovery


def test_a_failed_device_is_tried_with_back_off_and_takes_lists_again_only_after_a_trial(index, monkeypatch, caplog):
    def broken(self, pages, codes):
        raise RuntimeError("copy failed")

    now = [100.0]
    tier, store = open_tier(index, clock=lambda: now[0])
    with closing(tier), caplog.at_level(logging.INFO):
        assert tier.recover().result(300)
        assert tier.n_probes == 0
        with monkeypatch.context() as patch:
            patch.setattr(PageArena, "write", broken)
            for _ in range(2):
                done = tier.load(range(NLIST), store)
                assert done.exception(60) is not None or done.result().loaded == ()
            assert not tier.retry_due(100.9)
            now[0] = 101.0
            assert tier.retry_due(now[0])
            assert not tier.recover().result(300)
            assert not tier.usable
            assert not tier.retry_due(102.9)
        with store.lease() as residency, pytest.raises(DeviceError, match="copy failed"):
            tier.scanner(residency)
        now[0] = 103.0
        assert tier.retry_due(now[0])
        assert tier.recover().result(300)
        assert (tier.n_failures, tier.n_probes) == (1, 2)
        assert caplog.text.count("copy failed") == 1
        assert caplog.text.count("works again after 2 trial(s)") == 1
        assert tier.used_bytes == 0
        tier.load(range(NLIST), store).result(300)
        check_scan(index, tier, store)


@pytest.fixture
def stream(monkeypatch):
    """Tiers of this test copy through a late stream."""
    stream = LateStream()
    monkeypatch.setattr(device, "open_copier", lambda arena, staging_bytes: Copier(arena, stream))
    return stream


def test_a_device_lost_in_the_middle_of_a_batch_keeps_its_pages_until_it_answers(index, stream):
    tier, store = open_tier(index)
    with closing(tier):
        stream.break_after = 1
        assert tier.load(full_lists(index), store).exception(60) is not None
        assert stream.pending
        assert tier.kept_bytes > 0
        assert tier.used_bytes == tier.kept_bytes
        tier.check_invariants()
        stream.lost = True
        assert not tier.recover().result(300)
        assert tier.kept_bytes > 0
        stream.lost = False
        assert tier.recover().result(300)
        assert tier.used_bytes == tier.kept_bytes == 0
        assert tier.load(full_lists(index), store).result(300).loaded == tuple(full_lists(index))
        check_scan(index, tier, store)
        assert tier.copy_stats.nbytes > tier.used_bytes  # the trial's page too
        assert tier.host_bytes > 0


def test_a_device_is_well_where_the_host_has_no_memory_to_read_it_back_into(index, monkeypatch):
    def no_memory(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    tier, store = open_tier(index)
    with closing(tier):
        assert tier.load([0], store).result(300).loaded == (0,)
        pages = store.current.list_pages[0]
        monkeypatch.setattr(torch.Tensor, "new_empty", no_memory)
        with pytest.raises(MemoryError, match=f"{len(pages) * tier.geometry.page_bytes:,} bytes"):
            tier.read_back(pages).result(300)
        assert tier.usable
        monkeypatch.undo()
        assert len(tier.read_back(pages).result(300)) == len(pages) * tier.geometry.page_bytes


# Turns, pinned memory, closing


@pytest.fixture
def held_write(monkeypatch):
    """Holds the first write of a page until told; later writes are noted."""
    write, started, go_on, order = PageArena.write, threading.Event(), threading.Event(), []

    def held(self, pages, codes):
        started.set()
        assert go_on.wait(300)
        order.append(codes.copy())
        write(self, pages, codes)

    monkeypatch.setattr(PageArena, "write", held)
    return started, go_on, order


def test_a_foreground_load_goes_between_the_buffers_of_a_background_load(index, held_write):
    started, go_on, order = held_write
    lists = full_lists(index)
    largest = int(np.argmax(index.list_sizes))
    others = [i for i in lists if i != largest]
    tier, store = open_tier(index, page_bytes=1024, staging_bytes=3 * 2048)
    with closing(tier):
        background = tier.load(others, store, bandwidth_share=0.5)
        assert started.wait(300)
        foreground = tier.load([largest], store)
        go_on.set()
        assert foreground.result(300).loaded == (largest,)
        assert background.result(300).loaded == tuple(others)
    whole = index.stored_codes(largest)
    first = next(i for i, codes in enumerate(order) if np.array_equal(codes, whole[: len(codes)]))
    assert 0 < first <= 3, "the foreground waited for more than the buffer on its way"
    urgent = order[first : first + -(-len(whole) // max(len(c) for c in order))]
    assert np.array_equal(np.concatenate(urgent), whole), "something came between"


def test_closing_ends_queued_moves_after_the_buffer_on_its_way(index, held_write):
    started, go_on, _ = held_write
    lists = full_lists(index)
    tier, store = open_tier(index, page_bytes=1024, staging_bytes=3 * 2048)
    loads = [tier.load(lists, store, bandwidth_share=share) for share in (None, 0.001)]
    assert started.wait(300)
    closer = threading.Thread(target=tier.close)
    closer.start()
    while not tier._closed:
        pass
    go_on.set()
    closer.join()
    reports = [load.result(0) for load in loads]
    assert len(reports[0].skipped) >= len(lists) - 3
    assert len(reports[1].skipped) + len(reports[1].present) == len(lists)
    with pytest.raises(RouterClosedError):
        tier.load(lists, store)
    with pytest.raises(RouterClosedError):
        tier.recover()


def test_closing_does_not_wait_for_a_background_move_that_rests(index):
    clock = itertools.count(0.0, 1000.0)  # each step seems to take so long that the rest would last for days
    tier, store = open_tier(index, page_bytes=1024, staging_bytes=3 * 2048, clock=lambda: next(clock))
    load = tier.load(full_lists(index), store, bandwidth_share=0.001)
    while tier.copy_stats.sends == 0:
        pass
    closer = threading.Thread(target=tier.close, daemon=True)
    closer.start()
    closer.join(300)
    assert not closer.is_alive()
    assert load.result(0).skipped


def test_a_list_of_one_vector_comes_and_an_empty_one_takes_nothing(tmp_path):
    vectors = np.zeros((2, 8), np.float32)
    vectors[1] = 100
    with build(vectors, tmp_path / "i", nlist=2, metric="l2", codec="flat") as index:
        tier, store = open_tier(index)
        with closing(tier):
            sizes = index.list_sizes
            assert 1 in sizes
            report = tier.load(range(2), store).result(300)
            assert list(report.loaded) == np.flatnonzero(sizes).tolist()
            assert store.current.n_resident == np.count_nonzero(sizes)


def test_a_background_move_that_rests_goes_on_at_once_when_hurried(index):
    clock = itertools.count(0.0, 1000.0)
    tier, store = open_tier(index, page_bytes=1024, staging_bytes=3 * 2048, clock=lambda: next(clock))
    with closing(tier):
        load = tier.load(full_lists(index), store, bandwidth_share=0.001)
        while tier.copy_stats.sends == 0:
            pass
        tier.hurry()
        assert list(load.result(300).loaded) == full_lists(index)


def test_closing_leaves_behind_what_does_not_end(index, held_write):
    started, go_on, _ = held_write
    tier, store = open_tier(index)
    load = tier.load(full_lists(index), store)
    assert started.wait(300)
    assert tier.close(0.01) is False
    with pytest.raises(DeviceError, match="a move does not end"):
        load.result(0)
    go_on.set()
    assert tier.close(30)


def test_pinned_lists_go_without_staging_and_others_through_it(index, stream):
    lists = full_lists(index)
    memory = PinnedMemory(PageGeometry.for_code_size(index.code_size), page_locked=False)
    assert hold_lists(memory, index, lists[:5]).pinned == tuple(lists[:5])
    tier, store = open_tier(index, pinned=memory)
    with closing(tier):
        assert tier.load(lists[:5], store).result(300).loaded == tuple(lists[:5])
        assert tier.host_bytes == 0, "staging was used"
        tier.load(lists, store).result(300)
        assert tier.host_bytes > 0
        check_scan(index, tier, store)
    assert memory.find(lists[0]) is not None, "it is not the tier's"


def test_a_share_out_of_range_is_refused(index):
    tier, store = open_tier(index)
    with closing(tier), pytest.raises(InvalidInputError, match="bandwidth_share is 2"):
        tier.load([0], store, bandwidth_share=2)
