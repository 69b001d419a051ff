"""The pure parts behind the papers' figures: fits, orders, and models of time."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.figures import compressed, paper_runs, paper_server, piperag, table_2, telerag
from benchmarks.papers.figures.published import numbers
from hybridindex.partitioner.analysis import analyse


def test_synthetic_queries_probe_distinct_lists_with_the_printed_skew():
    for index, top in zip(("Wiki-All", "ORCAS 1K"), numbers("vectorliterag", "top20"), strict=True):
        profile = paper_server.index_profile(index)
        assert all(len(set(row)) == len(row) for row in profile.access.held_probes.tolist())
        curve = analyse(profile).curve
        assert 100 * curve.at(round(0.2 * curve.nlist)).hit_rate.mean() == pytest.approx(top, abs=2.5)


def test_hit_rates_of_synthetic_queries_spread_like_the_beta_that_is_meant():
    curve = analyse(paper_server.index_profile("Wiki-All")).curve
    # Beta(m nu, (1 - m) nu) at m = 1/2 has the variance 1 / (4 (nu + 1)).
    assert curve.sigma2_max == pytest.approx(1 / (4 * (paper_server.NU + 1)), rel=0.15)


def test_table_2_is_monotone_and_within_15_percent_of_the_rows_that_were_not_fitted():
    printed = np.array(numbers("vectorliterag", "table2_index"))
    lists = np.array(table_2.table_2_lists(paper_server.ORCAS_1K_S))
    assert (np.diff(lists) < 0).all()
    ours = lists + (printed - lists)[[0, -1]].mean()
    assert np.abs(ours[1:-1] / printed[1:-1] - 1).max() < 0.15


def coded_gb(**changes):
    codes = {"bits": 1, "code_bytes": 132, "scan_share": 132 / 256, "rerank_s": 1e-4, **changes}
    return np.array(compressed.table_2_gb(paper_server.Codes(**codes)))


def test_codes_take_fewer_bytes_for_the_same_slos_than_the_lists_of_the_paper():
    lists, codes = np.array(table_2.table_2_lists(paper_server.ORCAS_1K_S)), coded_gb()
    as_slow = coded_gb(scan_share=1.0, rerank_s=0.0)
    scratch = (64 << 20) / 1e9
    np.testing.assert_allclose((as_slow - scratch) / (lists - scratch), 132 / 256, rtol=0.02)
    assert (codes < 0.6 * as_slow).all()
    # Work that no placement takes away costs lists.
    assert (coded_gb(rerank_s=1e-2) > codes).all()


def test_the_host_time_in_use_is_the_fitted_one():
    printed = numbers("vectorliterag", "table2_index")
    at, above = (table_2.table_2_lists(factor * paper_server.ORCAS_1K_S) for factor in (0.93, 1.1))
    assert at[0] - at[-1] < printed[0] - printed[-1] < above[0] - above[-1]


def test_ours_is_first_in_a_panel_of_figure_11():
    panel = paper_server.Panel(index="ORCAS 1K", llm="qwen3-32b")
    rates = {policy: paper_runs.compliant(panel, policy) for policy in paper_server.POLICIES}
    assert max(rates, key=lambda policy: rates[policy]) == "ours"
    assert rates["cpu-only"] == 0
    # Three of four engines are left beside a dedicated GPU.
    assert rates["dedicated-gpu"] == pytest.approx(0.75 * panel.profile.throughput_rps, rel=0.05)


def test_more_prefetched_bytes_hit_more_and_speed_retrieval_up():
    budgets = np.linspace(0.5, 9.0, 12)
    hits = [telerag.hit_rate(gb, 512) for gb in budgets]
    assert (np.diff(hits) > 0).all()
    times = [telerag.retrieval_speedup(gb, 512, name="h100", cpu_s=0.251) for gb in budgets]
    assert (np.diff(times) > 0).all()
    assert times[0] > 1


def test_a_pipeline_gains_no_more_than_its_share_of_retrieval():
    assert telerag.whole_speedup(0.5, 1.0) == 1.0
    assert telerag.whole_speedup(0.5, 1e9) == pytest.approx(2.0)
    assert telerag.whole_speedup(0.0, 7.0) == 1.0


def test_the_fitted_times_give_back_the_row_they_were_fitted_to():
    timing = piperag.fitted()
    assert timing.synchronous_s() == pytest.approx(numbers("piperag", "retro_s")[0])
    assert timing.generate_s + timing.attend_s == pytest.approx(numbers("piperag", "model_s")[0])


def test_only_the_first_search_of_a_pipeline_is_waited_for():
    # 16 chunks of a second; the first waits for its search.
    assert piperag.Timing(generate_s=16.0, attend_s=0.0, search_s=0.5).pipelined_s() == pytest.approx(16.5)
    assert piperag.Timing(generate_s=16.0, attend_s=0.0, search_s=2.0).pipelined_s() == pytest.approx(2 + 1 + 15 * 2)


@pytest.mark.parametrize("interval", [8, 16, 32, 64])
@pytest.mark.parametrize("search_s", [0.01, 0.1, 0.6, 5.0])
def test_hiding_searches_never_costs_time_and_at_most_halves_it(interval, search_s):
    timing = piperag.Timing(generate_s=9.35, attend_s=0.99, search_s=search_s)
    ratio = timing.synchronous_s(interval) / timing.pipelined_s(interval)
    assert 1.0 <= ratio <= 2.0


def test_pipelining_gains_most_where_search_and_chunk_take_equally_long():
    even = piperag.Timing(generate_s=16.0, attend_s=0.0, search_s=1.0)
    ratios = [
        other.synchronous_s() / other.pipelined_s()
        for other in (even.faster(retrieval=4), even, even.faster(inference=4))
    ]
    assert ratios[1] > max(ratios[0], ratios[2])
