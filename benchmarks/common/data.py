"""The data that the benchmarks run on: a cached dataset, in the centred space unless raw is asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common.dataset import BenchmarkDataset, DatasetName, load_benchmark_dataset

__all__ = ["benchmark_cache", "benchmark_dataset"]


def benchmark_cache() -> Path:
    """``HYBRIDINDEX_CACHE`` if set, else ``build/cache`` of the checkout."""
    configured = os.environ.get("HYBRIDINDEX_CACHE")
    return Path(configured) if configured else ROOT / "build" / "cache"


def benchmark_dataset(name: DatasetName = "full") -> BenchmarkDataset:
    """The dataset ``name``, made first where the cache lacks it; stages are told on stderr."""
    last = ""

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage != last:
            last = stage
            sys.stderr.write(f"{stage} ...\n")

    return load_benchmark_dataset(name, benchmark_cache(), progress=tell)
