"""Systems whose true behaviour is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.models.fits import PiecewiseLinear
from hybridindex.studies.simulator import EngineRules, Inputs, System, build_system
from hybridindex.studies.simulator.policies import Unservable
from hybridindex.types import LLMProfile
from tests.partitioner.synthetic import make_profile

#: 512 prompt and 64 answer tokens, 200 requests/s at 4 GiB.
LLM = LLMProfile(kv_cache_bytes=4 << 30, throughput_rps=200.0, input_tokens=512, output_tokens=64, ttft_s=0.02)


@pytest.fixture(scope="session")
def analysis() -> Analysis:
    """256 lists, 500 held-back queries, a device that scans ten times as fast as the host."""
    return analyse(make_profile(n=1000, noise=0.05, device_per_byte_s=2e-11))


def system_of(policy: str, inputs: Inputs) -> System:
    system = build_system(policy, inputs)
    assert not isinstance(system, Unservable), system
    return system


def constant_service(analysis: Analysis, seconds: float, *, max_batch: int | None) -> System:
    """Every batch takes ``seconds``, whatever is in it: the engine alone, nothing is scanned."""
    flat = PiecewiseLinear(knots=np.array([1.0, 1e6]), values=np.array([seconds, seconds]))
    latency = replace(analysis.latency, coarse=flat, device=None, merge=None)
    rules = EngineRules(max_batch=max_batch, scatter=False)
    system = system_of("cpu-only", Inputs(analysis=analysis, slo_s=1.0, rate=1.0, rules=rules))
    nothing = replace(system.table.host, work=np.zeros(system.table.n), probes=np.zeros(system.table.n))
    table = replace(system.table, model=latency, host=nothing, _known={})
    return replace(system, table=table)
