"""What the first searches would do beside searching, done before: libraries that set themselves up when they are first
used, lengths that scans keep. A first product of matrices in faiss alone can take tens of milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.index.faiss_model import quantize
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["rehearse"]

#: faiss compares one query with centroids in another way than many: from 20, as it is set by default.
_BATCHES = (1, 20)


def rehearse(index: IVFIndex, scanner: HostScanner, lists: I64) -> None:
    """Searches with zeros, and prepares scans of ``lists``, which are in memory; no other list is read."""
    scanner.prepare(lists)
    before = scanner.adopt_thread()
    try:
        for n in _BATCHES:
            queries = np.zeros((n, index.scan_dim), dtype=np.float32)
            quantize(index.open_faiss(), queries, 1)
            probes = np.tile(lists[: index.nprobe], (n, 1))
            scanner.scan(queries, probes, np.zeros(probes.shape, dtype=np.float32), 1)
    finally:
        scanner.give_back_thread(before)
