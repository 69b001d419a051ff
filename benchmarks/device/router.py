"""What sessions, cache and plan changes do for a served index, through the router.

1. *Lookahead*: sessions whose draft stands near their final query. The final search is timed after the draft's lists
   have landed, as behind generation, against the same search on the host alone; by budget, and at a sixteenth and an
   eighth of the lists, as in TeleRAG: with much fewer probes nothing is left to save. eta is the hit rate by bytes.
   What can be reached is host / (fixed + max((1 - eta) scan, device)): the host's search, what of it is no scan, its
   scan, and the least that a device takes: one launch, and the bytes of the lists there at the speed of a sum that only
   reads (:mod:`benchmarks.device.calls.ceilings`). No time of our own kernels is in it; the same with the time that our
   scan took stands beside it. The copies have landed and take no part. Targets: 80 % of what can be reached; 7 times
   where eta >= 0.9.
2. *Cache*: the same sessions with half of the arena for what earlier ones used, against none: hit rate and bytes moved.
3. *Short windows*: the final search comes when a quarter of the time has passed that the draft's lists take to land.
   Searches that may wait for the others (TeleRAG, Appendix B, case 2) against such that begin at once, and the host.
4. *Plan change*: a tenth of the shard replaced again and again under searches: their p99 against undisturbed turns.
   Target: 1.5 at most.

Synthetic vectors: nothing has to be fetched. Sides run in turns and answers are compared. On the stand-in device all of
it runs to its end at a small size and claims nothing.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import Clusters, import_lists, make_clusters
from benchmarks.common.measure import Attempts, Timing, arguments, ratio_of_medians, show, write
from benchmarks.device.calls.ceilings import Floor, measure_floor
from benchmarks.device.targets import BOUND_TARGET, P99_TARGET, SPEEDUP_TARGET
from hybridindex.router.batch.stages import HOST_SCAN, LOOKAHEAD_WAIT, BatchReport, device_scan
from hybridindex.types import F32

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
#: Lists over probes.
_PROBE_PARTS = (16, 8)
#: Coverages of the two plans: a tenth of the larger shard comes and goes.
COVERAGES = (0.3, 0.27)
#: Of the time that a plan change may copy.
_BANDWIDTH_SHARE = 0.25
#: Length of the noise between centre and draft, and draft and final query; of unit vectors.
_FAR, _NEAR = 0.8, 0.35
_WAIT_S = 60.0
#: Sessions that are not counted.
_WARM_UP = 5
#: Window of a session in part 3, of the time in which its lists land.
_WINDOW = 0.25


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cuda:N, cpu (stand-in), or auto")
    parser.add_argument("--mib", type=int, help="MiB of vectors; default 2048 on a GPU, 128 on the stand-in")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--nprobe", type=int, nargs="+", help="default a sixteenth and an eighth of the lists")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the plan changes")


def make_pairs(data: Clusters, count: int, seed: int = 2) -> tuple[F32, F32]:
    """Drafts and final queries, (count, dim) each; topics repeat as Zipf's law has it."""
    rng = np.random.default_rng(seed)
    dim = data.centres.shape[1]
    topics = rng.permutation(len(data.centres))[np.minimum(rng.zipf(1.3, count), len(data.centres)) - 1]

    def near(points: F32, length: float) -> F32:
        noise = rng.standard_normal((count, dim)).astype(np.float32) * np.float32(length / np.sqrt(dim))
        moved = points + noise
        return np.ascontiguousarray(moved / np.linalg.norm(moved, axis=1, keepdims=True), dtype=np.float32)

    drafts = near(data.centres[topics], _FAR)
    return drafts, near(drafts, _NEAR)


