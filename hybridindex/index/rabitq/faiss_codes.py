"""Codes that faiss made (``IndexIVFRaBitQ``, 1 bit), put into our blocks.

faiss keeps of a row o with the residual r = o - c the signs V of r, not rotated, and two float32: b, |r|^2 (with inner
products: |r|^2 - |o|^2), and m = f sqrt(d) with f = |r|^2 / <V, r>. It answers with

    |q - o|^2    is about    b + |q - c|^2 - 2 f <V, q - c>

but nothing below 0; and, of inner products, with half of |q|^2 less that. Our blocks hold f, no g, and
h = b + |c|^2 + 2 f <V, c>: under l2 the estimate h - 2 x is that of faiss, up to |q|^2, which is the same for all rows,
and up to the rounding of f and q.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridindex.index.rabitq.encode import as_half, pack_blocks
from hybridindex.index.rabitq.spec import CodeFormat
from hybridindex.types import F32, F64, U8, Metric

__all__ = ["FAISS_CODEC", "FaissCodes", "code_bytes"]

#: What imports call the codec.
FAISS_CODEC = "faiss:IVFRaBitQ"
#: Of a code, behind its signs.
_FACTOR_BYTES = 8


def code_bytes(dim: int) -> int:
    """Of a row with 1 bit a dimension; more bits take more."""
    return -(-dim // 8) + _FACTOR_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissCodes:
    """Rows of one list or several."""

    #: (n, bytes) uint8, the lowest bit of a byte first; 1 for +.
    signs: U8
    #: (n,) float64; 0 where a row is its centroid.
    f: F64
    #: (n,) float64.
    b: F64
    dim: int

    @classmethod
    def of(cls, codes: U8, dim: int) -> FaissCodes:
        """``codes``: (n, :func:`code_bytes`) uint8."""
        factors = np.ascontiguousarray(codes[:, -_FACTOR_BYTES:]).view(np.float32).astype(np.float64)
        f = factors[:, 1] / np.sqrt(dim)
        return cls(signs=codes[:, :-_FACTOR_BYTES], f=np.where(np.isfinite(f), f, 0), b=factors[:, 0], dim=dim)

    def levels(self) -> F64:
        """V: (n, dim) float64, +1 and -1."""
        bits = np.unpackbits(np.ascontiguousarray(self.signs), axis=1, count=self.dim, bitorder="little")
        levels: F64 = bits * np.float64(2) - 1
        return levels

    def rows(self, centroid: F32) -> F32:
        """(n, dim) float32: c + f V, whose products with a query are those of the estimate but for a constant."""
        return (centroid + self.f[:, None] * self.levels()).astype(np.float32)

    def squares(self, centroid: F32, f: F64 | None = None) -> F32:
        """h: (n,) float32; ``f``: as it is stored, if not exactly."""
        c = centroid.astype(np.float64)
        return (self.b + c @ c + 2 * (self.f if f is None else f) * (self.levels() @ c)).astype(np.float32)

    def blocks(self, centroid: F32, form: CodeFormat) -> U8:
        """As :func:`hybridindex.index.rabitq.encode.encode_list`."""
        f = as_half(self.f.astype(np.float32), form.f_scale)
        h = self.squares(centroid, f.astype(np.float64) * form.f_scale)
        return pack_blocks([self.signs], f, np.zeros_like(f), h, form)

    def distances(self, query: F32, centroids: F32, metric: Metric) -> F64:
        """What faiss answers for a query that it does not round: (n,) float64.

        Args:
            centroids: (n, dim), of each row. Each sum is over its own row: what others there are changes nothing.
        """
        q = query.astype(np.float64)
        away = q - centroids
        nearness: F64 = (away * away).sum(axis=1) - 2 * self.f * (self.levels() * away).sum(axis=1) + self.b
        distances: F64 = np.maximum(nearness, 0) if metric == "l2" else ((q * q).sum() - nearness) / 2
        return distances
