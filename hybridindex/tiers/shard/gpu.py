"""A shard on a GPU, through faiss-gpu: what it can hold, how it gets there, and the temporary memory of a scan.

faiss-gpu's limits: k and the probes of a query are at most 2048, pq has 8 bits and residuals, and neither resources nor
indexes are thread-safe. What does not fit its temporary memory it allocates elsewhere; scans are cut so that all fits.
Of the other kinds it scans scalar quantizers, but some of what it does not like there ends the process, so they stay on
the host.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.faiss_model import require_faiss
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["GpuShard", "gpu_unsupported", "queries_per_search", "temp_bytes_per_query"]

_MAX_PROBES = 2048
#: Fixed temporaries of a search, and what alignment costs its dozen of allocations.
_TEMP_FIXED_BYTES = 64 << 10
_PAIR_BYTES = 12  # a float32 and an int64


def gpu_unsupported(index: IVFIndex | None = None) -> str:
    """Why faiss-gpu cannot hold shards, of ``index`` when given; empty where it can, as far as is known before a trial.

    Raises:
        MissingDependencyError: no faiss is installed.
    """
    faiss = require_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        return "faiss-gpu is not installed; it replaces faiss-cpu: pip uninstall faiss-cpu, then pip install faiss-gpu"
    if index is None:
        return ""
    ivf = index.open_faiss()
    if isinstance(ivf, faiss.IndexIVFPQ):
        if ivf.pq.nbits != 8 or not ivf.by_residual or ivf.polysemous_ht:
            return f"faiss-gpu holds pq of 8 bits with residuals, not {index.codec!r} as it is here"
        return ""
    return f"no GPU holds codec {index.codec!r}: faiss-gpu is used for pq alone"


def temp_bytes_per_query(*, width: int, k: int, longest: int, dim: int, table_entries: int) -> int:
    """Upper bound of faiss-gpu's temporary memory for one query of a pq search.

    Args:
        width: probes per query.
        longest: rows of the longest list.
        table_entries: sub-quantizers times codewords.
    """
    # faiss's own reckoning lives in gpu/impl/IVFUtils.cu; ours counts what it leaves to the caller as well.
    arguments = 4 * dim + _PAIR_BYTES * (width + k)
    # Two streams, each with: where lists begin, all distances, the first selection, the tables of each probe.
    each = 8 * (width + 1) + 4 * width * longest + _PAIR_BYTES * 8 * k + 4 * width * table_entries
    return arguments + 2 * each


def queries_per_search(
    temp_bytes: int, nlist: int, *, width: int, k: int, longest: int, dim: int, table_entries: int
) -> int:
    """Most queries that one search may have so that its temporaries fit ``temp_bytes``.

    Raises:
        OutOfBudgetError: not even one fits, or faiss-gpu does not take so many probes.
    """
    if width > min(_MAX_PROBES, nlist):
        raise OutOfBudgetError(f"queries probe {width} lists here; faiss-gpu takes at most {min(_MAX_PROBES, nlist)}")
    needed = temp_bytes_per_query(width=width, k=k, longest=longest, dim=dim, table_entries=table_entries)
    n = (temp_bytes - _TEMP_FIXED_BYTES) // needed
    if n < 1:
        raise OutOfBudgetError(
            f"scratch of {temp_bytes:,} bytes is too small for {width} probes at k {k}: a query needs "
            f"{needed + _TEMP_FIXED_BYTES:,}"
        )
    return n


class GpuShard:
    """Owner of one shard on one GPU and of the faiss resources that it needs: those of another shard are others', so
    that one may be made while another is scanned. Thread-safe: searches take turns."""

    name = "faiss-gpu"

    def __init__(self, ivf: Any, device: int, temp_bytes: int, longest: int) -> None:
        """Copies ``ivf`` with all its lists, of at most ``longest`` rows, to GPU ``device``.

        Raises:
            RuntimeError: faiss-gpu refuses it, or the device has no memory left.
        """
        faiss = self._faiss = require_faiss()
        self._lock = threading.Lock()
        self._temp_bytes = temp_bytes
        self._dim = int(ivf.d)
        self._nlist = int(ivf.nlist)
        self._table_entries = int(ivf.pq.M * ivf.pq.ksub)
        self._longest = longest
        self._resources: Any = faiss.StandardGpuResources()
        self._resources.setTempMemory(temp_bytes)
        # Page-locked staging of its own: 256 MiB by default, of use for copies that we do not make.
        self._resources.setPinnedMemory(0)
        options = faiss.GpuClonerOptions()
        # Answers are (list, row) pairs: no id takes device memory, and none is cut to 32 bits.
        options.indicesOptions = faiss.INDICES_IVF
        options.useFloat16 = False
        options.usePrecomputed = False
        options.allowCpuCoarseQuantizer = True
        if hasattr(options, "use_cuvs"):
            options.use_cuvs = False  # interleaves pq codes otherwise, and takes memory of its own
        self._index: Any = faiss.index_cpu_to_gpu(self._resources, device, ivf, options)

    def search(self, queries: F32, probes: I64, coarse_distances: F32, distances: F32, positions: I64) -> None:
        """See :meth:`hybridindex.tiers.shard.scanner.FaissShard.search`."""
        n, width = probes.shape
        k = distances.shape[1]
        step = queries_per_search(
            self._temp_bytes,
            self._nlist,
            width=width,
            k=k,
            longest=self._longest,
            dim=self._dim,
            table_entries=self._table_entries,
        )
        ptr, parameters = self._faiss.swig_ptr, self._faiss.SearchParametersIVF(nprobe=width)
        with self._lock:
            for start in range(0, n, step):
                rows = slice(start, start + step)
                x, lists, coarse = queries[rows], probes[rows], coarse_distances[rows]
                found = (ptr(distances[rows]), ptr(positions[rows]))
                self._index.search_preassigned_c(len(x), ptr(x), k, ptr(lists), ptr(coarse), *found, False, parameters)
        # A place without a candidate may keep any position where its distance is the worst there is.
        positions[np.abs(distances) >= np.finfo(np.float32).max] = -1

    def close(self) -> None:
        """See :meth:`hybridindex.tiers.shard.scanner.FaissShard.close`."""
        with self._lock:
            self._index = None
            self._resources = None
