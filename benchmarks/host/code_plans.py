"""Plans of codes against plans of rows at equal SLO, rate and recall; and what they predict against what is measured.

One run: the demo's embeddings, or others, as flat and as sq8 rows, and RaBitQ codes beside each. Every side is profiled
at the nprobe that reaches the same recall against true neighbours, on queries of the log.

**Plans.** For each coverage the SLO and the rate are those at which the plan of rows needs that coverage: half of the
rate that it can take, or more where that needs fewer lists, and the response time there. The plan of codes is asked for
the same. Devices are supposed to be GPUs of a given memory bandwidth, which share nothing with the host, because the
stand-in shares its cores; accesses and times of the host are measured. Device bytes are pages; scratch is in proportion
to the budget on both sides. Each plan of codes then serves held-back queries through a router with the stand-in, for
the work that it leaves to the host: bytes of codes scanned, and of rows read for candidates. "Filled": the same request
with as many hot lists as the target's bytes hold. Targets: 1/8 of the bytes of flat rows, 1/3 of sq8; host work per
query 1/20 of a scan of flat rows.

**Predictions**, on queries that nothing was chosen with, with the stand-in as it was profiled: recall that candidates
lose (target: 0.3 points off), latency of routed batches (20 %), rows reranked on the host per query (10 %).

``--answers N`` adds what :mod:`benchmarks.host.code_answers` counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import arguments, show, write
from benchmarks.host.code_answers import count_differences
from benchmarks.host.code_sides import K, Maker, Queries, Side, collection
from benchmarks.rivals import tuning
from hybridindex.partitioner.plan import Plan
from hybridindex.router import Router
from hybridindex.studies.simulator.other_machine import WhatIf
from hybridindex.types import F32, I64

COVERAGES = (0.1, 0.2, 0.4, 0.6)
#: That predictions are tried at.
TRIED = (0.0, 0.1, 0.3, 0.6)
BATCHES = (1, 4, 16, 64)
BYTES_TARGETS = {"flat": 1 / 8, "sq8": 1 / 3}
HOST_WORK_TARGET = 1 / 20
RECALL_TARGET, LATENCY_TARGET, RERANK_TARGET = 0.003, 0.20, 0.10
#: Of the highest rate of the plan of rows: the first at which it needs its coverage.
LOADS = (0.5, 0.7, 0.85, 0.95)
#: Held-back queries that recall is measured with, and that a plan serves.
TRIED_QUERIES = 1024


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", choices=("real", "full"), default="real")
    parser.add_argument("--synthetic", type=int, nargs="*", default=[], metavar="DIM", help="dimensions, beside it")
    parser.add_argument("--megabytes", type=int, default=128, help="float32 size of a synthetic dataset")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2], choices=(1, 2, 4))
    parser.add_argument("--recall", type=float, default=0.95, help="at 10, of every side")
    parser.add_argument("--device", default="cpu", help="cuda:N, or cpu for the stand-in")
    parser.add_argument(
        "--gb-per-s", type=float, default=1000, help="of the supposed devices, of which half is reached"
    )
    parser.add_argument("--profile-seconds", type=float, default=40)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--answers", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="few synthetic vectors, few rounds: does it work")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw as SVG")


# Plans


def goal(rows: Side, coverage: float) -> tuple[dict[str, Any], Plan] | None:
    """A rate and an SLO at which a plan of ``rows`` needs ``coverage``, with that plan; None: it never does."""
    problem = rows.problem()
    work = problem.work_at(int(np.ceil(coverage * problem.curve.nlist)))
    most = max(batch / problem.timing(work, batch)[1] for batch in problem.batches.tolist())
    for load in LOADS:
        rate = load * most / (1 + problem.headroom)
        slo_s = problem.at_rate(rate).settle(work, rate).response_s
        if not np.isfinite(slo_s):
            return None  # of this and higher rates some query would wait for ever
        asked = {"rate_qps": rate, "slo_ms": slo_s * 1e3 * (1 + 1e-9)}
        plan = rows.plan(**asked)
        if plan.feasible and plan.coverage >= 0.95 * coverage:
            return asked, plan
    return None


def page_bytes(plan: Plan) -> int:
    """Of the lists of a plan: its device bytes without scratch."""
    used = zip(plan.request.scratch, plan.device_bytes_each, strict=True)
    return plan.device_bytes - sum(scratch for scratch, taken in used if taken)


def compare(rows: Side, codes: Side, coverage: float, flat_work: float, queries: Queries) -> list[dict[str, Any]]:
    """A plan of ``rows`` at a coverage, and plans of ``codes`` for the same goal: the fewest bytes, and filled."""
    found = goal(rows, coverage)
    if found is None:
        sys.stderr.write(f"{rows.name}: no goal needs {coverage:.0%} of the lists\n")
        return []
    asked, whole = found
    target = BYTES_TARGETS[rows.rows]
    made = []
    for name, fill in (("fewest", 0), ("filled", int(target * page_bytes(whole)))):
        plan = codes.plan(**asked, fill_bytes=fill)
        left = served(codes, plan, queries)
        made.append(
            {
                "rows": rows.rows,
                "bits": codes.bits,
                "which": name,
                **asked,
                "rows_coverage": whole.coverage,
                "rows_bytes": page_bytes(whole),
                "coverage": plan.coverage,
                "row_lists": len(plan.resident_rows),
                "bytes": page_bytes(plan),
                "bytes_by_precision": plan.bytes_by_precision,
                "feasible": plan.feasible,
                "max_qps_over_rate": plan.max_sustainable_qps / asked["rate_qps"],
                "bytes_ratio": page_bytes(plan) / page_bytes(whole),
                "bytes_target": target,
                "host_work_ratio": (left["scanned_bytes"] + left["reranked_bytes"]) / flat_work,
                **left,
            }
        )
    return made


def served(codes: Side, plan: Plan, queries: Queries) -> dict[str, float]:
    """Work that a plan of codes leaves to the host, per query, served by a router with stand-in devices."""
    with open_router(codes, plan) as router:
        for part in tried(queries):
            router.search(part, K)
        stats = router.stats()
    compared = (stats.candidates - stats.device_candidates) / stats.queries
    every = codes.profile.notes["codes"]["candidates"]
    return {
        "scanned_bytes": stats.host_work_bytes / stats.queries,
        "reranked_bytes": compared * codes.row_bytes,
        "hit_rate": stats.hit_rate,
        "candidates_on_host": compared,
        "predicted_candidates_on_host": every * (1 - plan.predicted_row_hit_rate),
        "candidates": stats.candidates / stats.queries,
        "fallbacks": stats.device_fallbacks,
    }


def open_router(side: Side, plan: Plan) -> Router:
    """On the device that was profiled."""
    return side.index.router(plan=plan, devices=[side.device], precision=side.precision)


def scan_bytes(side: Side) -> float:
    """Bytes of a whole search per query, on held-back queries."""
    return float(side.here.curve.at(0).work.mean())


# Predictions


def latencies(side: Side, queries: Queries, repeats: int) -> list[dict[str, Any]]:
    """Routed batches of fresh queries, interleaved, beside what plans predict of them."""
    rng = np.random.default_rng(0)
    plans = {coverage: side.plan(supposed=False, coverage=coverage) for coverage in TRIED}
    routers = {c: open_router(side, plan) for c, plan in plans.items()}
    taken: dict[tuple[float, int], list[float]] = {(c, b): [] for c in TRIED for b in BATCHES}
    try:
        for router in routers.values():
            router.search(queries.held[:256], K)
        for _ in range(repeats):
            for key in rng.permutation(list(taken)).tolist():
                coverage, batch = float(key[0]), int(key[1])
                some = np.ascontiguousarray(queries.held[rng.integers(0, len(queries.held), batch)])
                start = time.perf_counter()
                routers[coverage].search(some, K)
                taken[coverage, batch].append(time.perf_counter() - start)
    finally:
        for router in routers.values():
            router.close()
    rows = []
    for (coverage, batch), seconds in taken.items():
        measured = float(np.median(seconds)) * 1e3
        predicted = plans[coverage].predicted_latency_ms(batch)
        halves = [float(np.median(seconds[i::2])) * 1e3 for i in (0, 1)]
        rows.append(
            {
                "side": side.name,
                "coverage": coverage,
                "batch": batch,
                "predicted_ms": predicted,
                "measured_ms": measured,
                "error": abs(predicted - measured) / measured,
                "noise": abs(halves[0] - halves[1]) / measured,
            }
        )
    return rows


def tried(queries: Queries) -> list[F32]:
    """Held-back queries in batches."""
    return [queries.held[start : start + 64] for start in range(0, TRIED_QUERIES, 64)]


def whole_search(rows: Side, queries: Queries) -> I64:
    """The best of all lists, by rows."""
    with rows.index.router() as router:
        return np.concatenate([router.search(part, K, rows.index.nlist).ids for part in tried(queries)])


def predictions(side: Side, queries: Queries, best: I64) -> dict[str, Any]:
    """Recall that candidates lose, and rows reranked per query: as the profile says, and on held-back queries."""
    notes = side.profile.notes
    with (
        side.index.router(precision="rows") as by_rows,
        side.index.router(precision="codes") as by_codes,
    ):
        nprobe = side.profile.nprobe
        rows, codes = (
            np.concatenate([router.search(part, K, nprobe).ids for part in tried(queries)])
            for router in (by_rows, by_codes)
        )
        stats = by_codes.stats()
    lost = tuning.found(rows, best) - tuning.found(codes, best)
    return {
        "side": side.name,
        "nprobe": nprobe,
        "recall": float(tuning.found(codes, best).mean()),
        "predicted_loss": notes["recall"]["lost_to_candidates"],
        "measured_loss": float(lost.mean()),
        "loss_margin": float(1.96 * lost.std() / np.sqrt(len(lost))),
        "candidates": stats.candidates / stats.queries,
        "candidate_us": stats.stages["rerank"].seconds / stats.candidates * 1e6,
        "threads": side.profile.threads,
    }


# Report


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One collection."""
    data, queries = collection(name, args.megabytes)
    what_if = WhatIf(device_bandwidth=args.gb_per_s * 1e9 if args.device == "cpu" else None)
    maker = Maker(queries=queries, level=args.recall, device=args.device, what_if=what_if, seconds=args.profile_seconds)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        sides, latency = [], []
        for side in maker.sides(data, Path(folder), args.bits, undo):
            sides.append(side)
            if side.bits is not None:
                # At once: the machine is as busy as it was while it was profiled, if it can be.
                latency += latencies(side, queries, args.repeats)
        rows = {side.rows: side for side in sides if side.bits is None}
        codes = [side for side in sides if side.bits is not None]
        flat_work = scan_bytes(rows["flat"])
        best = {name: whole_search(side, queries) for name, side in rows.items()}
        return {
            "dataset": name,
            "vectors": len(data.vectors),
            "dim": data.vectors.shape[1],
            "nlist": len(data.centres),
            "assumptions": rows["flat"].assumptions,
            "sides": [about(side, flat_work) for side in sides],
            "plans": [
                row
                for side in codes
                for coverage in COVERAGES
                for row in compare(rows[side.rows], side, coverage, flat_work, queries)
            ],
            "latency": latency,
            "predictions": [predictions(side, queries, best[side.rows]) for side in codes],
        }


