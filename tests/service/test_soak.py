"""What the load benchmarks conclude from: an oracle that sees one wrong digit, a load that is what it says."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.common.serving import Taken
from benchmarks.service.connection import Answer, request_bytes
from benchmarks.service.overload import judged
from benchmarks.service.overload_load import Clients
from benchmarks.service.soak import growth
from benchmarks.service.soak_client import SESSION_TTL_S, Client, _Conversation
from benchmarks.service.soak_load import MOST_BATCH, make_load, read_trace, synthetic_trace
from benchmarks.service.soak_oracle import PoolOracle
from hybridindex.answer_codec import ANSWER_TYPE, answer_bytes
from hybridindex.index import open_index
from hybridindex.service.auth import KeyFile, Keyring
from tests.clustered import DIM, clustered
from tests.service.live import live

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


@pytest.mark.parametrize(
    ("seconds", "status", "expected"), [(-1, 404, "unexpected"), (1, 404, "late"), (1, 410, "unexpected")]
)
def test_a_session_that_is_gone_is_late_only_when_its_time_was_over(seconds, status, expected):
    load = make_load(synthetic_trace(10), requests=10, seconds=1, pool=4, most_nprobe=2, seed=0)
    # Nothing is sent, nothing checked.
    client = Client(None, load, np.zeros((4, 8), np.float32), None, None, admin="a", fixed="b", default_nprobe=1)
    talk = _Conversation("name", time.perf_counter() - SESSION_TTL_S - seconds * 5)
    assert client._refused(Answer(status, b"", b""), "a look", talk) == expected
    assert len(client.unexpected) == (expected == "unexpected")


def _phase(answered, *, cores, refused=0.0, in_time=None, deepest=0, faults=()):
    return {
        "answered_rate": answered,
        "goodput": answered if in_time is None else in_time,
        "refused_rate": refused,
        "generator_cores": 0.1,
        "loop_cores": 0.2,
        "search_cores": cores - 0.3,
        "deepest_queue": deepest,
        "faults": dict.fromkeys(faults, 1),
    }


def _found(**changed):
    phases = {
        "capacity before": _phase(1000, cores=2.0),
        "overload": _phase(940, cores=2.0, refused=1000, in_time=930, deepest=1024),
        "capacity after": _phase(1000, cores=2.0),
        "capacity beside": _phase(980, cores=2.0),
        "overload, clients heed": _phase(900, cores=1.9, refused=10),
    }
    return {"phases": {**phases, **changed}}


def test_goodput_under_overload_is_judged_by_answers_in_time():
    found = judged(_found(), queue=1024)
    assert found["passed"]
    assert found["goodput_ratio"] == pytest.approx(0.93)
    assert found["goodput_ratio_beside"] == pytest.approx(930 / 980)
    assert found["goodput_ratio_heeding"] == pytest.approx(0.9)
    # 2 ms of both cores for each answer; what 940 of them leave is for 1000 refusals.
    assert found["answer_cpu_us"] == pytest.approx(2000)
    assert found["refusal_cpu_us"] == pytest.approx(120)


@pytest.mark.parametrize(
    "wrong", [{"in_time": 890}, {"deepest": 1025}, {"faults": ["refusals without Retry-After-Ms"]}]
)
def test_one_missed_target_fails_the_overload(wrong):
    overload = _phase(940, cores=2.0, refused=1000, **wrong)
    assert not judged(_found(overload=overload), queue=1024)["passed"]


def test_the_generator_counts_what_it_is_answered(make_service, tmp_path):
    service = make_service(limits={"in_flight_queries": 1, "queue_queries": 4})
    keys = KeyFile(tmp_path / "keys.json")
    names = [keys.add(f"client-{number}", "search") for number in range(3)]
    body = np.zeros(DIM, np.float32).tobytes()
    requests = [
        request_bytes("POST", "/v1/search?k=3", body, key=key, kind="application/octet-stream", accept=ANSWER_TYPE)
        for key in names
    ]
    arrivals = np.linspace(0.001, 0.1, 40)
    with live(service, Keyring(keys.path)) as port:
        clients = Clients(port, requests, status_key=names[0], most_open=9, body_bytes=answer_bytes(1, 3), tick_s=0.001)
        clients.wait_ready()
        answered = clients.closed_loop(0.05)
        service.admission._n_in_flight, service.admission._n_waiting = 1, 4
        service.admission.retry_after_s = lambda n: 0.5
        refused = clients.open_loop(arrivals, patient=False)
        patient = clients.open_loop(10 * arrivals, patient=True)
        service.admission._n_in_flight = service.admission._n_waiting = 0
        clients.close()
    assert set(answered.statuses) == {200}
    assert answered.sent == answered.statuses[200] == len(answered.latencies_s) >= 3
    assert refused.statuses == {503: 40 - refused.unsent}
    assert refused.retry_after_s.total() == refused.statuses[503]
    assert patient.held_back
    assert patient.statuses[503] < refused.statuses[503]
    assert not answered.faults + refused.faults + patient.faults


def test_threads_share_heaps_once_they_are_bounded():
    script = """
import ctypes, sys, threading
from hybridindex.service.daemon import bound_arenas
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
        pytest.skip("malloc_info, by which heaps are counted, is of glibc")
    heaps = {}
    for side in ("bounded", "free"):
        run = subprocess.run([sys.executable, "-c", script, side], capture_output=True, text=True, check=True)
        heaps[side] = run.stdout.count("<heap nr=")
    assert heaps["bounded"] <= 2 < heaps["free"]
