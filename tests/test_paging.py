"""Pages fit the lists that lie in them."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.paging import CODE_PAGE_BYTES, DEFAULT_PAGE_BYTES, PageGeometry, usual_page_bytes


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
