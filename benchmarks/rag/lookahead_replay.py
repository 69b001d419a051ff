"""How much of a final query the prefetch for its draft catches: TeleRAG's curve, budgets, batches and cache, replayed.

Real draft and final queries (TREC titles and descriptions, web queries and facets, questions and sub-questions,
conversations) on a demo data set. Counted in lists and bytes, nothing is timed. Hit rates are those of the *final*
query, by bytes of code and by count.

- **curve**: against lists prefetched, in per cent of nprobe. The paper (older text, HyDE): nearly every prefetched list
  is a hit up to 50 %, growth slows down to 150 %, flat near 95 % from there.
- **budgets**: the paper's GB as shares of its 61 GB index, in page bytes; lists that do not fit skipped or the end.
- **batches**: one budget, shared equally by query (the paper) or rank by rank across queries (the router).
- **cache**: lists kept by hotness after each pair, sessions replayed one after another, interleaved, and shuffled.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.data import benchmark_dataset
from benchmarks.common.dataset import BenchmarkDataset
from benchmarks.common.measure import arguments, show, write
from benchmarks.common.replay import DeviceReplay, choose_equally, choose_until_full, hit_rates
from hybridindex.api import Index
from hybridindex.paging import PageGeometry
from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.router.lookahead.prefetch import choose_lists
from hybridindex.tiers.serving import page_bytes_of
from hybridindex.types import F32, F64, I64

SHARES = np.arange(0, 301, 12.5) / 100
SHOWN = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
RANGES = ((0.0, 0.5), (0.5, 1.5), (1.5, 3.0))
#: TeleRAG, older text, Table 5 (nprobe nlist/8, index of 61 GB): pipeline, GB, hit rate on H100 and on RTX 4090.
PAPER_INDEX_GB = 61.0
PAPER_BUDGETS = (
    ("S-RAG", 1.25, 0.1498), ("IRG", 2.5, 0.2939), ("FLARE", 3, 0.3301), ("Iter", 3, 0.6146), ("S-RAG", 3, 0.3601),
    ("IRG", 4, 0.4449), ("Iter", 5, 0.8079), ("FLARE", 6, 0.5817), ("SubQ", 7, 0.5838), ("HyDE", 7, 0.6716),
    ("SubQ", 8, 0.6326), ("HyDE", 9, 0.7723),
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16)
INTERLEAVED = 32


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")


class Pairs:
    """The pairs in one space, quantized: drafts as whole orders of the lists, finals as their nprobe nearest."""

    def __init__(self, data: BenchmarkDataset, index: Index, space: str) -> None:
        vectors = [np.asarray(part) for part in (data.pairs.drafts(), data.pairs.finals())]
        if space == "centred":
            vectors = [data.centered(part) for part in vectors]
        self.work = index.list_bytes
        geometry = PageGeometry.for_code_size(index.ivf.code_size, page_bytes_of(index.ivf))
        self.list_bytes: I64 = geometry.pages_for(index.list_sizes) * geometry.page_bytes
        self.kinds = np.array([kind for _, _, kind in data.pairs.pairs()])
        self.sessions = data.pairs.sessions()
        self.nlist = index.nlist
        self._index = index
        self.drafts = self.quantize(vectors[0], self.nlist // 2)
        self.finals = self.quantize(vectors[1], self.nlist // 8)
        # One retrieval before, as a draft: what a conversation said up to the turn before.
        self.previous = self.quantize(np.roll(vectors[1], 1, axis=0), self.nlist // 2)
        self.has_previous = np.concatenate(([False], self.sessions[1:] == self.sessions[:-1]))

    def quantize(self, queries: F32, width: int) -> I64:
        ivf = self._index.ivf
        return ivf.quantize(ivf.transform(np.ascontiguousarray(queries)), width)[0]


def curve(orders: I64, finals: I64, nlist: int, work: I64) -> tuple[F64, F64]:
    """(n, shares) hit rates by bytes and by count when the first share·nprobe lists of ``orders`` (n, w) are there."""
    n, nprobe = finals.shape
    by_bytes, by_count = np.empty((n, len(SHARES))), np.empty((n, len(SHARES)))
    for start in range(0, n, 1024):
        rows = slice(start, start + 1024)
        rank = np.full((len(finals[rows]), nlist), nlist)
        np.put_along_axis(rank, orders[rows], np.arange(orders.shape[1])[None], axis=1)
        found, probed = np.take_along_axis(rank, finals[rows], axis=1), work[finals[rows]]
        for i, share in enumerate(SHARES):
            hit = found < round(share * nprobe)
            by_count[rows, i] = hit.mean(axis=1)
            by_bytes[rows, i] = np.where(hit, probed, 0).sum(axis=1) / np.maximum(probed.sum(axis=1), 1)
    return by_bytes, by_count


def curves(pairs: Pairs, hot: I64, space: str) -> list[dict[str, Any]]:
    """Mean curves by kind of pair, and of two that know nothing of the draft: the hot lists, and a stranger's draft."""
    rows = []
    stranger = np.random.default_rng(0).permutation(len(pairs.drafts))
    even = pairs.sessions % 2 == 0
    everyone = np.ones(len(pairs.drafts), dtype=np.bool_)
    for divisor in (16, 8):
        finals = pairs.finals[:, : pairs.nlist // divisor]
        sides = [("all pairs", pairs.drafts, everyone)]
        sides += [(kind, pairs.drafts, pairs.kinds == kind) for kind in ("trec", "web", "fanout", "cast")]
        sides.append(("cast, turn before", pairs.previous, (pairs.kinds == "cast") & pairs.has_previous))
        sides.append(("hot lists", np.broadcast_to(hot, (len(finals), len(hot))), everyone))
        sides.append(("a stranger's draft", pairs.drafts[stranger], everyone))
        for name, orders, mine in sides:
            by_bytes, by_count = curve(orders[mine], finals[mine], pairs.nlist, pairs.work)
            mean = by_count.mean(axis=0)
            rows.append(
                {
                    "space": space,
                    "nprobe": finals.shape[1],
                    "draft": name,
                    "pairs": int(mine.sum()),
                    "by_bytes": by_bytes.mean(axis=0),
                    "by_count": mean,
                    "hits_per_prefetched_list": [
                        (at(mean, high) - at(mean, low)) / (high - low) for low, high in RANGES
                    ],
                    "halves_differ": abs(by_count[even[mine]].mean(axis=0) - by_count[~even[mine]].mean(axis=0)).max(),
                }
            )
    return rows


def at(mean: F64, share: float) -> float:
    return float(mean[int(np.argmin(abs(SHARES - share)))])


def budgets(pairs: Pairs) -> list[dict[str, Any]]:
    """The paper's budgets as shares of the index: every pair alone, a full prefetch each."""
    rows = []
    total, nobody = int(pairs.list_bytes.sum()), np.zeros(pairs.nlist, dtype=np.bool_)
    for gigabytes in sorted({gigabytes for _, gigabytes, _ in PAPER_BUDGETS}):
        budget = int(gigabytes / PAPER_INDEX_GB * total)
        residents = {"skip": np.zeros((len(pairs.drafts), pairs.nlist), dtype=np.bool_)}
        residents["stop"] = residents["skip"].copy()
        for i, draft in enumerate(pairs.drafts):
            residents["skip"][i, choose_lists(draft[None], pairs.list_bytes, nobody, budget)[0]] = True
            residents["stop"][i, choose_until_full(draft, pairs.list_bytes, budget)] = True
        for divisor in (16, 8):
            finals = pairs.finals[:, : pairs.nlist // divisor]
            row: dict[str, Any] = {"GB of 61": gigabytes, "share": budget / total, "nprobe": finals.shape[1]}
            for rule, resident in residents.items():
                hit, work = np.take_along_axis(resident, finals, axis=1), pairs.work[finals]
                row[f"{rule}: by bytes"] = float((np.where(hit, work, 0).sum(axis=1) / work.sum(axis=1)).mean())
                row[f"{rule}: by count"] = float(hit.mean())
                row[f"{rule}: used"] = float((resident @ pairs.list_bytes).mean() / budget)
            paper = [f"{name} {rate:.0%}" for name, size, rate in PAPER_BUDGETS if size == gigabytes]
            rows.append({**row, "paper (nprobe nlist/8)": ", ".join(paper) if divisor == 8 else ""})
    return rows


def batches(pairs: Pairs, share: float) -> list[dict[str, Any]]:
    """One budget for a batch of pairs of different sessions; noise: the same rule on the other half of the batches."""
    rows = []
    total, nobody = int(pairs.list_bytes.sum()), np.zeros(pairs.nlist, dtype=np.bool_)
    finals = pairs.finals[:, : pairs.nlist // 16]
    order = np.random.default_rng(0).permutation(len(finals))
    for size in BATCHES:
        found: dict[str, list[tuple[float, float, float]]] = {"equal": [], "ranks": []}
        for start in range(0, len(order) - size + 1, size):
            batch = order[start : start + size]
            drafts = pairs.drafts[batch]
            chosen = {
                "equal": choose_equally(drafts, pairs.list_bytes, nobody, int(share * total)),
                "ranks": choose_lists(drafts, pairs.list_bytes, nobody, int(share * total))[0],
            }
            for rule, lists in chosen.items():
                resident = nobody.copy()
                resident[lists] = True
                rate, _ = hit_rates(finals[batch], resident, pairs.work)
                found[rule].append((rate.mean(), rate.min(), pairs.list_bytes[lists].sum() / (share * total)))
        equal, ranks = np.array(found["equal"]), np.array(found["ranks"])
        difference = (ranks - equal)[:, :2]
        low, high = np.percentile(difference[:, 0], [25, 75])
        rows.append(
            {
                "budget": share,
                "batch": size,
                "equal: mean": equal[:, 0].mean(),
                "ranks: mean": ranks[:, 0].mean(),
                "equal: smallest": equal[:, 1].mean(),
                "ranks: smallest": ranks[:, 1].mean(),
                "ranks - equal": difference[:, 0].mean(),
                "25 %": low,
                "75 %": high,
                "A/A": abs(ranks[::2, 0].mean() - ranks[1::2, 0].mean()),
                "equal: used": equal[:, 2].mean(),
                "ranks: used": ranks[:, 2].mean(),
            }
        )
    return rows


def session_orders(sessions: I64, rng: np.random.Generator) -> dict[str, I64]:
    """Sessions in random order, each whole; 32 of them taking turns; and pairs without regard to sessions."""
    starts = np.flatnonzero(np.diff(sessions, prepend=-1))
    runs = [run.tolist() for run in np.split(np.arange(len(sessions)), starts[1:])]
    waiting = [runs[i] for i in rng.permutation(len(runs))]
    whole = [pair for run in waiting for pair in run]
    turns: list[int] = []
    active, waiting = waiting[:INTERLEAVED], waiting[INTERLEAVED:]
    active = [list(run) for run in active]
    while active:
        for run in list(active):
            turns.append(run.pop(0))
            if not run:
                active.remove(run)
                if waiting:
                    active.append(list(waiting.pop(0)))
    return {
        "whole sessions": np.array(whole),
        "32 in turns": np.array(turns),
        "shuffled": rng.permutation(len(sessions)),
    }


def caches(pairs: Pairs, share: float) -> list[dict[str, Any]]:
    """Every pair prefetches ``share`` of the index; the second half of the replay counts, the first warms up.

    The cache has as much room again, so that it is half of the arena. "off, all of it": no cache and twice the budget,
    the same arena for twice the transfer.
    """
    total = int(pairs.list_bytes.sum())
    budget = int(share * total)
    finals = pairs.finals[:, : pairs.nlist // 16]
    drafts = pairs.drafts[:, : 3 * finals.shape[1]]
    sides: list[tuple[str, int, int, float]] = [
        ("off", budget, 0, 2.0),
        ("on, decay 2", budget, budget, 2.0),
        ("on, decay 1.1", budget, budget, 1.1),
        ("on, decay 1.01", budget, budget, 1.01),
        ("off, all of it", 2 * budget, 0, 2.0),
    ]
    rows = []
    orders = [session_orders(pairs.sessions, np.random.default_rng(seed)) for seed in range(3)]
    for order in orders[0]:
        for name, prefetch, room, decay in sides:
            runs = []
            for seeded in orders:
                device = DeviceReplay(
                    list_bytes=pairs.list_bytes,
                    work=pairs.work,
                    budget_bytes=prefetch,
                    share_bytes=room,
                    policy=HotnessPolicy(decay_factor=decay),
                )
                served = [device.serve(drafts[i : i + 1], finals[i : i + 1]) for i in seeded[order].tolist()]
                half = served[len(served) // 2 :]
                runs.append(
                    [
                        float(np.mean([batch.by_bytes for batch in half])),
                        float(np.mean([batch.by_count for batch in half])),
                        float(np.mean([batch.cached_by_bytes for batch in half])),
                        float(np.mean([batch.moved_bytes for batch in half])) / budget,
                    ]
                )
            mean, spread = np.mean(runs, axis=0), np.ptp(runs, axis=0)
            rows.append(
                {
                    "budget": share, "order": order, "cache": name, "by bytes": mean[0], "by count": mean[1],
                    "cache alone": mean[2], "moved / budget": mean[3], "A/A": spread[0],
                }
            )  # fmt: skip
    return rows


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    show(title, list(rows[0]), [[*row.values()] for row in rows])


def main() -> None:
    args = arguments(__doc__ or "", _options)
    import hybridindex as hx

    data = benchmark_dataset(args.dataset)
    nlist = 2975 if data.count > 300_000 else 1300
    raw = np.asarray(data.vectors())
    found: dict[str, list[dict[str, Any]]] = {"curves": [], "budgets": [], "batches": [], "cache": []}
    with tempfile.TemporaryDirectory() as folder:
        for space in ("centred", "raw"):
            vectors = data.centered(raw) if space == "centred" else raw
            with hx.build(vectors, Path(folder) / space, nlist=nlist, metric="ip") as index:
                pairs = Pairs(data, index, space)
                log = np.asarray(data.log_queries)
                probes = pairs.quantize(data.centered(log) if space == "centred" else log, nlist // 16)
                hot = np.argsort(-np.bincount(probes.reshape(-1), minlength=nlist), kind="stable")
                found["curves"] += curves(pairs, hot, space)
                if space == "raw":
                    continue
                found["budgets"] = budgets(pairs)
                found["batches"] = [row for share in (0.05, 0.10) for row in batches(pairs, share)]
                found["cache"] = [row for share in (0.02, 0.05) for row in caches(pairs, share)]

    name = f"{data.name}, nlist {nlist}"
    show(
        f"hit rate of the final query by count (by bytes), lists prefetched in % of nprobe: {name}",
        ("space", "nprobe", "draft", *(f"{share:.0%}" for share in SHOWN), "A/A"),
        [
            (row["space"], row["nprobe"], row["draft"],
             *(f"{at(row['by_count'], s):.2f} ({at(row['by_bytes'], s):.2f})" for s in SHOWN), row["halves_differ"])
            for row in found["curves"]
        ],
    )  # fmt: skip
    show(
        f"hits per prefetched list (1 = every list is wanted): {name}",
        ("space", "nprobe", "draft", *(f"{low:.0%} to {high:.0%}" for low, high in RANGES)),
        [(row["space"], row["nprobe"], row["draft"], *row["hits_per_prefetched_list"]) for row in found["curves"]],
    )
    table(f"budgets, in page bytes: {name}, centred", found["budgets"])
    table(f"one budget per batch, hit rates by bytes: {name}, centred, nprobe {nlist // 16}", found["batches"])
    table(f"cache on and off, arena of twice the budget: {name}, centred, nprobe {nlist // 16}", found["cache"])
    write(args.json, "lookahead_replay", {"dataset": data.name, "nlist": nlist, "shares": SHARES, **found})


if __name__ == "__main__":
    main()
