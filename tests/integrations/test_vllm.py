"""vLLM's share beside a plan: arguments, and refusals with all numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.config import RouterConfig
from hybridindex.errors import InvalidInputError
from hybridindex.integrations.vllm import check_fit, room_beside, share_with
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.router.lookahead.windows import Windows
from hybridindex.types import LLMProfile, TransferSample
from tests.partitioner.synthetic import make_profile

GIB = 1 << 30
LLM = LLMProfile(kv_cache_bytes=40 * GIB, throughput_rps=50.0, points=((4 * GIB, 5.0), (40 * GIB, 50.0)))


def plan_of(**changes: Any) -> Plan:
    arguments: dict[str, Any] = {"slo_ms": 50, "device_budget_bytes": 8 * GIB, "coverage": 0.5}
    return make_plan(make_profile(), PlanRequest.resolve(**{**arguments, **changes}))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(llm=LLM)


def test_the_cache_is_what_the_profile_leaves_beside_the_index(plan: Plan) -> None:
    share = share_with(plan, device_memory_bytes=80 * GIB, model_bytes=16 * GIB)
    assert plan.device_bytes <= share.index_bytes[0] <= plan.device_bytes + (256 << 20)
    assert share.kv_cache_memory_bytes == 40 * GIB - share.index_bytes[0]
    assert share.notes == (f"with another plan the index may grow to its budget, {8 * GIB} bytes",)
    assert share.arguments() == [
        "--kv-cache-memory-bytes",
        str(share.kv_cache_memory_bytes),
        "--gpu-memory-utilization",
        f"{share.gpu_memory_utilization:.2f}",
    ]


@given(st.integers(9 * GIB, 40 * GIB), st.integers(0, GIB // 2), st.integers(0, 8 * GIB))
def test_utilization_holds_with_the_index_already_there(plan: Plan, memory: int, context: int, lookahead: int) -> None:
    share = share_with(
        plan, device_memory_bytes=memory, kv_cache_bytes=1, context_bytes=context, lookahead_bytes=lookahead
    )
    free = memory - share.index_bytes[0] - context
    assert share.gpu_memory_utilization is not None
    assert free >= memory * share.gpu_memory_utilization
    assert share.gpu_memory_utilization <= 0.92


def test_the_index_never_counts_for_more_than_its_budget(plan: Plan) -> None:
    share = share_with(plan, device_memory_bytes=None, lookahead_bytes=1 << 50)
    assert share.index_bytes == (8 * GIB,)
    assert share.gpu_memory_utilization is None


def test_every_device_leaves_the_same_cache() -> None:
    plan = plan_of(llm=LLM, n_devices=2, device_budget_bytes=(8 * GIB, 4 * GIB))
    share = share_with(plan, device_memory_bytes=80 * GIB, lookahead_bytes=1 << 50)
    assert share.kv_cache_memory_bytes == 20 * GIB - 8 * GIB


def test_what_is_not_known_is_noted(plan: Plan) -> None:
    share = share_with(plan, device_memory_bytes=80 * GIB, kv_cache_bytes=1 * GIB)
    assert any("weights" in note for note in share.notes)
    small = plan_of(llm=replace(LLM, points=((39 * GIB + (GIB - 1), 5.0), (40 * GIB, 50.0))))
    assert any("below the smallest measured" in note for note in share_with(small, device_memory_bytes=80 * GIB).notes)
    bare = share_with(plan_of(), device_memory_bytes=80 * GIB)
    assert bare.kv_cache_memory_bytes is None
    assert any("sizes its KV cache itself" in note for note in bare.notes)


def test_what_does_not_fit_is_refused_with_all_numbers(plan: Plan) -> None:
    with pytest.raises(InvalidInputError, match=f"device memory is {41 * GIB} bytes; .*{16 * GIB} come to .* too many"):
        share_with(plan, device_memory_bytes=41 * GIB, model_bytes=16 * GIB)
    with pytest.raises(InvalidInputError, match="nothing is left"):
        share_with(plan_of(llm=replace(LLM, kv_cache_bytes=1000, points=())), device_memory_bytes=80 * GIB)
    for size in (0, -1):
        with pytest.raises(InvalidInputError, match=f"kv_cache_bytes is {size}; expected 1"):
            share_with(plan, device_memory_bytes=None, kv_cache_bytes=size)
    with pytest.raises(InvalidInputError, match="kv_cache_bytes is missing"):
        share_with(plan_of(), device_memory_bytes=None)
    index = share_with(plan, device_memory_bytes=80 * GIB).index_bytes[0]
    with pytest.raises(InvalidInputError, match="less than a hundredth"):
        share_with(plan_of(), device_memory_bytes=GIB, context_bytes=GIB - index)


def test_a_device_filled_to_the_last_byte_fits() -> None:
    parts = {"index_bytes": 10, "context_bytes": 20, "kv_bytes": 30, "model_bytes": 40}
    check_fit(100, **parts)
    with pytest.raises(InvalidInputError, match="1 too many"):
        check_fit(99, **parts)
    with pytest.raises(InvalidInputError, match="the model: -1 bytes"):
        check_fit(100, index_bytes=1, context_bytes=1, kv_bytes=None, model_bytes=-1)


def test_room_beside_a_running_engine_counts_the_context_that_is_there_already() -> None:
    words, enough = room_beside(1000, index_bytes=1000, context_bytes=300)
    assert enough
    assert words == "the index may take 1000 bytes and its process 300, 1300 were free"
    words, enough = room_beside(999, index_bytes=1000, context_bytes=None)
    assert not enough
    assert words == "the index may take 1000 bytes and its process an unknown part, 999 were free"


def test_lookahead_counts_as_the_router_takes_it(plan: Plan) -> None:
    llm = replace(LLM, generation_s={"answer": 2.0, "decide": 0.1})
    copies = (TransferSample(device="gpu", pinned=False, nbytes=1 << 30, seconds=1.0),)
    request = PlanRequest.resolve(slo_ms=50, device_budget_bytes=8 * GIB, coverage=0.5, llm=llm)
    measured = make_plan(replace(make_profile(), transfers=copies), request)
    share = share_with(measured, device_memory_bytes=80 * GIB)
    assert share.index_bytes[0] == max(measured.device_bytes, measured.request.scratch[0]) + 2 * GIB
    assert share.index_bytes != share_with(plan, device_memory_bytes=80 * GIB).index_bytes


def test_lookahead_counts_at_the_rate_of_a_gpus_router() -> None:
    """Which copies from page-locked memory, where nothing else is configured."""
    llm = replace(LLM, generation_s={"answer": 0.5})
    copies = tuple(
        TransferSample(device="cuda:0", pinned=pinned, nbytes=1 << 30, seconds=seconds)
        for pinned, seconds in ((False, 1.0), (True, 0.25))
    )
    request = PlanRequest.resolve(slo_ms=50, device_budget_bytes=8 * GIB, coverage=0.5, llm=llm)
    plan = make_plan(replace(make_profile(), transfers=copies), request)
    taken = Windows(None, None, pinned=RouterConfig(devices=("cuda:0",)).pins_lists).share_bytes(plan)
    assert taken == 2 * GIB
    share = share_with(plan, device_memory_bytes=80 * GIB)
    assert share.index_bytes[0] == max(plan.device_bytes, plan.request.scratch[0]) + taken
    # Of a plan without an LLM, the steps that are measured count, as for its router.
    bare = replace(plan, request=replace(request, llm=None))
    assert share_with(bare, device_memory_bytes=80 * GIB, llm=llm).index_bytes == share.index_bytes
