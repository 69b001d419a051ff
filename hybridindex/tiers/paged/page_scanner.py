"""What the scanners of a paged device share: the leased lists, the checks and the report of complete queries.

Three kernels implement it for rows: :mod:`hybridindex.tiers.paged.torch_scanner`,
:mod:`hybridindex.tiers.paged.native_scanner` and :mod:`hybridindex.tiers.paged.triton_scanner`; those for codes are in
:mod:`hybridindex.tiers.paged.codes`. :mod:`hybridindex.tiers.paged.kernel_choice` decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import numpy.typing as npt

from hybridindex.index.codec import DeviceCodec
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.validate import MAX_K, allowed_ids, check_filter, check_resident, check_shapes
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.types import F32, I64

__all__ = ["Candidates", "PageScanner"]

#: Which rows may be answered: by ids, or by a mask of the index's own rows; None: all.
Candidates = IdFilter | RowFilter | None


class PageScanner(ABC):
    """Scans the lists of one device that one snapshot holds. Made per batch; thread-safe as long as the lease lives."""

    name: str
    #: Of a query's answers.
    most_k = MAX_K

    def __init__(
        self,
        index: IVFIndex,
        codec: DeviceCodec,
        arena: PageArena,
        residency: Residency,
        ordinal: int,
        scratch_bytes: int,
    ) -> None:
        self._index = index
        self._codec = codec
        self._arena = arena
        self._residency = residency
        self._ordinal = ordinal
        self._scratch_bytes = scratch_bytes
        #: Why this kernel scans and not a faster one; empty where none is faster. Set by the tier.
        self.passed_over = ""
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027 - most take nothing
        """Makes what a kernel takes besides. Raises what its scanner cannot be made for."""

    @classmethod
    def beside(cls, other: PageScanner) -> Self:
        """The scanner of the same lists: for a scan that ``other``'s kernels do not make."""
        return cls(other._index, other._codec, other._arena, other._residency, other._ordinal, other._scratch_bytes)

    @property
    def kernel(self) -> str:
        """Which kernel scans, and why: "triton", or "torch: triton is not installed; ..."."""
        return f"{self.name}: {self.passed_over}" if self.passed_over else self.name

    def scan(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        *,
        filter_ids: IdFilter | None = None,
        on_done: OnDone | None = None,
        masks: RowMasks | None = None,
    ) -> tuple[F32, I64]:
        """See :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`.

        Args:
            masks: instead of ``filter_ids``, which rows each of the queries may be answered with.

        Raises:
            InvalidInputError: also when a probed list is not resident on this device in this snapshot.
            OutOfBudgetError: the scratch is too small for one query at this k.
        """
        index = self._index
        check_shapes(queries, probes, coarse_distances, k, dim=index.scan_dim, most=self.most_k)
        check_resident(probes, self._residency, self._ordinal, index.list_sizes)
        check_filter(filter_ids)
        if masks is None:
            distances, ids = self._scan(queries, probes, coarse_distances, k, filter_ids)
        else:
            distances, ids = self._scan_masked(queries, probes, coarse_distances, k, masks)
        if on_done is not None and len(queries):
            on_done(np.arange(len(queries), dtype=np.int32), distances, ids)
        return distances, ids

    def _scan_masked(
        self, queries: F32, probes: I64, coarse_distances: F32, k: int, masks: RowMasks
    ) -> tuple[F32, I64]:
        """A scan for each filter, unless a kernel can do better."""
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        for rows, wanted in masks.groups():
            distances[rows], ids[rows] = self._scan(queries[rows], probes[rows], coarse_distances[rows], k, wanted)
        return distances, ids

    def _allowed(self, list_id: int, wanted: IdFilter | RowFilter) -> npt.NDArray[np.bool_]:
        """Which rows of a list may be answered."""
        if not isinstance(wanted, RowFilter):
            return np.isin(self._index.list_ids(list_id), allowed_ids(wanted))
        first, end = wanted.first[list_id : list_id + 2].tolist()
        bits = np.unpackbits(wanted.mask[first >> 3 : (end + 7) >> 3], bitorder="little")
        return bits[first & 7 : (first & 7) + end - first].view(np.bool_)

    @abstractmethod
    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        """:meth:`scan` of arguments that were checked."""
