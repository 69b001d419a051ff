"""Stage tables against the partitioner's own predictions and the router's split."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.simulator import Inputs
from hybridindex.simulator.queries import query_pool
from tests.simulator.conftest import system_of


@pytest.mark.parametrize("count", [0, 20, 256])
def test_work_of_the_tiers_is_that_of_the_coverage_curve(analysis, count):
    curve = analysis.curve
    list_device = np.full(curve.nlist, -1, dtype=np.int16)
    list_device[curve.order[:count]] = np.arange(count) % 2
    (host, *devices), hit_rate = query_pool(curve, analysis.profile.dim).tiers(list_device, 2)
    work = curve.at(count)
    assert np.array_equal(host.work, work.miss_work)
    assert np.array_equal(host.probes, work.miss_probes)
    assert np.array_equal(devices[0].work + devices[1].work, work.hit_work)
    assert hit_rate == pytest.approx(work.hit_rate, abs=1e-6)


@pytest.mark.parametrize("batch", [1, 8, 40])
@pytest.mark.parametrize("policy", ["cpu-only", "all-gpu"])
def test_a_batch_takes_what_the_latency_model_says(analysis, batch, policy):
    system = system_of(policy, Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=1 << 30))
    times = system.table.of_batch(batch)
    count = analysis.curve.nlist if policy == "all-gpu" else 0
    parts = analysis.latency.parts(analysis.curve, analysis.curve.at(count), batch)
    assert np.array(times.host_s) == pytest.approx(parts.host_s)
    if policy == "all-gpu":
        assert np.array(times.device_s[0]) == pytest.approx(parts.device_s)
    assert times.coarse_s == pytest.approx(parts.coarse_s)


def test_large_batches_are_scaled_from_near_ones(analysis):
    table = system_of("cpu-only", Inputs(analysis=analysis, slo_s=0.1, rate=1.0)).table
    near, far = table.of_batch(1000), table.of_batch(1007)
    assert far.host_s[0] == pytest.approx(near.host_s[0] * 1.007, rel=0.01)
