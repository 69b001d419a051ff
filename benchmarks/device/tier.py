"""The device tier in one call: scan, residency, schedulers, copies, what a neighbour loses, sessions and plan changes.

Each part runs in a process of its own, with a limit of its own within that of all. What a part has finished is in the
results at once: whoever is stopped, by a limit, a signal or a crash, leaves the rows that were measured. A part whose
packages are missing is passed over and said to be. The last table holds every target against what was measured.
Without a GPU all parts run on the stand-in device, say so, and claim nothing.

**On a machine with one H200 and no network.** Run from the checkout. Python 3.12 with torch, triton, numpy, scipy,
rich, xxhash and filelock is enough for the scan. Other parts need faiss: carry a wheel of ``faiss-cpu`` (19 MB; it
needs numpy and packaging alone), fetched elsewhere by ``pip download --no-deps --only-binary=:all: --python-version
3.12 faiss-cpu`` and installed there with ``pip install --no-index --no-deps``; with one of ``faiss-gpu`` its scan is
compared. No control store, no service and no data set is needed; a log of requests is used where it lies
(:mod:`benchmarks.common.trace`). Tests want pytest, pytest-timeout and hypothesis, too.

Where a call has nine minutes, three of them have a list of parts each (``CALLS``), in the order of their worth::

    python -m benchmarks.device.tier --call 1 --json one.json
    python -m benchmarks.device.tier --call 2 --json two.json --with one.json
    python -m benchmarks.device.tier --call 3 --json three.json --with two.json

1. What the machine is and what it can do at best; coarse quantization; whether our kernels are right: tests marked
   ``gpu``, the error of distances, ``compute-sanitizer``; counters by ``ncu``. Eight minutes.
2. Scans of every shape, faiss-gpu on the same lists, publishing, copies.
3. A neighbour, time-sliced and under MPS; scans while copies take the bus; sessions and plan changes.

Each begins with the native extension, or the host's side would be faiss, slower than ours, and would flatter the
device. It must lie in the checkout, which comes before whatever is installed; where none loads it is built, which takes
a C++ compiler, CMake, ninja, scikit-build-core and nanobind::

    python -m pip install --no-index --no-build-isolation --no-deps --target build/there .
    cp build/there/hybridindex/_native*.so hybridindex/

``--with`` takes over what the call before found: the last table is of both. ``--minutes`` must end before the call
does, and what else the call does counts. Not in these calls: the schedulers, which need no GPU; ``device_living``,
filters and added rows (``--parts device_living``); ``benchmarks.device.sweep``, which looks for better settings of the
scan kernels where targets are missed, and ``benchmarks.device.codes``, which times the scan of codes.
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


def _tool(name: str, limit_s: float) -> Part:
    """Its program ends some seconds before it has to, so that what was printed is kept."""
    options = (name, "--seconds", f"{limit_s - 5:g}")
    return Part(name=name, module="device.calls.tools", limit_s=limit_s, needs=(), options=options)


#: What is worth most, and needs least, first.
PARTS = {
    part.name: part
    for part in (
        Part(name="device_scan", module="device.scan", limit_s=250),
        Part(name="device_swap", module="device.swap", limit_s=30, needs=()),
        Part(name="schedulers", module="host.schedulers", limit_s=60, needs=(), options=("--times",)),
        Part(name="device_copy", module="device.copy", limit_s=90, needs=("torch", "faiss")),
        Part(name="device_beside", module="device.beside", limit_s=110, needs=("torch", "faiss")),
        Part(name="device_router", module="device.router", limit_s=210, needs=("torch", "faiss")),
        Part(name="device_living", module="device.living", limit_s=180, needs=("torch", "faiss")),
        Part(name="device_beside_mps", module="device.calls.mps", limit_s=110, needs=("torch", "faiss")),
        Part(name="faiss_gpu", module="device.calls.faiss_gpu", limit_s=60),
        Part(name="ceilings", module="device.calls.ceilings", limit_s=30),
        Part(name="heavy", module="device.calls.heavy", limit_s=40),
        Part(name="device_coarse", module="device.calls.coarse", limit_s=20),
        _tool("machine", 10),
        _tool("extension", 90),
        _tool("gpu_tests", 140),
        _tool("movement_tests", 40),
        _tool("sanitizer", 60),
        _tool("counters", 50),
    )
}
#: Without ``--call`` and ``--parts``.
USUAL = (
    "device_scan",
    "device_swap",
    "schedulers",
    "device_copy",
    "device_beside",
    "device_router",
    "device_living",
    "device_coarse",
)
#: Number -> minutes and parts. Limits of the parts together are no longer.
CALLS = {
    1: (
        8.0,
        (
            *("machine", "extension", "ceilings", "heavy", "device_coarse", "gpu_tests", "movement_tests", "sanitizer"),
            "counters",
        ),
    ),
    2: (9.0, ("machine", "extension", "device_scan", "faiss_gpu", "device_swap", "device_copy")),
    3: (9.0, ("machine", "extension", "device_beside", "device_beside_mps", "device_router")),
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
    parser.add_argument("--call", type=int, choices=CALLS, help="the parts of one of three calls, and their minutes")
    parser.add_argument("--parts", nargs="*", choices=PARTS, metavar="NAME")
    parser.add_argument("--minutes", type=float, help="for all parts together (default 9.5, or those of the call)")
    parser.add_argument("--with", dest="earlier", type=Path, nargs="+", default=[], metavar="FILE",
                        help="results of earlier runs: their parts stand beside those of this one")  # fmt: skip


def main() -> None:
    args = arguments(__doc__, _options)
    minutes, parts = CALLS[args.call] if args.call else (9.5, USUAL)
    end_s = time.monotonic() + 60 * (args.minutes or minutes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    run, stopped = Run(args.json), None
    for file in args.earlier:
        run.adopt(file)
    with tempfile.TemporaryDirectory() as folder:
        try:
            measure(parts if args.parts is None else args.parts, run, Path(folder), end_s)
        except Stopped as reason:
            stopped = f"stopped by {reason}"
    show_verdicts(judge(run.parts, run.status))
    bad = [f"{name} ({status})" for name, status in run.status.items() if status != _COMPLETE]
    if stopped or bad:
        raise SystemExit("; ".join([*([stopped] if stopped else []), f"not complete: {', '.join(bad)}"]))


if __name__ == "__main__":
    main()
