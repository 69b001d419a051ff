"""Every row of the tables: what the next plan is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridindex.errors import InvalidInputError, PlanConflictError
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.replan import PlanChanges, PlanDevices, replan
from hybridindex.types import LLMProfile

MIB = 1 << 20
SOLVED = PlanRequest.resolve(
    slo_ms=50,
    device_budget_bytes=(8 * MIB, 16 * MIB),
    n_devices=2,
    rate_qps=100,
    llm=LLMProfile(kv_cache_bytes=1 << 30, throughput_rps=10.0),
    epsilon=0.5,
    percentile=95,
    page_bytes=8192,
    scratch_bytes=4096,
    unscannable="said by the tier",
)
FIXED = replace(SOLVED, coverage=0.3)
DEVICES = PlanDevices(n_devices=2)


def test_what_nobody_asks_for_stays():
    for current in (SOLVED, FIXED):
        assert replan(current, PlanChanges(), None) == current
        again = replan(current, PlanChanges(), DEVICES)
        kept = ("slo_ms", "budgets", "rate_qps", "llm", "epsilon", "percentile", "coverage", "slo_stage")
        assert [getattr(again, name) for name in kept] == [getattr(current, name) for name in kept]


@pytest.mark.parametrize(
    ("name", "value"),
    [("rate_qps", 7.0), ("epsilon", 0.0), ("percentile", 50.0), ("slo_stage", "ttft"), ("llm", LLMProfile(
        kv_cache_bytes=1 << 20, throughput_rps=2.0))],
)  # fmt: skip
def test_what_is_asked_for_is_new_and_leaves_a_fixed_coverage(name, value):
    assert replan(FIXED, PlanChanges(**{name: value}), None) == replace(FIXED, **{name: value})


@pytest.mark.parametrize(
    ("current", "asked", "coverage"),
    [
        (None, {}, None),
        (None, {"coverage": "solve"}, None),
        (None, {"coverage": 0.2}, 0.2),
        (SOLVED, {}, None),
        (SOLVED, {"slo_ms": 40}, None),
        (SOLVED, {"device_budget_bytes": MIB}, None),
        (SOLVED, {"coverage": 0.2}, 0.2),
        (SOLVED, {"coverage": 0}, 0.0),
        (SOLVED, {"coverage": "solve", "slo_ms": 40}, None),
        (FIXED, {}, 0.3),
        (FIXED, {"coverage": 0.2}, 0.2),
        (FIXED, {"coverage": "solve"}, None),
        (FIXED, {"coverage": "solve", "slo_ms": 40}, None),
        (FIXED, {"coverage": "solve", "device_budget_bytes": 0}, None),
    ],
)
@pytest.mark.parametrize("devices", [None, DEVICES])
def test_coverage(current, asked, coverage, devices):
    if current is None:
        asked, devices = {"slo_ms": 50, "device_budget_bytes": MIB, **asked}, DEVICES
    found = replan(current, PlanChanges(**asked), devices)
    assert found.coverage == coverage
    assert found.slo_ms == asked.get("slo_ms", 50)
    if "device_budget_bytes" in asked:
        assert found.budgets == (asked["device_budget_bytes"],) * 2


@pytest.mark.parametrize("current", [SOLVED, FIXED])
@pytest.mark.parametrize("deciding", [("slo_ms",), ("device_budget_bytes",), ("slo_ms", "device_budget_bytes")])
@pytest.mark.parametrize("coverage", [None, 0.2])
def test_a_fixed_coverage_against_a_new_target_is_an_error_that_names_both(current, deciding, coverage):
    if current is SOLVED and coverage is None:
        return
    changes = PlanChanges(coverage=coverage, **dict.fromkeys(deciding, 1000))
    with pytest.raises(PlanConflictError, match="coverage is") as caught:
        replan(current, changes, DEVICES)
    said = str(caught.value)
    assert all(f"{name} 1000" in said for name in deciding)
    assert ("in force" in said) == (coverage is None)
    assert "'solve'" in said


def test_without_a_plan_in_force_the_configuration_gives_budgets_and_the_target_is_named():
    devices = replace(DEVICES, device_budget_bytes=(MIB, 2 * MIB), page_bytes=16384, scannable=False)
    found = replan(None, PlanChanges(slo_ms=50), devices)
    assert (found.budgets, found.page_bytes, found.scannable) == ((MIB, 2 * MIB), 16384, False)
    assert replan(None, PlanChanges(slo_ms=50, device_budget_bytes=3), devices).budgets == (3, 3)
    with pytest.raises(InvalidInputError, match="slo_ms is missing"):
        replan(None, PlanChanges(), devices)
    with pytest.raises(InvalidInputError, match="device_budget_bytes is missing"):
        replan(None, PlanChanges(slo_ms=50), DEVICES)


def test_a_plan_in_force_comes_before_the_configuration_but_not_its_devices():
    devices = replace(DEVICES, device_budget_bytes=MIB, page_bytes=16384, fixed_bytes=512, unscannable="here")
    found = replan(SOLVED, PlanChanges(), devices)
    assert found.budgets == SOLVED.budgets
    assert (found.page_bytes, found.unscannable) == (16384, "here")
    assert found.scratch != SOLVED.scratch
    with pytest.raises(InvalidInputError, match="device_budget_bytes has 2 entries"):
        replan(SOLVED, PlanChanges(), replace(devices, n_devices=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("slo_ms", -1), ("coverage", 2), ("coverage", "most"), ("epsilon", -1)),
        *(("slo_ms", 10**400), ("rate_qps", 10**400), ("device_budget_bytes", 10**400)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(InvalidInputError, match=f"{name} is {value!r}"):
        replan(FIXED, PlanChanges(**{name: value}), None)
