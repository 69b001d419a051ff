"""Our host scan against faiss's ``search_preassigned``, and both against what the machine can do.

Same lists, queries and probes, same threads, same run, sides in turns. faiss runs in the best of its parallel modes 1
(over probes), 2 (both) and 3 (over queries) for each row; its default, mode 0, runs search_preassigned on one thread
and has a column of its own, no target. Coarse quantization is on neither side, nor in the ceiling. A call is the mean
over a pool of batches, so that small batches do not read the same lists over and over.

The ceiling of a row is the largest ratio that any scanner could reach: faiss's time over the longer of reading each
probed list once at the machine's read bandwidth (unique bytes: codes, not ids) and multiplying at its sgemm rate
(2 x d per query and probed vector). A machine whose last-level cache holds much of an index can pass that bandwidth.

Targets, ratio over faiss: flat, d >= 256: 1.2/4/10/20/30 for batch 1/4/16/64/256; d = 128: 1.2/2.5/5/8/12; or 0.75 of
the ceiling where that is less. sq8: 10/20 for batch 16/64, or 0.60 of the ceiling; where bound by memory also 2.5
times our own flat. Machine: 60 % of the sgemm rate where bound by compute, 75 % of the bandwidth where by memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import (
    Clusters,
    Reuse,
    import_lists,
    make_clusters,
    make_queries,
    real_clusters,
)
from benchmarks.common.machine import Ceilings, measure_ceilings
from benchmarks.common.measure import Timing, arguments, interleave, ratio_of_medians, show, write
from benchmarks.common.scanner import close_scanner, host_scanner
from hybridindex.types import F32, I64, Metric

K = 10
DATASETS = ("real", "128", "384", "384-l2", "768", "1024")
BATCHES = (1, 4, 16, 64, 256)
#: Batches of a pool: about the same number of queries per timed call.
POOL = {1: 32, 4: 16, 16: 8, 64: 2, 256: 1}
FLAT_TARGETS = {
    256: {1: 1.2, 4: 4.0, 16: 10.0, 64: 20.0, 256: 30.0},
    128: {1: 1.2, 4: 2.5, 16: 5.0, 64: 8.0, 256: 12.0},
}
SQ8_TARGETS = {16: 10.0, 64: 20.0}
OVER_OWN_FLAT = 2.5
MACHINE_SHARE = {"memory": 0.75, "compute": 0.60}
#: Of distances; what two orders of float32 summation differ by, and int8 arithmetic must not exceed.
TOLERANCE = 2e-4


@dataclass(frozen=True, slots=True)
class Batch:
    """One call's arguments."""

    queries: F32
    probes: I64
    coarse: F32


@dataclass(frozen=True, slots=True)
class Setting:
    """What a set of rows has in common."""

    dataset: str
    dim: int
    metric: Metric
    batches: tuple[int, ...]
    seconds: float
    repeats: int
    threads: int


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small indexes, few batches and repeats: does it work")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=16, help="most repeats of a row")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a row may take; 4 repeats at least")
    parser.add_argument("--megabytes", type=int, default=512, help="float32 size of a synthetic dataset")


def faiss_side(ivf: Any, pool: list[Batch], mode: int, threads: int) -> Callable[[], tuple[F32, I64]]:
    """The whole pool through search_preassigned in this parallel mode; returns the last batch's answer."""
    import faiss

    ptr = faiss.swig_ptr
    params = faiss.SearchParametersIVF(nprobe=pool[0].probes.shape[1])  # type: ignore[call-arg]

    def run() -> tuple[F32, I64]:
        faiss.omp_set_num_threads(threads)
        ivf.parallel_mode = mode
        for b in pool:
            distances, ids = np.empty((len(b.queries), K), np.float32), np.empty((len(b.queries), K), np.int64)
            ivf.search_preassigned_c(
                len(b.queries), ptr(b.queries), K, ptr(b.probes), ptr(b.coarse), ptr(distances), ptr(ids), False, params
            )
        return distances, ids

    return run


