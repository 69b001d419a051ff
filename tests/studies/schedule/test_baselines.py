"""Baselines: what they may use, and the paper's ratios against them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import model
from hybridindex.studies.schedule import case, llm_extension, llm_only, long_context, search


def test_the_extended_system_halves_all_chips(large):
    for schedule in llm_extension(case("case2"), large).schedules:
        assert [s.chips for s in schedule.subsystems] == [64]
        assert schedule.decoding.chips == 64


def test_the_extended_system_may_take_fewer_chips_in_halves(large):
    both = llm_extension(case("case4"), large), llm_extension(case("case4"), large, chips="any")
    for schedule in both[1].schedules:
        assert len(schedule.subsystems) == 1
        assert schedule.subsystems[0].chips == schedule.decoding.chips
    assert both[1].best_throughput.qps_per_chip > both[0].best_throughput.qps_per_chip


def test_no_baseline_beats_the_search(large):
    schema = case("case2")
    ours = search(schema, large)
    for schedule in llm_extension(schema, large, chips="any").schedules:
        at_least = ours.within(schedule.ttft_s)
        assert at_least is not None
        assert at_least.qps_per_chip >= schedule.qps_per_chip * (1 - 1e-12)


def test_an_odd_number_has_no_halves(large):
    with pytest.raises(InvalidInputError, match="chips is 7; expected an even number"):
        llm_extension(case("case2"), replace(large, chips=7))
    with pytest.raises(InvalidInputError, match="chips is 'half'; expected all or any"):
        llm_extension(case("case2"), large, chips="half")


def test_retrieval_with_a_small_model_beats_a_large_one_alone(large):
    """Figure 5: RAG with 8B gives 1.5 times the requests per chip of 70B alone; RAG with 1B is no faster."""
    hosts = replace(large, chips=64, servers=16, whole_servers=True)
    with_retrieval = search(case("case1"), hosts).best_throughput.qps_per_chip
    smaller = search(replace(case("case1"), generative_llm=model("llama3-1b")), hosts).best_throughput.qps_per_chip
    alone = llm_only(replace(case("case1"), generative_llm=model("llama3-70b")), hosts).best_throughput.qps_per_chip
    assert with_retrieval / alone == pytest.approx(1.5, rel=0.1)
    assert smaller == pytest.approx(with_retrieval, rel=0.05)


def test_a_long_context_costs_thousands_of_times_more(large):
    """Section 5.2: 2852.6 x the time to first token and 6633.9 x the throughput per chip, on a private simulator."""
    schema = case("case2")
    plain, long = search(schema, large), long_context(schema, large)
    assert long.best_ttft.ttft_s / plain.best_ttft.ttft_s > 100
    assert plain.best_throughput.qps_per_chip / long.best_throughput.qps_per_chip > 1000


def test_alone_there_is_neither_retrieval_nor_rewriting(large):
    best = llm_only(case("case4"), large).best_throughput
    assert best.placement == "prefix | decode"
    assert best.servers == 0
