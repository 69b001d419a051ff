"""The reservoir is bounded, forgets, keeps the newest queries, and of those before every one as likely."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.refresh.reservoir import QueryReservoir


def numbered(start, stop, dim=3):
    """Queries that say which they are."""
    return np.repeat(np.arange(start, stop, dtype=np.float32)[:, None], dim, axis=1)


def feed(reservoir, numbers, *, now_s=lambda i: 0.0, batch=1):
    for i in range(numbers.start, numbers.stop, batch):
        reservoir.offer(numbered(i, min(i + batch, numbers.stop)), now_s(i))
    reservoir.check_invariants()


def test_few_queries_are_all_there_in_order():
    reservoir = QueryReservoir(100, retention_s=10)
    feed(reservoir, range(40))
    np.testing.assert_array_equal(reservoir.sample(0.0), numbered(0, 40))


def test_a_single_query_is_taken_as_such():
    reservoir = QueryReservoir(4, retention_s=10)
    reservoir.offer(np.ones(3, dtype=np.float32), 0.0)
    assert reservoir.sample(0.0).shape == (1, 3)


def test_what_is_kept_is_a_copy():
    reservoir = QueryReservoir(4, retention_s=10)
    query = np.ones((1, 3), dtype=np.float32)
    reservoir.offer(query, 0.0)
    query[:] = 7
    assert (reservoir.sample(0.0) == 1).all()


@pytest.mark.parametrize("batch", [1, 7, 5000])
def test_it_never_holds_more_than_its_capacity(batch):
    reservoir = QueryReservoir(64, retention_s=10)
    feed(reservoir, range(5000), batch=batch)
    assert 16 <= len(reservoir) <= 64
    assert reservoir.nbytes == len(reservoir) * 12
    assert reservoir.offered == 5000
    assert 16 <= len(reservoir.sample(0.0)) <= len(reservoir)


def test_old_queries_are_not_answered_and_leave():
    reservoir = QueryReservoir(1000, retention_s=10)
    feed(reservoir, range(100), now_s=float)
    np.testing.assert_array_equal(reservoir.sample(99.0), numbered(89, 100))
    assert len(reservoir) == 11
    assert reservoir.sample(1000.0).shape == (0, 0)


def test_a_sample_may_begin_later():
    reservoir = QueryReservoir(1000, retention_s=1000)
    feed(reservoir, range(100), now_s=float)
    np.testing.assert_array_equal(reservoir.sample_since(99.0, 60.0), numbered(60, 100))


@pytest.mark.parametrize("batch", [1, 7, 40, 900])
def test_the_newest_are_all_there_whatever_came_before(batch):
    reservoir = QueryReservoir(64, retention_s=1e6)
    feed(reservoir, range(10_000 - 10_000 % batch), now_s=float, batch=batch)
    feed(reservoir, range(10_000, 10_020), now_s=float, batch=min(batch, 20))
    np.testing.assert_array_equal(reservoir.sample_since(10_020.0, 10_000.0), numbered(10_000, 10_020))
    assert len(reservoir.sample(10_020.0)) < 52


def test_a_sample_since_a_time_is_the_newest_or_uniform_whichever_is_more():
    """Of 1000 queries a uniform sample has a few, and of 170 that all fit, 70 more than are newest."""
    reservoir = QueryReservoir(200, retention_s=1e6)
    feed(reservoir, range(6000), now_s=float)
    newest = reservoir.sample_since(6000.0, 5000.0)[:, 0]
    assert newest.tolist() == list(range(5900, 6000))
    few = QueryReservoir(200, retention_s=1e6)
    feed(few, range(190), now_s=float)
    np.testing.assert_array_equal(few.sample_since(190.0, 20.0), numbered(20, 190))


def test_the_last_few_are_answered_with_the_time_of_the_first():
    reservoir = QueryReservoir(64, retention_s=1000)
    assert reservoir.newest(0.0, 5)[1] == 0.0
    feed(reservoir, range(900), now_s=float)
    rows, since_s = reservoir.newest(900.0, 20)
    np.testing.assert_array_equal(rows, numbered(880, 900))
    assert since_s == 880.0
    assert len(reservoir.newest(900.0, 40)[0]) == 32
    assert len(reservoir.newest(1890.0, 20)[0]) == 10


def test_it_is_uniform_over_the_stream():
    """Each tenth of the stream is met as often: 400 samples of 32 of 1000, 5 standard errors."""
    counts = np.zeros(10)
    for seed in range(400):
        reservoir = QueryReservoir(32, retention_s=10, seed=seed)
        feed(reservoir, range(1000), batch=50)
        counts += np.bincount((reservoir.sample(0.0)[:, 0] // 100).astype(int), minlength=10)
    mean = counts.mean()
    assert (abs(counts - mean) < 5 * np.sqrt(mean)).all(), counts


def test_it_is_uniform_when_the_load_falls_and_the_rate_rises():
    """A peak that has left the window, then 400 queries, then, at a higher rate, 2000: all are met as often."""
    middle = late = 0
    for seed in range(300):
        reservoir = QueryReservoir(64, retention_s=30, seed=seed)
        feed(reservoir, range(10_000), now_s=lambda i: i / 10_000, batch=1000)
        feed(reservoir, range(10_000, 10_400), now_s=lambda i: 20 + (i - 10_000) / 400, batch=40)
        feed(reservoir, range(10_400, 12_400), now_s=lambda i: 32 + (i - 10_400) / 125, batch=50)
        drawn = reservoir.sample(48.0)[:, 0]
        assert (drawn >= 10_000).all()
        middle += (drawn < 10_400).sum()
        late += (drawn >= 10_400).sum()
    expected = (middle + late) / 6
    assert abs(middle - expected) < 5 * np.sqrt(expected), (middle, late)


def test_after_a_peak_the_rate_recovers():
    reservoir = QueryReservoir(64, retention_s=5)
    feed(reservoir, range(20_000), now_s=lambda i: i / 20_000)
    feed(reservoir, range(20_000, 24_000), now_s=lambda i: 10 + (i - 20_000) / 10)
    # 50 queries in the last five seconds; all of them fit.
    assert len(reservoir.sample(410.0)) >= 12


def test_capacity_0_keeps_nothing():
    reservoir = QueryReservoir(0, retention_s=10)
    feed(reservoir, range(100))
    assert len(reservoir) == reservoir.nbytes == 0
    assert reservoir.sample(0.0).size == 0


def test_clear_forgets():
    reservoir = QueryReservoir(16, retention_s=10)
    feed(reservoir, range(1000))
    reservoir.clear()
    assert reservoir.sample(0.0).size == 0
    feed(reservoir, range(10))
    assert len(reservoir.sample(0.0)) == 10


def test_threads_share_it():
    reservoir = QueryReservoir(128, retention_s=100)
    start = threading.Barrier(5)
    samples = []

    def offer(first):
        start.wait()
        feed_from = range(first, first + 2000)
        for i in feed_from:
            reservoir.offer(numbered(i, i + 1), i / 1e4)

    def read():
        start.wait()
        samples.extend(reservoir.sample(0.5) for _ in range(50))

    threads = [threading.Thread(target=offer, args=(2000 * t,)) for t in range(4)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reservoir.check_invariants()
    assert reservoir.offered == 8000
    for sample in samples:
        assert len(sample) <= 128
        assert len(np.unique(sample[:, 0])) == len(sample) if len(sample) else True


@pytest.mark.parametrize(("arguments", "field"), [((-1, 1.0), "capacity"), ((1, 0.0), "retention_s")])
def test_senseless_limits_are_refused(arguments, field):
    with pytest.raises(InvalidInputError, match=field):
        QueryReservoir(arguments[0], retention_s=arguments[1])
