"""The model of host scans behind deadlines: pure, fed with stated times."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.router.batch.deadline import PaceEstimator, nprobe_for_deadline

#: (1, 100) bytes of each probe.
LISTS = np.full((1, 100), 1000, np.int64)


def seen(times):
    pace = PaceEstimator()
    for nbytes, seconds in times:
        pace.observe(nbytes, seconds)
    return pace


def chosen(pace, window_s, other_bytes=0):
    return nprobe_for_deadline(LISTS, other_bytes, window_s, pace, 1, 100)


def foretold(pace, nbytes):
    (seconds,) = pace.predict(np.array([nbytes]))
    return seconds


def test_nothing_is_lowered_while_nothing_is_known():
    assert PaceEstimator().predict(np.array([1])) is None
    assert chosen(seen([(0, 5.0)]), 1e-9) == 100


def test_what_a_scan_costs_before_its_first_byte_keeps_no_nprobe_small():
    """1 ms, and 1 us a byte: small scans look slow. Nprobe grows until the line stands where scans are."""
    pace = seen([(1000, 2e-3)] * 5)
    assert 20 <= chosen(pace, 51e-3) < 30
    for _ in range(30):
        nprobe = chosen(pace, 51e-3)
        pace.observe(1000 * nprobe, 1e-3 + 1e-3 * nprobe)
    assert chosen(pace, 51e-3) >= 48


def test_other_requests_of_the_batch_take_their_part():
    pace = seen([(50_000, 0.05)] * 5)
    assert chosen(pace, 0.0501) == 50
    assert chosen(pace, 0.0501, other_bytes=20_000) == 30


def test_the_slowest_twentieth_counts():
    """Every tenth scan takes half as long again: the average would be late with it."""
    pace = seen([(50_000, 0.15 if n % 10 == 9 else 0.1) for n in range(200)])
    assert foretold(pace, 50_000) == pytest.approx(0.15, rel=0.08)
    calm = seen([(50_000, 0.1)] * 100)
    assert foretold(calm, 50_000) == pytest.approx(0.1)


def test_small_scans_have_their_own_slowest():
    """They take up to half as long again, large ones what the line says."""
    times = [(4_000, 4e-3 * (1 + 0.5 * (n % 8 == 1))) if n % 2 else (900_000, 0.9) for n in range(400)]
    pace = seen(times)
    assert foretold(pace, 900_000) == pytest.approx(0.9, rel=0.01)
    assert foretold(pace, 4_000) >= 6e-3
    # A size that was never seen is as slow as any.
    assert foretold(pace, 40_000) >= 1.4 * 40e-3 * 0.9


def closed_loop(window_s, searches, slow):
    """Each search takes the nprobe that its deadline leaves: 1 ms a list, and what ``slow(number)`` says."""
    rng, pace, chosen_ones = np.random.default_rng(0), PaceEstimator(), []
    for number in range(searches):
        nprobe = chosen(pace, window_s)
        pace.observe(1000 * nprobe, 1e-3 * nprobe * rng.uniform(0.95, 1.05) * slow(number, rng))
        chosen_ones.append(nprobe)
    return chosen_ones


@pytest.mark.parametrize(
    "slow",
    [
        lambda number, rng: 20.0 if rng.random() < 0.005 else 1.0,
        lambda number, rng: 3.0 if rng.random() < 0.01 else 1.0,
        lambda number, rng: 20.0 if number in (1, 5) else 1.0,
        lambda number, rng: 4.0 if 300 <= number < 340 else 1.0,
        lambda number, rng: 3.0 if number < 200 and rng.random() < 0.06 else 1.0,
    ],
    ids=["seldom, by far", "seldom", "at the start", "for a while", "often for a while"],
)
def test_interruptions_are_forgotten(slow):
    """Though nobody visits the sizes again that they made look slow."""
    used = closed_loop(0.15, 3000, slow)
    assert np.mean(used[-1000:]) > 90


def test_a_start_that_all_scans_have_hides_no_nprobe_that_fits():
    """5 ms before the first byte, three large scans to each small one: small ones are far above the line."""
    rng, pace = np.random.default_rng(0), PaceEstimator()
    for _ in range(100):
        for nprobe in (100, 100, 100, 1):
            pace.observe(1000 * nprobe, (5e-3 + 1e-3 * nprobe) * rng.uniform(0.98, 1.02))
    assert 85 <= chosen(pace, 0.1) <= 97
    seconds = pace.predict(1000 * np.arange(1, 101))
    assert (np.diff(seconds) >= 0).all()


def test_one_interrupted_scan_changes_little():
    pace = seen([(50_000, 0.1)] * 100)
    pace.observe(50_000, 60.0)
    assert foretold(pace, 50_000) < 0.14
    for _ in range(20):
        pace.observe(50_000, 0.1)
    assert chosen(pace, 0.1 + 1e-9) >= 44


def test_a_slow_scan_among_few_does_not_lead_to_the_floor():
    """The smaller of the first two scans took longer: a line through them falls."""
    pace = seen([(85_000, 1.22), (73_000, 1.43)])
    assert 20 < chosen(pace, 0.89) < 60


def test_a_host_that_got_slower_is_followed():
    pace = seen([(50_000, 0.1)] * 50 + [(50_000, 2.0)] * 40)
    assert foretold(pace, 50_000) >= 2.0


def test_the_floor_holds():
    pace = seen([(1, 3600.0)])
    assert nprobe_for_deadline(LISTS, 0, 0.05, pace, 3, 16) == 3
