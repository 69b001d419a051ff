"""The stand-in's scanner over a real arena: what the host answers, from pages of any size in any order.

The kernels have their own tests in tests/native; what every scanner promises is in test_scanner_contract.py.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from hybridindex.errors import OutOfBudgetError
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from tests.clustered import NLIST, clustered, small_index
from tests.tiers.paged.scanning import fill_with_gaps

CASES = [(codec, metric) for codec in ("flat", "fp16", "bf16", "sq8") for metric in ("ip", "l2")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def index(request, tmp_path_factory):
    codec, metric = request.param
    with small_index(tmp_path_factory.mktemp("idx") / "i", codec=codec, metric=metric) as index:
        yield index


def full_tier(index, rows_per_page):
    """A tier without a spare page, every list resident, some of them in every second page."""
    geometry = PageGeometry(code_size=index.code_size, rows_per_page=rows_per_page)
    wanted = int(geometry.pages_for(index.list_sizes).sum()) * geometry.page_bytes
    tier = DeviceTier(
        index, "cpu", 0, budget_bytes=16 << 20, wanted_bytes=wanted, memory=PagedMemory(page_bytes=geometry.page_bytes)
    )
    store = ResidencyStore(index.nlist, lambda _d, pages: tier.arena.pages.free(pages))
    fill_with_gaps(tier, store)
    return tier, store


@pytest.mark.parametrize("rows_per_page", [1, 7, 16, 50])
@pytest.mark.parametrize("scratch_bytes", [20_000, 1 << 20])
def test_the_stand_in_answers_what_the_host_answers(index, rows_per_page, scratch_bytes):
    tier, store = full_tier(index, rows_per_page)
    tier.scratch_bytes = scratch_bytes
    queries = index.transform(clustered(70, seed=3))
    probes, coarse = index.quantize(queries, 12)
    probes[5] = -1
    with closing(tier), closing(HostNativeScanner(index, threads=1)) as host, store.lease() as residency:
        scanner = tier.scanner(residency)
        assert type(scanner) is NativePageScanner
        pages = [p for p in residency.list_pages if p is not None]
        assert any((np.diff(p) != 1).any() for p in pages), "no list has a gap"
        expected = host.scan(queries, probes, coarse, 10)
        distances, ids = scanner.scan(queries, probes, coarse, 10)
    np.testing.assert_array_equal(distances, expected[0])
    # Equal distances may come in another order here: devices know positions, not ids.
    unique = np.array([len(set(row)) == len(row) for row in distances.tolist()])
    assert unique.any()
    np.testing.assert_array_equal(ids[unique], expected[1][unique])


def test_a_scratch_that_is_too_small_for_one_query_says_what_it_needs(index):
    tier, store = full_tier(index, 50)
    tier.scratch_bytes = 20_000
    probes = np.arange(NLIST)[None]
    with closing(tier), store.lease() as residency, pytest.raises(OutOfBudgetError, match="a query needs"):
        tier.scanner(residency).scan(clustered(1), probes, np.zeros(probes.shape, np.float32), 2048)
