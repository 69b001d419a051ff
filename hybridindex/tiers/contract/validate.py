"""Argument checks shared by all scanners: an error before anything is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridindex.config import MAX_K
from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.tiers.contract.protocol import IdFilter
from hybridindex.tiers.contract.residency import Residency
from hybridindex.types import F32, I64

__all__ = ["MAX_K", "allowed_ids", "check_filter", "check_resident", "check_scan", "check_shapes", "check_threads"]


def check_scan(
    queries: F32, probes: I64, coarse_distances: F32, k: int, *, dim: int, nlist: int, most: int = MAX_K
) -> None:
    """Checks the arguments of :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`; ``most``: k's largest.

    Raises:
        InvalidInputError: names the argument, what it is and what it should be.
    """
    check_shapes(queries, probes, coarse_distances, k, dim=dim, most=most)
    _check_range(probes, nlist)


def check_shapes(queries: F32, probes: I64, coarse_distances: F32, k: int, *, dim: int, most: int = MAX_K) -> None:
    """:func:`check_scan` of all but which lists are probed."""
    if not 1 <= k <= most:
        raise InvalidInputError(f"k is {k}; expected 1..{most}")
    if queries.ndim != 2 or queries.shape[1] != dim or queries.dtype != np.float32:
        raise InvalidInputError(f"queries are {queries.dtype} {queries.shape}; expected float32 (n, {dim})")
    if probes.ndim != 2 or len(probes) != len(queries) or probes.dtype != np.int64:
        raise InvalidInputError(f"probes are {probes.dtype} {probes.shape}; expected int64 ({len(queries)}, p)")
    if coarse_distances.shape != probes.shape or coarse_distances.dtype != np.float32:
        raise InvalidInputError(
            f"coarse_distances are {coarse_distances.dtype} {coarse_distances.shape}; expected float32 {probes.shape}"
        )


def _check_range(probes: I64, nlist: int) -> None:
    if probes.size:
        low, high = int(probes.min()), int(probes.max())
        if low < -1 or high >= nlist:
            bad = low if low < -1 else high
            raise InvalidInputError(f"probes hold list id {bad}; expected -1 (skip) or 0..{nlist - 1}")


def check_resident(probes: I64, residency: Residency, ordinal: int, list_sizes: I64) -> None:
    """Checks that probes are lists, and that device ``ordinal`` holds each that has rows; an empty list holds nothing
    anywhere.

    Raises:
        InvalidInputError: names a list that is not resident there in this snapshot, or not there at all.
    """
    list_device = residency.list_device
    # Every scan of a device waits for this.
    fast = native is not None and probes.flags.c_contiguous
    if fast and native.first_absent(probes, list_sizes, list_device, ordinal) < 0:  # type: ignore[union-attr]
        return
    _check_range(probes, len(list_sizes))
    probed = probes[probes >= 0]
    absent = probed[(list_device[probed] != ordinal) & (list_sizes[probed] > 0)]
    if len(absent):
        raise InvalidInputError(f"list {int(absent[0])} is probed on device {ordinal} but not resident there")


def check_filter(filter_ids: Any) -> None:
    """Checks a filter of :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`.

    Raises:
        InvalidInputError: neither ascending int64 ids nor a bool array.
    """
    if filter_ids is None:
        return
    if not isinstance(filter_ids, np.ndarray) or filter_ids.ndim != 1 or filter_ids.dtype not in (np.int64, np.bool_):
        what = f"{filter_ids.dtype} {filter_ids.shape}" if isinstance(filter_ids, np.ndarray) else type(filter_ids)
        raise InvalidInputError(f"filter_ids is {what}; expected a one-dimensional int64 or bool array")
    if filter_ids.dtype == np.int64 and len(filter_ids) > 1 and (filter_ids[1:] < filter_ids[:-1]).any():
        raise InvalidInputError("filter_ids are not in ascending order")


def allowed_ids(filter_ids: IdFilter) -> I64:
    """A filter as ascending ids (m,) int64, contiguous."""
    if filter_ids.dtype == np.bool_:
        return np.flatnonzero(filter_ids)
    return np.ascontiguousarray(filter_ids, dtype=np.int64)


def check_threads(threads: Any) -> int | None:
    """A thread count of at least 1, or None.

    Raises:
        InvalidInputError: anything else.
    """
    if threads is None:
        return None
    if isinstance(threads, bool) or not isinstance(threads, int | np.integer) or threads < 1:
        raise InvalidInputError(f"threads is {threads!r}; expected an integer of at least 1")
    return int(threads)
