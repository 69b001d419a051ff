"""Runs another program for a while, and reads what NVIDIA's tools and pytest print."""

from __future__ import annotations

import csv
import ctypes
import glob
import io
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["COMPLETE", "Done", "Interrupted", "counters", "counts_of_tests", "run", "sanitizer_errors", "table"]

COMPLETE = "complete"
_PR_SET_PDEATHSIG = 1
#: Where NVIDIA's tools are installed.
_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda-*/bin")
#: Characters of what a program printed that results keep.
_KEPT = 20_000


class Interrupted(BaseException):
    """A signal asked for the end: what runs is ended, and what it printed is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a program ended, and what it printed until then."""

    #: "complete", "not installed", "exit status 3", "SIGSEGV", "stopped after 60 s".
    status: str
    text: str = ""
    seconds: float = 0.0

    @property
    def kept(self) -> str:
        """The beginning and the end of the text."""
        if len(self.text) <= _KEPT:
            return self.text
        return f"{self.text[: _KEPT // 2]}\n[...]\n{self.text[-_KEPT // 2 :]}"


def run(command: Sequence[str], limit_s: float, *, alone: bool = True, **environment: str) -> Done:
    """Runs ``command`` for ``limit_s`` at most; it and what it started end with this process at the latest.

    ``alone`` False: what it starts may go on.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                [_place(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
                preexec_fn=_end_with_us if alone else None,
            )
        except FileNotFoundError:
            return Done(status="not installed")
        try:
            try:
                status = _said(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit_s:.0f} s"
            except Interrupted:
                status = f"stopped early, after {time.monotonic() - start:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return Done(status=status, text=out.read(), seconds=time.monotonic() - start)


def _place(name: str) -> str:
    """Of a program that may lie beside CUDA, where no search path leads."""
    beside = (place for pattern in _PLACES for place in sorted(glob.glob(f"{pattern}/{name}"), reverse=True))
    return shutil.which(name) or next(beside, name)


def _end_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _said(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}" if code else COMPLETE


def table(text: str) -> list[dict[str, str]]:
    """Rows of ``nvidia-smi --format=csv``."""
    rows = [[field.strip() for field in row] for row in csv.reader(io.StringIO(text)) if row]
    return [dict(zip(rows[0], row, strict=False)) for row in rows[1:]]


def sanitizer_errors(text: str) -> int | None:
    """Of all summaries that ``compute-sanitizer`` printed; None where it printed none."""
    found = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
    return sum(found) if found else None


def counts_of_tests(text: str) -> dict[str, int]:
    """Of pytest's last summary line: passed, failed, error, skipped."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        found = re.findall(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed|deselected)", line)
        if found and re.search(r" in [\d.]+s", line):
            counts = {name: int(count) for count, name in found}
    return counts


def counters(text: str, metrics: Mapping[str, str]) -> list[dict[str, str | float]]:
    """One row a launch of ``ncu --csv --page raw``: the kernel, and each of ``metrics`` (name of ours -> its own) that
    is there. What stands before the table, and its row of units, is passed over."""
    lines = text.splitlines()
    header = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return []
    found = []
    for row in csv.DictReader(lines[header:]):
        if not (row["ID"] or "").isdigit():
            continue
        one: dict[str, str | float] = {"kernel": row.get("Kernel Name") or ""}
        for name, own in metrics.items():
            try:
                one[name] = float((row.get(own) or "").replace(",", ""))
            except ValueError:
                continue
        found.append(one)
    return found
