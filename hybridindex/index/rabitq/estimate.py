"""Estimates of distances from codes. The reference of the native scan: equal to the bit.

What stands for <q, o> is ((f * S) * u + (g * w)) + <q, c>, where S = <V, q'> with q' in whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.extension import native
from hybridindex.index.rabitq.encode import Blocks
from hybridindex.index.rabitq.rotation import rotate
from hybridindex.index.rabitq.spec import CodeFormat
from hybridindex.types import F32, I64

__all__ = ["LARGEST_ESTIMATE", "MOST_WHOLE", "CodedQueries", "code_queries", "estimates", "prepare_queries"]

#: By bits: queries are rounded to whole numbers up to this size. Coarse enough that sums of several of the kernels'
#: tables fit a byte; finer ones were measured to need no fewer candidates.
MOST_WHOLE = {1: 7, 2: 15, 4: 15}
#: Larger estimates, and what is no number, make no candidate.
LARGEST_ESTIMATE = np.nextafter(np.finfo(np.float32).max, np.float32(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedQueries:
    """Rotated queries in whole numbers."""

    #: (n, D) int8, within :data:`MOST_WHOLE`.
    whole: npt.NDArray[np.int8]
    #: (n,) float32: the step of each query, times ``f_scale``.
    u: F32

    def of(self, queries: I64) -> CodedQueries:
        """Some of them."""
        return CodedQueries(whole=self.whole[queries], u=self.u[queries])


def code_queries(queries: F32, signs: F32, form: CodeFormat) -> CodedQueries:
    """Of (n, d) float32 queries behind the pre-transforms, contiguous: natively where the extension does it."""
    if native is None:
        return prepare_queries(queries, signs, form)
    whole, u = np.empty((len(queries), form.padded_dim), np.int8), np.empty(len(queries), np.float32)
    native.rabitq_queries(queries, signs, form.bits, form.f_scale, whole, u)
    return CodedQueries(whole=whole, u=u)


def prepare_queries(queries: F32, signs: F32, form: CodeFormat) -> CodedQueries:
    """As :func:`code_queries`: its reference."""
    most = np.float32(MOST_WHOLE[form.bits])
    rotated = rotate(queries, signs)
    largest = np.abs(rotated).max(axis=1)
    with np.errstate(over="ignore"):
        factor = np.divide(most, largest, out=np.zeros_like(largest), where=largest > 0)
    factor[np.isinf(factor)] = 0  # too short for float32
    delta = np.where(factor > 0, largest / most, np.float32(0))
    whole = np.rint(rotated * factor[:, None]).astype(np.int8)
    return CodedQueries(whole=whole, u=delta * np.float32(form.f_scale))


def estimates(
    queries: CodedQueries, blocks: Blocks, centre_products: F32, centre_square: float, form: CodeFormat
) -> F32:
    """Of the distances between queries and rows of a list: (queries, rows) float32, smaller is better.

    Under l2 the square of the query is left out: it is the same for all rows.

    Args:
        centre_products: (queries,) float32, <q, c>.
        centre_square: |c|^2 of the list.
    """
    # Whole numbers below 2^24: exact, whatever the order of the sum.
    s = queries.whole.astype(np.float32) @ blocks.levels.astype(np.float32).T
    square = np.float32(centre_square)
    t = centre_products / square if square != 0 else np.zeros_like(centre_products)
    w = t * np.float32(form.g_scale)
    with np.errstate(over="ignore", invalid="ignore"):
        x = (blocks.f * s) * queries.u[:, None] + blocks.g * w[:, None] + centre_products[:, None]
    if form.metric == "ip":
        return -x
    estimate: F32 = blocks.h - np.float32(2) * x
    return estimate
