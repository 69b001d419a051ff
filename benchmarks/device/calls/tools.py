"""What other programs find out about the machine and our kernels: one of them a run, by name.

- *machine*: what ``nvidia-smi`` says of the GPU and its driver.
- *extension*: builds the native extension into the checkout, unless one that loads lies there.
- *gpu_tests*: tests marked ``gpu``; *movement_tests*: those which take all of the device's memory, alone.
- *sanitizer*: a few scans of each codec under ``compute-sanitizer``.
- *counters*: the same, larger, under Nsight Compute (``ncu``) with clocks as they are: bandwidth, registers, occupancy.

    python -m benchmarks.device.calls.tools sanitizer --json FILE

Each program has a limit of its own; what is missing, fails or takes too long is said, with what was printed until then.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import ROOT
from benchmarks.common.measure import arguments, write
from benchmarks.device.calls.commands import (
    COMPLETE,
    Done,
    Interrupted,
    counters,
    counts_of_tests,
    run,
    sanitizer_errors,
    table,
)
from hybridindex.tiers.contract.driver import driver_version

__all__ = ["METRICS", "TOOLS"]

_ASKED = (
    "name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "power.limit", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "mig.mode.current",
)  # fmt: skip
#: Name of ours -> Nsight Compute's.
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram bytes": "dram__bytes_read.sum",
    "registers": "launch__registers_per_thread",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
_KERNELS = "regex:scan_|estimate_|select_best"
#: Launches that are profiled, of all codecs together.
_LAUNCHES = 80
_MOVEMENT = "tests/tiers/test_movement_cuda.py"
#: Whether the extension of this checkout loads.
_LOADS = "from hybridindex.extension import native; raise SystemExit(native is None)"
_SCAN = (sys.executable, "-m", "benchmarks.device.calls.one_scan")


def _told(done: Done) -> dict[str, Any]:
    return {"status": done.status, "seconds": round(done.seconds, 1), "text": done.kept}


def machine(limit_s: float) -> dict[str, Any]:
    asked = run(["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv"], limit_s / 2)
    gpus = table(asked.text) if asked.status == COMPLETE else []
    return {"gpus": gpus, **_told(run(["nvidia-smi"], limit_s / 2))}


def extension(limit_s: float) -> dict[str, Any]:
    if run([sys.executable, "-c", _LOADS], limit_s).status == COMPLETE:
        return {"status": COMPLETE, "found": "already there", "seconds": 0.0, "text": ""}
    target = ROOT / "build" / "there"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "--upgrade",
               "--target", str(target), str(ROOT)]  # fmt: skip
    done = run(command, limit_s)
    if done.status == COMPLETE:
        for file in (target / "hybridindex").glob("_native*.so"):
            shutil.copy(file, ROOT / "hybridindex")
        loads = run([sys.executable, "-c", _LOADS], limit_s)
        if loads.status != COMPLETE:
            done = Done(status="built, but does not load", text=done.text + loads.text, seconds=done.seconds)
    return {"found": "built" if done.status == COMPLETE else "", **_told(done)}


def _tests(what: list[str], limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rfE", "--tb=short", "-p", "no:cacheprovider", *what]
    done = run(command, limit_s, TRITON_INTERPRET="0")
    return {"counts": counts_of_tests(done.text), **_told(done)}


def gpu_tests(limit_s: float) -> dict[str, Any]:
    return _tests(["tests/tiers", "tests/profiler/test_device.py", f"--ignore={_MOVEMENT}"], limit_s)


def movement_tests(limit_s: float) -> dict[str, Any]:
    return _tests([_MOVEMENT], limit_s)


def sanitizer(limit_s: float) -> dict[str, Any]:
    done = run(["compute-sanitizer", "--tool", "memcheck", *_SCAN], limit_s)
    scanned = [line.removeprefix("scanned ") for line in done.text.splitlines() if line.startswith("scanned ")]
    return {"errors": sanitizer_errors(done.text), "scanned": scanned, **_told(done)}


def profiled(limit_s: float) -> dict[str, Any]:
    done = run(["ncu", "--clock-control", "none", "--target-processes", "all", "--csv", "--page", "raw",
                "--kernel-name", _KERNELS, "--launch-count", str(_LAUNCHES), "--metrics", ",".join(METRICS.values()),
                *_SCAN, "--mib", "256", "--dim", "768", "--list-rows", "1000", "--nprobe", "128"], limit_s)  # fmt: skip
    return {"kernels": counters(done.text, METRICS), **_told(done)}


#: Name of a part -> what it does within so many seconds.
TOOLS: dict[str, Callable[[float], dict[str, Any]]] = {
    "machine": machine,
    "extension": extension,
    "gpu_tests": gpu_tests,
    "movement_tests": movement_tests,
    "sanitizer": sanitizer,
    "counters": profiled,
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of the program (default 60)")


def _stop(number: int, _frame: object) -> None:
    raise Interrupted(signal.Signals(number).name)


def main() -> None:
    args = arguments(__doc__, _options)
    signal.signal(signal.SIGTERM, _stop)
    result = TOOLS[args.tool](args.seconds)
    # What ended badly is measured, too: judges read how it ended.
    write(args.json, args.tool, {"stand_in": driver_version() is None, "complete": True, **result})
    rest = {key: value for key, value in result.items() if key != "text"}
    sys.stdout.write(f"{result['text']}\n{args.tool}: {rest}\n")


if __name__ == "__main__":
    main()
