"""Open-loop load beside an LLM: nobody waits for others, what fails is late, and the search for a rate ends at it."""

from __future__ import annotations

import json
import threading

import pytest

import hybridindex as hx
from benchmarks.rag.llm_arrivals import Attained, Load, compliant_rate, offered
from tests.clustered import clustered
from tests.llm_double import Handler, LLMDouble

LOAD = Load(
    queries=clustered(8, seed=2), k=3, nprobe=4, input_tokens=20, output_tokens=4, seconds=0.4, warmup_s=0.1, slo_s=20.0
)
RATE = 40.0


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "idx"
    with hx.build(clustered(200, seed=1), path, nlist=8, metric="l2") as index, index.router() as router:
        yield router


def test_requests_come_however_many_are_under_way(router):
    """The first answers wait for the third request: who sends one after the other never gets there."""
    crowd = threading.Barrier(3, timeout=300)

    def complete(handler: Handler, body: bytes) -> None:
        asked = json.loads(body)
        # A first request finds out what the server takes.
        if asked.get("stream") and asked["max_tokens"] == LOAD.output_tokens and not crowd.broken:
            with lock:
                first = len(seen) < 3
                seen.append(asked["prompt"])
            if first:
                crowd.wait()
        double.complete(handler, body)

    lock, seen = threading.Lock(), []
    double = LLMDouble({"/v1/completions": complete})
    with double:
        attained = offered(double.url, router, LOAD, RATE, seed=5)
    assert attained.in_time == 1
    assert 0 < attained.requests < len(seen)  # those of the warm-up are sent, not counted
    assert len(set(seen)) == len(seen)
    assert 0 < attained.search_p90_s <= attained.ttft_p90_s


def test_requests_that_fail_are_late(router):
    def refuse(handler: Handler, body: bytes) -> None:
        if json.loads(body)["max_tokens"] == LOAD.output_tokens:
            handler.answer(b"{}", 500)
        else:
            double.complete(handler, body)

    double = LLMDouble({"/v1/completions": refuse})
    with double:
        attained = offered(double.url, router, LOAD, RATE, seed=5)
    assert attained.in_time == 0
    assert attained.ttft_p50_s > LOAD.slo_s


def test_the_search_for_a_rate_ends_at_the_largest_that_complies():
    def measure(rate: float) -> Attained:
        in_time = 0.95 if rate <= 11 else 0.5
        return Attained(rate_rps=rate, requests=1, in_time=in_time, ttft_p50_s=0, ttft_p90_s=0, search_p90_s=0)

    rate, tried = compliant_rate(measure, 16.0, 6)
    assert 10.75 <= rate <= 11
    assert [one["rate_rps"] for one in tried] == sorted(one["rate_rps"] for one in tried)
    assert compliant_rate(lambda r: measure(r + 99), 16.0, 3)[0] == 0
