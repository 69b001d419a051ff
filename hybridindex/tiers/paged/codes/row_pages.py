"""Exact distances of candidates from rows that lie on a device beside codes: what
:mod:`hybridindex.tiers.host.reranker` computes from the rows of the host, to the bit.

Rows lie in their pages one behind the other, across the ends of pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.types import F32, I64

__all__ = ["RowPages"]

_ROW_MASK = (1 << POSITION_BITS) - 1


class RowPages(ABC):
    """The rows that one device holds in one snapshot. Made per batch; thread-safe as long as the lease lives."""

    name: str

    @staticmethod
    @abstractmethod
    def supports(arena: PageArena) -> bool:
        """Whether it reads this arena, and computes what the host does."""

    def __init__(
        self, index: IVFIndex, arena: PageArena, residency: Residency, ordinal: int, scratch_bytes: int
    ) -> None:
        """
        Args:
            index: by its codes.
            residency: of all pieces of its lists.
        """
        codec = index.rows.device_codec()
        assert codec is not None, "codes are made of these codecs alone"
        self._index = index.rows
        self._codec: DeviceCodec = codec
        self._arena = arena
        self._residency = residency.part(index.nlist, index.nlist)
        self._ordinal = ordinal
        self._scratch_bytes = scratch_bytes

    def distances(self, queries: F32, positions: I64) -> F32:
        """Of each query and its candidates.

        Args:
            queries: (n, scan_dim) float32, contiguous, behind the pre-transforms.
            positions: (n, r) int64; see :mod:`hybridindex.tiers.contract.positions`. -1: none.

        Returns:
            (n, r) float32; NaN where there is none, and where the distance is no number or as far as can be.

        Raises:
            InvalidInputError: a position is no row of a list whose rows this device holds.
            OutOfBudgetError: the scratch is too small for one row.
        """
        found = positions[positions >= 0]
        lists = found >> POSITION_BITS
        if len(found) and (
            int(lists.max()) >= self._index.nlist
            or (self._residency.list_device[lists] != self._ordinal).any()
            or ((found & _ROW_MASK) >= self._index.list_sizes[lists]).any()
        ):
            raise InvalidInputError(f"positions hold rows that device {self._ordinal} does not have")
        distances = np.full(positions.shape, np.nan, dtype=np.float32)
        if len(found):
            self._compare(queries, np.ascontiguousarray(positions), distances)
        return distances

    @abstractmethod
    def _compare(self, queries: F32, positions: I64, distances: F32) -> None:
        """Fills in (n, r) distances of positions that were checked; they come as NaN."""
