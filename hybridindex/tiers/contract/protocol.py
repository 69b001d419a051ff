"""The protocol of scanners of inverted lists. ``tests/tiers/test_scanner_contract.py`` tests every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hybridindex.types import F32, I32, I64

__all__ = ["IdFilter", "OnDone", "Scanner"]

#: Called as queries complete: rows (m,) int32 into the scanned batch, their distances (m, k) f32 and ids (m, k) int64.
#: Called from the scanning thread, every row exactly once, before ``scan`` returns.
OnDone = Callable[[I32, F32, I64], None]

#: The ids that may be answered: (m,) int64 in ascending order, or a (largest id + 1,) bool array, true where allowed.
IdFilter = npt.NDArray[np.int64] | npt.NDArray[np.bool_]


class Scanner(Protocol):
    """Scans the given probes and nothing else; safe to call from several threads."""

    #: Short name used in profiles and reports: "faiss", "torch".
    name: str

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
        """Top-k of each query over its probed lists.

        Args:
            queries: (n, scan_dim) float32, host, already pre-transformed.
            probes: (n, p) int64 list ids; -1 = skip.
            coarse_distances: (n, p) float32 distance of each query to each probed centroid. Not optional: residual
                codecs need them.
            k: 1..2048.
            filter_ids: when given, only vectors with these ids are candidates; see :data:`IdFilter`.
            on_done: see :data:`OnDone`.

        Returns:
            distances (n, k) float32 best first and ids (n, k) int64. Empty places hold id -1.

        Raises:
            InvalidInputError: shapes or dtypes disagree, a probe is not a list id, ``k`` is out of range.
        """
        ...
