"""Shares of a request's cost, against RAGO's Figures 7(c), 6 and 8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.schedule_breakdown import chip_seconds
from hybridindex.studies.hardware import model
from hybridindex.studies.schedule import case

#: Tokens of output -> per cent of the time in retrieval, for prompts of 128 to 2048 tokens.
FIGURE_7C = {
    128: (86.3, 81.2, 72.5, 59.5, 43.2),
    256: (79.4, 74.3, 65.7, 53.2, 38.1),
    512: (68.4, 63.5, 55.3, 44.0, 30.9),
}


def share(schema, resources, stage="retrieval"):
    seconds = chip_seconds(schema, resources)
    return 100 * seconds[stage] / sum(seconds.values())


@pytest.mark.parametrize("output", FIGURE_7C)
def test_retrieval_s_share_for_8b_by_lengths(large, output):
    for prompt, printed in zip((128, 256, 512, 1024, 2048), FIGURE_7C[output], strict=True):
        schema = replace(case("case1"), prompt_tokens=prompt, output_tokens=output)
        assert share(schema, large) == pytest.approx(printed, abs=1.2)


def test_retrieval_takes_over_70b_between_four_and_eight_queries(large):
    """Section 5.1: inference limits until four queries a retrieval; at eight retrieval dominates."""
    shares = [
        share(replace(case("case1"), generative_llm=model("llama3-70b"), queries_per_retrieval=n), large)
        for n in (1, 2, 4, 8)
    ]
    assert shares == sorted(shares)
    assert shares[1] < 50 < shares[3]
    assert shares[2] == pytest.approx(50, abs=3)


def test_retrieval_of_a_text_costs_next_to_nothing(large):
    """Section 5.2: 0.01 % to 0.4 %; the encoder dominates from a million tokens on."""
    assert share(case("case2"), large) < 0.4
    assert share(case("case2"), large, "encode") > 50


def test_what_does_not_fit_costs_without_end(large):
    few = replace(large, chips=2)
    assert chip_seconds(replace(case("case1"), generative_llm=model("llama3-405b")), few)["prefix"] == float("inf")
