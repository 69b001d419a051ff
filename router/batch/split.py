"""Probe split: which probed list is scanned where, by one leased snapshot. Pure; no threads, no torch.

The native kernel does the work; :func:`split_probes_reference` says in numpy what it must answer, and stands in where
the extension was not built.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.types import F32, I32, I64

__all__ = ["HOST", "ProbePart", "ProbeSplit", "split_probes", "split_probes_reference"]

#: The tier number of the host; devices count from 0.
HOST = -1


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
    n = len(probes)
    hit_rate, n_parts, n_probes = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n, np.int32)
    try:
        found = native.split_probes(
            probes, coarse_distances, list_device, list_bytes, n_devices, hit_rate, n_parts, n_probes
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
        rows = np.flatnonzero(mine.any(axis=1))
        if len(rows) == 0:
            continue
        n_parts[rows] += 1
        width = int(mine.sum(axis=1).max())
        # A stable sort of "not mine" moves a row's own probes to the front and keeps their order.
        order = np.argsort(~mine[rows], axis=1, kind="stable")[:, :width]
        kept = np.take_along_axis(mine[rows], order, axis=1)
        parts.append(
            ProbePart(
                tier,
                rows.astype(np.int32),
                np.where(kept, np.take_along_axis(probes[rows], order, axis=1), -1),
                np.where(kept, np.take_along_axis(coarse_distances[rows], order, axis=1), np.float32(0)),
                int(work[mine].sum()),
            )
        )
    return ProbeSplit(tuple(parts), hit_rate, n_parts, valid.sum(axis=1).astype(np.int32))
