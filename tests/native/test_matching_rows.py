"""Positions of the rows that a filter leaves: the extension against numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import _native
from hybridindex.tiers.host.filtered_scanner import matching_rows_reference
from tests.examples import examples


def a_filter(rng, sizes, share):
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    bits = np.zeros(-(-int(first[-1]) // 64) * 64, dtype=np.bool_)
    bits[: first[-1]] = rng.random(int(first[-1])) < share
    counts = np.diff(np.concatenate([[0], np.cumsum(bits)])[first])
    return SimpleNamespace(mask=np.packbits(bits, bitorder="little"), first=first, counts=counts)


@examples(200)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([0, 1, 2, 7, 63, 64, 65, 128, 300]), min_size=1, max_size=9),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    room=st.integers(0, 3),
)
def test_it_finds_what_the_reference_finds(seed, sizes, share, room):
    rng = np.random.default_rng(seed)
    wanted = a_filter(rng, sizes, share)
    probes = rng.integers(-1, len(sizes), (rng.integers(0, 5), rng.integers(0, 6)))
    held = np.where(probes >= 0, wanted.counts[probes], 0).sum(axis=1)
    shape = (len(probes), int(held.max(initial=0)) + room)
    found, expected = np.full(shape, -7), np.full(shape, -7)
    _native.matching_rows(wanted.mask, wanted.first, probes, found)
    matching_rows_reference(wanted.mask, wanted.first, probes, expected)
    assert found.tolist() == expected.tolist()


def test_what_does_not_fit_is_refused():
    wanted = a_filter(np.random.default_rng(0), [10, 70], 1.0)

    def ask(probes, width, mask=wanted.mask, first=wanted.first):
        _native.matching_rows(mask, first, np.array(probes), np.empty((len(probes), width), np.int64))

    ask([[0, 1]], 80)
    with pytest.raises(ValueError, match="more rows than there is room"):
        ask([[0, 1]], 79)
    for probe in (2, -2, 1 << 40):
        with pytest.raises(IndexError, match=f"probe {probe}"):
            ask([[probe]], 80)
    with pytest.raises(IndexError, match="list 1 leaves the mask"):
        ask([[1]], 80, mask=wanted.mask[:8].copy())
    with pytest.raises(IndexError, match="list 0 leaves the mask"):
        ask([[0]], 80, first=np.array([5, 4]))
    with pytest.raises(ValueError, match="multiple of 8"):
        ask([[0]], 80, mask=wanted.mask[:9].copy())
    with pytest.raises(ValueError, match="one entry per list"):
        ask([[0]], 80, first=np.empty(0, np.int64))
