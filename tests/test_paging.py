"""Pages fit the lists that lie in them."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.paging import CODE_PAGE_BYTES, DEFAULT_PAGE_BYTES, PageGeometry, usual_page_bytes
from hybridindex.partitioner.plan import Plan
from tests.clustered import clustered, plan_in_pages


def useful(row_bytes: int, sizes: np.ndarray) -> tuple[PageGeometry, float]:
    """Pages, and which part of them rows fill."""
    geometry = PageGeometry.for_code_size(row_bytes, usual_page_bytes("flat", row_bytes, sizes))
    return geometry, float(sizes.sum() / (geometry.pages_for(sizes).sum() * geometry.rows_per_page))


@pytest.mark.parametrize("row_bytes", [16, 96, 128, 384, 512, 1536, 3072, 4096, 16_384])
@pytest.mark.parametrize("mean", [10, 100, 250, 1000, 20_000])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_most_of_a_page_is_used_where_pages_can_be_small(row_bytes, mean, spread):
    sizes = np.random.default_rng(0).normal(mean, spread * mean, 2000).clip(0).astype(np.int64)
    geometry, share = useful(row_bytes, sizes)
    rows = geometry.rows_per_page
    assert rows & (rows - 1) == 0, "kernels take a power of two"
    assert geometry.page_bytes <= max(2 * DEFAULT_PAGE_BYTES, row_bytes)
    smallest = geometry.page_bytes < 2 * 8192 or rows == 1
    assert share >= 0.85 or smallest
    # As large as can be: of twice the rows, less would be used.
    larger = PageGeometry(code_size=row_bytes, rows_per_page=2 * rows)
    if larger.page_bytes <= DEFAULT_PAGE_BYTES:
        assert sizes.sum() < 0.85 * larger.pages_for(sizes).sum() * larger.rows_per_page


def test_lists_of_a_hundred_rows_of_a_hundred_bytes_fill_most_of_their_pages():
    geometry, share = useful(128, np.full(5000, 100))
    assert (geometry.rows_per_page, share >= 0.7) == (64, True)


def test_nothing_to_fit():
    assert usual_page_bytes("flat", 128, np.zeros(4, dtype=np.int64)) == DEFAULT_PAGE_BYTES
    assert usual_page_bytes("flat", 1 << 20, np.full(3, 5)) == 1 << 20
    for codec in ("rabitq1", "pq48", "pqfs16"):
        assert usual_page_bytes(codec, 48, np.full(3, 5)) == CODE_PAGE_BYTES


def test_rows_in_very_long_lists_keep_large_pages_whatever_lists_are_beside_them():
    """A list of a million rows would have sixteen thousand pages of 8 KiB."""
    short, long = np.full(60_000, 100), np.full(4, 1_000_000)
    assert usual_page_bytes("sq8", 128, np.concatenate((short, long))) > 4 * 8192
    # One among many is no reason to leave most of the memory empty.
    assert usual_page_bytes("sq8", 128, np.concatenate((short, [20_000]))) == 8192
    _, share = useful(128, np.concatenate((short, [20_000])))
    assert share >= 0.7


def test_devices_hold_lists_of_a_hundred_rows_of_a_hundred_bytes_in_pages_that_they_fill(tmp_path):
    """Of a whole index: as it is planned, and as it lies in the arena."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((64, 128), dtype=np.float32) * 4
    rows = np.repeat(centers, 100, axis=0) + rng.standard_normal((6400, 128), dtype=np.float32)
    with hx.build(rows, tmp_path / "i", nlist=64, metric="l2", codec="sq8", nprobe=8) as index:
        assert np.median(index.list_sizes) == pytest.approx(100, abs=30)
        profile = index.profile(rows[::20] + 0.1, nprobe=8, devices=0, max_seconds=0.5)
        plan = index.plan(50, 64 << 20, profile, coverage=1.0)
        useful_bytes = int(index.list_bytes.sum())
        assert useful_bytes == 128 * 6400 >= 0.7 * (plan.device_bytes - plan.request.scratch[0])
        with index.router(plan, ["cpu"], lookahead_bytes=0) as router:
            [tier] = router.devices
            assert router.residency.n_resident == (index.list_sizes > 0).sum()
            assert useful_bytes >= 0.7 * tier.arena.nbytes
            assert tier.arena.nbytes == plan.device_bytes - plan.request.scratch[0]
        # Without a plan the same pages, for what sessions bring.
        with index.router(devices=["cpu"], device_budget_bytes=64 << 20) as router:
            assert router.page_bytes == plan.request.page_bytes
            assert useful_bytes >= 0.7 * router.devices[0].arena.nbytes


def test_a_plan_s_record_keeps_its_pages(tmp_path):
    """Also one of an earlier version, which says 64 KiB."""
    with hx.build(clustered(3000), tmp_path / "i", nlist=32, metric="l2", nprobe=8) as index:
        profile = index.profile(clustered(100, seed=2), nprobe=8, devices=0, max_seconds=0.5)
        for most in (DEFAULT_PAGE_BYTES, 8192):
            plan = plan_in_pages(index, profile, most, 8 << 20, 0.5)
            again = Plan.from_record(plan.to_record(), profile)
            with index.router(again, ["cpu"]) as router:
                assert router.page_bytes == most == again.request.page_bytes
                assert router.devices[0].geometry == again.analysis.curve.geometry
                assert router.stats().unplaced_lists == 0
