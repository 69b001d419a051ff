"""The coarse quantizer of an index alone: for a process that chooses lists and scans none.

It is made from the bytes of ``model.faiss`` that an open index has mapped, so it stays that of the generation that
serves, whatever the directory holds now.
"""

from __future__ import annotations

from hybridindex.errors import CorruptIndexError
from hybridindex.index.faiss_model import (
    LoadedModel,
    apply_transforms,
    faiss_message,
    peel,
    quantize,
    require_faiss,
)
from hybridindex.types import F32, I64, U8

__all__ = ["CoarseModel"]


class CoarseModel:
    """Pre-transforms and coarse quantization; immutable, from any thread."""

    def __init__(self, model: LoadedModel, *, fingerprint: str) -> None:
        """See :meth:`from_bytes`."""
        self._model = model
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
        return quantize(self._model.ivf, transformed, nprobe)
