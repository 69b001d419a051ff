"""Our histograms against prometheus_client's own."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Theirs

from hybridindex.service.observe.histograms import Histogram

BOUNDS = (0.001, 0.25, 1.0, 4.0)


def text_of(*families) -> list[str]:
    registry = CollectorRegistry()
    for family in families:
        registry.register(family)
    # When a series began is theirs alone.
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1e6))), max_size=30))
def test_the_text_is_the_same(values):
    ours, theirs = (
        Histogram("x_seconds", "What.", BOUNDS, "stage"),
        Theirs("x_seconds", "What.", ["stage"], buckets=BOUNDS, registry=None),
    )
    for label, value in values:
        ours.of(label).observe(value)
        theirs.labels(label).observe(value)
    assert text_of(ours) == text_of(theirs)


def test_without_a_label():
    ours, theirs = Histogram("x", "What.", BOUNDS), Theirs("x", "What.", buckets=BOUNDS, registry=None)
    for value in (0.0, 0.001, 0.5, 9.0):
        ours.of().observe(value)
        theirs.observe(value)
    assert text_of(ours) == text_of(theirs)


def test_no_observation_of_any_thread_is_lost():
    found = Histogram("x", "What.", BOUNDS)

    def observe(_number: int) -> None:
        for _ in range(5000):
            found.of().observe(0.5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(observe, range(8)))
    counts, total = found.of().read()
    assert counts[-1] == ("+Inf", 40_000.0)
    assert math.isclose(total, 20_000.0)
