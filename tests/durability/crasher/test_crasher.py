"""Real processes, real files, kill -9: ten of the five hundred kills of ``python -m tests.durability.crasher``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_what_was_acknowledged_is_there_after_any_kill(tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.durability.crasher", "--kills", "10", "--folder", tmp_path]
    # A process of its own: it forks, and starts threads in the children.
    done = subprocess.run([*command, "--json", file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["kills"] == 10
    assert report["changes"] > 20
    assert not report["failures"]
