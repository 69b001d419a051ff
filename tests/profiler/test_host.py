from __future__ import annotations

import itertools
import time

import faiss
import numpy as np
import pytest

from hybridindex.profiler.host import host_threads, time_host
from hybridindex.profiler.request import ProfileRequest
from hybridindex.profiler.work import work_of
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.openmp import OpenMpThreads


class RecordingScanner(OpenMpThreads):
    """A scanner that notes what it is asked to scan."""

    name = "recording"
    threads = 1

    def __init__(self) -> None:
        self.probes: list[np.ndarray] = []

    def scan(self, queries, probes, coarse_distances, k, *, filter_ids=None, on_done=None):
        assert len(queries) == len(probes) == len(coarse_distances)
        self.probes.append(probes)
        return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)


@pytest.fixture
def order(index):
    return np.argsort(-index.list_bytes, kind="stable")


def timed(index, queries, order, scanner, *, max_seconds=60.0, clock=time.perf_counter, **options):
    settings = {"nprobe": 4, "k": 3, "batches": (1, 4), "coverages": (0.25, 0.5), "repeats": 3, **options}
    request, x = ProfileRequest(**settings), index.transform(queries)
    return time_host(index, scanner, x, order, request, max_seconds=max_seconds, clock=clock)


def test_every_batch_and_coverage_is_timed_once_a_round(index, queries, order):
    timing = timed(index, queries, order, HostFaissScanner(index, threads=1))
    coarse = [s for s in timing.samples if s.stage == "coarse"]
    scans = [s for s in timing.samples if s.stage == "host_scan"]
    assert {b: sum(s.batch == b for s in coarse) for b in (1, 4)} == {1: 9, 4: 9}
    assert sorted({s.coverage for s in scans}) == [0.0, 0.25, 0.5]
    assert sum(s.coverage == 0 for s in scans) == 6
    assert all(s.seconds > 0 for s in timing.samples)
    assert timing.notes["rounds"] == 3
    assert timing.notes["coverages"] == [0, 0.25, 0.5]


def test_samples_say_the_work_that_was_scanned(index, queries, order):
    scanner = RecordingScanner()
    timing = timed(index, queries, order, scanner)
    scans = [s for s in timing.samples if s.stage == "host_scan"]
    for sample, probes in zip(scans, scanner.probes[-len(scans) :], strict=True):
        work = work_of(probes, index.list_bytes)
        assert sample.probes == work.probes
        assert sample.work_bytes == work.work_bytes
        assert sample.max_work_bytes == work.max_work_bytes
        assert sample.unique_bytes == work.unique_bytes
        resident = order[: round(sample.coverage * index.nlist)]
        assert not np.isin(probes, resident).any()
        assert 0 <= sample.min_hit_rate < 1
        if sample.coverage == 0:
            assert sample.min_hit_rate == 0
            assert sample.probes == sample.batch * 4


def test_rounds_draw_different_queries(index, queries, order):
    scanner = RecordingScanner()
    timed(index, queries, order, scanner, batches=(4,), coverages=(), repeats=6)
    assert len({probes.tobytes() for probes in scanner.probes[-6:]}) > 1


def test_same_seed_asks_for_the_same_scans(index, queries, order):
    first, second, other = RecordingScanner(), RecordingScanner(), RecordingScanner()
    timed(index, queries, order, first, seed=1)
    timed(index, queries, order, second, seed=1)
    timed(index, queries, order, other, seed=2)
    asked = [[probes.tobytes() for probes in scanner.probes] for scanner in (first, second, other)]
    assert asked[0] == asked[1] != asked[2]


def test_batches_that_do_not_fit_the_time_are_left_out_and_named(index, queries, order):
    scanner = RecordingScanner()
    now = 0.0

    def clock() -> float:  # a scan of one query takes a second
        return now

    def scan(x, probes, coarse, k, **_):
        nonlocal now
        now += len(x)
        return np.zeros((len(x), k), np.float32), np.zeros((len(x), k), np.int64)

    scanner.scan = scan
    timing = timed(index, queries, order, scanner, batches=(1, 4, 64), coverages=(), max_seconds=120.0, clock=clock)
    assert timing.notes["batches"] == [1, 4]
    assert timing.notes["batches_left_out"] == [64]
    assert "120.0 s" in timing.notes["batches_left_out_because"]


def test_two_rounds_of_the_smallest_batch_are_measured_whatever_they_take(index, queries, order):
    ticking = itertools.count()
    timing = timed(
        index,
        queries,
        order,
        RecordingScanner(),
        repeats=9,
        max_seconds=0.5,
        clock=lambda: float(next(ticking)),
    )
    assert timing.notes["batches"] == [1]
    assert timing.notes["rounds"] == 2
    assert timing.notes["rounds_wanted"] == 9


def test_faiss_gets_its_own_thread_setting_back(index):
    before = faiss.omp_get_max_threads()
    with host_threads(HostFaissScanner(index, threads=before + 1)):
        assert faiss.omp_get_max_threads() == before + 1
    assert faiss.omp_get_max_threads() == before
