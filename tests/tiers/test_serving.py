"""Which tier serves what, and what opens."""

from __future__ import annotations

import importlib.util
from contextlib import closing

import faiss
import pytest
import torch

from hybridindex.index import codec
from hybridindex.paging import CODE_PAGE_BYTES, DEFAULT_PAGE_BYTES, shard_page_bytes, usual_page_bytes
from hybridindex.tiers import serving
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.serving import codec_service, open_device_tier, tier_of
from hybridindex.tiers.shard.gpu import GpuShard
from hybridindex.tiers.shard.scanner import model_bytes
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import small_index
from tests.coded import with_codes

BUDGET = 4 << 20


@pytest.mark.parametrize(
    ("name", "tier", "kind"),
    [
        ("flat", "paged", DeviceTier),
        ("pq8", "paged", DeviceTier),
        ("pqfs12", "paged", DeviceTier),
        ("faiss:SQ4", "shard", ShardTier),
    ],
)
def test_each_codec_has_its_tier_on_the_stand_in(tmp_path, name, tier, kind):
    with small_index(tmp_path / "i", codec=name) as index:
        choice = tier_of(index, "cpu")
        assert choice.tier == tier
        assert choice.reason == ""
        with closing(open_device_tier(index, "cpu", 0, budget_bytes=BUDGET, wanted_bytes=BUDGET)) as opened:
            assert type(opened) is kind
            assert opened.usable
            assert opened.disabled_reason == choice.reason
        assert codec_service(index.codec, "cpu").scanner != "host"


def test_a_fast_scan_that_faiss_alone_knows_stays_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 11)
    with small_index(tmp_path / "i", codec="pqfs12") as index:
        choice = tier_of(index, "cpu")
        assert choice.tier == "host"
        assert "scanned together" in choice.reason
        with closing(open_device_tier(index, "cpu", 0, budget_bytes=BUDGET, wanted_bytes=BUDGET)) as opened:
            assert not opened.usable
            assert opened.disabled_reason == choice.reason


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_lie_in_pages_of_their_own_size(tmp_path, bits):
    with with_codes(small_index(tmp_path / "i"), bits=bits) as index:
        view = index.by_codes()
        choice = tier_of(view, "cpu")
        assert (choice.tier, choice.page_bytes, choice.reason) == ("paged", CODE_PAGE_BYTES, "")
        with closing(open_device_tier(view, "cpu", 0, budget_bytes=BUDGET, wanted_bytes=BUDGET)) as opened:
            assert type(opened) is DeviceTier
            assert opened.geometry.rows_per_page % 16 == 0
            scanner = opened._scanner_kind.name
        assert codec_service(view.codec, "cpu").scanner == codec_service("rabitq", "cpu").scanner == scanner


def test_a_plan_for_shards_reckons_with_their_pages_and_tables(tmp_path):
    with small_index(tmp_path / "i", codec="faiss:PQ6x6np") as index:
        choice = tier_of(index, "cpu")
        assert (choice.page_bytes, choice.fixed_bytes) == (shard_page_bytes(index.code_size), model_bytes(index))
        with closing(open_device_tier(index, "cpu", 0, budget_bytes=BUDGET, wanted_bytes=0)) as tier:
            assert isinstance(tier, ShardTier)
            assert tier.geometry.page_bytes == choice.page_bytes
            assert tier.fixed_bytes == choice.fixed_bytes + tier.scratch_bytes
    with small_index(tmp_path / "f") as index:
        usual = usual_page_bytes(index.codec, index.code_size, index.list_sizes)
        assert (tier_of(index, "cpu").page_bytes, tier_of(index, "cpu").fixed_bytes) == (usual, 0)
        assert usual < DEFAULT_PAGE_BYTES


def test_without_faiss_gpu_a_gpu_leaves_such_a_codec_to_the_host(tmp_path, monkeypatch):
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with small_index(tmp_path / "i", codec="faiss:PQ6x6np") as index:
        choice = tier_of(index, "cuda:0")
        assert choice.tier == "host"
        assert "faiss-gpu is not installed" in choice.reason


def test_fast_scan_says_why_it_stays_on_the_host():
    service = codec_service("faiss:IVFResidualQuantizerFastScan", "cpu")
    assert service.scanner == "host"
    assert "scanned together" in service.reason
    for name in ("pqfs", "pqfs12", "pq", "pq8"):
        assert codec_service(name, "cpu").scanner == "native"
    assert codec_service("faiss:IVFPQ", "cpu").scanner == "faiss"


def test_of_codecs_without_a_page_kernel_a_gpu_serves_pq_alone(monkeypatch):
    monkeypatch.setattr(serving, "resolve_device", lambda _name: (torch.device("cuda:0"), None))
    monkeypatch.setattr(serving, "gpu_unsupported", lambda: "")
    own = codec_service("faiss:IVFPQ", "cuda:0")
    assert (own.scanner, own.reason) == (GpuShard.name, "")
    assert codec_service("pq8", "cuda:0").scanner == ("triton" if importlib.util.find_spec("triton") else "torch")
    other = codec_service("faiss:IVF32,SQ4", "cuda:0")
    assert (other.scanner, other.reason) == ("host", "faiss-gpu is used for pq alone")
    monkeypatch.setattr(serving, "gpu_unsupported", lambda: "faiss-gpu is not installed")
    assert codec_service("faiss:IVFPQ", "cuda:0").reason == "faiss-gpu is not installed"
