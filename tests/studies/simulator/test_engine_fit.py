"""What is fitted to served batches is what served them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.latency import RoutingModel
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.studies.simulator import EngineRules, Inputs, poisson, simulate
from hybridindex.studies.simulator.engine_fit import Served, fit_engine
from hybridindex.studies.simulator.engine_loop import retrieve
from hybridindex.studies.simulator.stage_table import stage_table
from tests.studies.simulator.conftest import system_of


def slower(system, **rules):
    """A system whose engine has costs that its profile does not know."""
    routing = RoutingModel(fixed_s=2e-4, per_query_s=1e-4)
    table = replace(system.table, routing=routing, coarse_factor=1.5, host_factor=1.3, device_factor=1.2, _known={})
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
        split_s=found.split_s,
        engine_s=found.engine_s,
        # One device, which takes part in every batch.
        device_s=scans if scans.size else np.zeros(found.batches.size),
    )


@pytest.fixture(params=[0.0, 0.1], ids=["host", "host and device"])
def system(analysis, request):
    plan = make_plan(
        analysis.profile,
        PlanRequest.resolve(slo_ms=1, device_budget_bytes=64 << 20, coverage=request.param),
        analysis=analysis,
    )
    return system_of("ours", Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=64 << 20, plan=plan))


def test_an_engine_is_recovered_from_what_it_served(system):
    truth = slower(system, wake_s=(5e-5, 1.5e-4), between_s=3e-4)
    found = fit_engine(system.table, [served_by(truth, 0.2), served_by(truth, 0.8)])
    assert found.coarse_ratio == pytest.approx(1.5, rel=0.02)
    if system.table.devices:
        assert found.of(system).table.device_factor == pytest.approx(1.2, rel=0.02)
    for size in (1, 4, 16):
        told, real = (one.table.of_batch(size) for one in (found.of(system), truth))
        sums = [one.own_s + np.mean(one.host_s) for one in (told, real)]
        assert sums[0] == pytest.approx(sums[1], rel=0.03)
    assert found.wake_s.mean() == pytest.approx(1e-4, rel=0.1)
    assert found.between_s == pytest.approx(3e-4, rel=0.02)
    assert found.ratio(system.table, served_by(truth, 0.5)) == pytest.approx(1.0, abs=0.02)


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
    told, draws = found.scatter.told_s, np.linspace(0, 1, 100, endpoint=False)
    short, long = (np.ptp([found.scatter.ratio(one, draw) for draw in draws]) for one in (told[0], told[-1]))
    assert short > 2 * long > 0


def test_queries_are_those_that_the_load_began_with(system):
    still = replace(slower(system), rules=EngineRules(scatter=False))
    load = served_by(still, 0.5)
    # The same load, of a pool that begins with its hundredth query.
    pool = replace(system.table.pool, probes=np.roll(system.table.pool.probes, 100, axis=0))
    rolled = stage_table(
        pool, system.table.model, np.where(system.table.host.lists, -1, 0).astype(np.int16), 1, resident_bytes=0
    )
    right, wrong = (fit_engine(rolled, [replace(load, first_query=first)]).scatter.ratios for first in (100, 0))
    assert np.std(right) < 0.01 < np.std(wrong)


def test_waiting_for_a_slot_is_no_pause_of_the_engine(system):
    # In turns: a batch whose device part takes long, one that comes at once, one that has to wait for the first.
    n, step = 16, 10.0 * np.arange(16)
    started, done = ((step[:, None] + times).ravel() for times in ([0, 1.1, 5.0], [5.0, 2.1, 6.0]))
    load = Served(
        arrivals=np.repeat(step, 3),
        started_s=started,
        done_s=done,
        batches=np.ones(3 * n, dtype=np.int64),
        split_s=np.full(3 * n, 0.1),
        engine_s=np.ones(3 * n),
        device_s=np.zeros(3 * n),
    )
    assert fit_engine(system.table, [load]).between_s == pytest.approx(0.1)


def test_too_few_batches_are_named(system):
    with pytest.raises(InvalidInputError, match="loads have 3 batches"):
        fit_engine(system.table, [served_by(system, 0.01, n=3)])
