"""The benchmark of coarse quantization on a shape that takes no time; and what it counts as changed."""

from __future__ import annotations

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from benchmarks.host import coarse


def test_rows_of_every_metric_and_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(coarse, "POOL", 300)
    file = tmp_path / "coarse.json"
    options = ["--dataset", "none", "--shapes", "40x16", "--batches", "1", "5", "--repeats", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["coarse", *options])
    threads = faiss.omp_get_max_threads()
    try:
        coarse.main()
    finally:
        faiss.omp_set_num_threads(threads)
    found = json.loads(file.read_text())
    assert [(r["metric"], r["nprobe"], r["batch"]) for r in found["rows"]] == [
        (metric, nprobe, batch) for metric in ("ip", "l2") for nprobe in (5, 20, 25) for batch in (1, 5)
    ]
    assert all(d["lists"] == d["distances"] == 0 for d in found["differ"] if d["side"].startswith("ours"))
    assert {d["queries"] for d in found["differ"]} == {256}


def test_queries_that_change_with_the_batch_are_counted() -> None:
    def run(queries: coarse.F32) -> tuple[coarse.I64, coarse.F32]:
        lists = np.tile(np.arange(3), (len(queries), 1))
        distances = np.zeros((len(queries), 3), np.float32)
        if len(queries) > 1:
            lists[1, 2] = 7
            distances[[1, 4], 0] = 1e-7
        return lists, distances

    assert coarse.changed(run, np.zeros((6, 2), np.float32)) == (1, 2)
