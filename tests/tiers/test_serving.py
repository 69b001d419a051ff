"""Which tier serves what, and what opens."""

from __future__ import annotations

from contextlib import closing

import faiss
import pytest
import torch

from hybridindex.paging import DEFAULT_PAGE_BYTES, shard_page_bytes
from hybridindex.tiers import serving
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.serving import codec_service, open_device_tier, tier_of
from hybridindex.tiers.shard.gpu import GpuShard
from hybridindex.tiers.shard.scanner import model_bytes
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import small_index

BUDGET = 4 << 20


@pytest.mark.parametrize(
    ("codec", "tier", "kind"),
    [("flat", "paged", DeviceTier), ("pq8", "shard", ShardTier), ("pqfs12", "host", DeviceTier)],
)
def test_each_codec_has_its_tier_on_the_stand_in(tmp_path, codec, tier, kind):
    with small_index(tmp_path / "i", codec=codec) as index:
        choice = tier_of(index, "cpu")
        assert choice.tier == tier
        assert bool(choice.reason) == (tier == "host")
        with closing(open_device_tier(index, "cpu", 0, budget_bytes=BUDGET, wanted_bytes=BUDGET)) as opened:
            assert type(opened) is kind
            assert opened.usable == (tier != "host")
            assert opened.disabled_reason == choice.reason
        assert codec_service(index.codec, "cpu").scanner != "host" or tier == "host"


def test_a_plan_for_shards_reckons_with_their_pages_and_tables(tmp_path):
    with small_index(tmp_path / "i", codec="pq8") as index:
        choice = tier_of(index, "cpu")
        assert (choice.page_bytes, choice.fixed_bytes) == (shard_page_bytes(8), model_bytes(index))
        with closing(open_device_tier(index, "cpu", 0, budget_bytes=BUDGET, wanted_bytes=0)) as tier:
            assert isinstance(tier, ShardTier)
            assert tier.geometry.page_bytes == choice.page_bytes
            assert tier.fixed_bytes == choice.fixed_bytes + tier.scratch_bytes
    with small_index(tmp_path / "f") as index:
        assert (tier_of(index, "cpu").page_bytes, tier_of(index, "cpu").fixed_bytes) == (DEFAULT_PAGE_BYTES, 0)


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="faiss-gpu is installed")
def test_without_faiss_gpu_a_gpu_leaves_such_a_codec_to_the_host(tmp_path):
    with small_index(tmp_path / "i", codec="pq8") as index:
        choice = tier_of(index, "cuda:0")
        assert choice.tier == "host"
        assert "faiss-gpu is not installed" in choice.reason


def test_fast_scan_says_why_it_stays_on_the_host():
    for codec in ("pqfs", "pqfs12", "faiss:IVFPQFastScan"):
        service = codec_service(codec, "cpu")
        assert service.scanner == "host"
        assert "scanned together" in service.reason
    assert codec_service("pq8", "cpu").scanner == "faiss"


def test_of_codecs_without_a_page_kernel_a_gpu_serves_pq_alone(monkeypatch):
    monkeypatch.setattr(serving, "resolve_device", lambda _name: (torch.device("cuda:0"), None))
    monkeypatch.setattr(serving, "gpu_unsupported", lambda: "")
    assert (codec_service("pq8", "cuda:0").scanner, codec_service("pq8", "cuda:0").reason) == (GpuShard.name, "")
    other = codec_service("faiss:IVF32,SQ4", "cuda:0")
    assert (other.scanner, other.reason) == ("host", "faiss-gpu is used for pq alone")
    monkeypatch.setattr(serving, "gpu_unsupported", lambda: "faiss-gpu is not installed")
    assert codec_service("pq8", "cuda:0").reason == "faiss-gpu is not installed"
