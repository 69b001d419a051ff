"""What the rows of a product quantizer are, and how they lie in the pages of a device. No I/O, no faiss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridindex.types import F32, Metric

__all__ = ["BLOCK_ROWS", "PqForm"]

#: Rows of a block of four-bit codes, as faiss scans them.
BLOCK_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PqForm:
    """A product quantizer and how distances come about: see :mod:`hybridindex.index.pq.distances`."""

    dim: int
    #: Sub-quantizers; each has dim / parts dimensions.
    parts: int
    metric: Metric
    #: Rows are vectors minus their list's centroid.
    residual: bool
    #: (dim, 16 or 256) float32: a dimension of all codewords of its part.
    codewords: F32
    #: (dim,) float32: taken from queries and centroids where rows have terms, so that no digits are lost far from the
    #: origin.
    middle: F32

    @property
    def bits(self) -> int:
        """Of a part: 8, and a row's bytes follow each other; or 4, and rows lie in blocks of 32
        (:mod:`hybridindex.index.storage.pqfs`)."""
        return 4 if self.codewords.shape[1] == 16 else 8

    @property
    def part_dims(self) -> int:
        return self.dim // self.parts

    @property
    def code_size(self) -> int:
        """Bytes of a row in ``lists.bin``."""
        return self.parts if self.bits == 8 else -(-self.parts // 2)

    @property
    def group_rows(self) -> int:
        """Rows whose codes lie together."""
        return 1 if self.bits == 8 else BLOCK_ROWS

    @property
    def has_terms(self) -> bool:
        """Whether a part of the distance is the row's own, whatever the query."""
        return self.residual and self.metric == "l2"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a page: where rows have terms, that of each group lies behind its codes, as float32."""
        return self.code_size + (np.dtype(np.float32).itemsize if self.has_terms else 0)
