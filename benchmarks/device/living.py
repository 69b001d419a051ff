"""Filters and added rows where a device holds all lists: what a search takes there, over the host alone.

1. *Filters* leave half, a tenth and a twentieth of the rows at random. One filter after the other, and different ones
   at once, which share batches; masks lie on the device after the first search of each.
2. *Added rows*, a tenth of the index: once they lie on the device, against a router that has them scanned on the host.

Sides run in turns, and answers are compared. On the stand-in device all of it runs at a small size and claims nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists, make_clusters, make_queries
from benchmarks.common.measure import Attempts, Timing, arguments, ratio_of_medians, show, write
from benchmarks.device.router import budget_of
from hybridindex.api import open_index
from hybridindex.types import F32

SHARES = (0.5, 0.1, 0.05)
BATCHES = (1, 8, 64)
K = 10
#: Different filters at once.
_FILTERS = 8
_ADDED = 0.1
_WARM_UP, _WAIT_S = 3, 60.0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cuda:N, cpu (stand-in), or auto")
    parser.add_argument("--mib", type=int, help="MiB of vectors; default 4096 on a GPU, 64 on the stand-in")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--nprobe", type=int, help="default a 32nd of the lists")
    parser.add_argument("--searches", type=int, default=100, help="of each side")


def _compared(sides: dict[str, Any], ask: Any, searches: int) -> dict[str, Any]:
    """Times of ``ask(router, number)`` with each side's router, in turns; ``device`` over ``host``."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(searches + _WARM_UP):
        answers = {}
        for side in rng.permutation(list(sides)).tolist():
            start = time.perf_counter()
            answers[side] = ask(sides[side], number)
            seconds[side].append(time.perf_counter() - start)
        for found, expected in zip(answers["device"], answers["host"], strict=True):
            assert np.allclose(found.distances, expected.distances, rtol=0, atol=2e-4), "an answer is another one"
    timed = {side: Timing(tuple(values[_WARM_UP:])) for side, values in seconds.items()}
    return {
        "ms": {side: timing.median * 1e3 for side, timing in timed.items()},
        "times_faster": ratio_of_medians(timed["host"], timed["device"]),
        "noise": ratio_of_medians(timed["host again"], timed["host"]),
    }


def _filtered(sides: dict[str, Any], queries: F32, nprobe: int, count: int, searches: int) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(1), []
    for share in SHARES:
        kept = [np.flatnonzero(rng.random(count) < share) for _ in range(_FILTERS)]
        filters = {side: [router.filter(allow_ids=ids) for ids in kept] for side, router in sides.items()}
        of_router = {id(router): filters[side] for side, router in sides.items()}

        def one(router: Any, number: int, batch: int, of_router: Any = of_router) -> list[Any]:
            at = number * batch % (len(queries) - batch)
            wanted = of_router[id(router)][number % _FILTERS]
            return [router.search(queries[at : at + batch], K, nprobe, row_filter=wanted)]

        def many(router: Any, number: int, of_router: Any = of_router) -> list[Any]:
            at = number % (len(queries) - _FILTERS)
            futures = [
                router.submit(queries[at + i], K, nprobe, row_filter=wanted)
                for i, wanted in enumerate(of_router[id(router)])
            ]
            return [future.result(_WAIT_S) for future in futures]

        for batch in BATCHES:
            row = _compared(sides, lambda router, number, batch=batch: one(router, number, batch), searches)
            rows.append({"share": share, "batch": batch, "filters": 1, **row})
        rows.append({"share": share, "batch": 1, "filters": _FILTERS, **_compared(sides, many, searches)})
    return rows


def _added(index: Any, sides: dict[str, Any], queries: F32, vectors: F32, nprobe: int, searches: int) -> dict[str, Any]:
    for start in range(0, len(vectors), 10_000):
        index.add(vectors[start : start + 10_000])
    end = time.monotonic() + _WAIT_S
    while sides["device"].added_on_devices < len(vectors) and time.monotonic() < end:
        sides["device"].search(queries[:1], K, nprobe)
        time.sleep(0.01)
    rows = []
    for batch in BATCHES:

        def ask(router: Any, number: int, batch: int = batch) -> list[Any]:
            at = number * batch % (len(queries) - batch)
            return [router.search(queries[at : at + batch], K, nprobe)]

        rows.append({"batch": batch, **_compared(sides, ask, searches)})
    return {"added": len(vectors), "on_device": sides["device"].added_on_devices, "rows": rows}


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device = args.device if args.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    _, info = resolve_device(device)
    mib = args.mib or (64 if info.stand_in else 4096)
    data = make_clusters(args.dim, mib << 20)
    count, nlist = len(data.vectors), len(data.centres)
    nprobe = args.nprobe or max(1, nlist // 32)
    queries = make_queries(data.centres, 4096, "low")
    more = data.vectors[np.random.default_rng(2).choice(count, int(_ADDED * count), replace=False)]
    filters: list[dict[str, Any]] = []
    added: dict[str, Any] = {}
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, "mib": mib, "dim": args.dim,
                  "nlist": nlist, "nprobe": nprobe, "filters": filters, "added": added,
                  "failed": attempts.failed}  # fmt: skip
        write(args.json, "device_living", result)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "idx"
        import_lists(data.vectors, data.lists, data.centres, "flat", "ip", path).close()
        del data
        with open_index(path, write=True) as index:
            profile = index.profile(queries[:1000], nprobe=nprobe, devices=[device], max_seconds=10, save=False)
            # Room for added rows beside all lists.
            budget = budget_of(int(1.5 * index.list_bytes.sum()))
            plan = index.plan(1000, budget, profile, coverage=1.0)
            with (
                index.router(plan=plan, devices=[device]) as there,
                index.router() as host,
                index.router() as again,
            ):
                sides = {"device": there, "host": host, "host again": again}
                with attempts("filters"):
                    filters += _filtered(sides, queries, nprobe, count, args.searches)
                save()
                with attempts("added rows"):
                    added.update(_added(index, sides, queries, more, nprobe, args.searches))
                save(complete=not attempts.failed)
    claim = " (the stand-in: claims nothing)" if info.stand_in else ""
    show(
        f"searches with filters, lists on {info.label}, over the host alone: {count:,} rows, nprobe {nprobe}{claim}",
        ("rows left", "batch", "filters", "host ms", "device ms", "times faster", "A/A"),
        [
            (f"{r['share']:.0%}", r["batch"], r["filters"], r["ms"]["host"], r["ms"]["device"],
             f"{r['times_faster'][0]:.2f}", f"{r['noise'][0]:.3f}")
            for r in filters
        ],
    )  # fmt: skip
    show(
        f"searches beside {added.get('added', 0):,} added rows, {added.get('on_device', 0):,} of them there{claim}",
        ("batch", "host ms", "device ms", "times faster", "A/A"),
        [
            (r["batch"], r["ms"]["host"], r["ms"]["device"], f"{r['times_faster'][0]:.2f}", f"{r['noise'][0]:.3f}")
            for r in added.get("rows", ())
        ],
    )
    attempts.end()


if __name__ == "__main__":
    main()
