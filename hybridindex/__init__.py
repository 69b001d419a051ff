"""SLO-aware manager of a hybrid CPU+GPU IVF index for retrieval-augmented generation.

::

    import hybridindex as hx

    index = hx.build(vectors, path="idx", nlist=1024, metric="ip", codec="flat")
    profile = index.profile(queries, nprobe=64)
    plan = index.plan(slo_ms=50, device_budget_bytes=2 << 30, profile=profile)
    with index.router(plan=plan, devices=["cuda:0"]) as router:
        result = router.search(queries, k=10)
"""

from importlib import import_module
from typing import Any

from hybridindex.api import Index, build, from_faiss, remove_replaced, restore, rollback
from hybridindex.api import open_index as open  # noqa: A004 - hx.open, as in io.open
from hybridindex.config import HealthPolicy, RouterConfig, SearchParams
from hybridindex.errors import HybridIndexError
from hybridindex.old_paths import install as _find_old_paths
from hybridindex.types import LLMProfile, Profile, SearchResult, VectorFile

__version__ = "0.2.0"

__all__ = [
    "HealthPolicy",
    "HybridIndexError",
    "Index",
    "LLMProfile",
    "Profile",
    "RouterConfig",
    "SearchParams",
    "SearchResult",
    "VectorFile",
    "__version__",
    "build",
    "from_faiss",
    "open",
    "remove_replaced",
    "restore",
    "rollback",
]

_find_old_paths()


def __getattr__(name: str) -> Any:
    """``hx.cluster`` without an import of its own: most users serve from one machine, and do not wait for it."""
    if name == "cluster":
        return import_module("hybridindex.cluster")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