def about(side: Side, flat_work: float) -> dict[str, Any]:
    """What a search takes, all of it on the host, and all lists on devices."""
    whole, codes = side.plan(coverage=1.0), side.index.ivf.rabitq
    return {
        "side": side.name,
        "nprobe": side.profile.nprobe,
        "list_bytes": side.profile.nbytes,
        "whole_bytes": page_bytes(whole),
        "scan_bytes": scan_bytes(side),
        "scan_over_flat": scan_bytes(side) / flat_work,
        "candidates": None if codes is None else codes.spec.candidates_for(K, side.profile.nprobe),
        "candidates_at_100": None if codes is None else codes.spec.candidates_for(100, side.profile.nprobe),
    }


def rerank_error(plan: dict[str, Any]) -> float:
    """Of the predicted rows that the host compares, over those that a search has."""
    off = abs(plan["predicted_candidates_on_host"] - plan["candidates_on_host"])
    return float(off / plan["candidates"])


def judged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every target, and the worst of what was measured. Plans that miss their goal are counted and not judged;
    where none is left, nothing was met."""
    asked = [row for one in results for row in one["plans"]]
    plans = [row for row in asked if row["feasible"]]
    latency = [row for one in results for row in one["latency"]]
    predicted = [row for one in results for row in one["predictions"]]
    rows: list[tuple[str, float, float]] = [("plans of codes that miss the goal", len(asked) - len(plans), 0)]
    for codec, target in BYTES_TARGETS.items():
        mine = [row["bytes_ratio"] for row in plans if row["rows"] == codec and row["which"] == "fewest"]
        rows.append((f"device bytes over those of {codec} rows, fewest", max(mine, default=math.nan), target))
    for which in ("fewest", "filled"):
        mine = [row["host_work_ratio"] for row in plans if row["which"] == which]
        rows.append((f"host work left over a flat scan, {which}", max(mine, default=math.nan), HOST_WORK_TARGET))
    rows += [
        (
            "recall loss, predicted less measured",
            max(abs(row["predicted_loss"] - row["measured_loss"]) for row in predicted),
            RECALL_TARGET,
        ),
        ("latency, median error", float(np.median([row["error"] for row in latency])), LATENCY_TARGET),
        ("latency, worst error", max(row["error"] for row in latency), LATENCY_TARGET),
        ("rows compared on the host, error", max(map(rerank_error, plans), default=math.nan), RERANK_TARGET),
    ]
    return [
        {"what": what, "worst": worst, "target": target, "met": bool(worst <= target)} for what, worst, target in rows
    ]


def main() -> None:
    args = arguments(__doc__, _options)
    names = [args.dataset, *map(str, args.synthetic)]
    if args.quick:
        names, args.megabytes, args.bits, args.profile_seconds, args.repeats = ["32"], 4, [1], 1, 3
    results = [measure(name, args) for name in names]
    for one in results:
        show_one(one)
    targets = judged(results)
    answers = count_differences(args.answers) if args.answers else None
    if answers is not None:
        show("answers", tuple(answers), [tuple(answers.values())])
        wrong = {"what": "answers that differ", "worst": answers["differences"], "target": 0}
        targets.append({**wrong, "met": not answers["differences"]})
    show(
        "targets",
        ("what", "worst", "target", "met"),
        [(t["what"], float(t["worst"]), float(t["target"]), "yes" if t["met"] else "NO") for t in targets],
    )
    if args.plot is not None:
        picture(args.plot, results[0])
    recall = {"level": args.recall, "k": K}
    write(args.json, "code_plans", {**recall, "results": results, "answers": answers, "targets": targets})


def show_one(one: dict[str, Any]) -> None:
    """Tables of one collection."""
    title = f"{one['dataset']}: {one['vectors']:,} x {one['dim']}"
    columns = ("side", "nprobe", "MB", "MB in pages", "scan over flat", "candidates")
    show(
        f"{title}: sides at equal recall",
        columns,
        [
            (
                s["side"],
                s["nprobe"],
                s["list_bytes"] / 1e6,
                s["whole_bytes"] / 1e6,
                s["scan_over_flat"],
                s["candidates"],
            )
            for s in one["sides"]
        ],
    )
    show(
        f"{title}: plans of codes where the plan of rows needs a coverage",
        ("rows", "bits", "plan", "req/s", "SLO ms", "rows cov.", "rows MB", "codes cov.", "lists of rows", "MB",
         "bytes ratio", "host work ratio", "compared on host", "predicted", "feasible"),
        [
            (p["rows"], p["bits"], p["which"], p["rate_qps"], p["slo_ms"], p["rows_coverage"], p["rows_bytes"] / 1e6,
             p["coverage"], p["row_lists"], p["bytes"] / 1e6, p["bytes_ratio"], p["host_work_ratio"],
             p["candidates_on_host"], p["predicted_candidates_on_host"], p["feasible"])
            for p in one["plans"]
        ],
    )  # fmt: skip
    show(
        f"{title}: latency of routed batches",
        ("side", "coverage", "batch", "predicted ms", "measured ms", "error", "half against half"),
        [tuple(row.values()) for row in one["latency"]],
    )
    show(
        f"{title}: recall and candidates",
        ("side", "nprobe", "recall", "lost, predicted", "lost, measured", "±", "candidates",
         "us each", "threads"),
        [tuple(row.values()) for row in one["predictions"]],
    )  # fmt: skip


def picture(folder: Path, one: dict[str, Any]) -> None:
    """Device bytes at equal goals, and latency as predicted and measured."""
    from benchmarks.papers.figures.draw import Line, Panel, draw

    panels = []
    for rows in BYTES_TARGETS:
        mine = [p for p in one["plans"] if p["rows"] == rows]
        first = [p for p in mine if p["which"] == "fewest" and p["bits"] == mine[0]["bits"]]
        x = [100 * p["rows_coverage"] for p in first]
        lines = [Line(label="rows", x=x, y=[p["rows_bytes"] / 2**20 for p in first])]
        for bits in sorted({p["bits"] for p in mine}):
            own = [p for p in mine if p["bits"] == bits and p["which"] == "fewest"]
            whole = next(s["whole_bytes"] for s in one["sides"] if s["side"] == f"{bits} bit, {rows}")
            lines.append(Line(label=f"{bits} bit", x=x, y=[p["bytes"] / 2**20 for p in own], marker="s"))
            lines.append(Line(label=f"every list, {bits} bit", x=x, y=[whole / 2**20] * len(x), marker=""))
        panels.append(
            Panel(
                title=f"same SLO, rate and recall: {rows} rows",
                xlabel="lists that the plan of rows needs, %",
                ylabel="MiB on the device",
                lines=lines,
                options={"yscale": "symlog"},
            )
        )
    points = one["latency"]
    top = max(max(p["measured_ms"], p["predicted_ms"]) for p in points)
    low = min(min(p["measured_ms"], p["predicted_ms"]) for p in points)
    panels.append(
        Panel(
            title="latency of routed batches",
            xlabel="measured, ms",
            ylabel="predicted, ms",
            lines=[Line(label="equal", x=(low, top), y=(low, top), published=True, marker="")],
            options={"xscale": "log", "yscale": "log"},
            also=lambda axis: axis.scatter(
                [p["measured_ms"] for p in points], [p["predicted_ms"] for p in points], s=8, color="C3"
            ),
        )
    )
    draw(folder / "code-plans.svg", panels)


if __name__ == "__main__":
    main()
