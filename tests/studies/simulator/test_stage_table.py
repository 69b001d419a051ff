"""Stage tables against the partitioner's own predictions and the router's split."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.studies.simulator import Inputs
from hybridindex.studies.simulator.query_pool import query_pool
from tests.studies.simulator.conftest import system_of


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


@pytest.mark.parametrize("batch", [1, 2, 7, 499, 500, 600])
def test_windows_touch_the_bytes_of_their_lists(analysis, batch):
    pool = query_pool(analysis.curve, analysis.profile.dim)
    lists = np.arange(analysis.profile.nlist) % 3 > 0
    found = pool.window_union(lists, batch)
    for first in (0, 1, 250, len(pool) - 1):
        probed = np.unique(pool.probes[(first + np.arange(batch)) % len(pool)])
        probed = probed[probed >= 0]
        assert found[first] == pool.list_bytes[probed[lists[probed]]].sum()
    assert found.mean() == pytest.approx(pool.union_bytes(lists, batch), rel=0.02)


def test_an_early_answer_comes_when_its_lists_and_those_of_lighter_requests_are_scanned(analysis):
    table = system_of("cpu-only", Inputs(analysis=analysis, slo_s=0.1, rate=1.0)).table
    first, size = table.n - 2, 5
    rows = (first + np.arange(size)) % table.n
    lists = [set(row[row >= 0].tolist()) for row in table.pool.probes[rows]]
    nbytes, wanted = table.pool.list_bytes, {one: sum(one in row for row in lists) for row in lists for one in row}
    cost = {one: nbytes[one] * (1 + table.pool.request_cost * wanted[one]) for one in wanted}
    seen: set[int] = set()
    expected = np.zeros(size)
    for place in sorted(range(size), key=lambda i: sum(cost[one] for one in lists[i])):
        seen |= lists[place]
        expected[place] = sum(cost[one] for one in seen) / sum(cost.values())
    assert table.early_ends(first, size) == pytest.approx(expected)
    assert max(table.early_ends(first, size)) == 1


def test_who_has_nothing_on_the_host_ends_before_its_scan(analysis):
    table = system_of("all-gpu", Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=1 << 30)).table
    assert table.early_ends(0, 3) == [0, 0, 0]


@pytest.mark.parametrize("batch", [1, 8, 40])
@pytest.mark.parametrize("policy", ["cpu-only", "all-gpu"])
def test_a_batch_takes_what_the_latency_model_says(analysis, batch, policy):
    system = system_of(policy, Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=1 << 30))
    times = system.table.of_batch(batch)
    count = analysis.curve.nlist if policy == "all-gpu" else 0
    parts = analysis.latency.parts(analysis.curve, analysis.curve.at(count), batch)
    assert np.array(times.host_s) == pytest.approx(parts.host_s)
    if policy == "all-gpu":
        # What queries share is expected there, and counted here.
        assert np.mean(times.device_s[0]) == pytest.approx(parts.device_s.mean(), rel=1e-3)
        assert np.array(times.device_s[0]) == pytest.approx(parts.device_s, rel=0.02)
    assert times.coarse_s == pytest.approx(parts.coarse_s)


def test_large_batches_are_scaled_from_near_ones(analysis):
    table = system_of("cpu-only", Inputs(analysis=analysis, slo_s=0.1, rate=1.0)).table
    near, far = table.of_batch(1000), table.of_batch(1007)
    assert far.host_s[0] == pytest.approx(near.host_s[0] * 1.007, rel=0.01)
