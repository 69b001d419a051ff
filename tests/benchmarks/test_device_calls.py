"""The calls on a machine with a GPU: programs that are absent, fail or hang; what they print; lists that are probed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ROOT
from benchmarks.device import targets
from benchmarks.device import tier as device_tier
from benchmarks.device.calls import coarse, faiss_gpu, heavy, probes, tools
from benchmarks.device.calls.ceilings import Floor
from benchmarks.device.calls.commands import Done, counters, counts_of_tests, run, sanitizer_errors, table
from benchmarks.device.calls.mps import multi_process_service
from benchmarks.device.copy import use_arena
from benchmarks.device.scan import BYTES, make_lists
from benchmarks.device.targets import judge
from hybridindex.tiers.paged.arena import PageAllocator, page_runs
from hybridindex.tiers.paged.triton_scanner import TritonScanner
from tests.tiers.triton_here import require_triton

SMI = "name, driver_version, memory.total [MiB]\nNVIDIA H200, 570.1, 143771 MiB\n"
NCU = """==PROF== Connected to process 7
scanned f32, ip
"ID","Process ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread","dram__bytes_read.sum"
"","","","usecond","register/thread","Mbyte"
"0","7","scan_light","12.5","128","1,234.5"
"1","7","select_best","3.25","40","n/a"
"""
SANITIZER = "========= COMPUTE-SANITIZER\nscanned f32, ip\nscanned f32, l2\n========= ERROR SUMMARY: 0 errors\n"
PYTEST = "..s\nFAILED tests/tiers/x.py::test_y\n1 failed, 2 passed, 3 skipped, 9 deselected in 4.56s\n"


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """``programs(name, text, status, seconds)``: a program of that name prints the text, sleeps and ends so."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("benchmarks.device.calls.commands._PLACES", ())
    # What is judged is not a stand-in's.
    monkeypatch.setattr(tools, "driver_version", lambda: "570.1")

    def make(name, text="", status=0, seconds=0):
        (folder / f"{name}.txt").write_text(text)
        script = f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\ncat {folder}/{name}.txt\n'
        script += f"sleep {seconds}\nexit {status}\n"
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
        return folder / f"{name}.calls"

    return make


def verdicts(monkeypatch, tmp_path, tool, seconds="9"):
    """Of a run of the tool, as the last table has them."""
    file = tmp_path / f"{tool}.json"
    monkeypatch.setattr(sys, "argv", ["tools", tool, "--seconds", seconds, "--json", str(file)])
    monkeypatch.setattr(tools.signal, "signal", lambda *_: None)
    tools.main()
    result = json.loads(file.read_text())
    assert {"date", "versions"} <= set(result["environment"])
    return judge({tool: result}, {tool: "complete"})


def test_what_is_absent_is_said(programs, monkeypatch, tmp_path):
    for tool in ("machine", "sanitizer", "counters"):
        (only,) = verdicts(monkeypatch, tmp_path, tool)
        assert (only.met, only.measured) == (None, "nothing")
        assert "not installed" in only.note


def test_the_machine_is_named(programs, monkeypatch, tmp_path):
    calls = programs("nvidia-smi", SMI)
    (only,) = verdicts(monkeypatch, tmp_path, "machine")
    assert only.measured == "NVIDIA H200, driver 570.1"
    assert "--query-gpu=name,driver_version" in calls.read_text()


@pytest.mark.parametrize(
    ("text", "status", "met", "note"),
    [
        (SANITIZER, 0, True, "complete; scanned f32, ip; f32, l2"),
        (SANITIZER, 3, None, "exit status 3"),
        (SANITIZER.replace(": 0 errors", ": 1 error"), 1, False, "exit status 1"),
        ("========= Error: no device\n", 0, None, "complete; scanned nothing"),
    ],
)
def test_a_sanitizer_passes_only_what_it_saw_to_its_end(programs, monkeypatch, tmp_path, text, status, met, note):
    programs("compute-sanitizer", text, status)
    (only,) = verdicts(monkeypatch, tmp_path, "sanitizer")
    assert only.met is met
    assert only.note.startswith(note)


def test_a_program_that_hangs_is_stopped_and_what_it_printed_is_kept(programs, monkeypatch, tmp_path):
    programs("ncu", NCU, seconds=60)
    started = time.monotonic()
    found = verdicts(monkeypatch, tmp_path, "counters", seconds="0.5")
    assert time.monotonic() - started < 30
    assert [v.what for v in found] == ["scan_light, 1 launches", "select_best, 1 launches"]
    assert found[0].note == "ncu: stopped after 0 s"
    assert "registers 128 to 128" in found[0].measured
    kept = json.loads((tmp_path / "counters.json").read_text())["text"]
    assert kept == NCU


def test_counters_are_asked_for_with_clocks_as_they_are(programs, monkeypatch, tmp_path):
    calls = programs("ncu", "==ERROR== ERR_NVGPUCTRPERM\n", 1)
    (only,) = verdicts(monkeypatch, tmp_path, "counters")
    assert (only.measured, only.note) == ("nothing", "ncu: exit status 1")
    assert "--clock-control none" in calls.read_text()


