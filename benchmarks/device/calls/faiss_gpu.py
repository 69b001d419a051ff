"""Our scan against faiss-gpu's, of the same lists, queries and probes, in one process.

faiss gets the rows of our arena as the inverted lists of an ``IVF,Flat`` index (float32), or of an fp16 scalar
quantizer (``IVF,SQfp16``, the same bytes as ours), and searches them with ``search_preassigned``: coarse quantization
is in neither side's time. Both go from host arrays to host arrays, by the clock, in turns. Answers are compared:
distances, and how many ids are the same. Target: faster from batch 8 on, for float32; the rest is reported.

Without faiss-gpu, or without a GPU, faiss on the CPU takes its place against the stand-in, to show that it runs, and
nothing is claimed; on a GPU without faiss-gpu nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, interleave, ratio_of_medians, show, write
from benchmarks.device.scan import ROUNDED, Batch, K, ResidentLists, exact_distances, make_batch, make_lists
from benchmarks.device.targets import SCAN_NPROBE, SCAN_TARGETS
from hybridindex.paging import scratch_for_budget
from hybridindex.types import F32, I64

#: Codec of ours -> faiss's name for the same bytes.
CODECS = {"f32": "IVF,Flat", "f16": "IVF,SQfp16"}
DIM, LIST_ROWS = 768, 1000
TURNS = 4


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=2.0, help="resident bytes on a GPU, of each side")
    parser.add_argument("--repeats", type=int, default=30)


def gpus() -> int | None:
    """How many GPUs faiss can use; None where it is not installed."""
    if importlib.util.find_spec("faiss") is None:
        return None
    import faiss

    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def faiss_lists(lists: ResidentLists) -> Any:
    """faiss's index on the CPU with the rows and ids of ``lists``."""
    import faiss

    metric = faiss.METRIC_INNER_PRODUCT if lists.metric == "ip" else faiss.METRIC_L2
    dim, nlist, ptr = lists.scan_dim, lists.nlist, faiss.swig_ptr
    quantizer = faiss.IndexFlat(dim, metric)
    # Nobody asks it, but it must have as many centroids as there are lists.
    quantizer.add(np.random.default_rng(0).standard_normal((nlist, dim), dtype=np.float32))
    ivf: Any
    if lists.codec.kind == "f32":
        ivf = faiss.IndexIVFFlat(quantizer, dim, nlist, metric)
    else:
        ivf = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, faiss.ScalarQuantizer.QT_fp16, metric, False)
    ivf.is_trained = True
    per_page = lists.arena.geometry.rows_per_page
    by_row = lists.arena.data.view(-1, lists.code_size)
    for i, size in enumerate(lists.list_sizes.tolist()):
        pages = lists.residency.list_pages[i]
        assert pages is not None
        where = (pages.astype(np.int64)[:, None] * per_page + np.arange(per_page)).ravel()[:size]
        codes = np.ascontiguousarray(by_row[where].cpu().numpy())
        ids = lists.ids_at(np.full(size, i), np.arange(size))
        ivf.invlists.add_entries(i, size, ptr(ids), ptr(codes))
    ivf.ntotal = int(lists.list_sizes.sum())
    return ivf


def on_gpu(ivf: Any, device: Any) -> tuple[Any, Any]:
    """A copy of faiss's index on the GPU, and what must live as long."""
    import faiss

    resources = faiss.StandardGpuResources()
    return faiss.index_cpu_to_gpu(resources, device.index or 0, ivf), resources


def compare(lists: ResidentLists, batch: Batch, ours: tuple[F32, I64], theirs: tuple[F32, I64]) -> tuple[int, float]:
    """Queries for which faiss's distances differ from ours by more than rounding; the share of equal ids."""
    wrong = 0
    for row, x in enumerate(batch[0]):
        _, terms = exact_distances(lists, lists.rows_of(ours[1][row]), x)
        wrong += bool((np.abs(ours[0][row] - theirs[0][row]) > 2 * ROUNDED * terms).any())
    return wrong, float((ours[1] == theirs[1]).mean())


