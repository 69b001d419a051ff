"""What joins a batch: bounded in queries, and in the size of its arrays."""

from __future__ import annotations

from hybridindex.router.batch.batching import MAX_BATCH_CELLS, fits


def test_a_batch_takes_what_waits_up_to_a_cap():
    assert fits(1023, 1, None)
    assert fits(3, 1, 4)
    assert not fits(4, 1, 4)


def test_wide_requests_share_a_batch_only_while_its_arrays_stay_small():
    wide = MAX_BATCH_CELLS // 64
    assert fits(63, 1, None, wide)
    assert not fits(64, 1, None, wide)
    assert fits(1023, 1, None, 1024)
