"""On-demand batching: what the next batch takes, and how many may be under way (VectorLiteRAG, "dynamic batching").

Pure. The engine applies it to its queue, :mod:`hybridindex.studies.simulator` to virtual time, where a batch of small
requests stays far below :data:`MAX_BATCH_CELLS` and ``max_batch`` is the one cap.
"""

from __future__ import annotations

__all__ = ["MAX_BATCHES_IN_FLIGHT", "MAX_BATCH_CELLS", "fits"]

#: The host starts on the next batch while a device finishes the last.
MAX_BATCHES_IN_FLIGHT = 2

#: Queries times their largest nprobe, k or candidates, of several requests in one batch: its arrays then take tens of
#: MiB. A request that is larger goes alone.
MAX_BATCH_CELLS = 1 << 20


def fits(n_taken: int, n_more: int, max_batch: int | None, width: int = 1) -> bool:
    """Whether a request of ``n_more`` queries joins a batch of ``n_taken``.

    Args:
        max_batch: most queries; None: everything that waits.
        width: the largest nprobe, k or number of candidates of all of them.
    """
    n = n_taken + n_more
    return (max_batch is None or n <= max_batch) and n * width <= MAX_BATCH_CELLS
