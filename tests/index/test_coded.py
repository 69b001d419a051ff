"""An index seen by its codes: what is another one's, what stays the rows'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index import IVFIndex
from hybridindex.index.rabitq.encode import decode_blocks
from hybridindex.paging import PageGeometry
from tests.coded import TABLE, with_codes


@pytest.fixture
def coded(make_index: Callable[..., IVFIndex]) -> IVFIndex:
    return with_codes(make_index("fp16", "l2", dim=40), bits=2)


def test_lists_are_blocks_of_codes(coded: IVFIndex) -> None:
    view, codes = coded.by_codes(), coded.rabitq
    assert codes is not None
    assert (view.codec, view.code_size, view.group_rows) == ("rabitq2", (2 * 2 * 64 + 128) // 16, 16)
    np.testing.assert_array_equal(view.list_bytes, -(-coded.list_sizes // 16) * 384)
    for list_id, size in enumerate(coded.list_sizes.tolist()):
        blocks = view.list_codes(list_id)
        assert blocks.shape == (-(-size // 16) * 16, 24)
        assert not blocks.flags.writeable
        np.testing.assert_array_equal(blocks.ravel(), view.stored_codes(list_id))
        np.testing.assert_array_equal(
            decode_blocks(blocks.ravel(), size, codes.spec).levels, codes.decode_list(list_id).levels
        )
    with pytest.raises(InvalidInputError, match="list is 12; expected 0 to 11"):
        view.list_codes(12)


def test_a_device_is_told_how_they_are_coded(coded: IVFIndex) -> None:
    codec = coded.by_codes().device_codec()
    assert (codec.kind, codec.dim, codec.code_size, codec.by_residual) == ("rabitq", 40, 24, False)
    assert codec.form is coded.rabitq.spec


def test_all_else_is_the_index_of_the_rows(coded: IVFIndex) -> None:
    view = coded.by_codes()
    assert view.rows is coded
    assert coded.rows is coded
    assert view.by_codes() is view
    assert view.centroids is coded.centroids
    assert view.integrity is coded.integrity
    np.testing.assert_array_equal(view.decode_list(3), coded.decode_list(3))
    np.testing.assert_array_equal(view.list_ids(3), coded.list_ids(3))
    queries = np.random.default_rng(0).standard_normal((3, 40), dtype=np.float32)
    for one, other in zip(view.quantize(queries, 4), coded.quantize(queries, 4), strict=True):
        np.testing.assert_array_equal(one, other)


def test_plans_of_codes_are_told_from_those_of_rows_and_of_other_codes(coded: IVFIndex) -> None:
    rows, two_bits = coded.fingerprint, coded.by_codes().fingerprint
    assert coded.by_codes().fingerprint == two_bits
    coded = with_codes(coded, bits=4)
    four_bits = coded.by_codes().fingerprint
    # The same bytes as before, and another number of candidates.
    fewer = with_codes(coded, bits=2, table=replace(TABLE, r=tuple(tuple(r // 2 for r in row) for row in TABLE.r)))
    assert len({rows, two_bits, four_bits, fewer.by_codes().fingerprint}) == 4


def test_a_view_ends_with_its_index(coded: IVFIndex) -> None:
    view = coded.by_codes()
    view.close()
    assert coded.list_codes(0).shape[1] == 80
    coded.close()
    with pytest.raises(InvalidInputError, match="was closed"):
        view.list_codes(0)


def test_an_index_without_codes_says_how_to_get_some(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index()
    with pytest.raises(
        UnsupportedIndexError, match=r"has no codes that can be used: hybridindex compress .* makes some"
    ):
        index.by_codes()
    index.rabitq_problem = "they are damaged"
    with pytest.raises(UnsupportedIndexError, match="they are damaged"):
        index.by_codes()


@pytest.mark.parametrize(("page_bytes", "rows"), [(1, 16), (16 * 24, 16), (32 * 24 - 1, 16), (32 * 24, 32)])
def test_no_page_parts_a_block(page_bytes: int, rows: int) -> None:
    geometry = PageGeometry.for_code_size(24, page_bytes, group_rows=16)
    assert (geometry.rows_per_page, geometry.group_rows) == (rows, 16)
    np.testing.assert_array_equal(geometry.pages_for(np.array([0, 1, 16, 33])), [0, 1, 1, 3 if rows == 16 else 2])
