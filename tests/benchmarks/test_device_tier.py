"""The frame around the parts: limits, what is kept of a part that ends early, what was missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.device import tier as device_tier
from benchmarks.device.tier import Part, Run, measure, run_part

#: Writes one row, in one step as the parts do, then does what it is told.
SCRIPT = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1] + ".new").write_text('{"stand_in": true, "complete": false, "rows": []}')
os.replace(sys.argv[1] + ".new", sys.argv[1])
"""
HANGS = SCRIPT + "time.sleep(60)"


def python(script, *arguments):
    return [sys.executable, "-c", script, *map(str, arguments)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(device_tier, "_TICK_S", 0.02)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", "complete"),
        ("sys.exit(3)", "failed: exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "failed: SIGKILL"),
    ],
)
def test_how_a_part_ended(tmp_path, end, status):
    file = tmp_path / "part.json"
    assert run_part(python(SCRIPT + end, file), 30, lambda _: None, file) == status


def test_a_part_that_hangs_is_stopped_and_its_rows_are_seen_before(tmp_path):
    file, seen = tmp_path / "part.json", []
    assert run_part(python(HANGS, file), 0.4, seen.append, file) == "stopped after 0 s"
    assert seen == ["running"]


def test_a_part_that_does_not_heed_the_signal_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(device_tier, "_GRACE_S", 0.1)
    file = tmp_path / "part.json"
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + HANGS
    started = time.monotonic()
    assert run_part(python(script, file), 0.4, lambda _: None, file).startswith("stopped")
    assert time.monotonic() - started < 30


def test_what_is_missing_or_out_of_time_is_said_and_nothing_started(monkeypatch, tmp_path):
    monkeypatch.setitem(
        device_tier.PARTS,
        "device_scan",
        Part(name="device_scan", module="device.scan", limit_s=9, needs=("no_such_package",)),
    )
    run = Run(tmp_path / "all.json")
    measure(["device_scan", "device_swap"], run, tmp_path, time.monotonic())
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["status"] == {
        "device_scan": "not run: no_such_package not installed",
        "device_swap": "not run: no time was left",
    }
    assert [(v["part"], v["met"], v["note"]) for v in written["verdicts"]] == [
        (name, None, status) for name, status in written["status"].items()
    ]


def test_parts_of_an_earlier_run_stand_beside_those_of_this_one(tmp_path):
    part = tmp_path / "device_swap.json"
    part.write_text('{"stand_in": true, "complete": true, "rows": []}')
    first, second = Run(tmp_path / "one.json"), Run(tmp_path / "two.json")
    first.note("device_swap", "complete", part, 1.0)
    second.adopt(tmp_path / "one.json")
    second.note("device_scan", "not run: no time was left")
    written = json.loads((tmp_path / "two.json").read_text())
    assert list(written["status"]) == ["device_swap", "device_scan"]
    assert written["parts"]["device_swap"]["complete"]


def test_a_killed_run_leaves_its_rows_and_no_process(tmp_path):
    file, pid = tmp_path / "all.json", tmp_path / "pid"
    driver = f"""
import os, pathlib, sys, time
from benchmarks.common import measure as common
from benchmarks.device import tier as device_tier
from benchmarks.device.tier import Run, run_part
device_tier._TICK_S = 0.02
part = pathlib.Path({str(tmp_path / "part.json")!r})
script = '''
import os, pathlib, sys, time
from benchmarks.common import measure as common
common.arguments("a part")
pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
pathlib.Path({str(tmp_path / "part.json")!r}).write_text('{{"stand_in": true, "complete": false, "rows": []}}')
time.sleep(60)
'''
run = Run(pathlib.Path({str(file)!r}))
run_part([sys.executable, "-c", script], 50, lambda s: run.note("device_swap", s, part), part)
"""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(python(driver), cwd=root, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert json.loads(file.read_text())["parts"]["device_swap"]["rows"] == []
    part = int(pid.read_text())
    end = time.monotonic() + 300
    while Path(f"/proc/{part}/stat").exists() and Path(f"/proc/{part}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the part goes on"
        time.sleep(0.01)
