from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from hybridindex.paging import format_bytes
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import rate_in_words
from hybridindex.types import LLMProfile
from tests.partitioner.synthetic import make_profile


def plan_of(analysis: Analysis, **asked: Any) -> Plan:
    return make_plan(analysis.profile, PlanRequest.resolve(**asked), analysis=analysis)


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


@pytest.mark.parametrize("n_devices", [1, 3])
@pytest.mark.parametrize("budget", [0, 1 << 20, 10 << 20])
@pytest.mark.parametrize("centroid_bytes", [0, 1 << 20])
def test_the_budget_that_is_named_suffices(
    analysis: Analysis, n_devices: int, budget: int, centroid_bytes: int
) -> None:
    """A larger budget has more scratch, which the lists do not get."""
    asked: dict[str, Any] = {
        "slo_ms": 0.26, "rate_qps": 300, "n_devices": n_devices, "centroid_bytes": centroid_bytes
    }  # fmt: skip
    plan = plan_of(analysis, device_budget_bytes=budget, **asked)
    assert not plan.feasible
    named = re.search(r"Another budget: ([\d.]+) MiB .* in all would meet the SLO", plan.explain())
    assert named is not None
    nbytes = float(named[1]) * (1 << 20)
    assert plan_of(analysis, device_budget_bytes=round(nbytes * 1.001) // n_devices, **asked).feasible
    if n_devices == 1:
        assert not plan_of(analysis, device_budget_bytes=round(nbytes * 0.98), **asked).feasible


def test_no_budget_helps_a_codec_that_no_device_scans(analysis: Analysis) -> None:
    last = plan_of(analysis, slo_ms=0.8, device_budget_bytes=10 << 20, scannable=False, unscannable="it is PQ")
    assert last.explain().splitlines()[-1] == "Another budget: none helps, it is PQ."


def test_half_of_a_ttft_slo_leaves_search_less_than_half(analysis: Analysis) -> None:
    llm = LLMProfile(kv_cache_bytes=1 << 30, throughput_rps=300.0, ttft_s=0.005)
    asked: dict[str, Any] = {"slo_stage": "ttft", "llm": llm, "device_budget_bytes": 20 << 20}
    half, whole = (plan_of(analysis, slo_ms=slo_ms, **asked) for slo_ms in (6.0, 12.0))
    assert whole.feasible
    assert half.feasible
    assert half.device_bytes > 0
    words = f"half of it would take {format_bytes(half.device_bytes)} ({half.coverage:.1%} of lists)"
    assert words in whole.explain()


def test_too_few_queries_to_compare_models_are_said() -> None:
    profile = make_profile(nlist=8, n=16, nprobe=1, batches=(1, 4), repeats=2)
    held = np.full_like(profile.access.held_probes, -1)
    held[0] = 3
    few = dataclasses.replace(profile, access=dataclasses.replace(profile.access, held_probes=held))
    said = plan_of(analyse(few), slo_ms=5.0, device_budget_bytes=1 << 20).explain()
    assert "too few queries to compare it with" in said
    assert "nan" not in said


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
