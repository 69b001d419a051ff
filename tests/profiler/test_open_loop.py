"""The load generator: arrivals are Poisson, every request is counted, failures are not hidden."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.profiler.open_loop import PoissonLoad, poisson_arrivals, run_open_loop
from hybridindex.router import Router
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from tests.clustered import clustered, small_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("load") / "i") as index:
        yield index


def test_arrivals_are_poisson():
    due = poisson_arrivals(1000, 20, seed=1)
    gaps = np.diff(due)
    assert len(due) == pytest.approx(20_000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert due[-1] < 20
    np.testing.assert_array_equal(due, poisson_arrivals(1000, 20, seed=1))


def test_every_request_is_counted(index):
    with Router(index) as router:
        result = run_open_loop(router, clustered(50), PoissonLoad(rate=400, duration_s=0.5, slo_ms=60_000))
    assert result.n_requests == len(poisson_arrivals(400, 0.5, 0))
    assert result.n_failed == 0
    assert result.attainment == 1.0
    assert result.p50_ms <= result.p90_ms <= result.p95_ms <= result.p99_ms
    assert result.mean_batch >= 1


def test_no_query_is_no_load(index):
    with Router(index) as router, pytest.raises(InvalidInputError, match="queries hold 0 rows"):
        run_open_loop(router, clustered(50)[:0], PoissonLoad(rate=400, duration_s=0.5))


def test_queries_are_checked_before_the_first_is_sent(index):
    queries = clustered(5)
    queries[3, 0] = np.nan
    with Router(index) as router:
        with pytest.raises(InvalidInputError, match=r"queries\[3\]"):
            run_open_loop(router, queries, PoissonLoad(rate=400, duration_s=0.5))
        assert router.stats().queries == 0


def test_failures_count_against_attainment(index, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("no")

    with Router(index) as router:
        monkeypatch.setattr(HostNativeScanner, "scan_checked", broken)
        result = run_open_loop(router, clustered(50), PoissonLoad(rate=200, duration_s=0.3, slo_ms=60_000))
    assert result.n_failed == result.n_requests
    assert result.attainment == 0.0


@pytest.mark.parametrize(
    ("rate", "duration_s"),
    [(0, 1), (-1, 1), (10, 0), (np.nan, 1), (0.001, 0.001), (np.inf, 1), (1e300, 1), (10, np.inf), (1e-9, 1e9)],
)
def test_bad_loads_are_named(index, rate, duration_s):
    with Router(index) as router, pytest.raises(InvalidInputError, match=r"rate|duration_s"):
        run_open_loop(router, clustered(5), PoissonLoad(rate=rate, duration_s=duration_s))


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"slo_ms": np.nan}, {"slo_ms": -4}, {"slo_ms": 0}, {"slo_ms": np.inf}])
def test_a_bad_seed_or_slo_is_named(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        PoissonLoad(rate=10, duration_s=1, **wrong)
