"""Which queries share a micro-batch, and which device gets it (TeleRAG, §4.2 and Appendix C). Pure.

Alike queries probe the same lists, so a micro-batch of them moves and scans fewer unique bytes; a device that caches
a micro-batch's lists already need not fetch them. Both choices are greedy, as in the paper.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.types import F32, F64, I64

__all__ = [
    "assign_greedily",
    "group_queries",
    "overlap_bytes",
    "resident_on",
]


def group_queries(queries: F32, group_size: int) -> I64:
    """Group of each query, (n,) int64 from 0, by L2 distance: greedy, the tightest group first.

    Each turn the query whose ``group_size - 1`` nearest among those without a group are nearest altogether takes them.
    All groups are full but the last, which has the rest. The same queries in the same order give the same groups.

    Args:
        queries: (n, scan_dim) float32, finite.

    Raises:
        InvalidInputError: ``group_size`` is below 1.
    """
    if group_size < 1:
        raise InvalidInputError(f"group_size is {group_size}; a group has at least 1 query")
    n, n_nearest = len(queries), group_size - 1
    if n_nearest == 0 or n <= group_size:
        return np.arange(n, dtype=np.int64) // group_size
    distances = _squared_distances(queries)
    np.fill_diagonal(distances, np.inf)
    nearest = _smallest(distances, n_nearest)
    spread = _sums(distances, nearest)
    n_full = n // group_size
    group_of = np.full(n, n_full, dtype=np.int64)
    gone = np.zeros(n, dtype=np.bool_)
    for group in range(n_full):
        seed = int(spread.argmin())
        members = np.append(nearest[seed], seed)
        group_of[members] = group
        gone[:] = False
        gone[members] = True
        distances[:, members] = np.inf
        spread[members] = np.inf
        # Only who lost a neighbour has others now.
        robbed = np.flatnonzero(gone[nearest].any(axis=1) & np.isfinite(spread))
        nearest[robbed] = _smallest(distances[robbed], n_nearest)
        spread[robbed] = _sums(distances[robbed], nearest[robbed])
    return group_of


def _smallest(rows: F32, count: int) -> I64:
    """Columns of the ``count`` smallest of each row, in no order."""
    columns: I64 = np.argpartition(rows, count - 1, axis=1)[:, :count]
    return columns


def _sums(rows: F32, columns: I64) -> F64:
    # Squares of the longest queries that an index takes fit float32, many of them together do not.
    sums: F64 = np.take_along_axis(rows, columns, axis=1).sum(axis=1, dtype=np.float64)
    return sums


def _squared_distances(queries: F32) -> F32:
    # Norms and products cancel badly far from the origin; between queries only differences matter.
    x = queries - queries.mean(axis=0, dtype=np.float64).astype(np.float32)
    norms = np.einsum("nd,nd->n", x, x)
    # Not x @ x.T: BLAS would wait for threads of its own, for milliseconds where scans keep the cores busy.
    squared: F32 = norms[:, None] + norms[None, :] - 2.0 * np.einsum("nd,md->nm", x, x)
    return squared


def resident_on(list_device: npt.NDArray[np.int16], n_devices: int) -> npt.NDArray[np.bool_]:
    """(n_devices, nlist) bool of a residency snapshot's ``list_device`` (nlist,) int16, -1 = host."""
    resident: npt.NDArray[np.bool_] = list_device[None, :] == np.arange(n_devices, dtype=np.int16)[:, None]
    return resident


def overlap_bytes(probes: I64, group_of: I64, n_groups: int, resident: npt.NDArray[np.bool_], list_bytes: I64) -> F64:
    """Bytes of each group's unique lists that each device has, (n_groups, n_devices) float64, exact below 2**53.

    Args:
        probes: (n, p) int64 probed lists; -1 = none.
        group_of: (n,) int64 group of each query, 0 to ``n_groups`` - 1.
        resident: (n_devices, nlist) bool. A list may be on several devices.
        list_bytes: (nlist,) int64. Ones count lists, as the paper does.
    """
    nlist = len(list_bytes)
    # One column more takes the probes that name no list: -1 is the last column.
    touched = np.zeros((n_groups, nlist + 1), dtype=np.bool_)
    touched[group_of[:, None], probes] = True
    resident_bytes = resident * list_bytes.astype(np.float64)
    overlap: F64 = np.einsum("gl,dl->gd", touched[:, :nlist].astype(np.float64), resident_bytes)
    return overlap


def assign_greedily(overlap: F64) -> I64:
    """Device of each group, (n_groups,) int64: largest overlap first, and as many groups for each device as for others.

    Quotas differ by one at most. Among equal overlaps the lower group, then the lower device is first.

    Args:
        overlap: (n_groups, n_devices) float64, larger is better.

    Raises:
        InvalidInputError: there are groups and no device.
    """
    n_groups, n_devices = overlap.shape
    if n_devices == 0 and n_groups:
        raise InvalidInputError(f"{n_groups} groups and no device; give one device at least")
    device_of = np.full(n_groups, -1, dtype=np.int64)
    if n_groups == 0:
        return device_of
    quota, extra = divmod(n_groups, n_devices)
    taken = [0] * n_devices
    # Which devices get one group more is open: those whose overlap asks for it first.
    for pair in np.argsort(-overlap, axis=None, kind="stable").tolist():
        group, device = divmod(pair, n_devices)
        if device_of[group] >= 0 or taken[device] > quota or (taken[device] == quota and extra == 0):
            continue
        extra -= taken[device] == quota
        device_of[group] = device
        taken[device] += 1
    return device_of
