"""What the scanners of pages of codes share. They answer what the host's scan of codes answers, to the bit: see
:mod:`hybridindex.index.rabitq.estimate`.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from hybridindex.config import MAX_CANDIDATES
from hybridindex.errors import InvalidInputError
from hybridindex.index.rabitq.codes import RabitqCodes
from hybridindex.index.rabitq.spec import CodeFormat
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.types import F32, I64

__all__ = ["CodePageScanner"]


class CodePageScanner(PageScanner):
    """A :class:`PageScanner` whose scan answers (estimates, positions), smaller is better, and takes the products of
    queries and centroids for coarse distances. Its index is a :class:`hybridindex.index.ivf.CodedIndex`."""

    most_k = MAX_CANDIDATES

    @property
    def _codes(self) -> RabitqCodes:
        codes = self._index.rabitq
        assert codes is not None
        return codes

    @property
    def _form(self) -> CodeFormat:
        form = self._codec.form
        assert form is not None
        return form

    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        if wanted is not None:
            raise InvalidInputError("a filter is given for a scan of codes; filters need a scan of rows")
        estimates = np.full((len(queries), k), np.inf, dtype=np.float32)
        positions = np.full((len(queries), k), -1, dtype=np.int64)
        self._scan_codes(
            np.ascontiguousarray(queries), probes, np.ascontiguousarray(coarse_distances), estimates, positions
        )
        return estimates, positions

    @abstractmethod
    def _scan_codes(self, queries: F32, probes: I64, products: F32, estimates: F32, positions: I64) -> None:
        """Fills in (n, k) estimates and positions, best first by (estimate, position). They come as empty places."""
