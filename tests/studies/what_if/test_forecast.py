"""Forecasts: which design, how sensitive, and what is near an infeasible goal."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import model
from hybridindex.studies.what_if import INPUTS, LLMService, Setting, forecast, parse_fleet
from hybridindex.studies.what_if.residents import least_split, split_residents


@pytest.fixture(scope="module")
def found(setting):
    return forecast(setting)


def test_the_design_with_the_highest_rate_is_chosen_and_the_others_explained(found):
    rates = {design.name: design.compliant_qps for design in found.designs}
    assert found.chosen.name == "split"
    assert rates["split"] >= max(rates.values()) * 0.99
    for name in ("dedicated-gpu sustains", "all-gpu sustains"):
        assert name in found.why
    # Each number beside the lists that it takes.
    most, asked = found.chosen.best, found.chosen.point
    assert (
        f"{most.compliant_qps:.4g} requests/s within the SLO at most, with {most.device_bytes / 1e9:.3g} GB"
        in found.why
    )
    assert f"the rate asked for takes {asked.device_bytes / 1e9:.3g} GB" in found.why
    assert found.feasible
    assert json.loads(json.dumps(found.to_data()))["chosen"] == "split"


def test_a_machine_that_barely_holds_the_llm_has_dashes_where_less_would_not(analysis):
    service = LLMService(model=model("llama3-70b"), fleet=parse_fleet("h100x2"), input_tokens=17182)
    whole = int(service.fleet.usable_bytes)
    found = forecast(
        Setting(
            analysis=analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=2),
            rate_qps=0.01,
            slo_ms=60_000.0,
            n_devices=2,
            budget_bytes=min(whole, service.profile().kv_cache_bytes // 2),
            device_bytes=whole,
            llm=service.profile(),
            service=service,
            llm_devices=service.chips_per_engine,
            slo_stage="ttft",
        )
    )
    assert found.sensitivity["kv_memory"] == {"compliant_qps": None, "device_bytes": None, "ttft_ms": None}
    assert set(found.sensitivity) == set(INPUTS)


def test_an_llm_without_kv_cache_takes_no_request_and_has_nothing_to_vary(setting):
    none = replace(setting, llm=replace(setting.llm, kv_cache_bytes=0, points=()), service=None)
    found = forecast(none)
    assert not found.feasible
    assert found.nearest.binds == "llm"
    assert none.varied("kv_memory", 1.1).llm == none.llm


def test_a_dedicated_gpu_is_chosen_where_the_cache_is_scarce_and_the_engines_many(setting):
    # All lists fit one device, and beside the LLM they would cost it a third of its cache.
    scarce = replace(setting, llm=replace(setting.llm, points=(), throughput_rps=60.0), service=None, slo_ms=80.0)
    # On a device that is fast enough to serve all alone.
    chosen = forecast(scarce.varied("hbm_bandwidth", 10.0))
    assert chosen.chosen.name == "dedicated-gpu", chosen.why


def test_sensitivity_has_the_signs_of_physics(setting):
    # The SLO binds, not the rate: a batch may take 58 ms.
    by = forecast(replace(setting, slo_ms=200.0, rate_qps=20.0)).sensitivity
    assert set(by) == set(INPUTS)
    assert by["slo"]["device_bytes"] < 0
    assert by["rate"]["device_bytes"] > 0
    assert by["skew"]["device_bytes"] < 0
    assert by["host_latency"]["device_bytes"] > 0
    assert by["kv_memory"]["compliant_qps"] > 0
    assert by["host_latency"]["compliant_qps"] < 0
    assert by["skew"]["compliant_qps"] > 0
    assert by["hbm_bandwidth"]["compliant_qps"] > 0
    assert by["host_latency"]["ttft_ms"] > 0


def test_the_elasticity_is_that_of_the_input_alone(setting):
    # The SLO says nothing about what a batch takes.
    assert forecast(setting).sensitivity["slo"]["ttft_ms"] == 0


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_varied_there_and_back_is_the_input(setting, name):
    there = setting.varied(name, 1.1)
    again = there.varied(name, 1 / 1.1)
    before, after = (least_split(split_residents(one)).device_bytes for one in (setting, again))
    assert after == pytest.approx(before, rel=0.02)
    assert there is not setting


def test_more_measured_cache_goes_on_with_the_last_slope(setting):
    llm = replace(setting.llm, kv_cache_bytes=1000, throughput_rps=10.0, points=((500, 8.0),))
    more = replace(setting, llm=llm, service=None).varied("kv_memory", 1.1).llm
    assert (more.kv_cache_bytes, more.throughput_rps) == (1100, pytest.approx(10.4))


def test_an_unreachable_rate_names_the_llm_and_the_nearest_rate_is_feasible(setting):
    asked = forecast(replace(setting, rate_qps=1e4))
    assert not asked.feasible
    assert asked.nearest.binds == "llm"
    assert asked.nearest.slo_ms is None
    assert asked.nearest.rate_qps == max(design.compliant_qps for design in asked.designs)
    again = forecast(replace(setting, rate_qps=asked.nearest.rate_qps))
    assert again.feasible


def test_an_unreachable_slo_names_the_nearest_one_which_is_feasible(setting):
    asked = forecast(replace(setting, slo_ms=setting.llm.ttft_s * 1e3 + 0.1))
    assert not asked.feasible
    assert asked.nearest.binds == "slo_ms"
    assert forecast(replace(setting, slo_ms=asked.nearest.slo_ms)).feasible
    shorter = forecast(replace(setting, slo_ms=setting.llm.ttft_s * 500))
    assert "first token alone" in shorter.nearest.reason


def test_small_devices_bind_by_their_budget(setting):
    asked = forecast(replace(setting, budget_bytes=200 << 20, device_bytes=200 << 20, slo_ms=150.0))
    assert asked.nearest.binds == "budget_bytes"


def test_an_index_that_leaves_no_cache_binds_by_kv_memory(setting):
    llm = replace(setting.llm, points=(), throughput_rps=60.0)
    asked = forecast(replace(setting, llm=llm, service=None, rate_qps=58.0, slo_ms=150.0, llm_devices=8))
    assert asked.nearest.binds == "kv_memory"


def test_without_an_llm_search_alone_is_asked(setting):
    alone = forecast(replace(setting, llm=None, service=None, slo_stage="search", slo_ms=300.0))
    assert alone.feasible
    assert all(math.isinf(point.llm_qps) for point in alone.curve)
    assert alone.to_data()["curve"][0]["llm_qps"] is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rate_qps": -1.0}, "rate_qps is -1"),
        ({"slo_ms": 0.0}, "slo_ms is 0"),
        ({"n_devices": 0}, "n_devices is 0"),
        ({"llm_devices": 9}, "llm_devices is 9"),
        ({"device_bytes": 1}, "device_bytes is 1"),
        ({"slo_stage": "search", "percentile": 101.0}, "percentile is 101"),
    ],
)
def test_impossible_questions_name_the_field(setting, wrong, named):
    with pytest.raises(InvalidInputError, match=named):
        replace(setting, **wrong)


def test_an_unknown_input_is_refused(setting):
    with pytest.raises(InvalidInputError, match=r"input is 'luck'.*skew"):
        setting.varied("luck", 1.1)