@pytest.mark.parametrize(
    ("ended", "status", "met"),
    [
        (["complete"], "complete", True),
        (["exit status 1", "exit status 2"], "exit status 2", False),
        (["exit status 1", "complete", "complete"], "complete", True),
        (["exit status 1", "complete", "exit status 1"], "built, but does not load", False),
    ],
)
def test_an_extension_is_built_where_none_loads(monkeypatch, tmp_path, ended, status, met):
    ends = iter(ended)
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    monkeypatch.setattr(tools, "run", lambda *_: Done(status=next(ends)))
    result = tools.extension(9)
    assert result["status"] == status
    (only,) = judge({"extension": {"stand_in": False, "complete": True} | result}, {"extension": "complete"})
    assert only.met is met
    assert next(ends, None) is None


def test_tables_of_programs():
    assert table(SMI) == [{"name": "NVIDIA H200", "driver_version": "570.1", "memory.total [MiB]": "143771 MiB"}]
    assert counters(NCU, tools.METRICS) == [
        {"kernel": "scan_light", "us": 12.5, "registers": 128.0, "dram bytes": 1234.5},
        {"kernel": "select_best", "us": 3.25, "registers": 40.0},
    ]
    assert counters("nothing", tools.METRICS) == []
    assert sanitizer_errors(SANITIZER + "========= ERROR SUMMARY: 2 errors\n") == 2
    assert sanitizer_errors("") is None
    assert counts_of_tests(PYTEST) == {"failed": 1, "passed": 2, "skipped": 3, "deselected": 9}
    assert counts_of_tests("no tests ran in 0.01s") == {}


@pytest.mark.parametrize(
    ("status", "counts", "met"),
    [
        ("complete", {"passed": 2, "skipped": 1}, True),
        ("complete", {"skipped": 3}, None),
        ("exit status 1", {"failed": 1, "passed": 9}, False),
        ("exit status 2", {"error": 1}, None),
        ("stopped after 105 s", {}, None),
    ],
)
def test_tests_pass_only_where_some_ran(status, counts, met):
    result = {"stand_in": False, "complete": True, "status": status, "counts": counts}
    (only,) = judge({"gpu_tests": result}, {"gpu_tests": "complete"})
    assert only.met is met


def test_what_a_program_started_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    done = run(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], 0.5)
    assert done.status == "stopped after 0 s"
    child, end = Path(f"/proc/{pid.read_text().strip()}/stat"), time.monotonic() + 30
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.01)


def test_a_tool_that_is_told_to_end_keeps_what_was_printed(programs, tmp_path):
    calls, file = programs("ncu", NCU, seconds=60), tmp_path / "counters.json"
    command = [sys.executable, "-m", "benchmarks.device.calls.tools", "counters", "--json", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        end = time.monotonic() + 300
        while not calls.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.2)
    finally:
        process.terminate()
        process.wait(60)
    written = json.loads(file.read_text())
    assert written["status"].startswith("stopped early")
    assert len(written["kernels"]) == 2


