from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.fits import fit_piecewise_linear, ratio_levels

SAMPLES = st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10.0)), min_size=1, max_size=40)


@given(SAMPLES)
def test_fit_never_decreases_and_is_continuous(samples: list[tuple[int, float]]) -> None:
    fit = fit_piecewise_linear([float(x) for x, _ in samples], [y for _, y in samples])
    at = np.linspace(0, 200, 2001)
    values = fit.predict(at)
    assert (np.diff(values) >= -1e-12).all()
    spread = max(float(np.ptp(fit.values)), float(fit.values[-1]))
    for knot in fit.knots:
        near = fit.predict(np.array([knot - 1e-6, knot, knot + 1e-6]))
        assert np.ptp(near) <= 1e-5 * (1 + spread)


def test_fit_goes_through_quantiles_of_repeats_and_shrugs_off_an_outlier() -> None:
    fit = fit_piecewise_linear([1, 1, 1, 4, 4, 4], [1.0, 1.1, 99.0, 2.0, 2.1, 2.2])
    assert fit.predict(np.array([1.0, 4.0])) == pytest.approx([1.1, 2.1])
    high = fit_piecewise_linear([1, 1, 1], [1.0, 2.0, 3.0], quantile=1.0)
    assert float(high.predict(1)) == 3.0


def test_fit_extends_the_last_slope_and_says_so() -> None:
    fit = fit_piecewise_linear([1, 2, 4], [1.0, 2.0, 6.0])
    assert float(fit.predict(6)) == pytest.approx(10.0)
    assert fit.extrapolated(6)
    assert not fit.extrapolated(4)
    assert float(fit.predict(0.5)) == 1.0


def test_noise_at_the_end_does_not_make_large_batches_free() -> None:
    fit = fit_piecewise_linear([1, 16, 32, 64], [1.0, 16.0, 33.0, 31.0])
    assert fit.values[-1] == fit.values[-2]
    assert float(fit.predict(128)) > 1.5 * float(fit.predict(64))


def test_one_knot_is_proportional_beyond_it() -> None:
    fit = fit_piecewise_linear([8], [2.0])
    assert float(fit.predict(16)) == pytest.approx(4.0)
    assert float(fit.predict(1)) == 2.0


@pytest.mark.parametrize(
    ("x", "y", "quantile"),
    [([], [], 0.5), ([1], [1, 2], 0.5), ([1], [float("nan")], 0.5), ([float("inf")], [1], 0.5), ([1], [1], 1.5)],
)
def test_bad_samples_are_refused(x: list[float], y: list[float], quantile: float) -> None:
    with pytest.raises(InvalidInputError):
        fit_piecewise_linear(x, y, quantile)


def test_ratio_levels_are_quantiles_of_measured_over_predicted() -> None:
    levels = ratio_levels(np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4), levels=2)
    assert levels == pytest.approx([1.75, 3.25])
    assert ratio_levels(np.ones(3), np.zeros(3)).tolist() == [1.0] * 16
