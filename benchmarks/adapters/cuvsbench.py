"""hybridindex for cuvs-bench (26.08): importing this registers its backend ``hybridindex``.

Parameters are of :func:`hybridindex.build` (``nlist``, ``codec``) and of a search (``nprobe``); ``cuvsbench.yml`` has
some. Each build and nprobe is a result of its own, with its recall.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import cuvs_bench.orchestrator
import numpy as np
from cuvs_bench.backends import get_registry
from cuvs_bench.backends.base import BenchmarkBackend, BuildResult, Dataset, SearchResult
from cuvs_bench.orchestrator import register_config_loader
from cuvs_bench.orchestrator.config_loaders import BenchmarkConfig, ConfigLoader, DatasetConfig, IndexConfig

import hybridindex as hx
from hybridindex.types import Metric

__all__ = ["HybridIndexBackend", "HybridIndexLoader"]

_NAME = "hybridindex"
#: Of one search.
_MOST_QUERIES = 4096
_METRICS: dict[str, Metric] = {"euclidean": "l2", "inner_product": "ip", "cosine": "ip"}


class HybridIndexLoader(ConfigLoader):
    """``algorithm_configuration``: a file as ``cuvsbench.yml``; None: that one. ``groups``: of it, with commas."""

    config_path = str(Path(cuvs_bench.orchestrator.__file__).parents[1] / "config")

    @property
    def backend_type(self) -> str:
        return _NAME

    def _discover_algo_groups(
        self, dataset_conf: dict[str, Any], dataset: str, dataset_path: str, **kwargs: Any
    ) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
        file = kwargs.get("algorithm_configuration") or Path(__file__).with_suffix(".yml")
        groups = self.load_yaml_file(str(file))["groups"]
        wanted = (kwargs.get("groups") or "base").split(",")
        if unknown := set(wanted) - groups.keys():
            raise ValueError(f"groups: {min(unknown)!r} is not in {file}; expected {', '.join(groups)}")
        return [(_NAME, name, groups[name], {}) for name in wanted]

    def _build_benchmark_configs(
        self,
        dataset_config: DatasetConfig,
        dataset_conf: dict[str, Any],
        dataset: str,
        dataset_path: str,
        expanded_groups: list[tuple[str, str, dict[str, Any], list[Any], list[Any], dict[str, Any]]],
        **kwargs: Any,
    ) -> list[BenchmarkConfig]:
        found = []
        for _, _, _, builds, searches, _ in expanded_groups:
            if kwargs.get("_tune_build_params") is not None:
                builds, searches = [kwargs["_tune_build_params"]], [kwargs.get("_tune_search_params") or {}]
            for build in builds:
                name = ".".join([_NAME, *(f"{key}{value}" for key, value in build.items())])
                path = Path(dataset_path) / dataset / "index" / name
                for search in searches:
                    index = IndexConfig(
                        name=name, algo=_NAME, build_param=build, search_params=[search], file=str(path)
                    )
                    found.append(BenchmarkConfig(indexes=[index], backend_config={"name": name}))
        return found


class HybridIndexBackend(BenchmarkBackend):
    """Of one index and one nprobe, on the host."""

    @property
    def algo(self) -> str:
        return _NAME

    def build(
        self, dataset: Dataset, indexes: list[IndexConfig], force: bool = False, dry_run: bool = False
    ) -> BuildResult:
        """One that is there is kept, unless ``force``, with the seconds that it took; one without them is not."""
        (config,) = indexes
        took = Path(f"{config.file}.seconds")
        seconds = 0.0
        if not dry_run and not force and Path(config.file).is_dir() and took.exists():
            seconds = float(took.read_text())
        elif not dry_run:
            took.unlink(missing_ok=True)
            rows = _rows(dataset.training_vectors, dataset.distance_metric)
            began = time.perf_counter()
            metric = _METRICS[dataset.distance_metric]
            Path(config.file).parent.mkdir(parents=True, exist_ok=True)
            hx.build(rows, config.file, metric=metric, replace=True, **config.build_param).close()
            seconds = time.perf_counter() - began
            took.write_text(f"{seconds!r}\n")
        nbytes = sum(file.stat().st_size for file in Path(config.file).rglob("*") if file.is_file())
        return BuildResult(config.file, seconds, nbytes, _NAME, config.build_param)

    def search(
        self,
        dataset: Dataset,
        indexes: list[IndexConfig],
        k: int,
        batch_size: int = 10000,
        mode: str = "latency",
        force: bool = False,
        search_threads: int | None = None,
        dry_run: bool = False,
    ) -> SearchResult:
        """Every query once, ``batch_size`` at a time; recall is the orchestrator's."""
        (config,) = indexes
        (params,) = config.search_params
        queries = _rows(dataset.query_vectors[:0] if dry_run else dataset.query_vectors, dataset.distance_metric)
        ids = np.empty((len(queries), k), dtype=np.int64)
        distances = np.empty((len(queries), k), dtype=np.float32)
        step, taken = min(batch_size, _MOST_QUERIES), []
        if len(queries):
            with hx.open(config.file) as index, index.router(threads=search_threads) as router:
                router.search(queries[:step], k, **params)  # reads what is not in memory yet
                for at in range(0, len(queries), step):
                    began = time.perf_counter()
                    found = router.search(queries[at : at + step], k, **params)
                    taken.append(time.perf_counter() - began)
                    ids[at : at + step], distances[at : at + step] = found.ids, found.distances
        seconds = sum(taken)
        p50, p95, p99 = 1e3 * np.percentile(taken or [0.0], [50, 95, 99])
        return SearchResult(
            neighbors=ids,
            distances=distances,
            search_time_ms=1e3 * seconds,
            queries_per_second=len(queries) / seconds if seconds else 0.0,
            recall=0.0,
            algorithm=_NAME,
            search_params=[params],
            latency_percentiles={"p50": float(p50), "p95": float(p95), "p99": float(p99)},
            metadata={"batch_size": step},
        )


def _rows(vectors: Any, distance: str) -> Any:
    if distance not in _METRICS:
        raise ValueError(f"distance is {distance!r}; expected {', '.join(_METRICS)}")
    rows: Any = np.ascontiguousarray(vectors, dtype=np.float32)
    if distance == "cosine":
        lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
        rows = rows / np.where(lengths > 0, lengths, 1)
    return rows


register_config_loader(_NAME, HybridIndexLoader)
get_registry().register(_NAME, HybridIndexBackend)
