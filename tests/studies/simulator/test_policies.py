"""Policies: what they keep where, and that resources count."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.simulator import POLICIES, Inputs, Unservable, build_system, compliant_rate, poisson, simulate
from hybridindex.studies.simulator.lookahead_replay import LookaheadRules
from hybridindex.studies.simulator.policies import hedrarag_lists
from tests.studies.simulator.conftest import LLM, system_of

AHEAD = LookaheadRules(window_s=0.05, bytes_per_s=1e9, overlap=0.9, arena_bytes=20 << 20)


@pytest.fixture(scope="module")
def inputs(analysis) -> Inputs:
    return Inputs(analysis=analysis, slo_s=0.1, rate=100.0, n_devices=2, budget_bytes=64 << 20, llm=LLM)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_what_it_is_offered(inputs, policy):
    system = system_of(policy, inputs)
    outcome = simulate(system, poisson(60.0, 3_000, seed=1), slo_s=0.1)
    assert outcome.throughput_rps == pytest.approx(60.0, rel=0.1)
    assert 0 < outcome.kv_mean <= outcome.kv_peak <= 1
    assert outcome.attainment > 0.9


def test_memory_goes_to_the_index_or_to_the_llm(inputs, analysis):
    kv = {name: system_of(name, inputs).llm.kv_tokens for name in ("cpu-only", "all-gpu", "dedicated-gpu")}
    assert kv["all-gpu"] < kv["cpu-only"]
    assert kv["dedicated-gpu"] == kv["cpu-only"] // 2
    everything = system_of("all-gpu", inputs)
    assert min(everything.table.hit_rate) == 1
    shards = [tier.lists for tier in everything.table.devices]
    assert not (shards[0] & shards[1]).any()
    sizes = [analysis.profile.list_bytes[lists].sum() for lists in shards]
    assert max(sizes) < 1.1 * min(sizes)


def test_hedrarag_balances_search_and_llm(inputs):
    # An LLM that takes more than the host alone can search: the split must help search, and only as far as it must.
    eager = replace(inputs, llm=replace(LLM, throughput_rps=6000.0))
    system = system_of("hedrarag", eager)
    host = system_of("cpu-only", eager)
    assert host.table.capacity() < 6000
    assert system.table.capacity() == pytest.approx(system.llm.capacity_rps, rel=0.25)
    placed = sum(int(tier.lists.sum()) for tier in system.table.devices)
    assert hedrarag_lists(eager) == placed > 0
    assert hedrarag_lists(inputs) == 0
    with pytest.raises(InvalidInputError, match="llm is missing"):
        hedrarag_lists(replace(inputs, llm=None))


def test_resources_that_do_not_allow_a_policy_are_told(inputs):
    small = replace(inputs, budget_bytes=8 << 20)
    refused = build_system("all-gpu", small)
    assert isinstance(refused, Unservable)
    assert "2 devices hold" in refused.reason
    assert isinstance(build_system("dedicated-gpu", replace(inputs, n_devices=1)), Unservable)
    assert isinstance(build_system("hedrarag", replace(inputs, llm=None)), Unservable)


def test_a_dedicated_device_has_the_bytes_that_the_llm_would_have(inputs):
    small = replace(inputs, budget_bytes=8 << 20)
    lists = {}
    for device_bytes in (None, 64 << 20):
        system = system_of("dedicated-gpu", replace(small, device_bytes=device_bytes))
        lists[device_bytes] = int(system.table.devices[0].lists.sum())
    assert lists[64 << 20] > lists[None]
    # Others share their devices with the LLM.
    assert isinstance(build_system("all-gpu", replace(small, device_bytes=64 << 20)), Unservable)
    with pytest.raises(InvalidInputError, match="device_bytes is -1"):
        replace(small, device_bytes=-1)


@pytest.mark.timeout(120)
def test_contention_over_years_of_virtual_time_takes_little_memory(inputs):
    rare = replace(inputs, contention=0.5)
    tracemalloc.start()
    outcome = simulate(system_of("all-gpu", rare), poisson(1e-5, 300, seed=1), slo_s=0.1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome.attainment > 0.9
    assert peak < 100 << 20


def test_an_unknown_policy_is_named(inputs):
    with pytest.raises(InvalidInputError, match=r"policy is 'best'.*hedrarag"):
        build_system("best", inputs)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rate": -1.0}, "rate"),
        ({"slo_s": 0.0}, "slo_s"),
        ({"n_devices": 0}, "n_devices"),
        ({"contention": -1}, "cont"),
    ],
)
def test_wrong_inputs_are_named(inputs, wrong, named):
    with pytest.raises(InvalidInputError, match=f"^{named}"):
        replace(inputs, **wrong)


def test_lookahead_serves_more_and_the_cache_more_again(inputs):
    given = replace(inputs, llm=None, lookahead=AHEAD, rate=20.0)
    rates = {name: np.mean(system_of(name, given).table.hit_rate) for name in ("ours", "no-cache", "no-lookahead")}
    assert rates["no-lookahead"] < rates["no-cache"] < rates["ours"]


def test_more_capacity_never_lowers_attainment(analysis):
    found = []
    for budget in (0, 8 << 20, 16 << 20, 64 << 20):
        given = Inputs(analysis=analysis, slo_s=0.001, rate=800.0, budget_bytes=budget)
        system = system_of("dedicated-gpu", given)
        found.append(simulate(system, poisson(1500.0, 20_000, seed=1), slo_s=0.001).attainment)
    assert (np.diff(found) > -0.01).all()
    assert found[-1] > found[0] + 0.2


def test_the_compliant_rate_is_met_and_a_little_more_is_not(inputs):
    system = system_of("cpu-only", replace(inputs, llm=None))

    def run(rate):
        return simulate(system, poisson(rate, 10_000, seed=1), slo_s=0.003)

    found = compliant_rate(run, attainment=0.9, ceiling=20_000.0)
    assert run(found.rate).attainment >= 0.9
    assert run(found.rate * 1.05).attainment < 0.9
    assert not found.at_ceiling
    nothing = compliant_rate(lambda rate: simulate(system, poisson(rate, 500, seed=1), slo_s=1e-6), ceiling=100.0)
    assert nothing.rate == 0
