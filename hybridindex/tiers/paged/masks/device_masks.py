"""Masks of filters in a device's memory, for scans to come: those that were asked for last, as many as have room."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.types import I32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMasks", "PairMasks"]

#: That a device keeps, where there is room for more.
_MOST_MASKS = 32
#: Words that each mask begins at a multiple of.
_ALIGNED = 16


class PairMasks(NamedTuple):
    """Of p (query, stretch of a list) pairs of a scan."""

    #: Different ones.
    filters: tuple[RowFilter, ...]
    #: (p,) int32: which of these is each pair's.
    of_pair: I32
    #: (p,) int64: the bit of its first row.
    first_bit: I64
    #: (p,) int64: its rows.
    rows: I64


class DeviceMasks:
    """One scan at a time."""

    @staticmethod
    def room(words: int, wanted: RowFilter) -> int:
        """Of so many words, how many masks of the index of ``wanted`` may take."""
        stride = _stride(wanted)
        return min(words // stride, _MOST_MASKS) * stride

    def __init__(self, words: torch.Tensor, at: int, wanted: RowFilter) -> None:
        """
        Args:
            words: int32 memory of the device, a multiple of what a mask takes.
            at: its place in what the kernels see.
            wanted: any filter of the index.
        """
        self._words, self._at, self._stride = words, at, _stride(wanted)
        #: Of each place its filter, the one that was asked for last behind the others.
        self._held: OrderedDict[int, weakref.ref[RowFilter] | None] = OrderedDict(
            (place, None) for place in range(len(words) // self._stride)
        )

    def __len__(self) -> int:
        """How many it can hold."""
        return len(self._held)

    def hold(self, filters: Sequence[RowFilter]) -> I64:
        """Where the mask of each begins, in words of what the kernels see; as many as it can hold at most.

        What is not there is copied: it is there for what is queued on the device's stream from now on.
        """
        assert len(filters) <= len(self), "more masks than there is room for"
        known = {each(): place for place, each in self._held.items() if each is not None}
        places = [known.get(each) for each in filters]
        for place in places:
            if place is not None:
                self._held.move_to_end(place)
        free = iter([place for place in self._held if place not in places])
        for number, wanted in enumerate(filters):
            if places[number] is None:
                places[number] = place = next(free)
                self._put(place, wanted)
        return self._at + self._stride * np.array(places, dtype=np.int64)

    def _put(self, place: int, wanted: RowFilter) -> None:
        import torch

        mask = wanted.mask.view(np.int32)
        start = place * self._stride
        self._words[start : start + len(mask)].copy_(torch.from_numpy(mask))
        self._held[place] = weakref.ref(wanted)
        self._held.move_to_end(place)

    def operands(self, masks: PairMasks) -> dict[str, I64]:
        """What the kernel reads of each pair, by name."""
        starts = self.hold(masks.filters)
        return {
            "mask_rows": masks.rows,
            "mask_word": starts[masks.of_pair] + (masks.first_bit >> 5),
            "mask_bit": masks.first_bit & 31,
        }


def _stride(wanted: RowFilter) -> int:
    """Words of a mask."""
    return max(1, -(-wanted.mask.nbytes // (4 * _ALIGNED))) * _ALIGNED
