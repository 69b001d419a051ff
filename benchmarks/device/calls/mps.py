"""What another user of the device loses where CUDA's Multi-Process Service (MPS) serves both.

Starts a control daemon of the service in a folder of its own, runs :mod:`benchmarks.device.beside` under it, and ends
it. Where it cannot be started, the results say why and hold no rows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.measure import PART, arguments, write
from benchmarks.device.calls.commands import COMPLETE, run
from hybridindex.tiers.contract.driver import driver_version

__all__ = ["multi_process_service"]

_CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_PATIENCE_S = 10.0


@contextmanager
def multi_process_service(folder: Path) -> Iterator[str]:
    """Starts the daemon; processes that are started meanwhile go through it. It is ended again. Why it could not be
    started; empty where it runs."""
    before = {name: os.environ.get(name) for name in _FOLDERS}
    for name in _FOLDERS:
        own = folder / name.lower()
        own.mkdir()
        os.environ[name] = str(own)
    why = _started()
    try:
        if why:
            _restore(before)
        yield why
    finally:
        if not why:
            _quit()
        _restore(before)


def _started() -> str:
    done = run([_CONTROL, "-d"], _PATIENCE_S, alone=False)
    if done.status == COMPLETE:
        return ""
    return f"{_CONTROL} -d: {done.status} {done.text.strip()[:200]}".rstrip()


def _quit() -> None:
    try:
        subprocess.run([_CONTROL], input="quit\n", capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        sys.stderr.write(f"{_CONTROL} does not end\n")


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    args = arguments(__doc__)
    # The daemon must not outlive this process.
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory() as folder, multi_process_service(Path(folder)) as why:
        if why:
            sys.stdout.write(f"MPS could not be started: {why}\n")
            write(args.json, "device_beside", {"stand_in": driver_version() is None, "complete": True, "rows": [],
                                               "sharing": f"MPS could not be started: {why}"})  # fmt: skip
            return
        command = [sys.executable, "-m", "benchmarks.device.beside"]
        command += ["--json", str(args.json)] if args.json else []
        done = subprocess.run(command, env=os.environ | {PART: "1"}, check=False)
    if done.returncode:
        raise SystemExit(f"under MPS: exit status {done.returncode}")


if __name__ == "__main__":
    main()
