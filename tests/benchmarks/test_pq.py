"""The comparison of product-quantized lists: which parallel mode faiss runs in."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.clusters import make_spectrum
from benchmarks.host import pq
from benchmarks.host.pq import MODES, Sides, fastest, measure, with_truth
from hybridindex.index import build


@pytest.mark.parametrize("quick", MODES)
def test_the_fastest_parallel_mode_is_taken(quick: int) -> None:
    made = Sides()
    assert fastest(made, lambda: time.sleep(0 if made.mode == quick else 0.005), 1) == quick


@pytest.mark.parametrize("codec", ["pqfs", "pq"])
def test_faiss_is_timed_in_the_mode_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    drawn = make_spectrum(32, 2_128)
    data = with_truth("drawn", drawn[:2_000].copy(), drawn[2_000:].copy(), "ip")
    chosen = iter((1, 3, 2, 0))
    monkeypatch.setattr(pq, "fastest", lambda *asked: next(chosen))
    seen = []
    real = pq.interleave

    def watched(sides, **options):
        timed = real(sides, **options)
        seen.append(index.open_faiss().parallel_mode)
        return timed

    monkeypatch.setattr(pq, "interleave", watched)
    with build(data.vectors, tmp_path / "i", nlist=16, metric="ip", codec=codec) as index:
        rows = list(measure(index, data, 4, 2, 2))
    pq._KNOWN.clear()
    assert [(row["what"], row["batch"], row["faiss_mode"]) for row in rows] == [
        ("scan", 1, 1),
        ("scan", 64, 3),
        ("search", 1, 2),
        ("search", 64, 0),
    ]
    assert seen == [1, 3, 2, 0]
    assert all(np.isfinite(row["ratio"]).all() for row in rows)