def our_side(scanner: Any, ivf: Any, pool: list[Batch]) -> Callable[[], tuple[F32, I64]]:
    """The whole pool through our scanner; returns the last batch's answer."""

    def run() -> tuple[F32, I64]:
        ivf.parallel_mode = 2  # for the stand-in, which shares the faiss index
        for b in pool:
            answer: tuple[F32, I64] = scanner.scan(b.queries, b.probes, b.coarse, K)
        return answer

    return run


def differing(ours: tuple[F32, I64], theirs: tuple[F32, I64]) -> int:
    """Queries whose answers differ by more than ties: distances place by place, then ids that only one side has."""
    wrong = 0
    # Empty places hold no distance worth comparing.
    (d_all, i_all), (fd_all, fi_all) = ((np.where(ids < 0, 0, distances), ids) for distances, ids in (ours, theirs))
    for d, i, fd, fi in zip(d_all, i_all, fd_all, fi_all, strict=True):
        near = TOLERANCE * (1 + np.abs(fd))
        same = bool(np.all(np.abs(d - fd) <= near))
        # An id that only one side found must tie with the last place.
        for distances, ids, others in ((d, i, fi), (fd, fi, i)):
            alone = ~np.isin(ids, others)
            same = same and bool(np.all(np.abs(distances[alone] - fd[-1]) <= 2 * near[-1]))
        wrong += not same
    return wrong


def target_of(codec: str, dim: int, batch: int, ceiling: float) -> float | None:
    """The ratio to reach; None where there is no target."""
    if codec == "flat":
        table = FLAT_TARGETS[256] if dim >= 256 else FLAT_TARGETS.get(dim, {})
        return min(table[batch], 0.75 * ceiling) if batch in table else None
    return min(SQ8_TARGETS[batch], 0.60 * ceiling) if batch in SQ8_TARGETS else None