def budget_of(bytes_for_lists: int) -> int:
    """A device budget whose arena has about so many bytes."""
    return bytes_for_lists + min(64 << 20, bytes_for_lists // 7) + (1 << 20)


class Stages:
    """Stage times of a router's batches, one search after another."""

    def __init__(self, router: Any) -> None:
        self._reports: queue.SimpleQueue[BatchReport] = queue.SimpleQueue()
        self._seconds: dict[str, list[float]] = {}
        router.on_batch.append(self._reports.put)

    def take(self) -> None:
        """Notes the one batch that has just been answered, which may be told of after the answer."""
        times = {s.stage: s.ended_s - s.started_s for s in self._reports.get(timeout=_WAIT_S).stages}
        for stage in (HOST_SCAN, device_scan(0)):
            self._seconds.setdefault(stage, []).append(times.get(stage, 0.0))

    def median(self, stage: str) -> float:
        """Seconds of a search in ``stage``; the first ones warm up."""
        return float(np.median(self._seconds[stage][_WARM_UP:]))


def allowed_speedup(*, host_s: float, scan_s: float, device_s: float, eta: float) -> float:
    """How many times faster a search can be whose ``device_s`` on the device spare the host ``eta`` of its scan."""
    fixed_s = max(0.0, host_s - scan_s)
    return host_s / (fixed_s + max((1 - eta) * scan_s, device_s))


def lookahead_row(
    index: Any, device: str, drafts: F32, finals: F32, nprobe: int, share: float, floor: Floor
) -> dict[str, Any]:
    """Searches with lookahead of ``share`` of the index's bytes against searches on the host alone."""
    probed_bytes = float(index.list_bytes[index.ivf.quantize(finals, nprobe)[0]].sum(axis=1).mean())
    budget = int(share * index.list_bytes.sum())
    seconds: dict[str, list[float]] = {"host": [], "with": [], "host again": []}
    hits, moved = [], 0
    rng = np.random.default_rng(0)
    options = {"device_budget_bytes": budget_of(budget), "lookahead_bytes": budget, "cache_fraction": 0.0}
    with index.router(devices=[device], **options) as ahead, index.router() as host:
        stages = {ahead: Stages(ahead), host: Stages(host)}
        host_scanner = host.host_scanner
        for draft, final in zip(drafts, finals, strict=True):
            with ahead.session(lookahead_bytes=budget) as session:
                session.lookahead(draft, nprobe=2 * nprobe).result(_WAIT_S)
                moved += session.stats.bytes_moved
                answers = {}
                for side in rng.permutation(list(seconds)).tolist():
                    start = time.perf_counter()
                    answers[side] = (session if side == "with" else host).search(final, 10, nprobe)
                    seconds[side].append(time.perf_counter() - start)
                    stages[ahead if side == "with" else host].take()
                hits.append(float(answers["with"].hit_rate[0]))
                found, expected = answers["with"].distances, answers["host"].distances
                assert np.allclose(found, expected, rtol=0, atol=2e-4), "lookahead changed an answer"
        scan_s, device_s = stages[host].median(HOST_SCAN), stages[ahead].median(device_scan(0))
        left_s = stages[ahead].median(HOST_SCAN)
    timed = {side: Timing(tuple(values[_WARM_UP:])) for side, values in seconds.items()}
    faster = ratio_of_medians(timed["host"], timed["with"])
    eta = float(np.mean(hits[_WARM_UP:]))
    least_s = floor.seconds(eta * probed_bytes)
    bound, own = (
        allowed_speedup(host_s=timed["host"].median, scan_s=scan_s, device_s=seconds, eta=eta)
        for seconds in (least_s, device_s)
    )
    return {
        "nprobe": nprobe,
        "share": share,
        "budget_bytes": budget,
        "moved_bytes_per_session": moved / len(drafts),
        "host_scanner": host_scanner,
        "eta": eta,
        "host_ms": timed["host"].median * 1e3,
        "host_scan_ms": scan_s * 1e3,
        "device_scan_ms": device_s * 1e3,
        "device_bytes": eta * probed_bytes,
        "device_least_ms": least_s * 1e3,
        "host_scan_left_ms": left_s * 1e3,
        "with_ms": timed["with"].median * 1e3,
        "times_faster": faster,
        "bound": bound,
        "of_bound": faster[0] / bound,
        #: With the device's own measured time.
        "own_bound": own,
        "of_own_bound": faster[0] / own,
        #: Without fixed costs, and with a device that takes no time; None: no bound.
        "ideal": 1 / (1 - eta) if eta < 1 else None,
        "noise": ratio_of_medians(timed["host again"], timed["host"]),
    }


def waiting_row(index: Any, device: str, drafts: F32, finals: F32, nprobe: int, share: float) -> dict[str, Any]:
    """Searches that come while lists of their draft are on their way: with waiting, without, and on the host alone."""
    budget = int(share * index.list_bytes.sum())
    options = {"device_budget_bytes": budget_of(budget), "lookahead_bytes": budget, "cache_fraction": 0.0}
    seconds: dict[str, list[float]] = {"waiting": [], "at once": [], "at once again": [], "host": []}
    hits: dict[str, list[float]] = {side: [] for side in seconds}
    landing: list[float] = []
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        routers = {
            side: stack.enter_context(
                index.router() if side == "host" else index.router(devices=[device], wait_for_lists=waits, **options)
            )
            for side, waits in (("waiting", True), ("at once", False), ("at once again", False), ("host", False))
        }
        for draft, final in zip(drafts, finals, strict=True):
            distances = []
            for side in rng.permutation(list(seconds)).tolist():
                with routers[side].session(lookahead_bytes=0 if side == "host" else budget) as session:
                    start = time.perf_counter()
                    coming = session.lookahead(draft, nprobe=2 * nprobe)
                    if len(landing) < _WARM_UP:  # the pace of copies is learned, too
                        coming.result(_WAIT_S)
                        landing += [time.perf_counter() - start] if side == "waiting" else []
                    elif side != "host":
                        time.sleep(_WINDOW * float(np.median(landing)))
                    start = time.perf_counter()
                    found = session.search(final, 10, nprobe)
                    seconds[side].append(time.perf_counter() - start)
                    hits[side].append(float(found.hit_rate[0]))
                    distances.append(found.distances)
            assert np.allclose(distances, distances[0], rtol=0, atol=2e-4), "lookahead changed an answer"
        waits = routers["waiting"].stats().stages.get(LOOKAHEAD_WAIT)
    timed = {side: Timing(tuple(values[_WARM_UP:])) for side, values in seconds.items()}
    return {
        "nprobe": nprobe,
        "share": share,
        "landing_ms": float(np.median(landing)) * 1e3,
        "waited": (waits.count if waits else 0) / len(drafts),
        "waited_ms": 1e3 * waits.seconds / waits.count if waits else 0.0,
        "hit_rate": {side: float(np.mean(values[_WARM_UP:])) for side, values in hits.items()},
        "ms": {side: timing.median * 1e3 for side, timing in timed.items()},
        "over_at_once": ratio_of_medians(timed["at once"], timed["waiting"]),
        "over_host": ratio_of_medians(timed["host"], timed["waiting"]),
        "noise": ratio_of_medians(timed["at once again"], timed["at once"]),
    }


def cache_rows(index: Any, device: str, drafts: F32, finals: F32, nprobe: int, share: float) -> list[dict[str, Any]]:
    """The sessions in order, each with ``share`` of the index's bytes, in an arena of twice as many."""
    budget = int(share * index.list_bytes.sum())
    rows = []
    for fraction in (0.0, 0.5):
        options = {
            "device_budget_bytes": budget_of(2 * budget),
            "lookahead_bytes": 2 * budget,
            "cache_fraction": fraction,
        }
        with index.router(devices=[device], **options) as router:
            hits, moved = [], 0
            for draft, final in zip(drafts, finals, strict=True):
                with router.session(lookahead_bytes=budget) as session:
                    session.lookahead(draft, nprobe=2 * nprobe).result(_WAIT_S)
                    hits.append(float(session.search(final, 10, nprobe).hit_rate[0]))
                    moved += session.stats.bytes_moved
            later = hits[len(hits) // 2 :]
            rows.append(
                {
                    "cache_fraction": fraction,
                    "share": share,
                    "hit_rate": float(np.mean(later)),
                    "moved_bytes_per_session": moved / len(hits),
                    "evicted_lists": router.stats().cache_evicted_lists,
                }
            )
    return rows


def plan_change_row(index: Any, device: str, queries: F32, nprobe: int, seconds: float) -> dict[str, Any]:
    """p99 of searches while plans alternate, over the p99 of turns without."""
    profile = index.profile(queries, nprobe=nprobe, devices=[device], max_seconds=10, save=False)
    budget = budget_of(int(0.6 * index.list_bytes.sum()))
    plans = [index.plan(1000, budget, profile, coverage=coverage) for coverage in COVERAGES]
    latencies: dict[bool, list[float]] = {True: [], False: []}
    changes: list[float] = []
    with index.router(plan=plans[0], devices=[device]) as router:
        changing, stop = threading.Event(), threading.Event()

        def change() -> None:
            turn = 0
            while not stop.is_set():
                if not changing.wait(0.01):
                    continue
                turn += 1
                start = time.perf_counter()
                router.apply_plan(plans[turn % 2], bandwidth_share=_BANDWIDTH_SHARE)
                changes.append(time.perf_counter() - start)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            turns = 10
            for turn in range(turns + 1):
                disturbed = bool(turn % 2)
                (changing.set if disturbed else changing.clear)()
                end = time.perf_counter() + seconds / turns
                while time.perf_counter() < end:
                    query = queries[len(latencies[False]) % len(queries)]
                    start = time.perf_counter()
                    router.search(query, 10, nprobe)
                    latencies[disturbed].append(time.perf_counter() - start)
        finally:
            stop.set()
            thread.join()
    p99 = {disturbed: float(np.percentile(values, 99)) for disturbed, values in latencies.items()}
    halves = [np.percentile(part, 99) for part in (latencies[False][::2], latencies[False][1::2])]
    return {
        "searches": {"undisturbed": len(latencies[False]), "changing": len(latencies[True])},
        "changes": len(changes),
        "change_ms": float(np.median(changes)) * 1e3 if changes else None,
        "p99_ms": {"undisturbed": p99[False] * 1e3, "changing": p99[True] * 1e3},
        "p99_ratio": p99[True] / p99[False],
        "noise": float(halves[0] / halves[1]),
    }


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device = args.device if args.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    on, info = resolve_device(device)
    floor = measure_floor(on)
    mib = args.mib or (128 if info.stand_in else 2048)
    data = make_clusters(args.dim, mib << 20)
    nlist = len(data.centres)
    nprobes = [min(n, nlist // 4) for n in args.nprobe or [nlist // part for part in _PROBE_PARTS]]
    drafts, finals = make_pairs(data, args.sessions + _WARM_UP)
    ahead: list[dict[str, Any]] = []
    cache: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    change: dict[str, Any] = {}
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, "mib": mib, "dim": args.dim,
                  "nlist": nlist, "nprobes": nprobes, "bound_target": BOUND_TARGET, "speedup_target": SPEEDUP_TARGET,
                  "p99_target": P99_TARGET, "sum_gbps": floor.sum_bytes_per_s / 1e9,
                  "launch_us": floor.launch_s * 1e6, "lookahead": ahead, "cache": cache, "waiting": waiting,
                  "plan_change": change, "failed": attempts.failed}  # fmt: skip
        write(args.json, "device_router", result)

    with (
        tempfile.TemporaryDirectory() as folder,
        import_lists(data.vectors, data.lists, data.centres, "flat", "ip", Path(folder) / "idx") as index,
    ):
        del data

        def look_ahead(nprobe: int) -> None:
            for share in SHARES:
                with attempts(f"lookahead, nprobe {nprobe}, budget {share:.0%}"):
                    ahead.append(lookahead_row(index, device, drafts, finals, nprobe, share, floor))
                save()

        nprobe = nprobes[0]
        look_ahead(nprobe)
        for share in SHARES[:2]:
            with attempts(f"cache, budget {share:.0%}"):
                cache += cache_rows(index, device, drafts, finals, nprobe, share)
            save()
        for share in SHARES[2:]:
            with attempts(f"short windows, budget {share:.0%}"):
                waiting.append(waiting_row(index, device, drafts, finals, nprobe, share))
            save()
        with attempts("plan change"):
            more, _ = make_pairs(make_clusters(args.dim, 1 << 20), 1000)
            change.update(plan_change_row(index, device, np.concatenate((finals, more)), nprobe, args.seconds))
        save()
        for nprobe in nprobes[1:]:
            look_ahead(nprobe)
    save(complete=not attempts.failed)
    claim = "stand-in: claims nothing" if info.stand_in else ""
    scanners = ", ".join(sorted({r["host_scanner"] for r in ahead}))
    show(
        f"final search after lookahead on {info.label}, over the host alone ({mib} MiB in {nlist} lists, host scan by "
        f"{scanners})",
        ("nprobe", "budget", "eta", "host ms", "with ms", "device ms", "at least", "times faster", "A/A", "allowed",
         "of it", f">= {BOUND_TARGET:g}", "by own times", "of it"),
        [
            (
                r["nprobe"],
                f"{r['share']:.0%}",
                f"{r['eta']:.2f}",
                r["host_ms"],
                r["with_ms"],
                r["device_scan_ms"],
                r["device_least_ms"],
                f"{r['times_faster'][0]:.2f}",
                f"{r['noise'][0]:.3f}",
                f"{r['bound']:.2f}",
                f"{r['of_bound']:.0%}",
                claim or ("yes" if r["of_bound"] >= BOUND_TARGET else "NO"),
                f"{r['own_bound']:.2f}",
                f"{r['of_own_bound']:.0%}",
            )
            for r in ahead
        ],
    )  # fmt: skip
    show(
        f"the final search comes after {_WINDOW:g} of the landing time: waiting for lists against beginning at once",
        ("nprobe", "budget", "landing ms", "waited", "for ms", "hit rate", "at once", "times faster", "A/A", "on host"),
        [
            (
                r["nprobe"],
                f"{r['share']:.0%}",
                r["landing_ms"],
                f"{r['waited']:.0%}",
                r["waited_ms"],
                f"{r['hit_rate']['waiting']:.2f}",
                f"{r['hit_rate']['at once']:.2f}",
                f"{r['over_at_once'][0]:.2f}",
                f"{r['noise'][0]:.3f}",
                f"{r['over_host'][0]:.2f}",
            )
            for r in waiting
        ],
    )
    show(
        "cache, over the second half of the sessions",
        ("budget", "cache share", "hit rate", "moved MB a session", "evicted lists"),
        [
            (
                f"{r['share']:.0%}",
                f"{r['cache_fraction']:.0%}",
                f"{r['hit_rate']:.3f}",
                r["moved_bytes_per_session"] / 1e6,
                r["evicted_lists"],
            )
            for r in cache
        ],
    )
    show(
        "searches while a tenth of the shard comes and goes",
        ("changes", "ms a change", "p99 ms", "undisturbed", "ratio", "A/A", f"<= {P99_TARGET:g}"),
        [
            (
                row["changes"],
                "-" if row["change_ms"] is None else row["change_ms"],
                row["p99_ms"]["changing"],
                row["p99_ms"]["undisturbed"],
                f"{row['p99_ratio']:.2f}",
                f"{row['noise']:.2f}",
                claim or ("yes" if row["p99_ratio"] <= P99_TARGET else "NO"),
            )
            for row in ([change] if change else [])
        ],
    )
    attempts.end()


if __name__ == "__main__":
    main()
