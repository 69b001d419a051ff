"""How exact the kernel for lists that many queries probe is: its distances against float64, at three dimensions.

Sixteen queries probe the same lists. The error of each returned distance is taken over the sum of its terms, and the
largest is kept. *normal*: rows and queries of both signs. *positive*: none is negative, so that sums grow and what a
matrix unit cuts off adds up. *heavy*: the share of the work that the kernel in question did; some codecs and metrics
have none. Target: 1e-6, as in the tests.

On the stand-in device torch scans, and nothing is claimed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, show, write
from benchmarks.device.scan import BYTES, ResidentLists, exact_distances, make_lists
from benchmarks.device.targets import EXACT_TARGET
from hybridindex.paging import scratch_for_budget
from hybridindex.tiers.paged.triton_scanner import TritonScanner
from hybridindex.types import Metric

DIMS = (768, 1536, 3072)
SIDES: tuple[tuple[str, Metric], ...] = (("normal", "ip"), ("normal", "l2"), ("positive", "ip"))
QUERIES, LISTS, LIST_ROWS, FOUND = 16, 8, 300, 100


def measure(lists: ResidentLists, signs: str) -> dict[str, Any]:
    """One row: the largest error of ``QUERIES`` queries."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((QUERIES, lists.scan_dim), dtype=np.float32)
    if signs == "positive":
        queries = np.abs(queries)
        lists.rows.abs_()
    probes = np.tile(np.arange(min(LISTS, lists.nlist)), (QUERIES, 1))
    scratch, heavy = scratch_for_budget(1 << 40), None
    if TritonScanner.unsupported(lists.arena):
        scanner = lists.scanner(scratch)
        distances, ids = scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), FOUND)
    else:
        scanner, workspace = lists.repeatable(scratch)
        distances, ids = scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), FOUND)
        tables = [launched[1] for launched in workspace.launched]
        heavy = 1 - sum(t.n_light for t in tables) / sum(t.n_items for t in tables)
    worst = 0.0
    for x, found, at in zip(queries, distances, ids, strict=True):
        exact, terms = exact_distances(lists, lists.rows_of(at), x)
        worst = max(worst, float((np.abs(found - exact) / terms).max()))
    return {"codec": lists.codec.kind, "dim": lists.scan_dim, "metric": lists.metric, "signs": signs,
            "scanner": scanner.name, "heavy": heavy, "error": worst}  # fmt: skip


def main() -> None:
    args = arguments(__doc__)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device("cuda:0" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, "rows": rows,
                  "target": EXACT_TARGET, "failed": attempts.failed}  # fmt: skip
        write(args.json, "heavy", result)

    for kind, dim in itertools.product(BYTES, DIMS):
        with attempts(f"{kind}, d={dim}"):
            lists = make_lists(device, kind, dim, "ip", LISTS * LIST_ROWS * dim * BYTES[kind], list_rows=LIST_ROWS)
            # Bytes have no sign of their own.
            for signs, metric in SIDES[: 2 if kind == "sq8" else 3]:
                with attempts(f"{kind}, d={dim}, {signs}, {metric}"):
                    rows.append(measure(replace(lists, metric=metric), signs))
        save()
    save(complete=not attempts.failed)
    if rows:
        show(f"largest error over the sum of terms, against float64, on {info.label}", tuple(rows[0]),
             [tuple("-" if v is None else v for v in row.values()) for row in rows])  # fmt: skip
    attempts.end()


if __name__ == "__main__":
    main()
