"""What the scanners of a paged device share: the leased lists, the checks and the report of complete queries.

Three kernels implement it: :mod:`hybridindex.tiers.paged.torch_scanner`, :mod:`hybridindex.tiers.paged.native_scanner`
and :mod:`hybridindex.tiers.paged.triton_scanner`; :mod:`hybridindex.tiers.paged.kernel_choice` decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from hybridindex.index.codec import DeviceCodec
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.validate import check_filter, check_resident, check_scan
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.types import F32, I64

__all__ = ["PageScanner"]


class PageScanner(ABC):
    """Scans the lists of one device that one snapshot holds. Made per batch; thread-safe as long as the lease lives."""

    name: str

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
    ) -> tuple[F32, I64]:
        """See :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`.

        Raises:
            InvalidInputError: also when a probed list is not resident on this device in this snapshot.
            OutOfBudgetError: the scratch is too small for one query at this k.
        """
        check_scan(queries, probes, coarse_distances, k, dim=self._index.scan_dim, nlist=self._index.nlist)
        check_resident(probes, self._residency, self._ordinal, self._index.list_sizes)
        check_filter(filter_ids)
        distances, ids = self._scan(queries, probes, k, filter_ids)
        if on_done is not None and len(queries):
            on_done(np.arange(len(queries), dtype=np.int32), distances, ids)
        return distances, ids

    @abstractmethod
    def _scan(self, queries: F32, probes: I64, k: int, filter_ids: IdFilter | None) -> tuple[F32, I64]:
        """:meth:`scan` of arguments that were checked."""
