"""The host scan of codecs whose queries faiss would round: rows are decoded by faiss and compared here.

A fast scan of faiss's rounds its tables; that matters where devices scan the same lists.

faiss scans bfloat16 rows with dot products of bfloat16 where the CPU has them: queries are rounded, and the answer
would depend on which tier scanned a list. This is slower than either scan, and serves where the native one is missing
or was not wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridindex.index.faiss_model import decode
from hybridindex.tiers.contract.protocol import IdFilter
from hybridindex.tiers.contract.validate import allowed_ids
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.index.live.added import AddedLists

__all__ = ["HostDecodedScanner", "rounds_queries"]

#: Elements of decoded rows, and of distances, at a time: 8 bytes each.
_BLOCK_ELEMENTS = 1 << 20


def rounds_queries(index: IVFIndex, *, beside_devices: bool = False) -> bool:
    """Whether faiss's own scan of this codec may round queries.

    Args:
        beside_devices: the tables of a fast scan count, too, whose distances differ from those of devices.
    """
    fast_scan = index.pq_form is not None and index.pq_form.bits == 4
    return index.codec == "bf16" or (beside_devices and fast_scan)


class HostDecodedScanner(HostFaissScanner):
    """Compares every probed row with unrounded queries, in double precision, list by list. Thread-safe."""

    def __init__(self, index: IVFIndex, *, threads: int | None = None, added: AddedLists | None = None) -> None:
        """``added``: scanned instead of the index's own lists."""
        super().__init__(index, threads=threads)
        self._reader = index.extent_reader() if added is None else added.reader

    def _search(
        self, x: F32, probes: I64, coarse: F32, k: int, distances: F32, ids: I64, params: IdFilter | None
    ) -> None:
        keep_max = self._index.metric == "ip"
        queries = x.astype(np.float64)
        allowed = None if params is None else allowed_ids(params)
        # Smaller is better from here on.
        best = np.full((len(x), k), np.inf, dtype=np.float32)
        ids.fill(-1)
        for list_id in np.unique(probes[probes >= 0]).tolist():
            members = np.flatnonzero((probes == list_id).any(axis=1))
            group = queries[members]
            step = max(1, _BLOCK_ELEMENTS // max(self._index.scan_dim, len(members)))
            found_ids = self._reader.ids(list_id)
            for start in range(0, len(found_ids), step):
                block_ids = found_ids[start : start + step]
                block = self._distances(group, list_id, start, len(block_ids))
                if keep_max:
                    np.negative(block, out=block)
                # As in faiss: what is not a number is no candidate.
                block[np.isnan(block)] = np.inf
                if allowed is not None:
                    block[:, ~np.isin(block_ids, allowed)] = np.inf
                best[members], ids[members] = _best(best[members], ids[members], block.astype(np.float32), block_ids)
        order = np.lexsort((ids, best), axis=1)
        distances[:] = np.take_along_axis(-best if keep_max else best, order, axis=1)
        ids[:] = np.take_along_axis(ids, order, axis=1)
        ids[np.isinf(distances)] = -1

    def _distances(self, queries: npt.NDArray[np.float64], list_id: int, start: int, n: int) -> Any:
        """(len(queries), n) float64 to ``n`` rows of a list."""
        codes = self._reader.rows(list_id, start, start + n)
        found = decode(self._ivf, codes, np.full(n, list_id, dtype=np.int64)).astype(np.float64)
        products = queries @ found.T
        if self._index.metric == "ip":
            return products
        squares = (queries**2).sum(axis=1)[:, None] + (found**2).sum(axis=1) - 2 * products
        return np.maximum(squares, 0, out=squares)

    def _parameters(self, width: int, filter_ids: IdFilter | None) -> IdFilter | None:
        return filter_ids


def _best(held: F32, held_ids: I64, block: F32, block_ids: I64) -> tuple[F32, I64]:
    """The k smallest of what is held, (m, k), and a block, (m, n)."""
    k = held.shape[1]
    values = np.concatenate((held, block), axis=1)
    numbers = np.concatenate((held_ids, np.broadcast_to(block_ids, block.shape)), axis=1)
    chosen = np.argpartition(values, k - 1, axis=1)[:, :k]
    return np.take_along_axis(values, chosen, axis=1), np.take_along_axis(numbers, chosen, axis=1)
