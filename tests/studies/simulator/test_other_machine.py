"""What-if: stated numbers change the fits as they say, and are told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.analysis import analyse
from hybridindex.studies.simulator import Inputs
from hybridindex.studies.simulator.other_machine import WhatIf, suppose
from tests.partitioner.synthetic import make_profile, with_candidates
from tests.studies.simulator.conftest import system_of


def times(analysis, policy="cpu-only"):
    given = Inputs(analysis=analysis, slo_s=0.1, rate=1.0, budget_bytes=1 << 30)
    return system_of(policy, given).table.of_batch(8)


def test_a_host_of_twice_the_speed_takes_half_the_time(analysis):
    faster, said = suppose(analysis, WhatIf(host_speed=2.0))
    before, after = times(analysis), times(faster)
    assert np.array(after.host_s) == pytest.approx(np.array(before.host_s) / 2)
    assert after.coarse_s == pytest.approx(before.coarse_s / 2)
    assert any("2 times as fast" in sentence for sentence in said)


def test_a_stated_bandwidth_is_what_scans_take(analysis):
    other, said = suppose(analysis, WhatIf(device_bandwidth=100e9, device_efficiency=0.5))
    system = system_of("all-gpu", Inputs(analysis=other, slo_s=0.1, rate=1.0, budget_bytes=1 << 30))
    table = system.table
    nbytes = table.pool.window_union(table.devices[0].lists, 8)[0]
    assert table.of_batch(8).device_s[0][0] == pytest.approx(100e-6 + nbytes / 50e9)
    assert any("0.5 of 100 GB/s" in sentence for sentence in said)


def test_longer_lists_take_longer_and_more_memory(analysis):
    longer, _ = suppose(analysis, WhatIf(index_scale=4.0))
    assert longer.profile.nbytes == pytest.approx(4 * analysis.profile.nbytes, rel=0.01)
    assert np.mean(times(longer).host_s) > 3 * np.mean(times(analysis).host_s)


def test_rows_beside_the_codes_of_longer_lists_are_as_many_more():
    codes = analyse(with_candidates(replace(make_profile(code_size=64), codec="rabitq1"), 2048))
    longer, _ = suppose(codes, WhatIf(index_scale=100.0))
    assert longer.curve.rows is not None
    assert longer.curve.rows.row_bytes == 2048
    assert longer.curve.rows.list_bytes.tolist() == (100 * 2048 * codes.profile.list_sizes).tolist()


def test_nothing_is_assumed_of_the_machine_that_was_profiled(analysis):
    same, said = suppose(analysis, WhatIf())
    assert same.latency is analysis.latency
    assert same.curve is analysis.curve
    assert not any(sentence.startswith("assumed") for sentence in said)


@pytest.mark.parametrize(
    "wrong", [{"device_bandwidth": 0.0}, {"device_efficiency": 1.5}, {"host_speed": -1.0}, {"index_scale": 0.0}]
)
def test_wrong_numbers_are_named(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        WhatIf(**wrong)
