"""Probe split: which probed list is scanned where, by one leased snapshot. Pure; no threads, no torch.

The native kernel does the work; :func:`split_probes_reference` says in numpy what it must answer, and stands in where
the extension was not built.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.partitioner.nodes.cover import MOST_NODES
from hybridindex.types import F32, I32, I64

__all__ = [
    "HOST",
    "ProbePart",
    "ProbeSplit",
    "compact",
    "split_among_nodes",
    "split_among_nodes_reference",
    "split_probes",
    "split_probes_reference",
]

#: The tier number of the host; devices count from 0.
HOST = -1

_Number = TypeVar("_Number", bound=np.generic)


class ProbePart(NamedTuple):
    """The probes of one tier, compacted: only queries with work there, only their own probes, in coarse order."""

    #: Device ordinal, or :data:`HOST`.
    device: int
    #: (m,) int32 rows of the batch.
    rows: I32
    #: (m, w) int64 list ids; short rows end in -1.
    probes: I64
    #: (m, w) float32.
    coarse_distances: F32
    #: Code bytes to scan, over all rows.
    total_bytes: int


class ProbeSplit(NamedTuple):
    """One batch, split."""

    #: Non-empty parts, host first.
    parts: tuple[ProbePart, ...]
    #: (n,) float32: resident bytes / probed bytes of each query.
    hit_rate: F32
    #: (n,) int32: parts that hold work of each query.
    n_parts: I32
    #: (n,) int32: probes of each query that name a list.
    n_probes: I32


def split_probes(
    probes: I64, coarse_distances: F32, list_device: npt.NDArray[np.int16], list_bytes: I64, n_devices: int
) -> ProbeSplit:
    """Splits (n, p) probes by ``list_device`` (nlist,) int16, -1 = host.

    Raises:
        InvalidInputError: a probe is not a list id, or a list is mapped to a device that is not there.
    """
    if native is None:
        return split_probes_reference(probes, coarse_distances, list_device, list_bytes, n_devices)
    return _split(probes, coarse_distances, list_device, list_bytes, n_devices)


def _split(
    probes: I64,
    coarse_distances: F32,
    list_device: npt.NDArray[np.int16],
    list_bytes: I64,
    n_devices: int,
    *of_nodes: Any,
) -> ProbeSplit:
    assert native is not None
    n = len(probes)
    hit_rate, n_parts, n_probes = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n, np.int32)
    try:
        found = native.split_probes(
            probes, coarse_distances, list_device, list_bytes, n_devices, hit_rate, n_parts, n_probes, *of_nodes
        )
    except IndexError as error:
        raise InvalidInputError(str(error)) from error
    parts = []
    for device, total_bytes, rows, lists, distances in found:
        if rows is None:  # one tier has the whole batch, and nothing was copied
            rows, lists, distances = np.arange(n, dtype=np.int32), probes, coarse_distances
        # The buffer protocol names int64 "long long", which numpy takes for int64 and faiss's bindings do not.
        parts.append(ProbePart(device, rows, lists.view(np.int64), distances, total_bytes))
    return ProbeSplit(tuple(parts), hit_rate, n_parts, n_probes)


def split_probes_reference(
    probes: I64, coarse_distances: F32, list_device: npt.NDArray[np.int16], list_bytes: I64, n_devices: int
) -> ProbeSplit:
    """The same in numpy."""
    n, nlist = len(probes), len(list_device)
    if probes.size and (probes.min() < -1 or probes.max() >= nlist):
        raise InvalidInputError(f"probes hold a list id outside -1..{nlist - 1}")
    valid = probes >= 0
    device = np.where(valid, list_device[probes], HOST)
    if device.size and (device.min() < HOST or device.max() >= n_devices):
        raise InvalidInputError(f"a list is mapped to a device outside {HOST}..{n_devices - 1}")
    work = np.where(valid, list_bytes[probes], 0)
    total, resident = work.sum(axis=1), np.where(device >= 0, work, 0).sum(axis=1)
    hit_rate = np.divide(resident, total, out=np.zeros(n), where=total > 0).astype(np.float32)
    n_parts = np.zeros(n, dtype=np.int32)
    parts = []
    for tier in range(HOST, n_devices):
        mine = valid & (device == tier)
        if not mine.any():
            continue
        rows, own, distances = compact(mine, probes, coarse_distances)
        n_parts[rows] += 1
        parts.append(ProbePart(tier, rows, own, distances, int(work[mine].sum())))
    return ProbeSplit(tuple(parts), hit_rate, n_parts, valid.sum(axis=1).astype(np.int32))


def compact(
    mine: npt.NDArray[np.bool_], probes: I64, beside: npt.NDArray[_Number]
) -> tuple[I32, I64, npt.NDArray[_Number]]:
    """The rows of (n, p) that have any of ``mine``, and only their own probes and what lies beside these, as coarse
    distances do, in their order, -1 and 0 at the end: (m,) int32, (m, w) int64, (m, w)."""
    if len(mine) == 1:
        own = np.flatnonzero(mine[0])
        return np.zeros(1, dtype=np.int32), probes[:, own], beside[:, own]
    rows = np.flatnonzero(mine.any(axis=1))
    mine = mine[rows]
    width = int(mine.sum(axis=1).max())
    # A stable sort of "not mine" moves a row's own probes to the front and keeps their order.
    order = np.argsort(~mine, axis=1, kind="stable")[:, :width]
    kept = np.take_along_axis(mine, order, axis=1)
    found = np.where(kept, np.take_along_axis(probes[rows], order, axis=1), -1)
    moved = np.where(kept, np.take_along_axis(beside[rows], order, axis=1), np.zeros((), beside.dtype))
    return rows.astype(np.int32), found, moved


def split_among_nodes(
    probes: I64,
    coarse_distances: F32,
    where: npt.NDArray[np.int16],
    list_device: npt.NDArray[np.int16],
    list_bytes: I64,
    n_devices: int,
) -> tuple[ProbeSplit, I64, I64]:
    """Splits probes of which other nodes of a cluster scan some.

    Args:
        where: (n, p) int16: -1 = here, j = node j, -2 = nobody has the list.

    Returns:
        The split, whose parts of node j have the device ``n_devices + j``; and of each query (n,) int64 the bytes of
        all its probes, and of those that nobody has.

    Raises:
        InvalidInputError: as :func:`split_probes`, or a node that is none.
    """
    if native is None:
        return split_among_nodes_reference(probes, coarse_distances, where, list_device, list_bytes, n_devices)
    work, lost = np.empty(len(probes), np.int64), np.empty(len(probes), np.int64)
    split = _split(probes, coarse_distances, list_device, list_bytes, n_devices, where, MOST_NODES, work, lost)
    return split, work, lost


def split_among_nodes_reference(
    probes: I64,
    coarse_distances: F32,
    where: npt.NDArray[np.int16],
    list_device: npt.NDArray[np.int16],
    list_bytes: I64,
    n_devices: int,
) -> tuple[ProbeSplit, I64, I64]:
    """The same in numpy."""
    if where.size and (where.min() < -2 or where.max() >= MOST_NODES):
        raise InvalidInputError(f"a probe is for a node outside -2..{MOST_NODES - 1}")
    valid = probes >= 0
    work = np.where(valid, list_bytes[probes], 0)
    own = np.where(where == HOST, probes, -1)
    here = split_probes_reference(own, coarse_distances, list_device, list_bytes, n_devices)
    parts, n_parts = list(here.parts), here.n_parts.copy()
    for node in np.unique(where[valid & (where >= 0)]).tolist():
        mine = valid & (where == node)
        rows, own, distances = compact(mine, probes, coarse_distances)
        n_parts[rows] += 1
        parts.append(ProbePart(n_devices + node, rows, own, distances, int(work[mine].sum())))
    total = work.sum(axis=1)
    on_devices = np.where(valid & (where == HOST) & (list_device[probes] >= 0), work, 0).sum(axis=1)
    hit_rate = np.divide(on_devices, total, out=np.zeros(len(probes)), where=total > 0).astype(np.float32)
    split = ProbeSplit(tuple(parts), hit_rate, n_parts, valid.sum(axis=1).astype(np.int32))
    return split, total, np.where(valid & (where < HOST), work, 0).sum(axis=1)
