"""What all benchmarks share: environment, interleaved timing, the A/A noise floor, and how results are written."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "PART",
    "Attempts",
    "Timing",
    "arguments",
    "environment",
    "interleave",
    "ratio_of_medians",
    "require_passive",
    "show",
    "write",
    "write_json",
]

#: Set for a process that is one part of a larger benchmark and must not outlive it, or it would keep the device.
PART = "HYBRIDINDEX_BENCHMARK_PART"
_PR_SET_PDEATHSIG = 1
#: Of tables that go to a file or a pipe, whose readers have no width.
_WIDTH = 200


def require_passive() -> None:
    """Starts the interpreter again with OMP_WAIT_POLICY=PASSIVE where it is not set: OpenMP reads it when it loads.
    Names the kernels that OpenBLAS should run on this CPU, to whoever loads faiss from now on."""
    from hybridindex.index.faiss_model import BLAS_CHOICE, blas_kernels

    if BLAS_CHOICE not in os.environ and (kernels := blas_kernels()):
        os.environ[BLAS_CHOICE] = kernels
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", *_module_arguments()])


def _module_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run benchmarks as python -m benchmarks.ROOM.NAME"
    return [spec.name, *sys.argv[1:]]


def arguments(description: str, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Parses the command line; ``--json FILE`` is always there."""
    require_passive()
    if os.environ.pop(PART, ""):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    if add is not None:
        add(parser)
    return parser.parse_args()


def environment() -> dict[str, Any]:
    """Machine, versions, load: what a number means nothing without."""
    import hybridindex
    from hybridindex.extension import native
    from hybridindex.index.faiss_model import BLAS_CHOICE
    from hybridindex.profiler.hardware import hardware_info
    from hybridindex.tiers.contract.driver import driver_version

    info = hardware_info()
    # A checkout on the path is not installed, and has a version all the same.
    versions = {"hybridindex": hybridindex.__version__}
    for package in ("faiss-cpu", "faiss-gpu", "numpy", "torch", "triton", "scipy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    # Asking torch would import it, which takes seconds: where it ran, it is there.
    cuda = sys.modules["torch"].version.cuda if "torch" in sys.modules else None
    versions |= {name: found for name, found in (("cuda", cuda), ("driver", driver_version())) if found}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": info.cpu_model,
        "cores": info.cores,
        "kernels": None if native is None else native.kernels_here()[0],
        "memory_gib": round(info.memory_bytes / 2**30, 1),
        "devices": list(info.devices),
        "python": platform.python_version(),
        "versions": versions,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "blas_kernels": os.environ.get(BLAS_CHOICE, ""),
        "load_average": os.getloadavg()[0],
    }


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated runs of one side."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.seconds, [25, 75])
        return float(low), float(high)


class Attempts:
    """What a benchmark does one after another: what raises is told, and does not keep the rest from being measured.
    Where a machine is lent for minutes nobody comes back for the rest."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one row less; kept and told
            self.failed.append(f"{what}: {error!r}")
            traceback.print_exc()

    def end(self) -> None:
        """Ends the process with a status where something failed."""
        if self.failed:
            raise SystemExit("failed: " + "; ".join(self.failed))


def interleave(
    sides: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 2,
    calls: int = 1,
    mirrored: bool = False,
) -> dict[str, Timing]:
    """Times every side once per round, in an order that changes each round; seconds per call.

    Each round gives every side ``calls`` calls in a row, timed together. ``mirrored``: every second round runs the
    order of the round before backwards, so that with few repeats no side stands mostly behind the same other one.
    """
    for run in sides.values():
        for _ in range(warmup):
            run()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    rng = np.random.default_rng(0)
    order: list[str] = []
    for number in range(repeats):
        order = order[::-1] if mirrored and number % 2 else rng.permutation(names).tolist()
        for name in order:
            run = sides[name]
            start = time.perf_counter()
            for _ in range(calls):
                run()
            taken[name].append((time.perf_counter() - start) / calls)
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def ratio_of_medians(a: Timing, b: Timing) -> tuple[float, float, float]:
    """Median of the pairwise ratios a/b with its quartiles; pairs are rounds, so that slow phases cancel."""
    ratios = np.array(a.seconds) / np.array(b.seconds)
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return float(middle), float(low), float(high)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table on stdout."""
    table = Table(*columns, title=title)
    for row in rows:
        # As text: errors and reasons may hold what looks like markup.
        table.add_row(*(Text(f"{v:.3g}" if isinstance(v, float) else str(v)) for v in row))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    sys.stdout.flush()


def write(file: Path | None, name: str, results: Mapping[str, Any]) -> None:
    """Writes ``results`` beside the environment."""
    if file is None:
        return
    write_json(file, {"benchmark": name, "environment": environment(), **results})


def write_json(file: Path, payload: Mapping[str, Any]) -> None:
    """Replaces ``file`` by ``payload``: who is killed meanwhile leaves the former one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(json.dumps(payload, indent=1, default=_plain) + "\n")
    fresh.replace(file)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
