"""What callers notice when one of four nodes hangs or dies under a load that the nodes sustain easily."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.load import Load, Taken
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes, until
from hybridindex.errors import HybridIndexError

__all__ = ["attainment_back", "measure_hang", "measure_kill"]

_N = 4
#: The service level: so many times the median before.
_SLO = 5.0
#: It is back where so many are within it; fewer where a second before the failure had fewer.
_ATTAINED = 0.95
#: Attainment is looked at over so many seconds.
_WINDOW_S = 1.0
_QUERIES = 4096
#: The first searches teach the nodes what is late.
_WARM_S = 4.0


def attainment_back(taken: Taken, slo_s: float, at_s: float, ends_s: float, least: float) -> float | None:
    """Seconds from ``at_s`` until the second that begins there, and all later ones, have an attainment of ``least``;
    None: it does not come back before ``ends_s``."""
    late = np.flatnonzero((taken.due_s >= at_s) & (taken.due_s < ends_s))
    back = 0.0
    for number in late:
        start = taken.due_s[number]
        if start + _WINDOW_S > ends_s:
            break
        if (taken.between(start, start + _WINDOW_S) <= slo_s).mean() < least:
            back = start - at_s
            following = taken.due_s[number + 1] if number + 1 < len(taken.due_s) else ends_s
            if following + _WINDOW_S > ends_s:
                return None
            back = following - at_s
    return float(back)


def _before(taken: Taken, start_s: float, at_s: float) -> dict[str, float]:
    """The time before the fault, and the service level that follows from it."""
    seconds = taken.between(start_s, at_s)
    slo_s = _SLO * float(np.median(seconds))
    starts = np.arange(start_s, at_s - _WINDOW_S, _WINDOW_S / 4)
    least = min(float((taken.between(s, s + _WINDOW_S) <= slo_s).mean()) for s in starts)
    return {
        "p50_before_ms": 1e3 * float(np.median(seconds)),
        "p99_before_ms": 1e3 * float(np.percentile(seconds, 99)),
        "slo_ms": 1e3 * slo_s,
        "attainment_before": float((seconds <= slo_s).mean()),
        # Other work of the machine counts as it is.
        "attained_at": min(least, _ATTAINED),
    }


def _after(taken: Taken, before: dict[str, float], at_s: float, ends_s: float) -> dict[str, Any]:
    seconds = taken.between(at_s, ends_s)
    back_s = attainment_back(taken, before["slo_ms"] / 1e3, at_s, ends_s, before["attained_at"])
    first = taken.between(at_s, at_s + _WINDOW_S)
    later = seconds if back_s is None else taken.between(at_s + back_s, ends_s)
    done = seconds[np.isfinite(seconds)]
    return {
        "searches_after": len(seconds),
        "failed": int(np.isinf(taken.seconds).sum()),
        "errors": dict(taken.errors),
        "late_after": int((seconds > before["slo_ms"] / 1e3).sum()),
        "p99_first_second_ms": 1e3 * float(np.percentile(first, 99, method="lower")),
        "worst_ms": 1e3 * float(done.max()),
        "p99_once_back_ms": 1e3 * float(np.percentile(later, 99, method="lower")),
        "back_s": back_s,
    }


def measure_hang(workload: Workload, folder: Path, *, rate: float, seconds: float, trials: int) -> dict[str, Any]:
    """One node is stopped for ``seconds``, and goes on; another one each time."""
    queries = mixed_queries(workload.centres, _QUERIES, seed=7)
    rows = []
    with nodes(workload, folder / "hang", _N, repair_after_s=300.0) as cluster, cluster.router() as router:
        for trial in range(trials):
            name = cluster.names[trial % _N]
            load = Load(router, queries, rate, workload.nprobe)
            time.sleep(_WARM_S if not trial else 1.0)
            start_s = time.monotonic()
            time.sleep(seconds)
            at_s = time.monotonic()
            cluster.signal(name, signal.SIGSTOP)
            try:
                seen_s = _seen_down(cluster, name)
                time.sleep(max(0.0, at_s + seconds - time.monotonic()))
            finally:
                ends_s = time.monotonic()
                cluster.signal(name, signal.SIGCONT)
            again_s = until(lambda: cluster.whole() and cluster.peers_up(), 60.0)
            taken = load.end()
            before = _before(taken, start_s, at_s)
            asked = {each["name"]: each for each in router.status()}
            rows.append(
                {
                    "trial": trial,
                    **before,
                    **_after(taken, before, at_s, ends_s),
                    "seen_down_s": seen_s,
                    "serves_again_s": again_s,
                    "hedged_by_client": sum(each["hedged"] for each in asked.values()),
                }
            )
    _show(f"one of {_N} nodes hangs, {rate:g} searches/s", rows)
    return {"rate": rate, "rows": rows, "back_s": _spread([row["back_s"] for row in rows])}


def _seen_down(cluster: Nodes, name: str) -> float | None:
    """Seconds until the manager sees it."""
    try:
        return until(lambda: cluster.state(name) == "down", 5.0)
    except TimeoutError:
        return None


def measure_kill(workload: Workload, folder: Path, *, rate: float, seconds: float, trials: int) -> dict[str, Any]:
    """One node ends and stays away; the others copy its lists. A fresh cluster each time."""
    queries = mixed_queries(workload.centres, _QUERIES, seed=8)
    rows = []
    for trial in range(trials):
        with nodes(workload, folder / f"kill-{trial}", _N, repair_after_s=1.0) as cluster, cluster.router() as router:
            name = cluster.names[trial % _N]
            others = [each for each in cluster.names if each != name]
            load = Load(router, queries, rate, workload.nprobe)
            time.sleep(_WARM_S)
            start_s = time.monotonic()
            time.sleep(seconds)
            held = _held_bytes(cluster, others)
            lost_bytes = _held_bytes(cluster, [name])
            at_s = time.monotonic()
            os.kill(cluster.processes[name].pid, signal.SIGKILL)
            # Nobody starts it again.
            closing = threading.Thread(target=cluster.processes[name].close)
            closing.start()
            seen_s = _seen_down(cluster, name)
            _wait_for_replicas(cluster)
            restored_s = time.monotonic() - at_s
            time.sleep(max(0.0, at_s + seconds - time.monotonic()))
            ends_s = time.monotonic()
            taken = load.end()
            closing.join()
            before = _before(taken, start_s, at_s)
            rows.append(
                {
                    "trial": trial,
                    **before,
                    **_after(taken, before, at_s, ends_s),
                    "seen_down_s": seen_s,
                    "replicas_again_s": restored_s,
                    "copied_bytes": _held_bytes(cluster, others) - held,
                    "lost_bytes": lost_bytes,
                    "nobody_has": cluster.manager.status()["lists_of_nobody"],
                }
            )
    _show(f"one of {_N} nodes is killed, {rate:g} searches/s, lists are copied after 1 s", rows)
    return {"rate": rate, "rows": rows, "replicas_again_s": _spread([row["replicas_again_s"] for row in rows])}


def _wait_for_replicas(cluster: Nodes) -> None:
    until(lambda: cluster.manager.status()["lists_below_replicas"] == 0, 120.0)


def _held_bytes(cluster: Nodes, names: list[str]) -> int:
    total = 0
    for name in names:
        try:
            total += int(cluster.calls(name).node()["held_bytes"])
        except HybridIndexError as error:
            raise SystemExit(f"{name} does not answer: {error}") from error
    return total


def _spread(values: list[Any]) -> dict[str, float | int]:
    known = [value for value in values if value is not None]
    found: dict[str, float | int] = {"trials": len(values), "never": len(values) - len(known)}
    if known:
        found |= {"median": float(np.median(known)), "least": min(known), "most": max(known)}
    return found


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = [name for name in rows[0] if name not in ("errors",)]
    show(title, ("", *(str(row["trial"]) for row in rows)), [(c, *(row[c] for row in rows)) for c in columns[1:]])
    for row in rows:
        for error, n in row["errors"].items():
            print(f"trial {row['trial']}: {n} x {error}")
