"""A forecast beside the simulator, which plays the same question request by request. A second or two."""

from __future__ import annotations

import pytest

from hybridindex.studies.simulator import Inputs, build_system, compliant_rate, poisson, simulate
from hybridindex.studies.simulator.system import System
from hybridindex.studies.what_if.designs import designs_of

POLICY = {"split": "ours", "dedicated-gpu": "dedicated-gpu", "all-gpu": "all-gpu"}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_design_sustains_what_the_simulator_finds(setting, number):
    design = designs_of(setting)[number]
    alone = design.name == "dedicated-gpu"
    system = build_system(
        POLICY[design.name],
        Inputs(
            analysis=setting.analysis,
            slo_s=setting.slo_ms / 1e3,
            rate=design.compliant_qps,
            n_devices=setting.n_devices,
            budget_bytes=setting.device_bytes if alone else setting.budget_bytes,
            llm=setting.llm,
            kv_bytes_per_token=setting.service.model.kv_bytes_per_token(),
            replicas=setting.service.engines,
        ),
    )
    assert isinstance(system, System)

    def run(rate):
        return simulate(system, poisson(rate, 1_000, seed=1), slo_s=setting.slo_ms / 1e3)

    found = compliant_rate(run, attainment=0.9, ceiling=1.2 * system.llm.capacity_rps)
    assert design.compliant_qps == pytest.approx(found.rate, rel=0.15)
