"""The centroids of an index on a device, which finds the lists that may be near to queries.

A device multiplies all queries of a batch with all centroids at once, and rounds in a way of its own. So it only
chooses candidates, a few more than are wanted. The host computes their distances, and proves that no other list is
nearer (:meth:`hybridindex.index.coarse.CoarseQuantizer.nearest_of`). Lists and distances are those that the host finds
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.types import F32, I32

if TYPE_CHECKING:
    import torch

__all__ = ["CentroidSearch", "DeviceCentroids", "centroid_bytes", "n_candidates"]

#: Queries whose distances to all centroids are in memory at once, and queries of one search at most.
_TOGETHER, MOST_QUERIES = 64, 1024
#: Of each of those distances: itself, and what their selection takes.
_BYTES_OF_DISTANCE = 12
#: What the library of matrix products takes for itself on a GPU.
_LIBRARY_BYTES = 33 << 20
#: Candidates beyond those that are wanted: a part of them, and so many.
_SPARE_PART, _SPARE = 8, 64


def centroid_bytes(nlist: int, dim: int) -> int:
    """What :class:`DeviceCentroids` takes of a GPU."""
    return nlist * (dim + 1) * 4 + _TOGETHER * nlist * _BYTES_OF_DISTANCE + _LIBRARY_BYTES


def n_candidates(nprobe: int, nlist: int) -> int | None:
    """How many lists a device chooses for each query; None: so many that the host had rather compare all."""
    chosen = nprobe + nprobe // _SPARE_PART + _SPARE
    return chosen if 2 * chosen <= nlist else None


class CentroidSearch:
    """Candidates that are on their way."""

    def __init__(self, found: torch.Tensor, ended: Any, held: object) -> None:
        """
        Args:
            found: (n, m + 1) int32 in host memory: m candidates, and the bits of how far the farthest one is.
            ended: CUDA event behind them; None: they are there.
            held: what the device still reads.
        """
        self._found, self._ended, self._held = found, ended, held

    def done(self) -> bool:
        """Whether they are there. Raises what the device has to say when it is lost."""
        return self._ended is None or bool(self._ended.query())

    def take(self) -> tuple[I32, F32]:
        """Candidates (n, m) int32 in no order, and (n,) float32 how far the farthest of each query is: no other list is
        nearer, as the device sees it. Once :meth:`done`."""
        found = self._found.numpy()
        return np.ascontiguousarray(found[:, :-1]), np.ascontiguousarray(found[:, -1]).view(np.float32)


class DeviceCentroids:
    """Centroids in the memory of a device. One thread searches at a time."""

    def __init__(self, centroids: F32, device: torch.device, *, by_products: bool) -> None:
        """Copies the centroids, and searches.

        Args:
            centroids: (nlist, dim) float32.
            by_products: whether larger scalar products are nearer, and not shorter distances.

        Raises:
            RuntimeError: the device has no room for them, or does not work.
        """
        import torch

        self._device = device
        #: (dim, nlist), a view; and of half the squared distance the part that no query changes, (nlist,).
        self._columns = torch.from_numpy(np.array(centroids)).to(device).T
        halves = np.zeros(len(centroids)) if by_products else (centroids.astype(np.float64) ** 2).sum(axis=1) / 2
        self._halves = torch.from_numpy(halves.astype(np.float32)).to(device)
        # Before others: scans of a batch wait for its lists.
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        for n in (1, _TOGETHER):
            self.start(np.zeros((n, centroids.shape[1]), dtype=np.float32), 1)
        if self._stream is not None:
            self._stream.synchronize()

    def start(self, queries: F32, m: int) -> CentroidSearch:
        """Starts to choose the ``m`` nearest centroids of ``queries`` (n, dim), n up to :data:`MOST_QUERIES`, and
        returns at once. Raises what the device has to say.
        """
        import torch

        x = torch.from_numpy(queries)
        if self._stream is None:
            return CentroidSearch(self._search(x, m), None, None)
        with torch.cuda.stream(self._stream):
            # Page-locked memory comes from torch's cache, which knows when a stream has read it.
            pinned = torch.empty(x.shape, dtype=torch.float32, pin_memory=True)
            pinned.copy_(x)
            there = self._search(pinned.to(self._device, non_blocking=True), m)
            found = torch.empty(there.shape, dtype=torch.int32, pin_memory=True)
            found.copy_(there, non_blocking=True)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(self._stream)
        return CentroidSearch(found, ended, (pinned, there))

    def _search(self, x: torch.Tensor, m: int) -> torch.Tensor:
        """(n, m + 1) int32: see :class:`CentroidSearch`."""
        import torch

        parts = []
        for first in range(0, len(x), _TOGETHER):
            distances = torch.addmm(self._halves, x[first : first + _TOGETHER], self._columns, alpha=-1)
            nearest, lists = torch.topk(distances, m, dim=1, largest=False, sorted=False)
            farthest = nearest.amax(dim=1, keepdim=True).view(torch.int32)
            parts.append(torch.cat((lists.to(torch.int32), farthest), dim=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
