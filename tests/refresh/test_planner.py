"""Plans made in a process of their own: the same as here, and whatever becomes of the process, serving goes on."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import hybridindex.refresh.planner_process
from hybridindex.errors import PlanningError, ProfileError
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.planner import Arenas
from hybridindex.plans.proposal import Served
from hybridindex.processes import SHORT_S
from hybridindex.refresh.pipe_codec import write_frame
from hybridindex.refresh.planner import CODEC, PlanningHere, RenewOptions
from hybridindex.refresh.planner_process import PlanningProcess
from hybridindex.refresh.update_cycle import CycleStage, Outcome
from tests.moving_load import moving_queries
from tests.partitioner.synthetic import make_profile, with_candidates, with_row_faults
from tests.refresh.world import CONFIG, LATE_S, NPROBE

APART = dataclasses.replace(CONFIG, planning="process", planning_timeout_s=120.0)
OPTIONS = RenewOptions(n_hot=9, decay=None, seed=3, min_queries=64, notes={"span_s": 1.5})


@pytest.fixture
def process(index):
    planner = PlanningProcess(index.ivf, timeout_s=600.0, nice=19)
    yield planner
    planner.close()


def same(one, other):
    """Whether two values are equal, arrays and dataclasses within them too."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if dataclasses.is_dataclass(one):
        skip = ("created_at", "cell_cache", "touch_cache", "_known")
        pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one) if f.name not in skip]
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, tuple):
        return type(other) is tuple and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or one != one)


def test_a_process_makes_the_plan_that_is_made_here(index, plan, process):
    queries = moving_queries(600, seed=5, moved=True)
    present = np.where(np.arange(index.nlist) % 3, plan.list_device, -1).astype(np.int16)
    served = Served(resident_lists=plan.resident_lists, list_device=plan.list_device, present=present)
    arenas = Arenas(scratch=plan.request.scratch, room=tuple(b // 2 for b in plan.request.budgets))
    found = []
    for planner in (PlanningHere(index.ivf), process):
        profile = planner.renew(plan.analysis.profile, queries, OPTIONS)
        made = planner.solve(profile, plan.request, arenas)
        found.append((profile, made, planner.weigh(made, served, 0.5)))
        assert made.analysis.profile is profile
    here, there = found
    assert same(here, there)
    assert not same(here[1], plan)
    assert there[1].predicted_latency_ms(7) == here[1].predicted_latency_ms(7)
    with index.router(there[1], ["cpu"]) as router:
        assert router.search(queries[:3], 5, NPROBE).ids.shape == (3, 5)
    record = there[1].to_record()
    assert np.array_equal(Plan.from_record(record, there[0]).resident_lists, here[1].resident_lists)


@pytest.mark.parametrize("row_cache_bytes", [None, 1 << 20])
def test_a_process_plans_from_a_profile_of_rows_on_disk(index, process, row_cache_bytes):
    codes = dataclasses.replace(make_profile(nlist=64, n=400, nprobe=8), codec="rabitq1", scanner="rabitq")
    profile = with_row_faults(with_candidates(codes, 1024))
    request = PlanRequest.resolve(slo_ms=1000, device_budget_bytes=4 << 20, row_cache_bytes=row_cache_bytes)
    here, there = (planner.solve(profile, request, None) for planner in (PlanningHere(index.ivf), process))
    assert same(here, there)
    assert (there.predicted_row_faults is None) == (row_cache_bytes is None)


def noted(intervals, call):
    """``call``, which notes the interpreter's switch interval each time."""
    return lambda *given, **named: (intervals.add(sys.getswitchinterval()), call(*given, **named))[1]


def test_an_update_that_is_planned_apart_is_committed(make_world, plan, monkeypatch):
    world = make_world(APART)
    waiting, moving = set(), set()
    read = noted(waiting, hybridindex.refresh.planner_process.read_frame)
    monkeypatch.setattr(hybridindex.refresh.planner_process, "read_frame", read)
    monkeypatch.setattr(world.router, "apply_plan", noted(moving, world.router.apply_plan))
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    world.serve(2, seed=5, moved=True)
    status = world.refresher.status()
    assert status.updates == {"committed": 1}, status.last_update.why
    assert world.router.plan is not plan
    world.answers_are_right()
    assert waiting == {sys.getswitchinterval()}
    assert list(moving) == [pytest.approx(SHORT_S)]


def test_after_a_long_steady_load_a_plan_is_made_of_all_that_came_since(make_world):
    world = make_world(store=False)
    world.serve(8, seed=3)
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    # And the query that closed the window before.
    assert world.refresher.status().last_update.proposal["n_queries"] == 201


def test_where_too_few_came_since_a_plan_is_made_of_the_newest(make_world):
    """Two windows of 20 queries are off; 64 make a plan."""
    drift = dataclasses.replace(CONFIG.drift, window_requests=20, min_queries=10)
    world = make_world(dataclasses.replace(CONFIG, drift=drift), store=False)
    world.serve(8, seed=3)
    for query in moving_queries(40, seed=4, moved=True):
        world.now += 0.01
        world.refresher.observe(query, LATE_S, world.router.search(query, 5).hit_rate)
    world.refresher.step()
    assert world.refresher.status().last_update.proposal["n_queries"] == 64


def test_a_plan_is_made_of_the_queries_that_came_while_its_process_began(make_world, monkeypatch):
    world = make_world(store=False)
    world.serve(1, seed=9, moved=True)
    late = moving_queries(50, seed=10, moved=True)
    monkeypatch.setattr(PlanningHere, "prepare", lambda planner: world.refresher.offer(late))
    assert world.refresher.propose().n_queries == 150


def test_a_process_plans_from_a_stored_profile_and_says_what_has_room(index, plan, process):
    request = dataclasses.replace(plan.request, coverage=0.9)
    served = Served.by(plan, plan.list_device)
    found = []
    for planner in (PlanningHere(index.ivf), process):
        made = planner.solve(plan.analysis.profile, request, None)
        assert made.analysis.profile is plan.analysis.profile
        half = (made.device_bytes - made.request.scratch[0]) // 2
        [all_of_it, part] = [planner.weigh(made, served, 1.0, room) for room in (None, [half])]
        assert all_of_it.placed is made
        assert part.placed.analysis is made.analysis
        found.append((made, part))
    assert same(*found)
    assert 0 < found[0][1].placed.coverage < found[0][0].coverage == pytest.approx(0.9, abs=0.05)


def test_errors_keep_their_kind(index, plan, process):
    options = dataclasses.replace(OPTIONS, min_queries=700)
    with pytest.raises(ProfileError, match="600 recent queries are known"):
        process.renew(plan.analysis.profile, moving_queries(600, seed=5, moved=True), options)
    with pytest.raises(PlanningError, match="AssertionError: weigh before solve"):
        process.weigh(plan, Served.nowhere(None, plan.nlist), 1.0)


def test_the_process_stands_behind_everything_else(process):
    with pytest.raises(PlanningError, match="nothing was renewed"):  # it answers, so it has begun
        process.solve(None, None, None)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)


def hanging(monkeypatch, tmp_path):
    """The process says nothing and waits."""
    return replaced(monkeypatch, tmp_path, "import time; time.sleep(600)")


def replaced(monkeypatch, tmp_path, source):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{source}\n")
    program.chmod(0o755)
    monkeypatch.setattr(hybridindex.refresh.planner_process.sys, "executable", str(program))
    return program


READING = "import os; read = lambda: [part for part in iter(lambda: os.read(0, 1 << 20), b'')];"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by itself with signal 9"),
        ("raise SystemExit(7)", "ended by itself with exit status 7"),
        ("import time; time.sleep(600)", r"it took more than 0\.5 s"),
        (f"{READING} os.write(1, b'?' * 99); read()", "its answer made no sense"),
        (f"{READING} os.write(1, b'HXF2' + bytes([1, 0, 0, 0, 3] + [0] * 7) + b'???'); read()", "damaged frame"),
    ],
)
def test_a_process_that_fails_fails_the_update_and_nothing_else(make_world, plan, monkeypatch, tmp_path, source, why):
    timeout_s = 0.5 if "took" in why else 60.0
    monkeypatch.setattr(hybridindex.refresh.planner_process, "_EXIT_TIMEOUT_S", 1.0)
    world = make_world(dataclasses.replace(APART, planning_timeout_s=timeout_s))
    with monkeypatch.context() as patch:
        replaced(patch, tmp_path, source)
        world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    last = world.refresher.status().last_update
    assert last.outcome is Outcome.FAILED
    assert "profiling failed: PlanningError" in last.why
    assert re.search(why, last.why), last.why
    assert world.events("refresh_ended")[0]["why"] == last.why
    assert world.router.plan is plan
    world.answers_are_right()
    assert world.refresher.status().stage is CycleStage.IDLE


