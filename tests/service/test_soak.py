"""What the load benchmarks conclude from: an oracle that sees one wrong digit, a load that is what it says."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.serving import Taken
from benchmarks.soak import growth
from benchmarks.soak_load import MOST_BATCH, make_load, read_trace, synthetic_trace
from benchmarks.soak_oracle import PoolOracle
from hybridindex.index import open_index
from tests.clustered import clustered

ROWS = np.arange(3, 9)


@pytest.fixture(scope="module")
def asked(planned_index):
    """(oracle, the router's own answer to the pool's ROWS with k 5 and nprobe 6)."""
    pool = clustered(40, seed=5)
    with open_index(planned_index) as index:
        import hybridindex as hx

        with hx.open(planned_index) as facade, facade.router() as router:
            yield PoolOracle(index, pool, most_nprobe=8, most_k=10), router.search(pool[ROWS], 5, 6)


def test_the_oracle_finds_right_answers_right_and_every_nprobe_exact(asked):
    oracle, result = asked
    assert oracle.problem(ROWS, 5, 6, 6, result) is None
    assert oracle.n_close_calls == 0


@pytest.mark.parametrize("wrong", ["id", "distance", "order", "nprobe", "another's", "hit rate", "empty", "twice"])
def test_the_oracle_finds_one_wrong_value(asked, wrong):
    oracle, result = asked
    ids, distances, used, rate = (
        np.array(a) for a in (result.ids, result.distances, result.nprobe_used, result.hit_rate)
    )
    rows = ROWS
    if wrong == "id":
        ids[2, 3] += 1
    elif wrong == "distance":
        distances[2, 3] *= 1.001
    elif wrong == "order":
        ids[1, [0, 1]], distances[1, [0, 1]] = ids[1, [1, 0]], distances[1, [1, 0]]
    elif wrong == "nprobe":
        used[4] = 5
    elif wrong == "another's":
        rows = ROWS[::-1]
    elif wrong == "hit rate":
        rate[0] = 1.5
    elif wrong == "empty":
        ids[0, 4], distances[0, 4] = -1, np.inf
    else:
        ids[3, 1], distances[3, 1] = ids[3, 0], distances[3, 0]
    altered = dataclasses.replace(result, ids=ids, distances=distances, nprobe_used=used, hit_rate=rate)
    assert oracle.problem(rows, 5, 6, 6, altered) is not None


def test_the_load_is_the_trace_in_less_time(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"t":0,"passages":[5,6]}\n{"t":10,"passages":[]}\n{"t":89,"passages":[8301]}\n')
    load = make_load(read_trace(file), requests=300, seconds=60, pool=64, most_nprobe=9, seed=0)
    assert load.due.shape == (300,)
    assert (np.diff(load.due) >= 0).all()
    assert 59 < load.due[-1] <= 60
    assert load.rows.shape == (300, MOST_BATCH)
    assert load.rows.min() >= 0
    assert load.rows.max() < 64
    # The hot passages lie elsewhere in each quarter.
    assert len({tuple(np.unique(part)) for part in np.split(load.rows, 4)}) > 1
    assert set(load.kind) > {"binary search", "bad request", "step of a session"}


def test_synthetic_arrivals_come_in_bursts():
    trace = synthetic_trace(4000)
    counts, _ = np.histogram(trace.arrivals, bins=400, range=(0, trace.seconds))
    assert counts.sum() == 4000
    # A Poisson process would have a ratio near 1.
    assert counts.var() / counts.mean() > 3


def test_growth_is_of_the_second_half():
    def samples(values):
        return [(float(i), Taken(rss_bytes=v, anonymous_bytes=v, fds=3, threads=2)) for i, v in enumerate(values)]

    warming = [*range(100, 200, 2), *[200] * 51]
    assert growth(samples(warming), "rss_bytes") == 0
    leaking = range(1000, 1101)
    assert growth(samples(leaking), "rss_bytes") == pytest.approx(0.038, abs=0.002)


def test_threads_share_heaps_once_they_are_bounded():
    script = """
import ctypes, sys, threading
from hybridindex.service.run import bound_arenas
bounded = bound_arenas() if sys.argv[1] == "bounded" else True
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
gate = threading.Barrier(9)
def allocate():
    libc.malloc(20_000)
    gate.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[t.start() for t in threads]
gate.wait()
[t.join() for t in threads]
out = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fflush(ctypes.c_void_p(out))
"""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("no glibc")
    heaps = {}
    for side in ("bounded", "free"):
        run = subprocess.run([sys.executable, "-c", script, side], capture_output=True, text=True, check=True)
        heaps[side] = run.stdout.count("<heap nr=")
    assert heaps["bounded"] <= 2 < heaps["free"]