def test_a_service_that_cannot_be_started_leaves_the_environment(programs, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with multi_process_service(tmp_path / "bin") as why:
        assert why == "nvidia-cuda-mps-control -d: not installed"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    programs("nvidia-cuda-mps-control", "no permission", 1)
    (tmp_path / "mps").mkdir()
    with multi_process_service(tmp_path / "mps") as why:
        assert why == "nvidia-cuda-mps-control -d: exit status 1 no permission"


def test_a_service_is_ended(programs, tmp_path):
    calls = programs("nvidia-cuda-mps-control")
    (tmp_path / "mps").mkdir()
    with multi_process_service(tmp_path / "mps") as why:
        assert why == ""
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert calls.read_text() == "-d\n"
    assert calls.read_text() == "-d\n\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


@pytest.mark.parametrize("call", device_tier.CALLS)
def test_limits_of_a_call_fit_its_minutes(call):
    minutes, parts = device_tier.CALLS[call]
    assert sum(device_tier.PARTS[name].limit_s for name in parts) <= 60 * minutes <= 9 * 60
    assert parts[:2] == ("machine", "extension")


def test_a_call_runs_its_parts_to_the_end_with_what_is_there(programs, tmp_path):
    programs("nvidia-smi", SMI)
    programs("compute-sanitizer", SANITIZER, 3)
    file = tmp_path / "one.json"
    command = [sys.executable, "-m", "benchmarks.device.tier", "--call", "1", "--json", str(file)]
    command += ["--parts", "machine", "extension", "sanitizer", "counters"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["status"] == dict.fromkeys(("machine", "extension", "sanitizer", "counters"), "complete")
    said = {v["part"]: (v["measured"], v["note"]) for v in written["verdicts"]}
    assert said["machine"][0] == "NVIDIA H200, driver 570.1"
    assert "exit status 3; scanned f32, ip" in said["sanitizer"][1]
    assert "ncu: not installed" in said["counters"][1]


@pytest.mark.parametrize("reuse", [1, 4, 18])
def test_batches_have_the_reuse_that_is_asked_for(reuse):
    rng = np.random.default_rng(0)
    found = probes.with_reuse(3000, 64, 256, reuse, rng)
    assert all(len(np.unique(row)) == len(row) for row in found)
    assert found.size / len(np.unique(found)) == pytest.approx(reuse, rel=0.02)


@pytest.mark.parametrize("there", [True, False])
def test_probes_of_a_log_are_skewed(monkeypatch, tmp_path, there):
    log = tmp_path / "log.jsonl"
    monkeypatch.setattr(probes, "LOGS", (tmp_path / "nowhere", log))
    if there:
        # A passage and its neighbour again and again, among others.
        rows = ({"t": i, "passages": [800, 801, i * 97 % probes.N_PASSAGES]} for i in range(100))
        log.write_text("\n".join(map(json.dumps, rows)))
    assert ("Zipf" in probes.log_source()) is not there
    probes._passages.cache_clear()
    rng = np.random.default_rng(0)
    found = probes.of_log(1500, 64, 64, rng)
    probes._passages.cache_clear()
    even = probes.even(1500, 64, 64, rng)
    assert all(len(np.unique(row)) == 64 for row in found)
    assert len(np.unique(found)) < len(np.unique(even))


def test_the_least_time_of_a_device_is_a_launch_and_its_bytes():
    floor = Floor(sum_bytes_per_s=1e9, launch_s=1e-5)
    assert floor.seconds(0) == 0
    assert floor.seconds(1e6) == pytest.approx(1.01e-3)


def test_a_used_arena_has_its_free_pages_scattered():
    class Tier:
        class arena:  # noqa: N801
            pages = PageAllocator(1000)

    kept = use_arena(Tier)
    free = Tier.arena.pages.free_pages()
    assert (len(kept), len(free)) == (500, 500)
    assert len(page_runs(free)) > 150


@pytest.mark.parametrize(("kind", "metric"), [("f32", "ip"), ("f16", "l2")])
def test_faiss_gets_the_same_rows_and_another_answer_is_found(kind, metric):
    import torch

    lists = make_lists(torch.device("cpu"), kind, 16, metric, 400 * 16 * BYTES[kind], list_rows=10)
    ivf = faiss_gpu.faiss_lists(lists)
    row = faiss_gpu.measure(lists, ivf, 8, 6, 1)
    assert (row["wrong"], row["same_ids"]) == (0, 1.0)
    assert row["faster"][0] > 0
    queries, asked = faiss_gpu.make_batch(lists, 2, 6, np.random.default_rng(0))
    found = lists.scan(lists.scanner(1 << 20), queries, asked)
    other = (found[0] + np.float32([[0], [0.01]]), found[1])
    assert faiss_gpu.compare(lists, (queries, asked), found, other) == (1, 1.0)


@pytest.mark.parametrize("kind", ["f16", "bf16", "sq8"])
def test_the_kernel_for_many_queries_is_the_one_that_is_checked(monkeypatch, kind):
    require_triton("cpu")
    import torch

    monkeypatch.setattr(TritonScanner, "unsupported", staticmethod(lambda _arena: ""))
    monkeypatch.setattr(heavy, "scratch_for_budget", lambda _budget: 1 << 20)
    monkeypatch.setattr(heavy, "FOUND", 10)
    lists = make_lists(torch.device("cpu"), kind, 16, "ip", 60 * 16 * BYTES[kind], list_rows=20)
    row = heavy.measure(lists, "normal")
    assert (row["scanner"], row["heavy"]) == ("triton", 1.0)
    assert row["error"] < 1e-6


def test_lists_that_a_device_chose_are_those_of_the_host():
    import torch

    row = coarse.measure(torch.device("cpu"), 1500, 24, 8, 1, 2)
    assert (row["different"], row["settled"]) == (0, 1.0)
    assert all(len(row[side]) == 3 for side in ("host_us", "device_us", "proof_us", "ratio"))
    result = {"stand_in": False, "complete": True, "rows": [row, {**row, "different": 3}]}
    right, wrong = targets.judge({"device_coarse": result}, {"device_coarse": "complete"})
    assert (right.met, right.measured, wrong.met, wrong.measured) == (True, "0 differ", False, "3 differ")


def test_every_part_is_judged():
    assert set(device_tier.PARTS) == set(targets._JUDGES)
    row = {"share": 0.5, "batch": 8, "times_faster": [2.0, 1.9, 2.1], "noise": [1.0, 0.9, 1.1]}
    result = {"stand_in": False, "complete": True, "filters": [row], "added": {"rows": [row]}}
    found = targets.judge({"device_living": result}, {"device_living": "complete"})
    assert [(each.what, each.measured, each.met) for each in found] == [
        ("filters that leave 50%, batch 8", "2.00 times as fast as the host", None),
        ("added rows, batch 8", "2.00 times as fast as the host", None),
    ]
