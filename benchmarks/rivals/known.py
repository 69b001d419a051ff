"""Every rival by name. Those whose package is not installed are not measured, and said not to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from benchmarks.rivals import faiss_systems, graphs, lance, rabitq_library
from benchmarks.rivals.system import Collection, System

__all__ = ["CURVES", "RIVALS", "Rival"]


@dataclass(frozen=True, slots=True)
class Rival:
    """How one is made."""

    name: str
    package: str
    make: Callable[[Collection], System]

    @property
    def missing(self) -> bool:
        return find_spec(self.package) is None


_FAST_SCAN = Rival("faiss IVF,PQ fast scan", "faiss", faiss_systems.fast_scan)
_GRAPHS = (
    Rival("faiss HNSW", "faiss", faiss_systems.hnsw),
    Rival("hnswlib HNSW", "hnswlib", graphs.hnswlib_graph),
    Rival("usearch HNSW", "usearch", graphs.usearch_graph),
)
#: Those of the picture.
CURVES = (Rival("faiss IVF,Flat", "faiss", faiss_systems.flat), _FAST_SCAN, *_GRAPHS)
#: Those that compressed lists are held against.
RIVALS = (
    *_GRAPHS,
    _FAST_SCAN,
    Rival("faiss IVF,PQ fast scan, half the codes", "faiss", partial(faiss_systems.fast_scan, dims=4)),
    Rival("faiss IVF,RaBitQ fast scan, 1 bit", "faiss", partial(faiss_systems.rabitq_fast_scan, bits=1)),
    Rival("faiss IVF,RaBitQ fast scan, 2 bits", "faiss", partial(faiss_systems.rabitq_fast_scan, bits=2)),
    Rival("RaBitQ library IVF", "rabitqlib", rabitq_library.rabitq_ivf),
    Rival("RaBitQ library SymphonyQG", "rabitqlib", rabitq_library.rabitq_graph),
    Rival("LanceDB IVF,PQ", "lancedb", lance.lance_ivf),
)
