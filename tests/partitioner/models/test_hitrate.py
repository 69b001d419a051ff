from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.hitrate import (
    MODEL_NAMES,
    BetaBinomialHitRate,
    BetaHitRate,
    EmpiricalHitRate,
    HitRateDistribution,
    HitRateName,
    PointHitRate,
    beta_binomial_hit_rate,
    beta_hit_rate,
    distribution,
    expected_min_hit_rate,
    hit_rate_to_coverage,
    modelled,
)

BATCHES = (1, 2, 4, 16, 64, 256)
MODELS = st.one_of(
    st.builds(beta_hit_rate, st.floats(0.0, 1.0), st.floats(0.0, 0.3)),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50).map(
        lambda rates: EmpiricalHitRate(ascending=np.sort(np.array(rates)))
    ),
    st.builds(
        lambda m, t, nu: BetaBinomialHitRate(mean=m, trials=t, nu=nu),
        st.floats(0.01, 0.99),
        st.integers(1, 64),
        st.one_of(st.floats(0.1, 1e4), st.just(float("inf"))),
    ),
)


@given(MODELS)
def test_expected_min_falls_with_the_batch_and_never_exceeds_the_mean(model: HitRateDistribution) -> None:
    minima = [model.expected_min(batch) for batch in BATCHES]
    assert minima[0] == pytest.approx(model.mean, abs=1e-6)
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(minima))
    assert all(0.0 <= m <= model.mean + 1e-9 for m in minima)


@given(MODELS)
def test_cdf_rises_to_one(model: HitRateDistribution) -> None:
    values = model.cdf(np.linspace(0, 1, 101))
    assert (np.diff(values) >= -1e-12).all()
    assert values[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("mean", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sigma2_max", [1e-6, 0.001, 0.05, 0.2, 0.249])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_beta_survival_form_equals_the_papers_integral(mean: float, sigma2_max: float, batch: int) -> None:
    model = beta_hit_rate(mean, sigma2_max)
    assert isinstance(model, BetaHitRate)
    # Eq. 2 with the density replaced by quantiles: the integral over u = F(x) of x(u) B (1 - u)^(B-1).
    value, _ = integrate.quad(
        lambda u: special.betaincinv(model.alpha, model.beta, u) * batch * (1 - u) ** (batch - 1),
        0,
        1,
        limit=400,
        points=[0.25 / batch, 1 / batch, min(3 / batch, 0.99)],
    )
    assert model.expected_min(batch) == pytest.approx(value, abs=2e-4)


def test_beta_has_the_variance_of_the_paper() -> None:
    model = beta_hit_rate(0.3, 0.04)
    assert model.variance == pytest.approx(4 * 0.04 * 0.3 * 0.7)


@pytest.mark.parametrize("sigma2_max", [0.0, -1.0, 1e-9])
def test_beta_without_variance_is_a_point(sigma2_max: float) -> None:
    model = beta_hit_rate(0.4, sigma2_max)
    assert isinstance(model, PointHitRate)
    assert model.expected_min(64) == 0.4


@pytest.mark.parametrize("sigma2_max", [0.25, 0.4])
def test_queries_that_hit_all_or_nothing_miss_in_a_batch(sigma2_max: float) -> None:
    """As those of nprobe 1: a point mass would say that a batch has the mean of the queries."""
    for model in (beta_hit_rate(0.4, sigma2_max), beta_binomial_hit_rate(0.4, sigma2_max, 16.0)):
        assert model.variance == pytest.approx(0.4 * 0.6)
        for batch in (1, 2, 8):
            assert model.expected_min(batch) == pytest.approx(0.4**batch)
        assert set(model.quantiles(10).tolist()) == {0.0, 1.0}
    just_below = beta_hit_rate(0.4, 0.249999).expected_min(2)
    assert beta_hit_rate(0.4, sigma2_max).expected_min(2) == pytest.approx(just_below, abs=1e-4)


@pytest.mark.parametrize("name", ["beta", "beta_binomial"])
def test_a_hit_that_a_model_has_no_query_for_is_kept(analysis: Analysis, name: HitRateName) -> None:
    """One query of large lists hits one of them."""
    curve = dataclasses.replace(analysis.curve, sigma2_max=0.24999, effective_probes=16.0)
    nothing = curve.at(0)
    work, hits = np.full(nothing.work.size, 16e9), np.zeros(nothing.work.size)
    hits[3] = 1e9
    found = modelled(curve, dataclasses.replace(nothing, work=work, hit_work=hits), name)
    assert np.isfinite(found.hit_work).all()
    assert found.hit_work.sum() == pytest.approx(1e9)


def test_beta_binomial_equals_simulation() -> None:
    rng = np.random.default_rng(0)
    model = BetaBinomialHitRate(mean=0.6, trials=8, nu=5.0)
    draws = rng.binomial(8, rng.beta(3.0, 2.0, size=(40_000, 4))) / 8
    assert model.variance == pytest.approx(draws.var(), rel=0.03)
    assert model.expected_min(4) == pytest.approx(draws.min(axis=1).mean(), abs=0.005)
    assert float(model.cdf(0.5)) == pytest.approx((draws <= 0.5).mean(), abs=0.01)


def test_empirical_moments_are_the_samples() -> None:
    model = EmpiricalHitRate(ascending=np.array([0.0, 0.5, 1.0]))
    assert model.mean == 0.5
    assert model.variance == pytest.approx(1 / 6)
    assert float(model.cdf(0.5)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_models_agree_on_the_mean(analysis: Analysis, name: HitRateName) -> None:
    work = analysis.curve.at(60)
    assert distribution(analysis.curve, work, name).mean == pytest.approx(work.hit_rate.mean())


@given(name=st.sampled_from(MODEL_NAMES), batch=st.sampled_from([1, 4, 16, 64]), eta=st.floats(0.01, 1.0))
def test_hit_rate_to_coverage_is_the_smallest_that_reaches(
    analysis: Analysis, name: HitRateName, batch: int, eta: float
) -> None:
    coverage = hit_rate_to_coverage(analysis.curve, batch, eta, name)
    assert coverage is not None
    count = round(coverage * analysis.curve.nlist)
    assert expected_min_hit_rate(analysis.curve, count, batch, name) >= eta - 1e-9
    if name == "empirical" and count > 0:
        assert expected_min_hit_rate(analysis.curve, count - 1, batch, name) < eta


def test_hit_rate_to_coverage_at_its_ends(analysis: Analysis) -> None:
    assert hit_rate_to_coverage(analysis.curve, 4, 0.0) == 0.0
    assert hit_rate_to_coverage(analysis.curve, 4, -3.0) == 0.0
    assert hit_rate_to_coverage(analysis.curve, 4, 1.01) is None
    low, high = (hit_rate_to_coverage(analysis.curve, batch, 0.5) for batch in (1, 64))
    assert low is not None
    assert high is not None
    assert low < high


def test_bad_arguments_are_refused(analysis: Analysis) -> None:
    with pytest.raises(InvalidInputError, match="batch is 0"):
        hit_rate_to_coverage(analysis.curve, 0, 0.5)
    with pytest.raises(InvalidInputError, match="eta"):
        hit_rate_to_coverage(analysis.curve, 1, float("nan"))
    with pytest.raises(InvalidInputError):
        PointHitRate(mean=0.5).expected_min(0)
