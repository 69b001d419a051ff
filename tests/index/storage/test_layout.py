"""Extents never overlap and stay aligned; blocks of 16 and of 32 go back to the rows they came from."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import CorruptIndexError
from hybridindex.index.storage.layout import (
    BLOCK,
    Layout,
    check_extents,
    from_blocks16,
    id_slots,
    plan_extents,
    to_blocks16,
    total_bytes,
)
from hybridindex.index.storage.pqfs import pack_pqfs, unpack_pqfs
from hybridindex.types import I64

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=20).map(lambda sizes: np.array(sizes, np.int64))
LAYOUTS = st.sampled_from(["rows", "blocks16", "pqfs32"])


@given(SIZES, st.integers(1, 300), LAYOUTS)
def test_planned_extents_are_aligned_and_pass_the_check(sizes: I64, code_size: int, layout: Layout) -> None:
    table = plan_extents(sizes, code_size, layout)
    nbytes = total_bytes(table, code_size)
    check_extents(
        table, nlist=len(sizes), count=int(sizes.sum()), code_size=code_size, layout=layout, file_bytes=nbytes
    )
    assert nbytes >= 64
    assert (table[:, 2] % 64 == 0).all()
    assert (table[:, 1] % BLOCK[layout] == 0).all()
    assert (table[:, 1] - sizes < 32 + 8).all()
    assert (id_slots(table, code_size) * 8 == table[:, 2] + table[:, 1] * code_size).all()


@given(SIZES, st.integers(1, 64), st.data())
def test_a_changed_table_is_refused(sizes: I64, code_size: int, data: st.DataObject) -> None:
    table = plan_extents(sizes, code_size, "rows")
    nbytes = total_bytes(table, code_size)
    row, column = data.draw(st.integers(0, len(sizes) - 1)), data.draw(st.integers(0, 2))
    value = data.draw(st.sampled_from([-1, 1 << 62, (1 << 63) - 1, nbytes + 64, int(table[row, column]) + 1]))
    changed = table.copy()
    changed[row, column] = value
    if column == 1 and value == table[row, 1] + 1:
        return  # one more row of capacity may still fit before the next extent
    with pytest.raises(CorruptIndexError):
        check_extents(
            changed, nlist=len(sizes), count=int(sizes.sum()), code_size=code_size, layout="rows", file_bytes=nbytes
        )


@given(st.integers(0, 50), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(0, 2**32))
def test_blocks16_goes_back_to_rows(n: int, dim: int, element: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (n, dim * element), dtype=np.uint8)
    blocks = to_blocks16(rows, element)
    assert blocks.shape == (-(-n // 16), 16 * dim * element)
    np.testing.assert_array_equal(from_blocks16(blocks, n, element), rows)


def test_blocks16_puts_one_dimension_of_sixteen_vectors_side_by_side() -> None:
    vectors = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
    blocks = to_blocks16(vectors.view(np.uint8), 4).view(np.float32).reshape(2, 3, 16)
    np.testing.assert_array_equal(blocks[0, 1], vectors[:16, 1])
    np.testing.assert_array_equal(blocks[1, 2, :4], vectors[16:, 2])
    assert (blocks[1, :, 4:] == 0).all()


@given(st.integers(0, 100), st.integers(1, 12), st.integers(0, 2**32))
def test_fast_scan_blocks_go_back_to_rows(n: int, code_size: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (n, code_size), dtype=np.uint8)
    np.testing.assert_array_equal(unpack_pqfs(pack_pqfs(rows), n), rows)


def test_fast_scan_blocks_are_those_of_faiss() -> None:
    x = np.random.default_rng(3).standard_normal((500, 16)).astype(np.float32)
    index = faiss.IndexPQFastScan(16, 8, 4)
    index.pq.cp.min_points_per_centroid = 1
    index.train(x)
    index.add(x)
    packed = faiss.vector_to_array(index.codes)
    np.testing.assert_array_equal(pack_pqfs(index.pq.compute_codes(x)).reshape(-1), packed)
