"""Scanners over small pages that lie anywhere."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.paged.triton_scanner import TritonScanner

__all__ = ["fill_with_gaps", "scanning"]


def fill_with_gaps(tier, store):
    """Has every list there, some of them in every second page; no page needs to be spare."""
    held = [tier.arena.pages.allocate(1) for _ in range(tier.arena.pages.n_pages)]
    nlist = len(store.current.list_device)
    for part in (held[::2], held[1::2]):
        for page in part:
            tier.arena.pages.free(page)
        report = tier.load(range(nlist), store).result()
    assert not report.skipped


@contextmanager
def scanning(index, device, *, scratch=1 << 20, page_bytes=512, scatter=True, kind=TritonScanner):
    """A scanner over all lists, on small pages that are handed out one by one, backwards and with gaps."""
    tier = DeviceTier(
        index, device, 0, budget_bytes=4 << 20, wanted_bytes=1 << 20, memory=PagedMemory(page_bytes=page_bytes)
    )
    if scatter:
        held = [tier.arena.pages.allocate(1) for _ in range(tier.arena.pages.n_pages)]
        for page in held[::2]:
            assert page is not None
            tier.arena.pages.free(page)
    store = ResidencyStore(index.nlist, lambda _d, pages: tier.arena.pages.free(pages))
    report = tier.load(range(index.nlist), store).result()
    assert not report.skipped
    try:
        with store.lease() as residency:
            if scatter:
                assert any((np.diff(p) != 1).any() for p in residency.list_pages if p is not None)
            yield kind(index, tier._codec, tier.arena, residency, 0, scratch)
    finally:
        tier.close()
