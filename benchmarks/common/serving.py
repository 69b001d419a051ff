"""A daemon under load: its process, what it takes, and a small index for it to serve.

Run as a module it *is* the daemon, with a refresh that looks often: a run of minutes shall see what days bring.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from hybridindex.types import F32

__all__ = ["Spent", "Taken", "daemon", "planned_index", "read_spent", "read_taken", "shipped_daemon", "sorted_clusters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a process holds at one moment."""

    rss_bytes: int
    #: Without mapped files: what it allocated.
    anonymous_bytes: int
    fds: int
    threads: int


def read_taken(pid: int) -> Taken:
    """Of a process of this user, from /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return Taken(
        rss_bytes=int(values["VmRSS"].split()[0]) << 10,
        anonymous_bytes=int(values["RssAnon"].split()[0]) << 10,
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(values["Threads"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """CPU time up to one moment, in seconds; the kernel counts it in ticks of 10 ms."""

    #: Of the process's first thread, which has the daemon's event loop, and of all its others.
    loop_s: float
    others_s: float
    #: That no process took, over all cores.
    idle_s: float


def read_spent(pid: int) -> Spent:
    """Of a process of this user and of the machine, from /proc."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def taken(stat: Path) -> float:
        # utime and stime; the name in parentheses before them may hold anything.
        words = stat.read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) * tick_s

    loop_s = taken(Path(f"/proc/{pid}/task/{pid}/stat"))
    all_s = taken(Path(f"/proc/{pid}/stat"))
    machine = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return Spent(loop_s=loop_s, others_s=all_s - loop_s, idle_s=(int(machine[4]) + int(machine[5])) * tick_s)


@contextmanager
def daemon(path: Path, *words: str, log: Path | None = None) -> Iterator[tuple[int, int]]:
    """This module as a daemon on a free port of the loopback; gives (pid, port). ``log``: where its log goes."""
    with _started(["benchmarks.common.serving", str(path), *words], log) as (pid, urls):
        yield pid, int(urls[0].rsplit(":", 1)[1])


@contextmanager
def shipped_daemon(path: Path, *words: str) -> Iterator[tuple[int, list[str]]]:
    """``hybridindex serve`` on a free port of the loopback, as users have it; gives (pid, URLs)."""
    with _started(["hybridindex", "serve", str(path), "--port", "0", *words, "--json"], None) as (pid, said):
        yield pid, said["urls"]


@contextmanager
def _started(module: Sequence[str], log: Path | None) -> Iterator[tuple[int, Any]]:
    """A process of a module with its arguments, and what its first line says in JSON."""
    command = [sys.executable, "-m", *module]
    with (log or Path(os.devnull)).open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the daemon did not start; see {log}" if log else "the daemon did not start")
            yield process.pid, json.loads(line)
        finally:
            process.terminate()
            process.wait(120)


def sorted_clusters(n: int, dim: int, *, n_centres: int, seed: int) -> F32:
    """(n, dim) float32 around centres, sorted by centre: rows that are near in number are near in space."""
    centres = np.random.default_rng(7).standard_normal((n_centres, dim))
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.integers(0, n_centres, n))
    return (centres[chosen] + 0.5 * rng.standard_normal((n, dim))).astype(np.float32)


def planned_index(
    path: Path, *, vectors: int, dim: int, nlist: int, nprobe: int, budget_bytes: int, n_centres: int = 200
) -> None:
    """Builds, profiles and plans: what a daemon with a device resumes."""
    import hybridindex as hx

    rows = sorted_clusters(vectors, dim, n_centres=n_centres, seed=1)
    with hx.build(rows, path, nlist=nlist, metric="l2", nprobe=nprobe) as index:
        calibration = sorted_clusters(400, dim, n_centres=n_centres // 4, seed=2)
        # Copies are timed: sessions name the time that theirs may take.
        profile = index.profile(calibration, nprobe, devices=["cpu"], max_seconds=2)
        index.apply_plan(index.plan(50, budget_bytes, profile, coverage=0.3), force=True)


def _refresher(index: Any, router: Any, store: Any) -> Any:
    from hybridindex.refresh.drift import DriftPolicy
    from hybridindex.refresh.refresher import RefreshConfig, Refresher
    from hybridindex.refresh.update_cycle import UpdatePolicy

    drift = DriftPolicy(window_requests=500, window_s=5, cool_down_s=5)
    update = UpdatePolicy(verify_timeout_s=20, back_off_s=5, verify_windows=1)
    # Every request counts as late: the hit rate alone decides, and updates come often.
    return Refresher(index, router, store, RefreshConfig(drift=drift, update=update, slo_ms=1e-3, tick_s=0.5))


def main() -> None:
    from hybridindex.config import RouterConfig
    from hybridindex.service.config import Limits, ServiceConfig
    from hybridindex.service.daemon import serve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("index", type=Path)
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--limits", type=json.loads, default={}, help="a JSON object")
    args = parser.parse_args()
    router = RouterConfig(devices=args.device, threads=args.threads)
    config = ServiceConfig(port=0, router=router, key_file=args.keys, limits=Limits(**args.limits))
    serve(
        args.index,
        config,
        make_refresher=_refresher if args.refresh else None,
        on_listening=lambda urls: print(json.dumps(urls), flush=True),
    )
    # As the command does.
    gc.freeze()


if __name__ == "__main__":
    main()
