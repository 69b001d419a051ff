"""A question whose machine is known: 256 lists, an LLM on eight H100 by roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.studies.hardware import model
from hybridindex.studies.what_if import LLMService, Setting, parse_fleet
from tests.partitioner.synthetic import make_profile


@pytest.fixture(scope="session")
def analysis() -> Analysis:
    """13 GB in lists of 50 MB; the host takes about 160 ms for a query, a device a tenth."""
    found = analyse(make_profile(n=400, noise=0.05, device_per_byte_s=2e-11, mean_size=100_000))
    return found.configured(page_bytes=found.curve.geometry.page_bytes, n_devices=8)


@pytest.fixture(scope="session")
def service() -> LLMService:
    return LLMService(model=model("llama3-8b"), fleet=parse_fleet("h100x8"))


@pytest.fixture(scope="session")
def setting(analysis, service) -> Setting:
    """An LLM with little KV cache: what the index takes is felt."""
    tight = replace(service, kv_factor=0.15)
    llm = tight.profile()
    return Setting(
        analysis=analysis,
        rate_qps=40.0,
        slo_ms=400.0,
        n_devices=8,
        budget_bytes=llm.kv_cache_bytes // 8,
        device_bytes=int(service.fleet.usable_bytes),
        llm=llm,
        service=tight,
        slo_stage="ttft",
    )
