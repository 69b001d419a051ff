"""Processes that have a core each, or a fixed part of one by the kernel's control groups (version 1 or 2)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = ["pinned", "quotas"]

#: A process that has used its part waits for the next period. The kernel gives no part of less than a millisecond.
_PERIOD_US, _LEAST_US = 4000, 1000
_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def pinned(pids: Sequence[int]) -> Iterator[None]:
    """Each process, with all of its threads, runs on one core: in turn, on those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    for number, pid in enumerate(pids):
        _pin(pid, {cores[number % len(cores)]})
    try:
        yield
    finally:
        for pid in pids:
            _pin(pid, set(cores))


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def quotas(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Each process, with all of its threads, runs at most ``cores`` of the time of a core. What it did not use of one
    period it may use in the next, where the kernel can: a node that waited for another one has lost nothing.

    Raises:
        OSError: this machine lets us make no control groups.
    """
    first = _ROOT / "cpu" / "cgroup.procs"
    parent = first.parent if first.exists() else _ROOT
    period_us = max(_PERIOD_US, round(_LEAST_US / cores))
    quota_us = round(cores * period_us)
    with ExitStack() as ending:
        for pid in pids:
            group = parent / f"hybridindex-{os.getpid()}-{pid}"
            group.mkdir()
            ending.callback(_remove, group, parent)
            if first.exists():
                (group / "cpu.cfs_period_us").write_text(str(period_us))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
                _write_if_there(group / "cpu.cfs_burst_us", quota_us)
            else:
                (group / "cpu.max").write_text(f"{quota_us} {period_us}")
                _write_if_there(group / "cpu.max.burst", quota_us)
            (group / "cgroup.procs").write_text(str(pid))
        yield


def _write_if_there(file: Path, value: int) -> None:
    with suppress(OSError):  # an older kernel
        file.write_text(str(value))


def _remove(group: Path, parent: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        (parent / "cgroup.procs").write_text(pid)
    for _ in range(100):  # a process that has just ended is in it for a moment
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
