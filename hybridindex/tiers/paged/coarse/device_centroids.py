"""The centroids of an index on a device, which finds the lists that may be near to queries.

A device multiplies all queries of a batch with all centroids at once, and rounds in a way of its own. So it only
chooses candidates, a few more than are wanted. The host computes their distances, and proves that no other list is
nearer (:meth:`hybridindex.index.coarse.CoarseQuantizer.nearest_of`). Lists and distances are those that the host finds
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hybridindex.types import F32, I32

if TYPE_CHECKING:
    import torch

__all__ = ["MOST_QUERIES", "DeviceCentroids", "centroid_bytes", "n_candidates"]

#: Queries whose distances to all centroids are in memory at once, and queries of one search at most.
_TOGETHER, MOST_QUERIES = 64, 1024
#: Of each of those distances: itself, its part of the candidates (half of the lists at most), and of their selection.
_BYTES_OF_DISTANCE = 16
#: What the library of matrix products takes for itself on a GPU.
_LIBRARY_BYTES = 33 << 20
#: Candidates beyond those that are wanted: a part of them, and so many.
_SPARE_PART, _SPARE = 8, 64
#: Centroids as long as this, or longer, are never proven to be the nearest.
_TOO_LONG = 1e15


def centroid_bytes(nlist: int, dim: int) -> int:
    """What :class:`DeviceCentroids` takes of a GPU."""
    return nlist * (dim + 1) * 4 + _TOGETHER * (nlist * _BYTES_OF_DISTANCE + dim * 4) + _LIBRARY_BYTES


def n_candidates(nprobe: int, nlist: int) -> int | None:
    """How many lists a device chooses for each query; None: so many that the host had rather compare all."""
    chosen = nprobe + nprobe // _SPARE_PART + _SPARE
    return chosen if 2 * chosen <= nlist else None


class DeviceCentroids:
    """Centroids in the memory of a device, with all that a search takes. One thread searches."""

    #: By device. A stream for each index would leave memory of the library behind with it.
    _streams: ClassVar[dict[str, Any]] = {}

    def __init__(self, centroids: F32, device: torch.device, *, by_products: bool) -> None:
        """
        Args:
            centroids: (nlist, dim) float32.
            by_products: whether larger scalar products are nearer, and not shorter distances.

        Raises:
            ValueError: nothing could be proven of them.
            RuntimeError: the device has no room for them, or does not work.
        """
        import torch

        nlist, dim = centroids.shape
        squares = np.einsum("ij,ij->i", centroids, centroids, dtype=np.float64)
        if not squares.max() < _TOO_LONG**2:
            raise ValueError("a centroid is too long, or no number")
        halves = np.zeros(nlist) if by_products else squares / 2
        on_gpu = device.type == "cuda"
        # The stand-in's products are in double precision: some CPUs multiply float32 with fewer bits than a GPU.
        kind = torch.float32 if on_gpu else torch.float64
        self._stream: Any = None
        if on_gpu:
            stream = self._streams.get(str(device))
            if stream is None:
                # Before others: scans of a batch wait for its lists.
                stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
                stream = self._streams.setdefault(str(device), stream)
            self._stream = stream
        most = max(1, nlist // 2)
        with torch.cuda.stream(self._stream):
            #: (dim, nlist), a view; and of half the squared distance the part that no query changes, (nlist,).
            self._columns = torch.from_numpy(np.array(centroids)).to(device, kind).T
            self._halves = torch.from_numpy(halves).to(device, kind)
            self._queries = torch.empty((_TOGETHER, dim), dtype=kind, device=device)
            self._distances = torch.empty((_TOGETHER, nlist), dtype=kind, device=device)
            self._nearest = torch.empty(_TOGETHER * most, dtype=kind, device=device)
            self._lists = torch.empty(_TOGETHER * most, dtype=torch.int64, device=device)
            self._farthest = torch.empty((_TOGETHER, 1), dtype=kind, device=device)
        #: Of the host, page-locked on a GPU.
        self._sent = torch.empty((_TOGETHER, dim), dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._came = torch.empty(_TOGETHER * most, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._how_far = torch.empty((_TOGETHER, 1), dtype=kind, device="cpu", pin_memory=on_gpu)

    def warm_up(self) -> None:
        """Searches once, on the thread that will: the device makes what it needs for that."""
        for n in (1, _TOGETHER):
            self.search(np.zeros((n, self._sent.shape[1]), dtype=np.float32), 1)

    def search(self, queries: F32, m: int) -> tuple[I32, F32]:
        """The ``m`` nearest centroids of ``queries`` (n, dim), as the device sees it. Waits for it, without a limit.
        Raises what it has to say.

        Args:
            m: half of the lists at most.

        Returns:
            Lists (n, m) int32 in no order, and (n,) float32 how far the farthest of each query is: no other list is
            nearer.
        """
        n = len(queries)
        lists, farthest = np.empty((n, m), dtype=np.int32), np.empty(n, dtype=np.float32)
        for first in range(0, n, _TOGETHER):
            some = slice(first, min(n, first + _TOGETHER))
            self._search(queries[some], lists[some], farthest[some])
        return lists, farthest

    def _search(self, queries: F32, lists: I32, farthest: F32) -> None:
        import torch

        n, m = lists.shape
        self._sent.numpy()[:n] = queries
        near, at = self._nearest[: n * m].view(n, m), self._lists[: n * m].view(n, m)
        came = self._came[: n * m].view(n, m)
        with torch.cuda.stream(self._stream):
            x = self._queries[:n].copy_(self._sent[:n], non_blocking=True)
            distances = torch.addmm(self._halves, x, self._columns, alpha=-1, out=self._distances[:n])
            torch.topk(distances, m, dim=1, largest=False, sorted=False, out=(near, at))
            torch.amax(near, dim=1, keepdim=True, out=self._farthest[:n])
            came.copy_(at, non_blocking=True)
            self._how_far[:n].copy_(self._farthest[:n], non_blocking=True)
            if self._stream is not None:
                # The thread sleeps, and leaves its core to others.
                ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                ended.record(self._stream)
                ended.synchronize()
        lists[:] = came.numpy()
        farthest[:] = self._how_far[:n, 0].numpy()