def test_where_no_process_may_be_started_the_error_names_the_option(make_world, monkeypatch):
    world = make_world(APART, store=False)
    world.serve(1, seed=4, moved=True)
    monkeypatch.setattr(hybridindex.refresh.planner_process.sys, "executable", "/nowhere/python")
    with pytest.raises(PlanningError, match='planning="here"'):
        world.refresher.propose()


def test_closing_ends_a_process_that_hangs(make_world, monkeypatch, tmp_path):
    world = make_world(APART)
    world.serve(1, seed=4, moved=True)
    hanging(monkeypatch, tmp_path)
    started = threading.Event()
    planning = world.refresher._updates._planning
    real = planning.start
    monkeypatch.setattr(planning, "start", lambda index: (real(index), started.set())[0])
    stepping = threading.Thread(target=world.refresher.step, args=("a person",))
    stepping.start()
    assert started.wait(300)
    pid = planning.planner.pid
    world.refresher.close()
    stepping.join(300)
    assert not stepping.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "it was told to stop" in world.refresher.status().last_update.why


ORPHAN = """
import sys, time
import hybridindex as hx
from hybridindex.refresh.planner_process import PlanningProcess
index = hx.open(sys.argv[1])
process = PlanningProcess(index.ivf, timeout_s=600, nice=0)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_no_process_outlives_a_killed_daemon_nor_needs_a_guarded_main(index, tmp_path):
    script = tmp_path / "embedding.py"
    script.write_text(ORPHAN)
    owner = subprocess.Popen([sys.executable, script, index.path], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    pid = int(owner.stdout.readline())
    gone = os.pidfd_open(pid)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    watch = select.poll()
    watch.register(gone, select.POLLIN)
    assert watch.poll(60_000), "the process that plans is still there"
    os.close(gone)


BUSY = """
import sys, time
import hybridindex.refresh.planner_worker as worker
worker._Calls.answer = lambda *call: (print("busy", file=sys.stderr, flush=True), time.sleep(600))
worker.main()
"""


def test_a_process_that_works_ends_with_its_input():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BUSY, "0"], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as worker:
        write_frame(worker.stdin, CODEC.encode({"call": "anything"}))
        assert worker.stderr.readline() == b"busy\n"
        worker.stdin.close()
        try:
            assert worker.wait(300) == 1
        finally:
            worker.kill()
