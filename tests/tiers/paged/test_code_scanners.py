"""Scanners of pages of codes over a real arena: they answer what the host answers, to the bit."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, OutOfBudgetError
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.paged.codes.native_code_scanner import NativeCodeScanner
from hybridindex.tiers.paged.codes.torch_code_scanner import TorchCodeScanner
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from tests.clustered import NLIST, clustered, small_index
from tests.coded import with_codes
from tests.tiers.paged.scanning import fill_with_gaps

CASES = [(bits, metric) for bits in (1, 2, 4) for metric in ("ip", "l2")]


@pytest.fixture(scope="module", params=CASES, ids=str)
def view(request, tmp_path_factory):
    bits, metric = request.param
    index = with_codes(small_index(tmp_path_factory.mktemp("idx") / "i", metric=metric), bits=bits)
    with index:
        yield index.by_codes()


def full_tier(view, rows_per_page):
    """A tier without a spare page, every list resident, some of them in every second page."""
    page_bytes = rows_per_page * view.code_size
    geometry = PageGeometry.for_code_size(view.code_size, page_bytes, group_rows=16)
    wanted = int(geometry.pages_for(view.list_sizes).sum()) * geometry.page_bytes
    tier = DeviceTier(
        view, "cpu", 0, budget_bytes=16 << 20, wanted_bytes=wanted, memory=PagedMemory(page_bytes=page_bytes)
    )
    assert tier.geometry == geometry
    store = ResidencyStore(view.nlist, lambda _d, pages: tier.arena.pages.free(pages))
    fill_with_gaps(tier, store)
    return tier, store


@pytest.mark.parametrize("kind", [NativeCodeScanner, TorchCodeScanner])
@pytest.mark.parametrize("rows_per_page", [16, 48])
@pytest.mark.parametrize("scratch_bytes", [150_000, 8 << 20])
def test_a_device_answers_what_the_host_answers(view, kind, rows_per_page, scratch_bytes):
    tier, store = full_tier(view, rows_per_page)
    queries = view.transform(clustered(70, seed=3))
    queries[4] = 0
    probes, _ = view.quantize(queries, 12)
    probes[5] = -1
    probes[6, 3:] = -1
    with closing(tier), closing(HostRabitqScanner(view, view.codes, threads=1)) as host, store.lease() as residency:
        pages = [p for p in residency.list_pages if p is not None]
        assert any((np.diff(p) != 1).any() for p in pages), "no list has a gap"
        products = host.centre_products(queries, probes)
        scanner = kind(view, view.device_codec(), tier.arena, residency, 0, scratch_bytes)
        for k in (1, 10, 130):
            for ours, right in zip(
                scanner.scan(queries, probes, products, k), host.scan(queries, probes, products, k), strict=True
            ):
                np.testing.assert_array_equal(ours, right)


def test_the_stand_in_scans_with_the_extension_and_with_torch_where_it_is_missing(view, monkeypatch):
    tier, store = full_tier(view, 16)
    with closing(tier), store.lease() as residency:
        assert type(tier.scanner(residency)) is NativeCodeScanner
    monkeypatch.setattr(NativeCodeScanner, "supports", staticmethod(lambda _arena: False))
    tier, store = full_tier(view, 16)
    with closing(tier), store.lease() as residency:
        assert type(tier.scanner(residency)) is TorchCodeScanner


@pytest.mark.parametrize("kind", [NativeCodeScanner, TorchCodeScanner])
def test_what_cannot_be_scanned_is_said(view, kind):
    tier, store = full_tier(view, 16)
    probes = np.arange(NLIST)[None]
    products = np.zeros(probes.shape, np.float32)
    with closing(tier), store.lease() as residency:
        small = kind(view, view.device_codec(), tier.arena, residency, 0, 20_000)
        with pytest.raises(OutOfBudgetError, match="is too small for 2048 candidates"):
            small.scan(clustered(1), probes, products, 2048)
        with pytest.raises(InvalidInputError, match="filters need a scan of rows"):
            small.scan(clustered(1), probes, products, 1, filter_ids=np.arange(3))
