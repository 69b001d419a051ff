"""What is judged of the router's cost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hybridindex
from benchmarks.common.measure import Timing
from benchmarks.host import router_overhead
from benchmarks.host.router_overhead import within


@pytest.mark.parametrize(
    ("batch", "extra_s", "met"),
    [(1, 150e-6, True), (1, 151e-6, False), (4, 1.0, None), (16, 0.05, True), (16, 0.051, False), (256, 0.06, False)],
)
def test_targets_of_the_router(batch: int, extra_s: float, met: bool | None) -> None:
    assert within(batch, extra_s, 1.0) is met


def test_a_faster_scan_does_not_hide_what_the_router_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"router": 0.5e-3, "same scanner": 2e-3}
    monkeypatch.setattr(
        router_overhead,
        "interleave",
        lambda sides, **options: {name: Timing((seconds.get(name, 1e-3),) * 3) for name in sides},
    )

    vectors = np.random.default_rng(0).standard_normal((600, 8), dtype=np.float32)
    with (
        hybridindex.build(vectors, tmp_path / "i", nlist=4, metric="ip", codec="flat") as index,
        index.router(threads=1) as router,
        ThreadPoolExecutor(1) as handed,
    ):
        rows = router_overhead.measure(index, (router, router), handed, vectors[:300], 2, 1)
    assert [row["met"] for row in rows] == [False, None, False, False, False]
    assert all(row["extra_us"] == pytest.approx(-500) for row in rows)
    assert all(row["same_scanner_percent"] == pytest.approx(100) for row in rows)
