"""Times of bursts: by hand, and against playing them through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.schedule_burst import play_burst
from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.pareto import undominated
from hybridindex.studies.schedule.stages.stage_pipeline import SIZES, Run, before, no_stage, through


def run(batch, seconds, interval=None):
    return Run(
        stage="s",
        log2_batch=batch.bit_length() - 1,
        latency_s=seconds,
        interval_s=seconds if interval is None else interval,
    )


def times_of(groups):
    """(SIZES,) times, and the log2 of the largest batch."""
    times, largest = np.zeros((1, SIZES)), np.zeros(1, dtype=np.int64)
    for group in groups:
        ways = no_stage()
        for one in reversed(group):
            ways = before([one], ways)
        times = through(ways, 0, times, largest)
        largest = np.maximum(largest, ways.log2_largest)
    return times[0], int(largest[0])


def test_stages_apart_work_side_by_side():
    # Four requests, one at a time: the second stage follows the first at its pace.
    times, _ = times_of([[run(1, 2.0)], [run(1, 1.0)]])
    assert times[:3].tolist() == [3.0, 5.0, 9.0]


def test_stages_that_share_chips_take_turns():
    # Figure 14(b): 4 together in 4 s, then 2 and 2 in 3 s each.
    times, largest = times_of([[run(4, 4.0), run(2, 3.0)]])
    assert largest == 2
    assert times[2] == 4.0 + 3.0 + 3.0
    np.testing.assert_allclose(play_burst([[run(4, 4.0), run(2, 3.0)]], 4), [7.0, 7.0, 10.0, 10.0])


def test_the_last_stage_goes_first():
    # First stage 1 s, second 1 s, one request at a time: done at 2, 4, 6, 8 rather than all at the end.
    np.testing.assert_allclose(play_burst([[run(1, 1.0), run(1, 1.0)]], 4), [2.0, 4.0, 6.0, 8.0])


def test_what_comes_together_is_worked_off_one_by_one():
    # Four retrieved at 10 s at once; the prefix takes them singly, 2 s each.
    times, _ = times_of([[run(4, 10.0)], [run(1, 2.0)]])
    assert times[2] == 18.0
    np.testing.assert_allclose(play_burst([[run(4, 10.0)], [run(1, 2.0)]], 4), [12.0, 14.0, 16.0, 18.0])


def test_a_pipeline_of_chips_takes_a_batch_every_interval():
    times, _ = times_of([[run(1, 4.0, interval=1.0)]])
    assert times[:3].tolist() == [4.0, 5.0, 7.0]
    np.testing.assert_allclose(play_burst([[run(1, 4.0, interval=1.0)]], 4), [4.0, 5.0, 6.0, 7.0])


stages = st.builds(
    lambda log2, seconds: run(1 << log2, seconds), st.integers(0, 4), st.integers(1, 40).map(lambda tenths: tenths / 10)
)


@given(group=st.lists(stages, min_size=1, max_size=4))
def test_one_group_is_as_played(group):
    times, largest = times_of([group])
    for size in range(largest, SIZES):
        assert times[size] == pytest.approx(play_burst([group], 1 << size).max())


@given(apart=st.lists(stages, min_size=1, max_size=4))
def test_stages_apart_with_growing_batches_are_as_played(apart):
    groups = [[one] for one in sorted(apart, key=lambda one: one.log2_batch)]
    times, largest = times_of(groups)
    for size in range(largest, SIZES):
        assert times[size] == pytest.approx(play_burst(groups, 1 << size).max())


@given(apart=st.lists(stages, min_size=1, max_size=4))
def test_stages_apart_are_never_later_than_said(apart):
    groups = [[one] for one in apart]
    times, largest = times_of(groups)
    for size in range(largest, SIZES):
        assert play_burst(groups, 1 << size).max() <= times[size] * (1 + 1e-9)


@given(
    apart=st.lists(stages, min_size=2, max_size=4),
    slower=st.integers(0, 3),
    by=st.integers(1, 20).map(lambda tenths: tenths / 10),
)
def test_a_slower_stage_never_speeds_a_burst_up(apart, slower, by):
    changed = list(apart)
    at = slower % len(apart)
    changed[at] = run(apart[at].batch, apart[at].latency_s + by)
    for shape in ([apart], [[one] for one in apart]):
        other = [changed] if len(shape) == 1 else [[one] for one in changed]
        assert (times_of(other)[0] >= times_of(shape)[0] * (1 - 1e-12)).all()


def test_a_burst_that_no_batch_divides_is_refused():
    with pytest.raises(InvalidInputError, match="requests is 6; expected a multiple of s's batch, 4"):
        play_burst([[run(4, 1.0)]], 6)


@given(
    rows=st.integers(1, 4).flatmap(
        lambda m: st.lists(st.lists(st.integers(0, 4), min_size=m, max_size=m), min_size=1, max_size=60)
    )
)
def test_undominated_rows_are_those_that_no_other_beats(rows):
    table = np.array(rows, dtype=np.float64)
    found = undominated(table)
    expected = {
        tuple(row)
        for row in rows
        if not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
    }
    assert len(found) == len(expected)
    assert {tuple(int(x) for x in table[i]) for i in found} == expected


def test_undominated_rows_of_many_blocks():
    rng = np.random.default_rng(5)
    table = rng.integers(0, 30, (2000, 3)).astype(np.float64)
    found = set(undominated(table).tolist())
    for i, row in enumerate(table):
        beats = (table <= row).all(1) & (table < row).any(1)
        if beats.any():
            assert i not in found
    assert {tuple(table[i]) for i in found} == {
        tuple(row) for row in table if not ((table <= row).all(1) & (table < row).any(1)).any()
    }


def test_nothing_has_no_undominated_rows():
    assert undominated(np.empty((0, 3))).tolist() == []
