"""Masks on a device: what was asked for last stays, nothing is found under another's name, and room is given once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.tiers.paged.masks import device_masks
from hybridindex.tiers.paged.masks.device_masks import DeviceMasks
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from tests.clustered import clustered, small_index
from tests.tiers.paged.scanning import scanning


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", n=600, nlist=4, dim=8) as index:
        yield index


def some(index, n):
    filters = RowFilters(index)
    return [filters.make(np.arange(i, 600, i + 2), None) for i in range(n)]


def held(masks, words, places):
    """The masks that lie at these places."""
    at = [int(place) - masks._at for place in places]
    return [words[start : start + 20].numpy().view(np.uint8) for start in at]


def test_the_ones_of_late_stay(index, monkeypatch):
    wanted = some(index, 5)
    words = torch.zeros(100, dtype=torch.int32)
    room = DeviceMasks.room(len(words), wanted[0])
    assert room == 96  # three of 600 bits, rounded up to 16 words
    masks = DeviceMasks(words[:room], 40, wanted[0])
    copies, put = [], DeviceMasks._put
    monkeypatch.setattr(DeviceMasks, "_put", lambda self, place, mask: copies.append(mask) or put(self, place, mask))

    def hold(*numbers):
        copies.clear()
        places = masks.hold([wanted[number] for number in numbers])
        assert len(set(places.tolist())) == len(numbers)
        for number, found in zip(numbers, held(masks, words, places), strict=True):
            np.testing.assert_array_equal(found[: wanted[number].mask.nbytes], wanted[number].mask)
        return [wanted.index(mask) for mask in copies]

    assert hold(0, 1, 2) == [0, 1, 2]
    assert hold(1) == []
    assert hold(2, 0) == []
    # Number 1 was asked for before all others.
    assert hold(3) == [3]
    assert hold(0, 2) == []
    assert hold(1, 4) == [1, 4]
    assert hold(4, 2, 1) == []
    assert hold(3) == [3]
    assert hold(2, 1, 3) == []
    assert hold(4) == [4]


def test_a_filter_that_is_gone_is_no_others(index):
    words = torch.zeros(32, dtype=torch.int32)
    first, second = some(index, 2)
    masks = DeviceMasks(words, 0, first)
    assert len(masks) == 1
    masks.hold([first])
    # In the memory of the first one, maybe under the same address.
    del first
    (place,) = masks.hold([second])
    np.testing.assert_array_equal(held(masks, words, [place])[0][: second.mask.nbytes], second.mask)


def test_runs_have_no_more_filters_than_there_is_room_for():
    masks = RowMasks((), np.array([0, 0, 1, 2, 2, 0, 1], np.int32))
    assert [(rows.start, rows.stop) for rows in masks.runs(1)] == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7)]
    assert [(rows.start, rows.stop) for rows in masks.runs(2)] == [(0, 3), (3, 6), (6, 7)]
    assert [(rows.start, rows.stop) for rows in masks.runs(3)] == [(0, 7)]
    assert list(RowMasks((), np.empty(0, np.int32)).runs(2)) == []


def scanned(index, device, masks, queries, probes, **options):
    with scanning(index, device, page_bytes=4096, **options) as scanner:
        coarse = np.zeros(probes.shape, np.float32)
        whole = scanner.scan(queries, probes, coarse, 5)
        found = [scanner.scan(queries, probes, coarse, 5, masks=masks) for _ in range(2)]
        # Scans without masks have what is left of the scratch.
        for one, other in zip(whole, scanner.scan(queries, probes, coarse, 5), strict=True):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    return found[0]


def test_more_filters_than_there_is_room_for_are_scanned_in_turn(index, device, monkeypatch):
    wanted = some(index, 5)
    queries, probes = clustered(9, 8, seed=4), np.tile(np.arange(4), (9, 1))
    masks = RowMasks(tuple(wanted), np.array([0, 1, 2, 3, 4, 0, 1, 2, 3], np.int32))
    right = scanned(index, device, masks, queries, probes, kind=TorchScanner)
    for most in (1, 2, 32):
        monkeypatch.setattr(device_masks, "_MOST_MASKS", most)
        found = scanned(index, device, masks, queries, probes, scratch=60_000)
        np.testing.assert_array_equal(found[1], right[1])
        np.testing.assert_allclose(found[0], right[0], rtol=1e-5, atol=1e-5)


def test_scratch_without_room_for_a_mask_is_refused(tmp_path, device):
    with (
        small_index(tmp_path / "i", n=60_000, nlist=2, dim=2) as index,
        scanning(index, device, scratch=25_000, scatter=False, page_bytes=65536) as scanner,
    ):
        masks = RowMasks((RowFilters(index).make(np.arange(9), None),), np.zeros(1, np.int32))
        arguments = clustered(1, 2), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), 1
        with pytest.raises(OutOfBudgetError, match="too small for a filter of 7,504 bytes"):
            scanner.scan(*arguments, masks=masks)
