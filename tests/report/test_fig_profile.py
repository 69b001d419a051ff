"""Labels keep off the curves."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.report.chart_data import AccessShares
from hybridindex.report.fig_profile import _passes


@pytest.mark.parametrize(("at_line", "label", "covered"), [(0.5, 0.59, True), (0.58, 0.59, True), (0.3, 0.93, False)])
def test_a_label_that_a_curve_would_pass_stands_at_the_other_side(at_line: float, label: float, covered: bool) -> None:
    lists = np.linspace(0.0, 1.0, 101)
    curve = np.interp(lists, (0.0, 0.2, 1.0), (0.0, at_line, 1.0))
    shares = AccessShares(lists=lists, fit_accesses=curve, held_accesses=curve, fit_work=curve, held_work=curve)
    assert _passes(shares, label) is covered
