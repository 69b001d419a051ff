"""What is fitted to served batches is what served them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.latency import RoutingModel
from hybridindex.simulator import EngineRules, Inputs, poisson, simulate
from hybridindex.simulator.retrieval import retrieve
from hybridindex.simulator.served import Served, fit_engine
from hybridindex.simulator.stages import BatchScatter
from tests.simulator.conftest import system_of


def slower(system, **rules):
    """A system whose engine has costs that its profile does not know."""
    routing = RoutingModel(scale=1.3, fixed_s=2e-4, per_query_s=1e-4)
    table = replace(system.table, routing=routing, device_factor=1.2, _known={})
    return replace(system, table=table, rules=replace(system.rules, **rules))


def served_by(system, load: float, *, n: int = 6_000, seed: int = 3) -> Served:
    workload = poisson(load * system.table.capacity(), n, seed=seed)
    found = retrieve(workload.arrivals, system.table, system.rules, seed=seed)
    scans = found.device_busy[:, 2] - found.device_busy[:, 1]
    return Served(
        arrivals=workload.arrivals,
        started_s=found.started_s,
        done_s=found.done_s,
        batches=found.batches,
        engine_s=found.engine_s,
        # One device, which takes part in every batch.
        device_s=scans if scans.size else np.zeros(found.batches.size),
    )


@pytest.fixture(params=["cpu-only", "all-gpu"])
def system(analysis, request):
    return system_of(request.param, Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=1 << 30))


def test_an_engine_is_recovered_from_what_it_served(system):
    truth = slower(system, wake_s=(5e-5, 1.5e-4), between_s=3e-4)
    found = fit_engine(system.table, [served_by(truth, 0.2), served_by(truth, 0.8)])
    for size in (1, 4, 16):
        told, real = (one.table.of_batch(size) for one in (found.of(system), truth))
        assert told.coarse_s + np.mean(told.host_s) == pytest.approx(real.coarse_s + np.mean(real.host_s), rel=0.05)
        assert np.array(told.device_s) == pytest.approx(np.array(real.device_s), rel=0.02)
    assert found.wake_s.mean() == pytest.approx(1e-4, rel=0.1)
    assert found.between_s == pytest.approx(3e-4, rel=0.02)
    assert found.pace(system.table, served_by(truth, 0.5)) == pytest.approx(1.0, abs=0.02)


def test_a_load_that_was_not_fitted_is_predicted(system):
    truth = slower(system, wake_s=(1e-4,), between_s=2e-4)
    fitted = fit_engine(system.table, [served_by(truth, 0.2), served_by(truth, 0.8)]).of(system)
    workload = poisson(0.6 * truth.table.capacity(), 20_000, seed=9)
    real, told, blind = (simulate(one, workload, slo_s=0.01) for one in (truth, fitted, system))
    assert told.search.p90 == pytest.approx(real.search.p90, rel=0.05)
    assert abs(told.search.p90 - real.search.p90) < abs(blind.search.p90 - real.search.p90)


def test_a_batch_scatters_like_those_of_its_length(system):
    load = served_by(replace(slower(system), rules=EngineRules(scatter=False)), 0.9)
    # Interruptions of a millisecond meet every second batch: long ones hardly notice.
    late = np.random.default_rng(1).choice([0.0, 1e-3], load.batches.size)
    found = fit_engine(system.table, [replace(load, engine_s=load.engine_s + late)])
    drawn = BatchScatter(told_s=found.told_s.tolist(), ratios=found.ratios.tolist())
    draws = np.linspace(0, 1, 100, endpoint=False)
    short, long = (np.ptp([drawn.ratio(told, draw) for draw in draws]) for told in found.told_s[[0, -1]])
    assert short > 2 * long > 0


def test_too_few_batches_are_named(system):
    with pytest.raises(InvalidInputError, match="loads have 3 batches"):
        fit_engine(system.table, [served_by(system, 0.01, n=3)])
