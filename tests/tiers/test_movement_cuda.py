"""Streams and events of a real GPU: what ``LateStream`` plays in the other tests of movement."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from hybridindex.errors import OutOfBudgetError
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.devices import available_bytes
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.pinned import PinnedMemory
from tests.clustered import NLIST, clustered, small_index
from tests.oracle import check_answer
from tests.tiers.options import hold_lists, tier_options

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BUDGET = 16 << 20
#: Three buffers of two pages: most lists need several.
SMALL = {"page_bytes": 1024, "staging_bytes": 3 * 2048}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("cuda") / "i") as index:
        yield index


def open_tier(index, **options):
    tier = DeviceTier(index, "cuda:0", 0, **tier_options(**{"budget_bytes": BUDGET, "wanted_bytes": BUDGET, **options}))
    return tier, ResidencyStore(NLIST, lambda _device, pages: tier.arena.pages.free(pages))


def check_bytes(index, tier, residency):
    for list_id in residency.resident_lists():
        codes = index.list_codes(list_id)
        found = tier.arena.rows(residency.list_pages[list_id], 0, len(codes)).cpu().numpy()
        np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("share", [None, 0.5])
def test_lists_arrive_in_scattered_pages_and_scan_right(index, pin, share):
    memory = PinnedMemory(PageGeometry.for_code_size(index.code_size, SMALL["page_bytes"]), page_locked=True)
    tier, store = open_tier(index, **SMALL, pinned=memory)
    with closing(tier):
        holes = [tier.arena.pages.allocate(1) for _ in range(tier.arena.pages.n_pages)]
        for page in holes[::2]:  # every second page: no two neighbours
            tier.arena.pages.free(page)
        if pin:
            assert hold_lists(memory, index, range(0, NLIST, 2)).reason == ""
        report = tier.load(range(NLIST), store, bandwidth_share=share).result(300)
        assert report.loaded == tuple(np.flatnonzero(index.list_sizes).tolist())
        queries = index.transform(clustered(5, seed=4))
        probes, coarse = index.quantize(queries, NLIST)
        with store.lease() as residency:
            check_bytes(index, tier, residency)
            distances, ids = tier.scanner(residency).scan(queries, probes, coarse, 10)
        check_answer(index, queries, probes, 10, distances, ids)
        stats = tier.copy_stats
        assert stats.nbytes == report.nbytes
        assert stats.busy_s > 0
        assert stats.runs == report.nbytes // tier.geometry.page_bytes


def test_a_load_does_not_wait_for_kernels_of_other_streams(index):
    """No device-wide synchronization: a kernel spinning on the scans' stream still runs when the lists are there."""
    tier, store = open_tier(index)
    with closing(tier):
        tier.load([0], store).result(300)  # allocates the staging buffers: that may wait for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)
        spinning = torch.cuda.Event()
        spinning.record()
        tier.load(range(NLIST), store).result(300)
        assert not spinning.query()
        assert store.current.n_resident == (index.list_sizes > 0).sum()
        torch.cuda.synchronize()
        with store.lease() as residency:
            check_bytes(index, tier, residency)


def test_readers_on_the_device_never_see_other_bytes_while_lists_come_and_go(index):
    tier, store = open_tier(index, budget_bytes=160 * 1024, wanted_bytes=160 * 1024, scratch_bytes=0, **SMALL)
    expected = {i: torch.from_numpy(index.list_codes(i).copy()).cuda() for i in range(NLIST)}
    torch.cuda.synchronize()
    torn, writing = [], threading.Event()

    def read():
        with torch.cuda.stream(torch.cuda.Stream()):
            while writing.is_set():
                with store.lease() as residency:
                    for list_id in residency.resident_lists().tolist():
                        rows = tier.arena.rows(residency.list_pages[list_id], 0, len(expected[list_id]))
                        if not torch.equal(rows, expected[list_id]):
                            torn.append(list_id)

    with closing(tier):
        writing.set()
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        rng = np.random.default_rng(0)
        for _ in range(300):
            tier.load(rng.permutation(NLIST)[:8], store).result(300)
            store.publish({}, drops=rng.permutation(NLIST)[:12].tolist())
        writing.clear()
        for reader in readers:
            reader.join()
        assert torn == []
        tier.check_invariants()


def test_a_trial_writes_and_reads_back_a_page(index):
    tier, _ = open_tier(index)
    with closing(tier):
        tier.fail(RuntimeError("said so"))
        assert tier.recover().result(300)
        assert tier.used_bytes == 0


def test_the_budget_holds_and_a_second_tier_over_what_is_free_is_refused(index):
    torch.cuda.empty_cache()
    free = available_bytes(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated()
    tier, store = open_tier(index)
    with closing(tier):
        tier.load(range(NLIST), store).result(300)
        assert torch.cuda.memory_allocated() - before <= BUDGET
        page_bytes = tier.geometry.page_bytes
        # wanted_bytes makes the arena: more pages than the device has.
        with pytest.raises(OutOfBudgetError, match=r"are needed .* are free"):
            open_tier(index, budget_bytes=2 * free, wanted_bytes=2 * free - (64 << 20) - page_bytes)
        assert torch.cuda.memory_allocated() - before <= BUDGET


def test_a_tier_that_a_neighbour_leaves_no_room_opens_when_the_neighbour_goes(index):
    # Large beside what the driver needs for kernels that are first used meanwhile.
    budget = 512 << 20
    torch.cuda.empty_cache()
    free = available_bytes(torch.device("cuda", 0))
    neighbour = torch.empty(free - budget // 2, dtype=torch.uint8, device="cuda:0")
    tier, store = open_tier(index, budget_bytes=budget, wanted_bytes=budget, without_room="retry")
    with closing(tier):
        assert isinstance(tier.failure, OutOfBudgetError)
        assert not tier.recover().result(300)
        del neighbour
        assert tier.recover().result(300)
        tier.load(range(NLIST), store).result(300)
        with store.lease() as residency:
            check_bytes(index, tier, residency)


def test_pinned_blocks_are_page_locked_and_within_the_limit(index):
    shared = PinnedMemory(PageGeometry.for_code_size(index.code_size), page_locked=True, limit_bytes=1 << 18)
    tier, store = open_tier(index, pinned=shared)
    with closing(tier):
        report = hold_lists(shared, index, np.flatnonzero(index.list_sizes))
        assert report.pinned
        assert report.left_out
        assert shared.nbytes <= 1 << 18
        assert all(run.block.data.is_pinned() for i in report.pinned for run in shared.find(i).runs)
        assert tier.load(report.pinned, store).result(300).loaded == report.pinned
        assert tier.host_bytes == 0, "staging was used"
        with store.lease() as residency:
            check_bytes(index, tier, residency)


def test_the_context_is_reported_apart_where_this_process_makes_it():
    code = (
        "from hybridindex.tiers.contract.devices import resolve_device\n"
        "first, again = resolve_device('cuda:0')[1], resolve_device('cuda:0')[1]\n"
        "assert first.context_bytes == again.context_bytes\n"
        "print(first.context_bytes)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    # None where the driver's library is missing; else some hundred MiB.
    assert out.strip() == "None" or 16 << 20 < int(out) < 4 << 30
