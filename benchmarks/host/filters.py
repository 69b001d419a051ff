"""Searches with a filter: recall@10 without tuning, and queries per second at equal recall beside faiss with an
``IDSelectorBitmap``.

Both sides hold the same vectors in the same lists, answer the same queries with the same threads, and take turns. Ours
is ``router.search(row_filter=...)`` with the nprobe that reaches the recall *without* a filter; filter and selector are
made beforehand. "By ids" is ours with ``allow_ids=`` in each search. faiss gets the smallest nprobe, to 3 %, at which
it finds as much as ours: its own nprobe finds less and less, the fewer rows a filter leaves. Filters leave rows at
random, or whole lists at random ("topics"). Truth is brute force over the rows that are left. Queries that tune are not
those that measure. Floor: how far the quartiles of our side over itself lie from 1.

Targets: recall of 0.95 with each filter; 10 times faiss where 1 % of the rows is left, 2 times where 10 % is.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import Clusters, import_lists, real_clusters
from benchmarks.common.measure import arguments, interleave, ratio_of_medians, show, write
from benchmarks.rivals.tuning import found, smallest
from hybridindex.types import F32, I64

K, RECALL = 10, 0.95
SHARES = (0.5, 0.1, 0.01, 0.001)
#: Times faiss's speed, by share of the rows that is left.
TARGETS = {0.01: 10.0, 0.1: 2.0}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--codecs", nargs="+", default=["flat", "sq8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--queries", type=int, default=512, help="of each half: one tunes, the other measures")
    parser.add_argument("--rounds", type=int, default=15)


def filters(data: Clusters) -> dict[str, dict[float, I64]]:
    """Ids that each filter leaves, by kind and share."""
    rng = np.random.default_rng(0)
    rows, order = rng.permutation(len(data.lists)), rng.permutation(len(data.centres))
    sizes = np.cumsum(np.bincount(data.lists, minlength=len(order))[order])
    topics = {share: order[: 1 + int(np.searchsorted(sizes, share * len(rows)))] for share in SHARES}
    return {
        "rows": {share: np.sort(rows[: max(K, int(share * len(rows)))]) for share in SHARES},
        "topics": {share: np.flatnonzero(np.isin(data.lists, lists)) for share, lists in topics.items()},
    }


def nearest(vectors: F32, queries: F32, ids: I64) -> I64:
    """(n, K) true neighbours by inner product among the rows ``ids``."""
    left = vectors[ids]
    parts = [queries[at : at + 64] @ left.T for at in range(0, len(queries), 64)]
    return np.concatenate([ids[np.argsort(-part, axis=1, kind="stable")[:, :K]] for part in parts])


def faiss_side(index: Any, ids: I64, count: int) -> Callable[[F32, int], I64]:
    """``search(queries, nprobe)`` among ``ids``."""
    import faiss

    ivf = index.ivf.open_faiss()
    allowed = np.zeros(count, dtype=np.bool_)
    allowed[ids] = True
    bits = np.packbits(allowed, bitorder="little")
    selector = faiss.IDSelectorBitmap(bits)  # type: ignore[call-arg, arg-type]

    def search(queries: F32, nprobe: int) -> I64:
        # Keeps the bits, which the selector points at.
        assert len(bits)
        ivf.parallel_mode = 1 if len(queries) == 1 else 3
        params = faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)  # type: ignore[call-arg]
        ids_found: I64 = ivf.search(queries, K, params=params)[1]
        return ids_found

    return search


def in_batches(search: Callable[[F32], object], queries: F32, batch: int, most: int) -> Callable[[], None]:
    """One round: batches of the queries, ``most`` at most."""
    starts = range(0, len(queries) - batch + 1, batch)[:most]

    def run() -> None:
        for at in starts:
            search(queries[at : at + batch])

    return run


def measure(index: Any, data: Clusters, log: F32, codec: str, args: Any) -> list[dict[str, Any]]:
    """One row per filter, batch size and number of threads."""
    import faiss

    tune, held = log[: args.queries], log[args.queries : 2 * args.queries]
    everything = nearest(data.vectors, tune, np.arange(len(data.vectors)))
    rows = []
    for threads in args.threads:
        faiss.omp_set_num_threads(threads)
        with index.router(threads=threads, precision="rows") as router:
            plain = lambda nprobe, r=router: float(found(r.search(tune, K, nprobe).ids, everything).mean())  # noqa: E731
            nprobe = smallest(plain, RECALL, 1, index.nlist)
            assert nprobe is not None
            for kind, by_share in filters(data).items():
                for share, ids in by_share.items():
                    rows += _cells(index, router, data, (tune, held), (codec, threads, kind, share), ids, nprobe, args)
    return rows


def _cells(
    index: Any, router: Any, data: Clusters, halves: tuple[F32, F32], names: Any, ids: I64, nprobe: int, args: Any
) -> list[dict[str, Any]]:
    codec, threads, kind, share = names
    tune, held = halves
    truth, held_truth = (nearest(data.vectors, queries, ids) for queries in halves)
    theirs = faiss_side(index, ids, len(data.vectors))

    prepared = router.filter(allow_ids=ids)

    def ours(queries: F32) -> I64:
        answered: I64 = router.search(queries, K, nprobe, row_filter=prepared).ids
        return answered

    def by_ids(queries: F32) -> object:
        return router.search(queries, K, nprobe, allow_ids=ids)

    aimed = float(found(ours(tune), truth).mean())
    equal = smallest(lambda p: float(found(theirs(tune, p), truth).mean()), aimed, 1, index.nlist) or index.nlist
    result = router.search(held, K, nprobe, row_filter=prepared)
    recall = float(found(result.ids, held_truth).mean())
    rows = []
    for batch in args.batches:
        most = 64 if batch == 1 else 2
        run = in_batches(ours, held, batch, most)
        sides = {
            "ours": run,
            "faiss": in_batches(lambda x: theirs(x, equal), held, batch, most),
            "by ids": in_batches(by_ids, held, batch, most),
            "again": run,
        }
        timed = interleave(sides, repeats=args.rounds, warmup=1)
        ratio, low, high = ratio_of_medians(timed["faiss"], timed["ours"])
        _, again_low, again_high = ratio_of_medians(timed["again"], timed["ours"])
        floor = max(abs(again_low - 1), abs(again_high - 1))
        target = TARGETS.get(share)
        rows.append(
            {
                "codec": codec,
                "threads": threads,
                "filter": kind,
                "share": share,
                "left": len(ids),
                "batch": batch,
                "nprobe": nprobe,
                "probed": float(result.nprobe_used.mean()),
                "recall": recall,
                "faiss_nprobe": equal,
                "faiss_recall": float(found(theirs(held, equal), held_truth).mean()),
                "faiss_recall_at_nprobe": float(found(theirs(held, nprobe), held_truth).mean()),
                "qps": _queries(batch, most, held) / timed["ours"].median,
                "over_faiss": ratio,
                "over_faiss_quartiles": (low, high),
                "by_ids_over_faiss": ratio_of_medians(timed["faiss"], timed["by ids"])[0],
                "floor": floor,
                "target": target,
                "verdict": None if target is None else _verdict(ratio, floor, target),
                "recall_met": recall >= RECALL,
            }
        )
    return rows


def _queries(batch: int, most: int, held: F32) -> int:
    return batch * len(range(0, len(held) - batch + 1, batch)[:most])


def _verdict(ratio: float, floor: float, target: float) -> str:
    if ratio >= target * (1 + floor):
        return "passed"
    return "missed" if ratio < target / (1 + floor) else "inconclusive"


def main() -> None:
    args = arguments(__doc__, _options)
    data, log = real_clusters(args.dataset)
    log = np.ascontiguousarray(log[np.random.default_rng(1).permutation(len(log))[: 2 * args.queries]])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for codec in args.codecs:
            with import_lists(data.vectors, data.lists, data.centres, codec, "ip", Path(folder) / codec) as index:
                rows += measure(index, data, log, codec, args)
    named = ("codec", "threads", "filter", "share", "batch")
    columns = (*named, "recall", "faiss at nprobe", "over faiss", "floor", "target")
    show(
        f"searches with filters ({len(data.vectors):,} rows, {len(data.centres)} lists)",
        columns,
        [
            (
                *(row[name] for name in named),
                f"{row['recall']:.3f}",
                f"{row['faiss_recall_at_nprobe']:.3f}",
                f"{row['over_faiss']:.2f}",
                f"{row['floor']:.2f}",
                "" if row["target"] is None else f"{row['target']:g}, {row['verdict']}",
            )
            for row in rows
        ],
    )
    write(args.json, "filters", {"rows_in_all": len(data.vectors), "nlist": len(data.centres), "k": K, "rows": rows})


if __name__ == "__main__":
    main()
