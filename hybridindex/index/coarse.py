"""Coarse quantization: of an open index, and of its model alone, for a process that chooses lists and scans none.

Where the quantizer is flat it is ours (``native/coarse/coarse_quantizer.cpp``): what a query gets depends neither on
the queries beside it nor on how many they are. faiss does the rest, and everything where the extension is missing; it
rounds in another way where it multiplies matrices, which depends on the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import CorruptIndexError
from hybridindex.extension import native
from hybridindex.index.faiss_model import (
    LoadedModel,
    apply_transforms,
    centroids_of,
    faiss_message,
    peel,
    quantize,
    require_faiss,
)
from hybridindex.types import F32, I32, I64, U8

__all__ = ["CoarseModel", "CoarseQuantizer"]


class CoarseQuantizer:
    """Finds the nearest centroids of an IVF index. Immutable, from any thread."""

    def __init__(self, ivf: Any) -> None:
        """
        Args:
            ivf: a faiss IVF index. A flat quantizer's centroids are copied.
        """
        self._ivf = ivf
        self._own: Any = None
        #: Whether distances are scalar products, to the bit those of ``native.pair_products``.
        self.gives_products = False
        if native is not None and _is_flat(ivf):
            self._own = native.CoarseQuantizer(centroids_of(ivf), self.inner_product, "")
            self.gives_products = self.inner_product

    @property
    def inner_product(self) -> bool:
        """Whether the nearest centroids are those of the largest scalar products; rows may have another metric."""
        return bool(self._ivf.quantizer.metric_type == require_faiss().METRIC_INNER_PRODUCT)

    @property
    def is_flat(self) -> bool:
        """Whether it is a plain table of centroids."""
        return _is_flat(self._ivf)

    @property
    def is_ours(self) -> bool:
        """Whether the extension does it."""
        return self._own is not None

    def quantize(self, x: F32, nprobe: int, pool: Any = None) -> tuple[I64, F32]:
        """Nearest centroids of ``x`` (n, scan_dim): lists (n, nprobe) int64, and distances f32.

        -1 = none found: by a graph quantizer, or since the other distances are no numbers. Equal distances are ordered
        by list where the quantizer is ours. ``pool``: a ``native.ThreadPool`` whose threads then help; what is found
        does not depend on it.
        """
        if self._own is None:
            return quantize(self._ivf, x, nprobe)
        lists = np.empty((len(x), nprobe), dtype=np.int64)
        distances = np.empty((len(x), nprobe), dtype=np.float32)
        self._own.quantize(x, lists, distances, pool)
        return lists, distances

    def nearest_of(self, x: F32, candidates: I32, farthest: F32, nprobe: int) -> tuple[I64, F32, npt.NDArray[np.bool_]]:
        """What :meth:`quantize` finds, to the bit, from candidates that a device chose; where it is ours.

        A device computes the centroids' negated scalar products with a query, or half their squared length less the
        product, with TF32 at worst.

        Args:
            x: (n, scan_dim) float32.
            candidates: (n, m) int32 lists in any order, m at least nprobe.
            farthest: (n,) float32: no other list is nearer to the query, as the device computes that.

        Returns:
            Lists (n, nprobe) int64, distances float32, and (n,) bool. True: no other list can be among the nearest.
            False: ignore the row.
        """
        lists = np.empty((len(x), nprobe), dtype=np.int64)
        distances = np.empty((len(x), nprobe), dtype=np.float32)
        settled = np.empty(len(x), dtype=np.bool_)
        self._own.nearest_of(x, candidates, farthest, lists, distances, settled)
        return lists, distances, settled


def _is_flat(ivf: Any) -> bool:
    """Whether the quantizer compares a query with all centroids as they are."""
    faiss = require_faiss()
    quantizer = faiss.downcast_index(ivf.quantizer)
    # Subclasses may search in another way.
    return (
        type(quantizer) in (faiss.IndexFlat, faiss.IndexFlatL2, faiss.IndexFlatIP)
        and quantizer.metric_type in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2)
        and quantizer.ntotal == ivf.nlist
    )


class CoarseModel:
    """Pre-transforms and coarse quantization; immutable, from any thread.

    Made from the bytes of ``model.faiss`` that an open index has mapped, so it stays that of the generation that
    serves, whatever the directory holds now.
    """

    def __init__(self, model: LoadedModel, *, fingerprint: str) -> None:
        """See :meth:`from_bytes`."""
        self._model = model
        self._coarse = CoarseQuantizer(model.ivf)
        self.fingerprint = fingerprint

    @classmethod
    def from_bytes(cls, data: U8, *, fingerprint: str) -> CoarseModel:
        """
        Args:
            data: (m,) uint8, :meth:`hybridindex.index.ivf.IVFIndex.mapped_model`; faiss trusts what it parses.
            fingerprint: of the index.

        Raises:
            CorruptIndexError: faiss cannot read it.
        """
        faiss = require_faiss()
        try:
            outer = faiss.deserialize_index(data, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)
        except (RuntimeError, MemoryError) as error:
            raise CorruptIndexError(f"faiss cannot read the model of {fingerprint}: {faiss_message(error)}") from error
        return cls(peel(outer)[0], fingerprint=fingerprint)

    @property
    def nlist(self) -> int:
        return int(self._model.ivf.nlist)

    def transform(self, queries: F32) -> F32:
        """(n, dim) float32 -> (n, scan_dim) float32, as :meth:`hybridindex.index.ivf.IVFIndex.transform`."""
        return apply_transforms(self._model.transforms, queries)

    def quantize(self, transformed: F32, nprobe: int) -> tuple[I64, F32]:
        """(n, scan_dim) -> lists (n, nprobe) int64, -1 = none found, and distances float32."""
        return self._coarse.quantize(np.ascontiguousarray(transformed, dtype=np.float32), nprobe)
