from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.lookahead_budget import MissCurve, deadline_nprobe, lookahead_budget, miss_curve_of

CURVE = MissCurve(nbytes=np.array([0.0, 100.0, 400.0, 1000.0]), miss_rate=np.array([1.0, 0.5, 0.2, 0.0]))


def test_a_slow_link_moves_what_fits_behind_generation() -> None:
    budget = lookahead_budget(
        bandwidth_bytes_per_s=100, t_llm_s=2.0, miss_curve=CURVE, host_scan_s=0.1, share_bytes=900
    )
    assert budget.nbytes == budget.overlap_bytes == 200
    assert budget.case == "overlap"
    assert budget.total_s < budget.total_without_s


def test_a_slow_host_makes_going_on_worth_it() -> None:
    budget = lookahead_budget(
        bandwidth_bytes_per_s=100, t_llm_s=0.5, miss_curve=CURVE, host_scan_s=12, share_bytes=5000
    )
    assert budget.case == "beyond"
    assert budget.nbytes == 400
    assert budget.eq7_bytes == int(100 * 12 * 0.8)


def test_the_share_is_never_exceeded() -> None:
    budget = lookahead_budget(bandwidth_bytes_per_s=1e9, t_llm_s=1, miss_curve=CURVE, host_scan_s=10, share_bytes=150)
    assert (budget.nbytes, budget.case) == (150, "share")
    everything = lookahead_budget(
        bandwidth_bytes_per_s=1e9, t_llm_s=1, miss_curve=CURVE, host_scan_s=10, share_bytes=5000
    )
    assert (everything.nbytes, everything.case) == (1000, "all")


def test_a_dead_link_moves_nothing() -> None:
    budget = lookahead_budget(bandwidth_bytes_per_s=0, t_llm_s=1, miss_curve=CURVE, host_scan_s=10, share_bytes=5000)
    assert budget.nbytes == 0


@given(
    bandwidth=st.floats(1, 1e4),
    t_llm=st.floats(0, 5),
    host=st.floats(0, 20),
    device=st.floats(0, 5),
    share=st.integers(0, 2000),
)
def test_no_other_budget_beyond_the_overlap_is_better(
    bandwidth: float, t_llm: float, host: float, device: float, share: int
) -> None:
    budget = lookahead_budget(
        bandwidth_bytes_per_s=bandwidth,
        t_llm_s=t_llm,
        miss_curve=CURVE,
        host_scan_s=host,
        device_scan_s=device,
        share_bytes=share,
    )
    assert 0 <= budget.nbytes <= share
    for nbytes in np.linspace(0, min(share, 1000), 97):
        miss = CURVE.at(nbytes)
        other = max(t_llm, nbytes / bandwidth) + max(miss * host, (1 - miss) * device)
        assert budget.total_s <= other + 1e-9


def test_the_profiles_curve_falls_from_one_to_zero(analysis: Analysis) -> None:
    curve = miss_curve_of(analysis.curve)
    assert curve.at(0) == 1.0
    assert curve.at(float(curve.nbytes[-1])) == pytest.approx(0.0)


def test_what_is_resident_already_needs_no_move(analysis: Analysis) -> None:
    whole = miss_curve_of(analysis.curve)
    there = int(whole.nbytes[len(whole.nbytes) // 3])
    rest = miss_curve_of(analysis.curve, resident_bytes=there)
    assert rest.nbytes[-1] == whole.nbytes[-1] - there
    for nbytes in np.linspace(0, rest.nbytes[-1], 11):
        assert rest.at(nbytes) == pytest.approx(whole.at(nbytes + there))
    everything = miss_curve_of(analysis.curve, resident_bytes=int(whole.nbytes[-1]) + 1)
    assert everything.nbytes.tolist() == [0.0]


@pytest.mark.parametrize("field", ["bandwidth_bytes_per_s", "t_llm_s", "host_scan_s", "device_scan_s", "share_bytes"])
def test_bad_arguments_are_refused(field: str) -> None:
    arguments = {"bandwidth_bytes_per_s": 1.0, "t_llm_s": 1.0, "host_scan_s": 1.0, "share_bytes": 1, field: -1}
    with pytest.raises(InvalidInputError, match=field):
        lookahead_budget(miss_curve=CURVE, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "rate"), [([1.0], [1.0]), ([0.0, 0.0], [1.0, 0.5]), ([0.0, 1.0], [0.5, 0.6]), ([], [])]
)
def test_bad_miss_curves_are_refused(nbytes: list[float], rate: list[float]) -> None:
    with pytest.raises(InvalidInputError):
        MissCurve(nbytes=np.array(nbytes), miss_rate=np.array(rate))


@given(st.floats(-1, 40), st.integers(1, 10), st.integers(0, 30))
def test_deadline_nprobe_is_the_largest_that_fits(window: float, low: int, extra: int) -> None:
    high = low + extra
    chosen = deadline_nprobe(lambda n: 0.3 + n * 0.7, window, min_nprobe=low, max_nprobe=high)
    fitting = [n for n in range(low, high + 1) if 0.3 + n * 0.7 <= window]
    assert chosen == max(fitting, default=low)


def test_deadline_nprobe_refuses_nonsense() -> None:
    with pytest.raises(InvalidInputError):
        deadline_nprobe(lambda n: 0.0, 1.0, min_nprobe=0, max_nprobe=4)
    with pytest.raises(InvalidInputError):
        deadline_nprobe(lambda n: 0.0, 1.0, min_nprobe=5, max_nprobe=4)
    with pytest.raises(InvalidInputError):
        deadline_nprobe(lambda n: 0.0, float("nan"), min_nprobe=1, max_nprobe=4)
