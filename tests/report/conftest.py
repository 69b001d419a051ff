"""One plan and one full report, shared by the tests that only read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.report import ReportFiles, write_report
from hybridindex.types import Profile, RecallPoint, TransferSample
from tests.partitioner.synthetic import make_profile

INDEX_INFO: dict[str, Any] = {
    "name": "small",
    "count": 9000,
    "dim": 128,
    "nlist": 128,
    "codec": "flat",
    "metric": "ip",
}
LOAD = [
    {"policy": policy, "rate": rate, "p50_ms": ms, "p95_ms": 2 * ms, "p99_ms": 3 * ms, "attainment": met}
    for rate in (100.0, 200.0)
    for policy, ms, met in (("host", 4.0, 0.7), ("hybrid", 2.0, 0.97))
]


@pytest.fixture(scope="session")
def bare_profile() -> Profile:
    """No device, no transfers, no recall."""
    return make_profile(nlist=128, n=600, noise=0.05)


@pytest.fixture(scope="session")
def full_profile() -> Profile:
    """Everything measured, on a stand-in device."""
    profile = make_profile(nlist=128, n=600, noise=0.05, device_per_byte_s=1e-11)
    return dataclasses.replace(
        profile,
        transfers=tuple(
            TransferSample(device="cpu (stand-in)", pinned=pinned, nbytes=int(b), seconds=1e-5 + b / 8e9)
            for pinned in (False, True)
            for b in np.geomspace(4096, 1 << 24, 6)
        ),
        recall=tuple(
            RecallPoint(nprobe=n, recall=1 - 0.5 / n, ndcg=1 - 0.4 / n, k=10, n_queries=100) for n in (1, 4, 16, 64)
        ),
    )


@pytest.fixture(scope="session")
def bare_plan(bare_profile: Profile) -> Plan:
    return make_plan(bare_profile, PlanRequest.resolve(slo_ms=0.8, device_budget_bytes=12 << 20, rate_qps=300.0))


@pytest.fixture(scope="session")
def full_plan(full_profile: Profile) -> Plan:
    return make_plan(full_profile, PlanRequest.resolve(slo_ms=0.8, device_budget_bytes=12 << 20, rate_qps=300.0))


@pytest.fixture(scope="session")
def full_report(tmp_path_factory: pytest.TempPathFactory, full_profile: Profile, full_plan: Plan) -> ReportFiles:
    return write_report(
        tmp_path_factory.mktemp("report"), index_info=INDEX_INFO, profile=full_profile, plan=full_plan, load=LOAD
    )


@pytest.fixture(scope="session")
def bare_report(tmp_path_factory: pytest.TempPathFactory, bare_profile: Profile, bare_plan: Plan) -> ReportFiles:
    folder = tmp_path_factory.mktemp("report")
    return write_report(folder, index_info=INDEX_INFO, profile=bare_profile, plan=bare_plan)
