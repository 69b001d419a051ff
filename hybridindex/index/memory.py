"""How a build divides its memory budget. Pure numbers.

The budget bounds anonymous memory that the build adds to the process: samples, chunks, centroids, k-means and matrix
product buffers. Not counted: the interpreter and the libraries, the caller's own arrays, and pages of mapped files,
which the kernel may drop at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridindex.errors import InvalidInputError
from hybridindex.index.codec import CodecSpec

__all__ = ["BuildMemory", "divide_budget"]

#: Blocked matrix product of faiss (4096 x 1024 floats), thread buffers of BLAS, digests, small things.
_FIXED_BYTES = 40 << 20
_MIN_FREE_BYTES = 8 << 20
_MAX_CHUNK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildMemory:
    """Row counts that keep a build under its budget."""

    #: Rows of the k-means sample.
    train_rows: int
    #: Rows of the sample that train the codec.
    encoder_rows: int
    #: Rows that are assigned or encoded at a time.
    chunk_rows: int


def divide_budget(budget_bytes: int, *, dim: int, nlist: int, spec: CodecSpec) -> BuildMemory:
    """Divide ``budget_bytes``.

    Raises:
        InvalidInputError: the budget does not even hold centroids and one useful chunk; says what would.
    """
    centroid_bytes = 4 * dim * nlist
    # Centroids live in k-means, in the quantizer and in its transpose or copy; a few numbers per list besides.
    fixed = _FIXED_BYTES + 3 * centroid_bytes + 64 * nlist
    free = budget_bytes - fixed
    if free < _MIN_FREE_BYTES:
        need = -(-(fixed + _MIN_FREE_BYTES) // (1 << 20))
        raise InvalidInputError(
            f"memory_budget_bytes is {budget_bytes}; nlist {nlist} of dim {dim} needs {need << 20} ({need} MiB) or more"
        )
    row = 4 * dim
    # The sample stays while the codec trains on a part of it (copy, residual, one sub-space at a time).
    train_rows = free * 6 // 10 // (row + 24)
    encoder_rows = min(65_536, free // 4 // (3 * row + 24))
    # A chunk: input, transformed or residual copies, the finite mask, codes and their sorted copy, bookkeeping.
    chunk_rows = min(free, _MAX_CHUNK_BYTES) // (4 * row + dim + 2 * spec.code_size + 64)
    return BuildMemory(
        train_rows=max(256, train_rows), encoder_rows=max(256, encoder_rows), chunk_rows=max(64, chunk_rows)
    )
