"""hybridindex for VectorDBBench: copied to ``vectordb_bench/backend/clients/hybridindex/`` it is a client there.

Rows that are inserted are kept in files; ``optimize`` builds the index of them; each process that searches opens it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from pydantic import BaseModel
from vectordb_bench.backend.clients.api import DBCaseConfig, DBConfig, MetricType, VectorDB
from vectordb_bench.backend.filter import Filter, FilterOp

import hybridindex as hx

__all__ = ["HybridIndex", "HybridIndexCaseConfig", "HybridIndexConfig"]


class HybridIndexConfig(DBConfig):
    """Where it lies."""

    #: A folder; one below it for each collection.
    path: str

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path}


class HybridIndexCaseConfig(BaseModel, DBCaseConfig):
    """How it is built and searched; zeros mean what hybridindex chooses."""

    metric_type: MetricType = MetricType.COSINE
    codec: str = "flat"
    nlist: int = 0
    nprobe: int = 0
    #: Host threads of each process that searches.
    threads: int = 0
    #: Such as cuda:0; with ``plan_ms`` and ``budget_bytes`` a plan of a profile decides what it holds.
    devices: list[str] = []
    plan_ms: float = 50.0
    budget_bytes: int = 0

    def index_param(self) -> dict[str, Any]:
        metric = "l2" if self.metric_type == MetricType.L2 else "ip"
        return {"metric": metric, "codec": self.codec, "nlist": self.nlist or None}

    def search_param(self) -> dict[str, Any]:
        return {"nprobe": self.nprobe or None}


class HybridIndex(VectorDB):
    supported_filter_types = [FilterOp.NonFilter, FilterOp.NumGE, FilterOp.StrEqual]  # noqa: RUF012 - as the class above
    name = "HybridIndex"

    def __init__(
        self,
        dim: int,
        db_config: dict[str, Any],
        db_case_config: HybridIndexCaseConfig,
        collection_name: str = "vectordbbench",
        drop_old: bool = False,
        with_scalar_labels: bool = False,
        **_more: Any,
    ) -> None:
        self._dim, self._case, self._labelled = dim, db_case_config, with_scalar_labels
        self._folder = Path(db_config["path"]) / collection_name
        if drop_old:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._where: str | None = None
        self._router: Any = None

    @property
    def _index(self) -> Path:
        return self._folder / "index"

    def need_normalize_cosine(self) -> bool:
        return True

    @contextmanager
    def init(self) -> Iterator[None]:
        with ExitStack() as open_:
            if self._index.exists():
                index = open_.enter_context(hx.open(self._index))
                options: dict[str, Any] = {"threads": self._case.threads} if self._case.threads else {}
                if self._case.devices:
                    options |= {"devices": self._case.devices, "plan": index.current_plan()}
                self._router = open_.enter_context(index.router(**options))
            try:
                yield
            finally:
                self._router = None

    def insert_embeddings(
        self, embeddings: Any, metadata: list[int], labels_data: list[str] | None = None, **_more: Any
    ) -> tuple[int, Exception | None]:
        rows = np.asarray(embeddings, dtype=np.float32).reshape(-1, self._dim)
        labels = "".join(json.dumps(label) + "\n" for label in labels_data or ())
        added = {
            "rows": rows.tobytes(),
            "ids": np.asarray(metadata, dtype=np.int64).tobytes(),
            "labels": labels.encode(),
        }
        try:
            with FileLock(self._folder / "lock"), self._whole(added):
                for name, data in added.items():
                    with (self._folder / name).open("ab") as file:
                        file.write(data)
        except OSError as error:
            return 0, error
        return len(rows), None

    @contextmanager
    def _whole(self, names: Iterable[str]) -> Iterator[None]:
        """Files are as long as they were where the block raises: an insert that is tried again is there once."""
        sizes = {file: file.stat().st_size if file.exists() else 0 for file in (self._folder / n for n in names)}
        try:
            yield
        except BaseException:
            for file, size in sizes.items():
                if file.exists():
                    os.truncate(file, size)
            raise

    def optimize(self, data_size: int | None = None) -> None:
        """Builds the index of all that was inserted, and a plan where there are devices."""
        ids = np.fromfile(self._folder / "ids", dtype=np.int64)
        rows = np.memmap(self._folder / "rows", dtype=np.float32, mode="r", shape=(len(ids), self._dim))
        columns: dict[str, Any] = {"id": ids}
        if self._labelled:
            columns["label"] = [json.loads(line) for line in (self._folder / "labels").read_text().splitlines()]
        built = hx.build(rows, self._index, ids=ids, attributes=columns, replace=True, **self._case.index_param())
        with built as index:
            if self._case.devices:
                profile = index.profile(rows[:: max(1, len(rows) // 2000)], devices=self._case.devices)
                index.apply_plan(index.plan(self._case.plan_ms, self._case.budget_bytes, profile))

    def prepare_filter(self, filters: Filter) -> None:
        if filters.type == FilterOp.NonFilter:
            self._where = None
        elif filters.type == FilterOp.NumGE:
            self._where = f"id >= {filters.int_value}"
        else:
            self._where = f"label = '{filters.label_value}'"

    def search_embedding(self, query: list[float], k: int = 100, **_more: Any) -> list[int]:
        if self._router is None:
            raise RuntimeError("there is no index yet: optimize() builds it; search inside init()")
        vector = np.asarray(query, dtype=np.float32)
        ids = self._router.search(vector, k, self._case.search_param()["nprobe"], where=self._where).ids[0]
        found: list[int] = ids[ids >= 0].tolist()
        return found
