"""Workloads: rates, bursts, traces, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.simulator import bursty, from_trace, poisson


def test_poisson_gaps_are_exponential():
    gaps = np.diff(poisson(20.0, 100_000, seed=1).arrivals)
    assert gaps.mean() == pytest.approx(0.05, rel=0.02)
    assert gaps.std() == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize("burstiness", [1.0, 2.0, 8.0])
def test_bursts_keep_the_rate_and_raise_the_variance_of_counts(burstiness):
    arrivals = bursty(100.0, 200_000, burstiness=burstiness, period_s=0.5, seed=1).arrivals
    assert (np.diff(arrivals) >= 0).all()
    assert len(arrivals) / arrivals[-1] == pytest.approx(100.0, rel=0.05)
    counts = np.bincount(arrivals.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2) if burstiness == 1 else counts.var() > 3 * 100


def test_a_trace_is_read_sorted_from_zero(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"t": 7, "input_tokens": 30, "output_tokens": 3}\n\n{"t": 5, "input_tokens": 10, "output_tokens": 1}\n'
    )
    workload = from_trace(file)
    assert workload.arrivals.tolist() == [0.0, 2.0]
    assert workload.input_tokens.tolist() == [10, 30]
    faster = workload.at_rate(10.0)
    assert faster.rate == pytest.approx(10.0)
    file.write_text("1.5\n2.5\n")
    assert from_trace(file).output_tokens is None


@pytest.mark.parametrize("times", ["3\n", "3\n3\n"])
def test_a_trace_without_a_span_has_no_rate_to_change(tmp_path, times):
    file = tmp_path / "trace.jsonl"
    file.write_text(times)
    with pytest.raises(InvalidInputError, match="come at the same time"):
        from_trace(file).at_rate(10.0)


@pytest.mark.parametrize("line", ["later", '{"t": -1}', '{"t": true}', '{"t": 1, "input_tokens": "many"}', "[" * 5000])
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "trace.jsonl"
    file.write_text(f"1\n{line}\n")
    with pytest.raises(InvalidInputError, match="request 2"):
        from_trace(file)


def test_bad_files_and_numbers_are_named(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be read"):
        from_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(InvalidInputError, match="holds no request"):
        from_trace(tmp_path / "empty")
    for rate in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match="rate is"):
            poisson(rate, 10, seed=0)
    with pytest.raises(InvalidInputError, match=r"burstiness is 0\.5"):
        bursty(1.0, 10, burstiness=0.5, period_s=1.0, seed=0)
    with pytest.raises(InvalidInputError, match="requests is 0"):
        poisson(1.0, 0, seed=0)


def test_bursts_too_short_for_memory_are_refused():
    with pytest.raises(
        InvalidInputError, match=r"period_s is 1e-12: 1000 requests at 10 per second take more than 10,000,000 periods"
    ):
        bursty(10.0, 1000, burstiness=2.0, period_s=1e-12, seed=0)
    with pytest.raises(InvalidInputError, match=r"period_s is 4\.94066e-324"):
        bursty(10.0, 1000, burstiness=2.0, period_s=5e-324, seed=0)


@pytest.mark.parametrize(
    "line", ["2", '{"t": 2}', '{"t": 2, "input_tokens": 5}', '{"t": 2, "input_tokens": 5, "output_tokens": 0}']
)
def test_a_trace_that_tells_lengths_of_some_requests_only_is_refused(tmp_path, line):
    file = tmp_path / "trace.jsonl"
    whole = '{"t": 1, "input_tokens": 30, "output_tokens": 3}'
    for lines, which in ((f"{whole}\n{line}\n", 2), (f"{line}\n{whole}\n", 1)):
        file.write_text(lines)
        with pytest.raises(InvalidInputError, match=f"request {which}: .*input_tokens and output_tokens"):
            from_trace(file)