def measure(lists: ResidentLists, ivf: Any, n: int, nprobe: int, repeats: int) -> dict[str, Any]:
    """One row: times of both, in turns, after their answers were compared."""
    rng = np.random.default_rng(n)
    batches = [make_batch(lists, n, nprobe, rng) for _ in range(TURNS)]
    ivf.nprobe = batches[0][1].shape[1]
    scanner = lists.scanner(scratch_for_budget(1 << 40))
    wrong, same = compare(lists, batches[0], lists.scan(scanner, *batches[0]), ivf.search_preassigned(
        batches[0][0], K, batches[0][1], np.zeros(batches[0][1].shape, np.float32)))  # fmt: skip
    turns = {"ours": 0, "faiss": 0, "ours again": 0}

    def ours(side: str) -> None:
        turns[side] += 1
        lists.scan(scanner, *batches[turns[side] % TURNS])

    def theirs() -> None:
        turns["faiss"] += 1
        queries, probes = batches[turns["faiss"] % TURNS]
        ivf.search_preassigned(queries, K, probes, np.zeros(probes.shape, np.float32))

    timed = interleave(
        {"ours": lambda: ours("ours"), "faiss": theirs, "ours again": lambda: ours("ours again")}, repeats=repeats
    )
    unique = float(np.mean([lists.list_sizes[np.unique(p)].sum() for _, p in batches]) * lists.codec.code_size)
    return {
        "codec": lists.codec.kind,
        "faiss": CODECS[lists.codec.kind],
        "metric": lists.metric,
        "batch": n,
        "nprobe": ivf.nprobe,
        "unique_bytes": unique,
        "ours_ms": timed["ours"].median * 1e3,
        "faiss_ms": timed["faiss"].median * 1e3,
        "scan_gbps": unique / timed["ours"].median / 1e9,
        "faiss_gbps": unique / timed["faiss"].median / 1e9,
        "faster": ratio_of_medians(timed["faiss"], timed["ours"]),
        "noise": ratio_of_medians(timed["ours again"], timed["ours"]),
        "wrong": wrong,
        "checked": n,
        "same_ids": same,
    }


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device("cuda:0" if torch.cuda.is_available() else "cpu")
    usable = gpus()
    reason = ""
    if usable is None:
        reason = "faiss is not installed"
    elif not usable and not info.stand_in:
        reason = "faiss is installed without its GPU part"
    nbytes = 8 << 20 if info.stand_in else int(args.gigabytes * 1e9)
    list_rows, repeats = (10, 3) if info.stand_in else (LIST_ROWS, args.repeats)
    rows: list[dict[str, Any]] = []
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, "reason": reason, "k": K,
                  "rows": rows, "failed": attempts.failed}  # fmt: skip
        write(args.json, "faiss_gpu", result)

    for kind in () if reason else CODECS:
        for metric in ("ip", "l2"):
            with attempts(f"{kind}, {metric}"):
                lists = replace(make_lists(device, kind, DIM, "ip", nbytes, list_rows=list_rows), metric=metric)
                ivf, kept = (faiss_lists(lists), None) if info.stand_in else on_gpu(faiss_lists(lists), device)
                for n in SCAN_TARGETS:
                    with attempts(f"{kind}, {metric}, batch {n}"):
                        rows.append(measure(lists, ivf, n, SCAN_NPROBE, repeats))
                    save()
                del ivf, kept, lists
    save(complete=not attempts.failed)
    if reason:
        sys.stdout.write(f"not compared: {reason}\n")
    else:
        columns = ("faiss", "metric", "batch", "nprobe", "ours_ms", "faiss_ms", "scan_gbps", "faiss_gbps", "wrong",
                   "same_ids")  # fmt: skip
        who = "faiss on the CPU; claims nothing" if info.stand_in else "faiss-gpu"
        show(f"our scan on {info.label} and {who}", (*columns, "times faster", "A/A"),
             [(*(r[c] for c in columns), f"{r['faster'][0]:.2f}", f"{r['noise'][0]:.2f}") for r in rows])  # fmt: skip
    attempts.end()


if __name__ == "__main__":
    main()
