"""The device tier in one call: scan, residency, schedulers, copies, what a neighbour loses, sessions and plan changes.

Each part runs in a process of its own, with a limit of its own within that of all. What a part has finished is in the
results at once: whoever is stopped, by a limit, a signal or a crash, leaves the rows that were measured. A part whose
packages are missing is passed over and said to be. The last table holds every target against what was measured.
Without a GPU all parts run on the stand-in device, say so, and claim nothing.

**On a machine with one H200 and no network.** Run from the checkout. Python 3.12 with torch, triton, numpy, scipy,
rich, xxhash and filelock is enough for the first three parts. The others need faiss: carry a wheel of ``faiss-cpu``
(19 MB; it needs numpy and packaging alone), fetched elsewhere by ``pip download --no-deps --only-binary=:all:
--python-version 3.12 faiss-cpu`` and installed there with ``pip install --no-index --no-deps``. No control store, no
service and no data set is needed. Have the native extension too, or the host's side is faiss, slower than ours, and
flatters the device. It must lie in the checkout, which comes before whatever is installed; where there are a C++
compiler, CMake, ninja, scikit-build-core and nanobind::

    python -m pip install --no-index --no-build-isolation --no-deps --target build/there .
    cp build/there/hybridindex/_native*.so hybridindex/

The results say which host scanner ran. Tests first, as far as these packages go (and pytest, pytest-timeout, hypothesis
and faiss); kernels that do not run there show here, in some minutes::

    nvidia-smi && TRITON_INTERPRET=0 python -m pytest -m gpu tests/tiers tests/profiler/test_device.py

Where a call has ten minutes, make three more, each writing to its own file, each with what the one before found; its
last table is then of both. Kernels are compiled in the first minutes::

    python -m benchmarks.device.tier --json one.json --parts device_scan device_swap schedulers device_copy
    python -m benchmarks.device.tier --json two.json --parts device_beside device_router --with one.json
    python -m benchmarks.device.tier --json three.json --parts device_living --with two.json

``--minutes`` (9.5) must end before the call does, and what else the call does counts. One part alone is ``python -m
benchmarks.device.scan --json FILE``; ``benchmarks.device.sweep`` looks for better settings of the scan kernels where
targets are missed, and ``benchmarks.device.codes`` times the scan of codes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.common.measure import PART, arguments, write_json
from benchmarks.device.targets import judge, show_verdicts

_COMPLETE = "complete"
#: How often a part's results are looked at, and how long one may take to end when it is told to.
_TICK_S, _GRACE_S = 0.5, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One benchmark, which writes ``--json`` whenever it has a new row."""

    #: Its key in the results.
    name: str
    #: ``ROOM.NAME``, as in ``python -m benchmarks.ROOM.NAME``.
    module: str
    #: Longer on the machine that it is for means that something hangs.
    limit_s: float
    needs: tuple[str, ...] = ("torch",)
    options: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


#: What is worth most, and needs least, first.
PARTS = {
    part.name: part
    for part in (
        Part(name="device_scan", module="device.scan", limit_s=240),
        Part(name="device_swap", module="device.swap", limit_s=60, needs=()),
        Part(name="schedulers", module="host.schedulers", limit_s=60, needs=(), options=("--times",)),
        Part(name="device_copy", module="device.copy", limit_s=180, needs=("torch", "faiss")),
        Part(name="device_beside", module="device.beside", limit_s=210, needs=("torch", "faiss")),
        Part(name="device_router", module="device.router", limit_s=330, needs=("torch", "faiss")),
        Part(name="device_living", module="device.living", limit_s=180, needs=("torch", "faiss")),
    )
}


class Stopped(BaseException):
    """A signal asked for the end."""


class Run:
    """Results of all parts so far, in ``file`` (None: nowhere) as they come."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.status: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.parts: dict[str, Any] = {}
        self._started = datetime.now(UTC).isoformat(timespec="seconds")

    def adopt(self, file: Path) -> None:
        """Takes over what another run's file holds."""
        earlier = json.loads(file.read_text())
        for field in ("status", "seconds", "parts"):
            getattr(self, field).update(earlier[field])

    def note(self, name: str, status: str, file: Path | None = None, seconds: float = 0.0) -> None:
        """How ``name`` stands; ``file``: its own results."""
        self.status[name], self.seconds[name] = status, round(seconds, 1)
        self.parts.pop(name, None)
        if file is not None and file.exists():
            self.parts[name] = json.loads(file.read_text())
        if self._file is not None:
            verdicts = [asdict(verdict) for verdict in judge(self.parts, self.status)]
            write_json(
                self._file,
                {
                    "benchmark": "device_tier",
                    "started": self._started,
                    "status": self.status,
                    "seconds": self.seconds,
                    "verdicts": verdicts,
                    "parts": self.parts,
                },
            )


def run_part(command: Sequence[str], limit_s: float, note: Callable[[str], None], changed: Path) -> str:
    """Runs ``command`` for ``limit_s`` at most; ``note`` is called whenever ``changed`` was written. How it ended."""
    # Indexes of gigabytes that a stopped part leaves go with the folder.
    environment = os.environ | {PART: "1", "TMPDIR": str(changed.parent)}
    process = subprocess.Popen(command, env=environment)
    end, seen = time.monotonic() + limit_s, 0
    try:
        while True:
            try:
                code = process.wait(_TICK_S)
            except subprocess.TimeoutExpired:
                if changed.exists() and (now := changed.stat().st_mtime_ns) != seen:
                    seen = now
                    note("running")
                if time.monotonic() > end:
                    return f"stopped after {limit_s:.0f} s"
                continue
            if code:
                return f"failed: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
            return _COMPLETE
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(names: Sequence[str], run: Run, folder: Path, end_s: float) -> None:
    """Runs the parts one after another until ``end_s`` (monotonic)."""
    for name in names:
        part, file, start = PARTS[name], folder / f"{name}.json", time.monotonic()
        left = end_s - start - _GRACE_S
        if missing := part.missing():
            run.note(name, f"not run: {', '.join(missing)} not installed")
            continue
        if left <= 0:
            run.note(name, "not run: no time was left")
            continue

        def note(status: str, name: str = name, file: Path = file, start: float = start) -> None:
            run.note(name, status, file, time.monotonic() - start)

        command = [sys.executable, "-m", f"benchmarks.{part.module}", "--json", str(file), *part.options]
        status = "interrupted"
        try:
            status = run_part(command, min(part.limit_s, left), note, file)
        finally:
            note(status)
            sys.stderr.write(f"{name}: {status}, {run.seconds[name]:.0f} s\n")


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts together (default 9.5)")
    parser.add_argument("--with", dest="earlier", type=Path, nargs="+", default=[], metavar="FILE",
                        help="results of earlier runs: their parts stand beside those of this one")  # fmt: skip


def main() -> None:
    args = arguments(__doc__, _options)
    end_s = time.monotonic() + 60 * args.minutes
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    run, stopped = Run(args.json), None
    for file in args.earlier:
        run.adopt(file)
    with tempfile.TemporaryDirectory() as folder:
        try:
            measure(args.parts, run, Path(folder), end_s)
        except Stopped as reason:
            stopped = f"stopped by {reason}"
    show_verdicts(judge(run.parts, run.status))
    bad = [f"{name} ({status})" for name, status in run.status.items() if status != _COMPLETE]
    if stopped or bad:
        raise SystemExit("; ".join([*([stopped] if stopped else []), f"not complete: {', '.join(bad)}"]))


if __name__ == "__main__":
    main()
