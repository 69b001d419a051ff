"""What the time and the memory of compressing are held against."""

from __future__ import annotations

import pytest

from benchmarks.host.code_build import TARGET_BYTES, judge

DIM = 64
ALL = TARGET_BYTES // 4 // DIM


def row(count: int, seconds: float, memory: float) -> dict[str, float]:
    return {"bits": 1, "count": count, "seconds": seconds, "memory_bytes": memory}


@pytest.mark.parametrize(("seconds", "met"), [(59.0, True), (61.0, False)])
def test_time_is_in_proportion_of_the_bytes_of_a_million_vectors_and_more(seconds, met):
    found = judge([row(4 * ALL, 4 * seconds, 1), row(ALL, seconds, 1), row(ALL // 4, seconds, 1)], DIM)
    assert [one["met"] for one in found] == [met] * 3


@pytest.mark.parametrize(("memory", "bounded"), [(140, True), (400, False)])
def test_memory_that_grows_with_the_vectors_is_not_bounded(memory, bounded):
    found = judge([row(ALL // 4, 1, 100), row(ALL, 1, memory)], DIM)
    assert [one["bounded"] for one in found] == [None, bounded]


def test_one_size_says_nothing_of_bounds():
    assert judge([row(ALL, 1, 100)], DIM)[0]["bounded"] is None
