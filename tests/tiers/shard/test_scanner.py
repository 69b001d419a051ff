"""A shard's memory and model: only its lists, the index's own quantizer, and no ids."""

from __future__ import annotations

import gc
import os

import faiss
import numpy as np
import pytest

from hybridindex.paging import PageGeometry, shard_page_bytes
from hybridindex.tiers.shard.scanner import ShardSource, StandInShard, model_bytes, warm_up
from tests.clustered import DIM, NLIST, small_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("shard") / "i", codec="pq8") as index:
        yield index


def geometry_of(index):
    return PageGeometry.for_code_size(index.code_size, shard_page_bytes(index.code_size))


def cut(index, lists):
    with ShardSource(index, np.array(lists, np.int64), geometry_of(index)) as source:
        for number in range(len(lists)):
            source.copy(number)
        return source.cut()


@pytest.mark.parametrize("code_size", [1, 3, 8, 16, 20, 48, 96, 100])
def test_a_page_is_whole_groups_of_rows_and_whole_allocations(code_size):
    page_bytes = shard_page_bytes(code_size)
    geometry = PageGeometry.for_code_size(code_size, page_bytes)
    assert geometry.page_bytes == page_bytes
    assert page_bytes % 512 == 0
    assert geometry.rows_per_page % 32 == 0
    smaller = range(32 * code_size, page_bytes, 32 * code_size)
    assert all(nbytes % 512 for nbytes in smaller)


def test_it_holds_its_lists_alone_with_the_codes_of_the_index(index):
    shard = cut(index, [4, 9])
    sizes = [shard.invlists.list_size(i) for i in range(NLIST)]
    expected = np.where(np.isin(np.arange(NLIST), [4, 9]), index.list_sizes, 0)
    assert sizes == expected.tolist()
    assert shard.ntotal == expected.sum()
    for list_id in (4, 9):
        codes = faiss.rev_swig_ptr(shard.invlists.get_codes(list_id), sizes[list_id] * index.code_size)
        np.testing.assert_array_equal(codes, index.list_codes(list_id).reshape(-1))


def test_it_shares_the_quantizer_and_outlives_neither_its_memory_nor_the_index_s(index):
    before = len(os.listdir("/proc/self/fd"))
    shard = cut(index, [4])
    assert shard.quantizer.this == index.open_faiss().quantizer.this
    assert not shard.own_fields
    assert len(os.listdir("/proc/self/fd")) == before
    del shard
    gc.collect()
    lists, _ = index.quantize(np.zeros((1, DIM), np.float32), 3)
    assert (lists >= 0).all()


def test_an_imported_model_behind_transforms_is_peeled(tmp_path):
    from hybridindex.index import from_faiss
    from tests.clustered import clustered

    made = faiss.index_factory(DIM, "OPQ8,IVF32,PQ8np")
    # How good the rotation is does not matter, that there is one does.
    faiss.downcast_VectorTransform(made.chain.at(0)).niter = 1
    made.train(clustered(3000, seed=1))
    made.add(clustered(3000, seed=1))
    faiss.write_index(made, str(tmp_path / "f"))
    with from_faiss(tmp_path / "f", tmp_path / "i") as index:
        shard = cut(index, [0])
        assert isinstance(shard, faiss.IndexIVFPQ)
        assert shard.use_precomputed_table == -1
        warm_up(StandInShard(shard), index.scan_dim, 0)


def test_the_bound_of_the_model_covers_centroids_and_tables(index):
    centroids, tables = 4 * NLIST * DIM, 4 * 256 * DIM
    assert model_bytes(index) >= centroids + 2 * tables
    assert model_bytes(index) < 2 * (centroids + 2 * tables)


def test_a_trial_search_notices_a_shard_that_finds_nothing(index):
    shard = StandInShard(cut(index, [4]))
    warm_up(shard, index.scan_dim, 4)
    warm_up(shard, index.scan_dim, -1)
    with pytest.raises(RuntimeError, match="list 5"):
        warm_up(shard, index.scan_dim, 5)
