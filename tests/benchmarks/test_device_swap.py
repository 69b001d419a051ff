"""The swap benchmark: publishes are real ones, compactions are seen, and a wait is laid to the publish it lies over."""

from __future__ import annotations

import numpy as np

from benchmarks.device.swap import Leases, Swaps, measure
from hybridindex.tiers.contract.residency import ResidencyStore


def test_swaps_replace_lists_and_keep_half_resident():
    store = ResidencyStore(64, lambda _device, _pages: None)
    swaps = Swaps(store)
    before = set(store.current.resident_lists().tolist())
    swaps.until_compaction(1)
    after = set(store.current.resident_lists().tolist())
    assert (len(before - after), len(after - before), len(after)) == (16, 16, 32)
    store.check_invariants()


def test_a_compaction_is_found_and_measured():
    row = measure(64, 6)
    assert row["leases"] > 0
    assert row["compactions"] >= 1
    assert row["compaction_pause_us"]["max"] <= row["pause_us"]["max"]


def test_the_longest_wait_across_a_publish_is_its_pause():
    leases = Leases(ResidencyStore(4, lambda _device, _pages: None))
    leases._seen = [(0.0, 1.0), (2.0, 2.5), (2.5, 4.0), (9.0, 9.5)]
    over = leases.longest_over([(0.2, 0.3), (2.4, 2.6), (5.0, 6.0), (1.0, 2.0)])
    np.testing.assert_allclose(over, [1.0, 1.5, 0.0, 0.0])
