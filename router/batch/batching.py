"""On-demand batching: what the next batch takes, and how many may be under way (VectorLiteRAG, "dynamic batching").

Pure. The engine applies it to its queue, :mod:`hybridindex.studies.simulator` to virtual time.
"""

from __future__ import annotations

__all__ = ["MAX_BATCHES_IN_FLIGHT", "fits"]

#: The host starts on the next batch while a device finishes the last.
MAX_BATCHES_IN_FLIGHT = 2


def fits(n_taken: int, n_more: int, max_batch: int | None) -> bool:
    """Whether a request of ``n_more`` queries joins a batch of ``n_taken``; None: everything that waits does."""
    return max_batch is None or n_taken + n_more <= max_batch
