"""Output that takes nothing: one line on stderr, an exit status that is not 0, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "full"])
@pytest.mark.parametrize("words", ["--version", "hardware", "hardware --json", "verify nowhere --json"])
def test_output_that_takes_nothing_is_said_in_one_line(words, closed):
    # Python buffers its output, as it does of most callers.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"{sys.executable} -m hybridindex {words} {'>&-' if closed else '>/dev/full'}"
    ran = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == (3 if "verify" in words else 1), ran.stderr
    (line,) = ran.stderr.splitlines()
    if "verify" not in words:
        assert line == f"OSError: {'standard output is closed' if closed else '[Errno 28] No space left on device'}"


def test_errors_that_nothing_takes_keep_their_status():
    command = f"{sys.executable} -m hybridindex search --json >/dev/full 2>/dev/null"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT).returncode == 2


@pytest.mark.parametrize(("given", "state"), [(None, "note"), ("passive", "ok"), ("ACTIVE", "note")])
def test_doctor_tells_the_callers_wait_policy(given, state):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    code = (
        "import hybridindex.cli.main; from hybridindex.cli.commands.doctor import _wait_policy; "
        "found = _wait_policy(); print(found.state, found.detail)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert ran.stdout.startswith(f"{state} {given or 'unset'}")


def test_sigterm_ends_the_first_process_of_a_container():
    """Which the kernel lets go on where it says nothing of it: seen by its handler."""
    program = (
        "import os, signal, sys\n"
        "os.getpid = lambda: 1\n"
        "from hybridindex.cli import entry\n"
        "sys.argv = ['hybridindex', '--version']\n"
        "entry.run()\n"
        "os.kill(int(os.readlink('/proc/self')), signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 143, ran.stderr
