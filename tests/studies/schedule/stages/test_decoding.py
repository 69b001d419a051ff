"""Decoding: throughput and time per token, alone and with iterative retrieval."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridindex.studies.hardware import model
from hybridindex.studies.schedule import case, decode_slowdown
from hybridindex.studies.schedule.stages.decoding import decodings
from hybridindex.studies.schedule.stages.stage_costs import StageCosts


def test_a_token_waits_for_others_and_for_each_retrieval(xpu, milan):
    schema = replace(case("case3"), generative_llm=model("llama3-8b"))
    costs = StageCosts(schema, xpu, milan, 32)
    plain = {d.batch: d for d in decodings(StageCosts(replace(schema, retrieval_frequency=1), xpu, milan, 32), 1)}
    found = {d.batch: d for d in decodings(costs, 1, iterative_batch=16)}
    assert min(found) >= 16
    assert min(plain) < 16
    (prefix,) = costs.costs("prefix", 1, 16)
    stalled = 3 * (costs.retrieval_s(16) + prefix.latency_s) / 256
    for batch in sorted(set(found) & set(plain)):
        expected = plain[batch].tpot_s * decode_slowdown(batch, 16, rounds=60) + stalled
        assert found[batch].tpot_s == pytest.approx(expected)
        assert found[batch].requests_per_s == pytest.approx(batch / (256 * expected))


def test_the_most_throughput_comes_first_and_is_slowest(xpu, milan):
    ways = decodings(StageCosts(case("case1"), xpu, milan, 32), 8)
    assert len(ways) > 3
    assert [d.requests_per_s for d in ways] == sorted((d.requests_per_s for d in ways), reverse=True)
    assert [d.tpot_s for d in ways] == sorted((d.tpot_s for d in ways), reverse=True)


def test_a_model_that_does_not_fit_does_not_decode(xpu, milan):
    schema = replace(case("case1"), generative_llm=model("llama3-405b"))
    assert decodings(StageCosts(schema, xpu, milan, 32), 2) == []
