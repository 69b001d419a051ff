"""Merging one tier's answer into a batch's running top-k, ties by (distance, id). Pure.

The native kernel does the work; :func:`merge_topk_reference` says in numpy what it must leave behind.
"""

from __future__ import annotations

import numpy as np

from hybridindex.extension import native
from hybridindex.types import F32, I32, I64

__all__ = ["empty_topk", "finish_topk", "merge_added", "merge_topk", "merge_topk_reference"]


def empty_topk(n: int, k: int, *, keep_max: bool) -> tuple[F32, I64]:
    """(n, k) distances and ids with every place empty."""
    worst = -np.inf if keep_max else np.inf
    return np.full((n, k), worst, dtype=np.float32), np.full((n, k), -1, dtype=np.int64)


def finish_topk(distances: F32, ids: I64, *, keep_max: bool) -> None:
    """Puts one scanner's complete answer (n, k) into its public form, in place: ties by id, empty places infinite."""
    if native is None:
        whole = np.arange(len(ids), dtype=np.int32)
        found = empty_topk(*ids.shape, keep_max=keep_max)
        merge_topk_reference(*found, whole, distances, ids, keep_max=keep_max)
        distances[:], ids[:] = found
    else:
        native.finish_topk(distances, ids, keep_max)


def merge_added(distances: F32, ids: I64, found: tuple[F32, I64], *, keep_max: bool) -> None:
    """Merges what a scan of added rows found into an answer, all (n, k), in place."""
    rows = np.arange(len(ids), dtype=np.int32)
    merge_topk(distances, ids, rows, *map(np.ascontiguousarray, found), keep_max=keep_max)


def merge_topk(best_distances: F32, best_ids: I64, rows: I32, distances: F32, ids: I64, *, keep_max: bool) -> None:
    """Merges part row i into batch row ``rows[i]``, in place.

    Args:
        best_distances: (n, k) float32, best first; changed.
        best_ids: (n, k) int64, -1 in empty places; changed.
        rows: (m,) int32.
        distances: (m, kp) float32, best first, ties in any order.
        ids: (m, kp) int64.
        keep_max: True for ip.
    """
    if native is None:
        merge_topk_reference(best_distances, best_ids, rows, distances, ids, keep_max=keep_max)
    else:
        native.merge_topk(best_distances, best_ids, rows, distances, ids, keep_max)


def merge_topk_reference(
    best_distances: F32, best_ids: I64, rows: I32, distances: F32, ids: I64, *, keep_max: bool
) -> None:
    """The same in numpy."""
    k = best_ids.shape[1]
    worst = np.float32(-np.inf if keep_max else np.inf)
    all_ids = np.concatenate((best_ids[rows], ids), axis=1)
    all_distances = np.concatenate((best_distances[rows], distances), axis=1)
    all_distances = np.where(all_ids < 0, worst, all_distances)
    rank = -all_distances if keep_max else all_distances
    # Empty places last, also behind a real result at infinite distance.
    order = np.lexsort((all_ids, rank, all_ids < 0), axis=1)[:, :k]
    best_ids[rows] = np.take_along_axis(all_ids, order, axis=1)
    best_distances[rows] = np.take_along_axis(all_distances, order, axis=1)
