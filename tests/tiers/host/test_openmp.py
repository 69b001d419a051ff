"""faiss calls of several threads, and when they have one: after a call that waited for a thread without a core."""

from __future__ import annotations

from contextlib import closing

import faiss
import numpy as np
import pytest

from hybridindex.tiers.host import openmp
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.openmp import OpenMpThreads, adopt_openmp_threads, openmp_threads
from tests.clustered import clustered, small_index


class Clock:
    """What the clocks say; :meth:`work` is a call that takes time."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = 0.0
        self.threads: list[int] = []

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.worked_s

    def work(self, took_s: float, worked_s: float) -> float:
        self.threads.append(openmp_threads())
        self.now_s += took_s
        self.worked_s += worked_s
        return took_s


class Scanner(OpenMpThreads):
    def __init__(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(openmp, "time", clock)
    before = adopt_openmp_threads(2)
    yield clock
    faiss.omp_set_num_threads(before)


def calls(scanner, clock, n, *, took_s=1e-3, worked_s=1.8e-3):
    """So many calls; the thread counts that they had."""
    clock.threads.clear()
    for _ in range(n):
        assert scanner.call_faiss(clock.work, took_s, worked_s=worked_s) == took_s
    return clock.threads.copy()


def test_calls_in_time_have_all_threads(clock):
    assert calls(Scanner(2), clock, 50) == [2] * 50


def test_after_a_late_call_the_next_have_one_thread(clock):
    scanner = Scanner(2)
    assert calls(scanner, clock, 1, took_s=9e-3) == [2]
    assert calls(scanner, clock, 17) == [1] * 16 + [2]
    assert openmp_threads() == 2


def test_twice_as_many_each_time_that_a_call_is_late_again(clock):
    scanner = Scanner(2)
    for alone in (16, 32, 64, 128, 256, 256):
        assert calls(scanner, clock, 1 + alone, took_s=9e-3) == [2] + [1] * alone
    assert calls(scanner, clock, 1) == [2]
    assert calls(scanner, clock, 1, took_s=9e-3) == [2]
    assert calls(scanner, clock, 17) == [1] * 16 + [2]


def test_a_call_that_waits_for_a_thread_at_work_is_not_late(clock):
    # All on one of them; a short wait beside long work; any wait that is short.
    assert calls(Scanner(2), clock, 3, took_s=2e-3, worked_s=2e-3) == [2] * 3
    assert calls(Scanner(2), clock, 3, took_s=12e-3, worked_s=10e-3) == [2] * 3
    assert calls(Scanner(2), clock, 3, took_s=180e-6, worked_s=1e-6) == [2] * 3


def test_a_scanner_of_one_thread_asks_no_clock(clock):
    adopt_openmp_threads(1)
    scanner = Scanner(1)
    assert calls(scanner, clock, 1, took_s=9e-3) == [1]
    assert scanner._alone == 0


def test_the_thread_count_comes_back_after_an_error(clock):
    scanner = Scanner(2)
    calls(scanner, clock, 1, took_s=9e-3)
    with pytest.raises(ZeroDivisionError):
        scanner.call_faiss(lambda: 1 // 0)
    assert openmp_threads() == 2


@pytest.mark.parametrize("codec", ["flat", "pq8", "pqfs8"])
def test_faiss_answers_the_same_with_one_thread(tmp_path, codec):
    """Coarse quantization and scan, below and above the batch from which faiss multiplies matrices."""
    with (
        small_index(tmp_path / "i", codec=codec, n=2000) as index,
        closing(HostFaissScanner(index, threads=2)) as scanner,
    ):
        before = scanner.adopt_thread()
        try:
            for n in (1, 2, 7, 19, 20, 64):
                queries = index.transform(clustered(n, seed=n))
                answers = []
                for alone in (0, 1000):
                    scanner._alone = alone
                    probes, coarse = scanner.call_faiss(index.quantize, queries, 8)
                    answers.append((probes, coarse, *scanner.scan_checked(queries, probes, coarse, 5)))
                assert scanner._alone == 998
                for two, one in zip(*answers, strict=True):
                    np.testing.assert_array_equal(two, one)
        finally:
            scanner.give_back_thread(before)
