from __future__ import annotations

import pytest

from hybridindex.paging import format_bytes
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest


@pytest.mark.parametrize("slo_ms", [0.01, 1.2, 100.0])
def test_lines_say_what_from_what_and_what_would_change_it(analysis: Analysis, slo_ms: float) -> None:
    plan = make_plan(
        analysis.profile,
        PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=20 << 20, rate_qps=300),
        analysis=analysis,
    )
    lines = plan.explain().splitlines()
    assert len(lines) == 11
    assert plan.verdict.value in lines[0]
    assert "lists on devices" in lines[0]
    assert ", decides" in lines[6]
    assert "VectorLiteRAG's Eq. 1" in lines[6]
    assert "synthetic" in lines[7]
    assert "200 held-back queries" in lines[7]
    assert "device scan" in lines[8]
    assert "half of it" in lines[9]
    assert "Another budget" in lines[10]
    assert "nan" not in plan.explain()


def test_bytes_read_well() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(3 << 40) == "3.00 TiB"