def measure_row(s: Setting, codec: str, indexes: dict[str, Any], scanners: dict[str, Any], pool: list[Batch]) -> Any:
    """One row: ``codec``'s index, this pool of batches."""
    index = indexes[codec]
    ivf = index.ivf.open_faiss()
    modes = {str(mode): faiss_side(ivf, pool, mode, s.threads) for mode in (1, 2, 3)}
    modes["2"]()
    tried = interleave(modes, repeats=2, warmup=0, mirrored=True)
    mode = min(tried, key=lambda name: min(tried[name].seconds))
    sides = {"ours": our_side(scanners[codec], ivf, pool), "faiss": modes[mode], "faiss again": modes[mode]}
    if codec != "flat" and "flat" in scanners:
        sides["our flat"] = our_side(scanners["flat"], indexes["flat"].ivf.open_faiss(), pool)
    start = time.perf_counter()
    answers = {name: run() for name, run in sides.items()}
    repeats = 2 * int(np.clip(s.seconds / (time.perf_counter() - start) / 2, 2, max(2, s.repeats // 2)))
    timed = interleave(sides, repeats=repeats, warmup=0, mirrored=True)
    alone = interleave({"mode 0": faiss_side(ivf, pool, 0, s.threads)}, repeats=2, warmup=0)["mode 0"]
    return describe(s, codec, index, pool, int(mode), timed, alone, answers)


def describe(
    s: Setting,
    codec: str,
    index: Any,
    pool: list[Batch],
    mode: int,
    timed: dict[str, Timing],
    alone: Timing,
    answers: dict[str, Any],
) -> dict[str, Any]:
    """The row in numbers; bytes, FLOPs and seconds are of one call."""
    list_bytes = index.list_bytes
    probed = sum(int(list_bytes[b.probes].sum()) for b in pool) / len(pool)
    unique = sum(int(list_bytes[np.unique(b.probes)].sum()) for b in pool) / len(pool)
    ours, best = timed["ours"].median / len(pool), timed["faiss"].median / len(pool)
    ratio, low, high = ratio_of_medians(timed["faiss"], timed["ours"])
    again, again_low, again_high = ratio_of_medians(timed["faiss again"], timed["faiss"])
    batch = len(pool[0].queries)
    flops = 2 * s.dim * probed / index.ivf.code_size
    return {
        "dataset": s.dataset,
        "dim": s.dim,
        "codec": codec,
        "metric": s.metric,
        "batch": batch,
        "nprobe": pool[0].probes.shape[1],
        "pool": len(pool),
        "repeats": len(timed["ours"].seconds),
        "reuse": probed / unique,
        "unique_bytes": unique,
        "flops": flops,
        "faiss_ms": best * 1e3,
        "faiss_mode": mode,
        "faiss_mode0_ms": alone.median / len(pool) * 1e3,
        "ours_ms": ours * 1e3,
        "ratio": ratio,
        "ratio_quartiles": (low, high),
        "ratio_mode0": alone.median / timed["ours"].median,
        "gbps": unique / ours / 1e9,
        "gflops": flops / ours / 1e9,
        "noise_percent": 100 * (again - 1),
        "noise_percent_quartiles": (100 * (again_low - 1), 100 * (again_high - 1)),
        "over_own_flat": ratio_of_medians(timed["our flat"], timed["ours"])[0] if "our flat" in timed else None,
        "differing_queries": differing(answers["ours"], answers["faiss"]),
        "checked_queries": batch,
    }


def judge(row: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """The row held against the machine and the targets."""
    bounds = {
        "memory": row["unique_bytes"] / ceilings.read_gbps / 1e9,
        "compute": row["flops"] / ceilings.sgemm_gflops / 1e9,
    }
    bound = max(bounds, key=lambda kind: bounds[kind])
    ceiling = row["faiss_ms"] / 1e3 / bounds[bound]
    target = target_of(row["codec"], row["dim"], row["batch"], ceiling)
    machine = bounds[bound] / (row["ours_ms"] / 1e3)
    over_flat = row["over_own_flat"]
    return {
        **row,
        "bound": bound,
        "ceiling": ceiling,
        "share_of_ceiling": row["ratio"] / ceiling,
        "target": target,
        "met": None if target is None else row["ratio"] >= target,
        "over_own_flat_met": None if over_flat is None or bound != "memory" else over_flat >= OVER_OWN_FLAT,
        "machine_share": machine,
        "machine_target": MACHINE_SHARE[bound],
        "machine_met": machine >= MACHINE_SHARE[bound],
    }


def pools(index: Any, queries: F32, batches: tuple[int, ...], nprobe: int) -> Iterator[list[Batch]]:
    """A pool of batches for every batch size, probes by the index itself."""
    for batch in batches:
        pool = []
        for number in range(POOL[batch]):
            part = np.ascontiguousarray(queries[(number * batch + np.arange(batch)) % len(queries)])
            pool.append(Batch(part, *index.ivf.quantize(part, nprobe)))
        yield pool


def measure_dataset(
    setting: Setting, codecs: tuple[str, ...], data: Clusters, queries: dict[str, F32], nprobe: int
) -> list[Any]:
    """Rows of one dataset: all codecs over the same lists, all query sets."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        indexes: dict[str, Any] = {}
        scanners: dict[str, Any] = {}
        try:
            for codec in codecs:
                indexes[codec] = import_lists(
                    data.vectors, data.lists, data.centres, codec, setting.metric, Path(folder) / codec
                )
                scanners[codec] = host_scanner(indexes[codec].ivf, setting.threads)
            for codec in codecs:
                for reuse, some in queries.items():
                    for pool in pools(indexes[codec], some, setting.batches, nprobe):
                        row = measure_row(setting, codec, indexes, scanners, pool)
                        rows.append({**row, "queries": reuse, "scanner": scanners[codec].name})
        finally:
            for scanner in scanners.values():
                close_scanner(scanner)
            for index in indexes.values():
                index.close()
    return rows


def main() -> None:
    args = arguments(__doc__, _options)
    import faiss

    if args.quick:
        args.seconds, args.repeats, args.megabytes = 0.2, 4, 64
        args.datasets = [name for name in args.datasets if name in ("real", "128", "384")]
    faiss.omp_set_num_threads(args.threads)
    ceilings = measure_ceilings(args.threads, (512 << 20) if args.quick else (2 << 30))
    print_machine("machine before", ceilings)
    rows: list[Any] = []
    for name in args.datasets:
        start = time.perf_counter()
        if name == "real":
            data, log = real_clusters("demo")
            queries = {"log": log[np.random.default_rng(0).integers(0, len(log), 512)]}
        else:
            data = make_clusters(int(name.removesuffix("-l2")), args.megabytes << 20)
            reuses: tuple[Reuse, ...] = ("low", "high")
            queries = {reuse: make_queries(data.centres, 512, reuse) for reuse in reuses}
        setting = Setting(
            dataset=name,
            dim=data.vectors.shape[1],
            metric="l2" if name.endswith("-l2") else "ip",
            batches=(1, 16, 64) if args.quick else BATCHES,
            seconds=args.seconds,
            repeats=args.repeats,
            threads=args.threads,
        )
        codecs = ("flat",) if name.endswith("-l2") else ("flat", "sq8")
        nprobe = min(args.nprobe, len(data.centres))
        rows += measure_dataset(setting, codecs, data, queries, nprobe)
        # Somebody else's load may have lowered them before; a ceiling that is too low softens targets.
        ceilings = ceilings.best(measure_ceilings(args.threads, ceilings.buffer_bytes))
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.0f} s\n")
    print_machine("machine, best of before and after each dataset: rows are held against this", ceilings)
    rows = [judge(row, ceilings) for row in rows]
    print_rows(rows, args.threads)
    write(args.json, "host_scan", {"threads": args.threads, "ceilings": ceilings.as_json(), "rows": rows})


def print_machine(title: str, c: Ceilings) -> None:
    """One line of ceilings."""
    print(
        f"{title}, {c.threads} threads: reads {c.read_gbps:.1f} GB/s over {c.buffer_bytes >> 20} MiB "
        f"({c.cached_gbps:.1f} GB/s over 128 MiB), sgemm {c.sgemm_gflops:.0f} GFLOP/s",
        flush=True,
    )


def print_rows(rows: list[Any], threads: int) -> None:
    """Two tables: against faiss, and against the machine."""
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "180")

    def names(r: Any) -> tuple[Any, ...]:
        return (f"{r['dataset']} {r['queries']}", r["codec"], r["metric"], r["batch"], f"{r['reuse']:.1f}")

    head = ("dataset", "codec", "metric", "batch", "reuse")
    show(
        f"{rows[0]['scanner']} scanner against faiss search_preassigned, {threads} threads, no coarse quantization",
        (*head, "faiss ms", "mode", "ours ms", "x best", "x mode 0", "ceiling", "A/A %", "target", "met", "differ"),
        [
            (
                *names(r),
                *(r[key] for key in ("faiss_ms", "faiss_mode", "ours_ms", "ratio", "ratio_mode0", "ceiling")),
                f"{r['noise_percent']:+.1f}",
                "-" if r["target"] is None else float(r["target"]),
                _said(r["met"]),
                f"{r['differing_queries']}/{r['checked_queries']}",
            )
            for r in rows
        ],
    )
    show(
        "ours against the machine",
        (*head, "bound", "GB/s", "GFLOP/s", "of ceiling", "target", "met", "x own flat", f">= {OVER_OWN_FLAT:g}"),
        [
            (
                *names(r),
                r["bound"],
                float(r["gbps"]),
                float(r["gflops"]),
                f"{r['machine_share']:.0%}",
                f"{r['machine_target']:.0%}",
                _said(r["machine_met"]),
                "-" if r["over_own_flat"] is None else float(r["over_own_flat"]),
                _said(r["over_own_flat_met"]),
            )
            for r in rows
        ],
    )


def _said(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "NO"


if __name__ == "__main__":
    main()
