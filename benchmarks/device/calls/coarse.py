"""Coarse quantization of batches: a device that chooses and the host that proves, against the host alone.

Centroids and queries are normal, of length 1, queries near to centroids. *host*: all centroids compared by the native
extension with ``--threads``. *device*: sending the queries, the products, the selection and the way back, by the clock.
*proof*: what the host then does. *ratio*: host over device and proof together. *settled*: queries of which no other
list had to be looked at. Lists and distances are compared to the bit.

On the stand-in device torch multiplies on the cores that the host has: it says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, show, write
from hybridindex.extension import native
from hybridindex.tiers.paged.coarse.device_centroids import DeviceCentroids, centroid_bytes, n_candidates
from hybridindex.types import F32

NPROBE, BATCHES = 256, (1, 8, 64)
#: (lists, dimensions) of the usual index, and of a large one.
SHAPES = ((5000, 768), (40_000, 768))
QUICK_SHAPES = ((2000, 64),)
RUNS = 50


def _quartiles(seconds: list[float]) -> list[float]:
    return [float(x) * 1e6 for x in np.percentile(seconds, [50, 25, 75])]


def measure(device: Any, nlist: int, dim: int, batch: int, threads: int, runs: int) -> dict[str, Any]:
    """One row: both sides in turns; microseconds as [median, quartiles]."""
    rng = np.random.default_rng(nlist + batch)
    centroids = rng.standard_normal((nlist, dim), dtype=np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    assert native is not None, "the extension is missing"
    quantizer, pool = native.CoarseQuantizer(centroids, True, ""), native.ThreadPool(threads - 1)
    there = DeviceCentroids(centroids, device, by_products=True)
    there.warm_up()
    m = n_candidates(NPROBE, nlist)
    assert m is not None
    host_s, device_s, proof_s = [], [], []
    settled = different = 0
    for _ in range(runs + 3):
        noise = rng.standard_normal((batch, dim), dtype=np.float32) * np.float32(1 / dim)
        queries: F32 = centroids[rng.integers(0, nlist, batch)] + noise
        lists, again = np.empty((2, batch, NPROBE), dtype=np.int64)
        distances, distances_again = np.empty((2, batch, NPROBE), dtype=np.float32)
        known = np.empty(batch, dtype=np.bool_)
        began = time.perf_counter()
        quantizer.quantize(queries, lists, distances, pool)
        by_host = time.perf_counter()
        candidates, farthest = there.search(queries, m)
        chosen = time.perf_counter()
        quantizer.nearest_of(queries, candidates, farthest, again, distances_again, known)
        proven = time.perf_counter()
        host_s.append(by_host - began)
        device_s.append(chosen - by_host)
        proof_s.append(proven - chosen)
        settled += int(known.sum())
        different += int((lists[known] != again[known]).sum() + (distances[known] != distances_again[known]).sum())
    both = np.array(device_s[3:]) + np.array(proof_s[3:])
    ratio = np.percentile(np.array(host_s[3:]) / both, [50, 25, 75])
    return {"lists": nlist, "dim": dim, "batch": batch, "nprobe": NPROBE, "host_us": _quartiles(host_s[3:]),
            "device_us": _quartiles(device_s[3:]), "proof_us": _quartiles(proof_s[3:]), "ratio": ratio.tolist(),
            "settled": settled / (batch * (runs + 3)), "different": different,
            "device_bytes": centroid_bytes(nlist, dim)}  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="of the host's side (default 1)")
    parser.add_argument("--quick", action="store_true", help="a small index and few runs")


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device("cuda:0" if torch.cuda.is_available() else "cpu")
    if info.stand_in:
        torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, "threads": args.threads,
                  "rows": rows, "failed": attempts.failed}  # fmt: skip
        write(args.json, "device_coarse", result)

    for (nlist, dim), batch in itertools.product(QUICK_SHAPES if args.quick else SHAPES, BATCHES):
        with attempts(f"{nlist} lists, batch {batch}"):
            rows.append(measure(device, nlist, dim, batch, args.threads, 5 if args.quick else RUNS))
        save()
    save(complete=not attempts.failed)
    show(f"coarse quantization, nprobe {NPROBE}, on {info.label}",
         ("lists", "dim", "batch", "host us", "device us", "proof us", "ratio", "settled", "different"),
         [(r["lists"], r["dim"], r["batch"], *(round(r[f"{side}_us"][0]) for side in ("host", "device", "proof")),
           f"{r['ratio'][0]:.2f}", f"{r['settled']:.1%}", r["different"]) for r in rows])  # fmt: skip
    attempts.end()


if __name__ == "__main__":
    main()
