"""Predicted against measured E[min hit rate] of a batch, on real queries that the profile never saw.

The profile gets a calibration half of each query set: from it come the hot order and all models. Measured is the mean,
over random batches of the other half, of the smallest hit rate (by bytes) in the batch. Targets over B in 1, 4, 16, 64
and coverage 5 to 60 %: absolute error at most 0.05 in the median and 0.10 at worst. The Beta model (the paper's) is
reported beside the empirical one, raw and centred embeddings side by side.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import arguments, show, write
from hybridindex.partitioner.models.hitrate import HitRateName, expected_min_hit_rate

BATCHES = (1, 4, 16, 64)
COVERAGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
MODELS: tuple[HitRateName, ...] = ("empirical", "beta", "beta_binomial")
N_CALIBRATION = 4000
N_BATCHES = 2000


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")


def measured_minimum(hit_rate: np.ndarray, batch: int, rng: np.random.Generator) -> float:
    """Mean of the smallest of ``batch`` queries over random batches."""
    return float(hit_rate[rng.integers(0, len(hit_rate), (N_BATCHES, batch))].min(axis=1).mean())


def main() -> None:
    args = arguments(__doc__, _options)
    import hybridindex as hx
    from hybridindex.partitioner import analyse

    data = benchmark_dataset(args.dataset)
    raw = np.asarray(data.vectors())
    nlist = 2975 if data.count > 300_000 else 1300
    rng = np.random.default_rng(0)
    summary, points = [], []
    with tempfile.TemporaryDirectory() as folder:
        for space in ("centred", "raw"):
            vectors = data.centered(raw) if space == "centred" else raw
            with hx.build(vectors, Path(folder) / space, nlist=nlist, metric="ip") as index:
                nprobe = nlist // 16
                for source in ("trec-terabyte05", "nq"):
                    queries = np.asarray(data.queries[source].vectors())
                    queries = data.centered(queries) if space == "centred" else queries
                    order = rng.permutation(len(queries))
                    calibration, test = order[:N_CALIBRATION], order[N_CALIBRATION:][:20_000]
                    profile = index.profile(
                        np.ascontiguousarray(queries[calibration]), nprobe, devices=0, max_seconds=2, save=False
                    )
                    analysis = analyse(profile)
                    probes, _ = index.ivf.quantize(index.ivf.transform(np.ascontiguousarray(queries[test])), nprobe)
                    work = index.list_bytes[probes]
                    total = work.sum(axis=1)
                    errors: dict[str, list[float]] = {what: [] for what in (*MODELS, "chosen")}
                    for coverage in COVERAGES:
                        count = int(np.ceil(coverage * nlist))
                        hot = np.zeros(nlist, dtype=bool)
                        hot[analysis.curve.order[:count]] = True
                        hit_rate = (work * hot[probes]).sum(axis=1) / total
                        for batch in BATCHES:
                            measured = measured_minimum(hit_rate, batch, rng)
                            point = {"space": space, "queries": source, "coverage": coverage, "batch": batch}
                            for name in MODELS:
                                predicted = expected_min_hit_rate(analysis.curve, count, batch, name)
                                errors[name].append(abs(predicted - measured))
                                point[name] = predicted
                            errors["chosen"].append(errors[analysis.hit_rates.best][-1])
                            points.append({**point, "measured": measured, "chosen": analysis.hit_rates.best})
                    for what, values in errors.items():
                        shown = f"chosen ({analysis.hit_rates.best})" if what == "chosen" else what
                        summary.append((space, source, shown, float(np.median(values)), float(np.max(values))))
    show(f"smallest hit rate of a batch, expected: {data.name}, nlist {nlist}, nprobe {nlist // 16}",
         ("space", "queries", "model", "median error", "worst error"), summary)  # fmt: skip
    write(
        args.json,
        "hit_rate",
        {"target": {"median": 0.05, "worst": 0.10}, "nlist": nlist, "summary": summary, "points": points},
    )


if __name__ == "__main__":
    main()
