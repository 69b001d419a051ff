"""Centroids on a device: what it chooses, proven by the host; their memory within the budget."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from hybridindex.errors import InvalidInputError
from hybridindex.paging import centroid_share
from hybridindex.tiers.paged.coarse import device_centroids
from hybridindex.tiers.paged.coarse.device_centroids import DeviceCentroids, centroid_bytes, n_candidates
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.serving import tier_of
from tests.clustered import DIM, NLIST, small_index
from tests.tiers.options import tier_options


@pytest.fixture(scope="module", params=["ip", "l2"])
def index(request, tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("centroids") / "i", metric=request.param) as index:
        yield index


@pytest.mark.parametrize("shortened", [False, True])
@pytest.mark.parametrize("n", [1, 64, 65, 200])
def test_the_host_proves_what_a_device_chose(index, any_device, shortened, n, monkeypatch):
    """Whatever products the process allows."""
    device = torch.device(any_device)
    if shortened and device.type == "cuda":
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    queries = np.random.default_rng(n).standard_normal((n, DIM), dtype=np.float32)
    centroids = DeviceCentroids(index.centroids, device, by_products=index.coarse.gives_products)
    centroids.warm_up()
    for m in (5, 16):
        candidates, farthest = centroids.search(queries, m)
    assert (candidates.shape, candidates.dtype, farthest.shape) == ((n, 16), np.int32, (n,))
    probes, distances, settled = index.coarse.nearest_of(queries, candidates, farthest, 4)
    right = index.quantize(queries, 4)
    assert settled.mean() > 0.8
    np.testing.assert_array_equal(probes[settled], right[0][settled])
    np.testing.assert_array_equal(distances[settled].view(np.int32), right[1][settled].view(np.int32))


def test_candidates_are_a_few_more_than_are_wanted_and_at_most_half_of_the_lists():
    assert n_candidates(256, 5000) == 256 + 32 + 64
    assert n_candidates(1, 130) == 65
    assert n_candidates(1, 129) is None
    assert n_candidates(128, 256) is None


def test_a_plan_for_a_gpu_leaves_them_memory_where_its_budget_is_not_small(index):
    wanted = tier_of(index, "cuda").centroid_bytes
    assert wanted == centroid_bytes(NLIST, DIM) > device_centroids._LIBRARY_BYTES
    assert tier_of(index, "cpu").centroid_bytes == 0
    assert centroid_share(16 * wanted, wanted) == wanted
    assert centroid_share(16 * wanted - 1, wanted) == 0


def open_tier(index, **options):
    options = {"budget_bytes": 8 << 20, "wanted_bytes": 1 << 20, "scratch_bytes": 2 << 20, **options}
    return DeviceTier(index, "cpu", 0, **tier_options(**options))


def test_scans_have_the_scratch_that_centroids_leave(index, caplog):
    caplog.set_level(logging.WARNING)
    tier = open_tier(index, centroid_bytes=1 << 20)
    assert tier.centroids is not None
    assert (tier.reserved_bytes, tier._scan_scratch) == (2 << 20, 1 << 20)
    for scratch in (3 << 20, (3 << 20) // 2):
        tier.resize(1 << 20, 8 << 20, scratch)
        assert tier.centroids is not None
    tier.check_invariants()
    assert not caplog.text
    # As a plan has it that was made for none: no less than half of what scans had at the opening.
    tier.resize(1 << 20, 8 << 20, (3 << 20) // 2 - 1)
    assert (tier.centroids, tier._scan_scratch) == (None, (3 << 20) // 2 - 1)
    assert "has no centroids any more" in caplog.text
    tier.check_invariants()
    tier.close()
    without = open_tier(index)
    assert (without.centroids, without._scan_scratch) == (None, 2 << 20)
    without.close()


def test_a_device_without_room_for_them_scans_all_the_same(index, monkeypatch, caplog):
    def no_room(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", no_room)
    tier = open_tier(index, centroid_bytes=1 << 20)
    assert (tier.centroids, tier.failure, tier._scan_scratch) == (None, None, 2 << 20)
    assert "cannot be put there: CUDA out of memory" in caplog.text
    tier.close()


def test_centroids_of_which_nothing_can_be_proven_stay_on_the_host(index, caplog):
    for bad in (np.nan, np.inf, 1e16):
        centroids = np.array(index.centroids)
        centroids[3, 2] = bad
        with pytest.raises(ValueError, match="too long, or no number"):
            DeviceCentroids(centroids, torch.device("cpu"), by_products=True)


def test_memory_that_is_taken_again_is_not_taken_twice(index):
    tier = open_tier(index, centroid_bytes=1 << 20)
    first, made = tier.centroids, []
    init = DeviceCentroids.__init__

    def counted(self, *args, **options):
        made.append(tier.centroids)
        init(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceCentroids, "__init__", counted)
        tier._take_memory()
    assert made == [None]
    assert tier.centroids is not first
    tier.close()


def test_who_opens_it_names_what_finds_lists(index):
    from hybridindex.router import Router

    with pytest.raises(InvalidInputError, match="coarse_quantization is 'gpu'; expected 'auto', 'host' or 'device'"):
        Router(index, coarse_quantization="gpu")
