from __future__ import annotations

import pytest

from hybridindex.paging import format_bytes
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import rate_in_words


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


def test_what_overflows_is_explained(analysis: Analysis) -> None:
    request = PlanRequest.resolve(slo_ms=1e300, device_budget_bytes=20 << 20, rate_qps=1e300)
    assert "VectorLiteRAG's Eq. 1" in make_plan(analysis.profile, request, analysis=analysis).explain()


def test_bytes_read_well() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(3 << 40) == "3.00 TiB"


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (0.5, "0.5 requests/s"),
        (4538.4, "4538 requests/s"),
        (9999.7, "10,000 requests/s"),
        (17_771.3, "17,771 requests/s"),
    ],
)
def test_a_rate_has_no_exponent(rate: float, words: str) -> None:
    assert rate_in_words(rate) == words
