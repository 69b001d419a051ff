"""faiss-gpu shards: what is refused, how scans are cut, and on a GPU that memory stays where it was promised."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch

from hybridindex.errors import OutOfBudgetError
from hybridindex.index import from_faiss
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.shard.gpu import gpu_unsupported, queries_per_search, temp_bytes_per_query
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import DIM, NLIST, clustered, small_index
from tests.oracle import check_answer

SEARCH = {"width": 16, "k": 10, "longest": 1000, "dim": 64, "table_entries": 8 * 256}


def test_the_bound_covers_faiss_s_own_reckoning():
    """Per query, of two streams each: prefix sums, all distances, the first selection, and pq's tables per probe."""
    own = 2 * (8 * 17 + 16 * 1000 * 4 + 8 * 10 * 12) + 2 * (16 * 8 * 256 * 4)
    arguments = 64 * 4 + 16 * 12 + 10 * 12
    assert own + arguments <= temp_bytes_per_query(**SEARCH) < 1.01 * (own + arguments)


def test_scans_are_cut_to_the_temporary_memory():
    needed = temp_bytes_per_query(**SEARCH)
    assert queries_per_search((64 << 10) + 3 * needed, 100, **SEARCH) == 3
    assert queries_per_search((64 << 10) + needed, 100, **SEARCH) == 1
    with pytest.raises(OutOfBudgetError, match="16 probes at k 10"):
        queries_per_search((64 << 10) + needed - 1, 100, **SEARCH)
    with pytest.raises(OutOfBudgetError, match="at most 2048"):
        queries_per_search(1 << 40, 4096, **{**SEARCH, "width": 2049})
    # faiss-gpu ends the process where a query probes more lists than there are.
    with pytest.raises(OutOfBudgetError, match="at most 15"):
        queries_per_search(1 << 40, 15, **SEARCH)


@pytest.fixture(params=["ip", "l2"])
def index(request, tmp_path):
    with small_index(tmp_path / "i", codec="pq8", metric=request.param) as index:
        yield index


def test_without_faiss_gpu_the_way_to_it_is_named(index, monkeypatch):
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    assert "pip install faiss-gpu" in gpu_unsupported(index)


def test_kinds_that_no_gpu_holds_are_named(tmp_path, monkeypatch):
    """As if faiss-gpu were there: what follows does not ask it."""
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    whole = faiss.IndexIVFPQ(faiss.IndexFlatL2(DIM), DIM, NLIST, 8, 8)
    whole.by_residual = False
    makes = {"pq8": whole, "SQ": faiss.index_factory(DIM, f"IVF{NLIST},SQ4")}
    for name, made in makes.items():
        made.train(clustered(3000, seed=1))
        made.add(clustered(100, seed=1))
        faiss.write_index(made, str(tmp_path / name))
        with from_faiss(tmp_path / name, tmp_path / f"{name}-idx") as index:
            assert name in gpu_unsupported(index)
    with small_index(tmp_path / "ours", codec="pq8") as ours:
        assert gpu_unsupported(ours) == ""


@pytest.fixture
def gpu_tier(index):
    if not torch.cuda.is_available():
        pytest.skip("of a real GPU, and there is none")
    if reason := gpu_unsupported():
        pytest.skip(reason)
    # faiss-gpu is there: that it takes this index is ours to get right.
    assert gpu_unsupported(index) == ""
    tier = ShardTier(index, "cuda:0", 0, budget_bytes=64 << 20, wanted_bytes=0)
    assert tier.usable, tier.disabled_reason
    owner = tier.pages
    yield tier, ResidencyStore(NLIST, lambda _device, pages: owner.free(pages))
    tier.close()


@pytest.mark.gpu
def test_a_swap_on_a_gpu_keeps_answers_and_gives_memory_back(index, gpu_tier):
    tier, store = gpu_tier
    queries = index.transform(clustered(300, seed=5))
    probes, coarse = index.quantize(queries, 8)
    tier.load(range(NLIST), store).result(300)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(0)[0]
    for round_ in range(3):
        store.publish({}, drops=[round_])
        tier.load(range(NLIST), store).result(300)
        with store.lease() as residency:
            distances, ids = tier.scanner(residency).scan(queries, probes, coarse, 10)
        order = np.lexsort((ids, -distances if index.metric == "ip" else distances, ids < 0), axis=1)
        sorted_distances, sorted_ids = (np.take_along_axis(a, order, 1) for a in (distances, ids))
        check_answer(index, queries, probes, 10, sorted_distances, sorted_ids)
        tier.check_invariants()
    torch.cuda.synchronize()
    # One shard as before; the driver hands memory out in blocks of 2 MiB.
    assert free - torch.cuda.mem_get_info(0)[0] <= 4 << 20


@pytest.mark.gpu
def test_a_shard_on_a_gpu_takes_no_more_than_its_account(index, gpu_tier):
    tier, store = gpu_tier
    queries = index.transform(clustered(64, seed=5))
    probes, coarse = index.quantize(queries, 8)
    # faiss's libraries load with the first shard, outside the budget like the context.
    tier.load([0], store).result(300)
    store.publish({}, drops=[0])
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(0)[0]
    tier.load(range(NLIST), store).result(300)
    with store.lease() as residency:
        tier.scanner(residency).scan(queries, probes, coarse, 100)
    torch.cuda.synchronize()
    # The handles of a shard's own streams and of cuBLAS are not in the account.
    assert before - torch.cuda.mem_get_info(0)[0] <= tier.used_bytes + (48 << 20)
