"""Virtual time against queueing theory where it has closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.partitioner.models.throughput import waiting_factor
from hybridindex.studies.simulator import Inputs, bursty, poisson, simulate
from hybridindex.studies.simulator.engine_loop import retrieve
from hybridindex.studies.simulator.stage_table import stage_table
from tests.studies.simulator.conftest import constant_service, system_of

T = 0.01


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_query_at_a_time_waits_as_long_as_in_m_d_1(analysis, load):
    system = constant_service(analysis, T, max_batch=1)
    outcome = simulate(system, poisson(load / T, 200_000, seed=3))
    # Pollaczek and Khinchine: rho T / 2 (1 - rho).
    assert outcome.search.mean - T == pytest.approx(load * T / (2 * (1 - load)), rel=0.05)
    assert outcome.mean_batch == 1


@pytest.mark.parametrize("load", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("percentile", [50, 90, 99])
def test_on_demand_batches_wait_as_the_partitioner_says(analysis, load, percentile):
    system = constant_service(analysis, T, max_batch=None)
    workload = poisson(load / T, 200_000, seed=4)
    found = retrieve(workload.arrivals, system.table, system.rules, seed=0)
    waited = np.percentile(found.started_s - workload.arrivals, percentile)
    assert waited / T == pytest.approx(waiting_factor(load / T, T, percentile), abs=0.02)


def test_bursts_wait_longer_at_the_same_rate(analysis):
    system = constant_service(analysis, T, max_batch=1)
    smooth, rough = poisson(50.0, 50_000, seed=1), bursty(50.0, 50_000, burstiness=4.0, period_s=1.0, seed=1)
    assert rough.rate == pytest.approx(smooth.rate, rel=0.1)
    assert simulate(system, rough).search.p90 > 2 * simulate(system, smooth).search.p90


@pytest.mark.parametrize("policy", ["cpu-only", "all-gpu"])
def test_every_request_is_answered_once_and_not_before_it_came(analysis, policy):
    system = system_of(policy, Inputs(analysis=analysis, slo_s=0.1, rate=1.0, n_devices=2, budget_bytes=1 << 30))
    workload = poisson(1.5 * system.table.capacity(), 20_000, seed=2)
    found = retrieve(workload.arrivals, system.table, system.rules, seed=1)
    assert found.batches.sum() == len(workload.arrivals)
    assert (found.started_s >= workload.arrivals).all()
    assert (found.done_s > found.started_s).all()
    assert np.isfinite(found.done_s).all()
    for device in range(2):
        scans = found.device_busy[found.device_busy[:, 0] == device]
        assert (scans[1:, 1] >= scans[:-1, 2]).all(), "a device scans one part at a time"


def test_a_batch_is_no_larger_than_its_cap(analysis):
    system = constant_service(analysis, T, max_batch=7)
    found = retrieve(poisson(500.0, 5_000, seed=2).arrivals, system.table, system.rules, seed=1)
    assert found.batches.max() == 7


def test_two_batches_at_most_are_under_way(analysis):
    system = system_of("all-gpu", Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=1 << 30))
    workload = poisson(3 * system.table.capacity(), 5_000, seed=2)
    found = retrieve(workload.arrivals, system.table, system.rules, seed=1)
    first = np.cumsum(found.batches) - found.batches
    starts, ends = found.started_s[first], np.maximum.reduceat(found.done_s, first)
    assert (starts[2:] >= ends[:-2]).all()
    assert (starts[1:] < ends[:-1]).any(), "the host starts on the next batch while the device works"


def test_early_dispatch_answers_light_requests_sooner_and_none_later(analysis):
    system = system_of("cpu-only", Inputs(analysis=analysis, slo_s=0.1, rate=1.0))
    workload = poisson(2 * system.table.capacity(), 5_000, seed=2)
    late = retrieve(workload.arrivals, system.table, replace(system.rules, early_dispatch=False), seed=1)
    early = retrieve(workload.arrivals, system.table, system.rules, seed=1)
    assert np.array_equal(early.started_s, late.started_s)
    assert (early.done_s <= late.done_s + 1e-9).all()
    assert (early.done_s < late.done_s - 1e-6).mean() > 0.3
    first = np.cumsum(early.batches) - early.batches
    # The heaviest request of a batch ends with the batch.
    assert np.maximum.reduceat(early.done_s, first) == pytest.approx(late.done_s[first])


def test_the_same_seed_gives_the_same_outcome_and_another_one_another(analysis):
    system = system_of("cpu-only", Inputs(analysis=analysis, slo_s=0.1, rate=1.0))
    workload = poisson(500.0, 5_000, seed=2)
    first, again, other = (simulate(system, workload, slo_s=0.003, seed=seed) for seed in (1, 1, 2))
    assert first.to_data() == again.to_data()
    assert np.array_equal(first.search_s, again.search_s)
    assert not np.array_equal(first.search_s, other.search_s)


def test_who_has_nothing_on_a_device_does_not_wait_for_it(analysis):
    system = system_of("cpu-only", Inputs(analysis=analysis, slo_s=0.1, rate=1.0))
    list_device = np.full(analysis.profile.nlist, -1, dtype=np.int16)
    list_device[analysis.curve.order[40]] = 0
    slow = stage_table(system.table.pool, analysis.latency, list_device, 1, resident_bytes=0, device_factor=1e5)
    found = retrieve(poisson(2 * system.table.capacity(), 1_000, seed=2).arrivals, slow, system.rules, seed=1)
    many = np.repeat(found.batches, found.batches) > 1
    took, alone = (found.done_s - found.started_s)[many], (found.hit_rate == 0)[many]
    assert 0.05 < alone.mean() < 0.95
    own = np.repeat(found.engine_s, found.batches)[many]
    assert (took <= own + 1e-9)[alone].all()
    assert (took > own + 1e-9)[~alone].all()


def test_an_idle_engine_wakes_first_and_a_busy_one_pauses(analysis):
    system = constant_service(analysis, T, max_batch=1)
    rules = replace(system.rules, wake_s=(1e-3,), between_s=2e-3)
    found = retrieve(np.array([0.0, 1.0, 1.0005, 1.002, 2.0]), system.table, rules, seed=0)
    assert found.started_s == pytest.approx([0.001, 1.001, 1.013, 1.025, 2.001])
    assert found.done_s - found.started_s == pytest.approx(T)


def test_requests_gather_while_an_engine_wakes(analysis):
    system = constant_service(analysis, T, max_batch=None)
    found = retrieve(np.array([0.0, 0.004, 0.2]), system.table, replace(system.rules, wake_s=(0.005,)), seed=0)
    assert found.batches.tolist() == [2, 1]
