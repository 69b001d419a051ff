"""TeleRAG's figures and hit-rate tables: our replayed hit rates, and its own model of time with them.

Hit rates are those of real queries and drafts that :mod:`benchmarks.rag.lookahead_replay` and :mod:`benchmarks.rag`
counted
here, looked up at the paper's shares of the index. Times are the paper's Eq. 1 to 4 with its printed CPU times. What
needs the length of its generations, which is not printed, is one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.claims import Claim
from benchmarks.papers.figures.draw import Line, Panel, draw
from benchmarks.papers.figures.published import beside, measured_here, missing, number, numbers
from hybridindex.partitioner.lookahead_budget import MissCurve, lookahead_budget
from hybridindex.studies.hardware import chip

__all__ = ["MISSING", "claims", "figures", "hit_rate", "retrieval_speedup", "whole_speedup"]

PAPER = "telerag"
PIPELINES = ("hyde", "sub_question", "iterative", "iter_retgen", "flare")
#: Of a GPU's memory bandwidth, by scans.
EFFICIENCY = 0.5
_HITS = "ours: 5,514 real pairs, 1,300 lists; bytes as shares of the index (public)"
_TIMES = "public: CPU times, budgets, chips; ours: hit rates; assumed: scans at half the bandwidth"

MISSING = (
    missing("9", "latency by pipeline and data set, RTX 4090", "the time of each generation is not printed"),
    missing(
        "10", "throughput by pipeline, H100, batches of 1 to 8", "generation and CPU times by batch are not printed"
    ),
    missing(
        "11",
        "throughput of 2, 4, 8 GPUs",
        "the spread of times of micro-batches is not printed",
        paper=PAPER,
        keys=("scaling_4",),
    ),
    missing("12", "split of latency by batch", "bars without numbers; Figure 4's shares are in the table"),
    missing(
        "13",
        "throughput gained by the cache",
        "generation times; ours are hit rates: lookahead.md, Cache",
        paper=PAPER,
        keys=("cache",),
    ),
    missing("Table 3 (newer)", "hit rates by budget, nprobe 256", "the numbers are lost in the text at hand"),
)


def _curve(nprobe: int) -> dict[str, Any]:
    """Hit rate by count against prefetched lists, all pairs, centred; ``nprobe`` of our 1,300 lists."""
    data = measured_here("lookahead_replay")
    own: dict[str, Any] = next(
        c for c in data["curves"] if (c["space"], c["nprobe"], c["draft"]) == ("centred", nprobe, "all pairs")
    )
    return {"prefetched": np.array(data["shares"]), "hits": np.array(own["by_count"])}


def hit_rate(gigabytes: float, nprobe: int) -> float:
    """Of the paper's ``nprobe`` (256 or 512 of 4,096 lists) when so many of its 61 GB are prefetched."""
    own = {256: 81, 512: 162}[nprobe]
    budgets = [b for b in measured_here("lookahead_replay")["budgets"] if b["nprobe"] == own]
    known = sorted((b["GB of 61"], b["skip: by count"]) for b in budgets)
    return float(np.interp(gigabytes, [0.0, *(gb for gb, _ in known)], [0.0, *(hits for _, hits in known)]))


def retrieval_speedup(gigabytes: float, nprobe: int, *, name: str, cpu_s: float) -> float:
    """CPU retrieval over ours: the misses on the CPU beside the hits on the GPU (Eq. 2 and 4)."""
    hits = hit_rate(gigabytes, nprobe)
    probed = number(PAPER, "index_gb") * 1e9 * nprobe / number(PAPER, "nlist")
    gpu_s = hits * probed / (chip(name).memory_bytes_per_s * EFFICIENCY)
    return cpu_s / max((1.0 - hits) * cpu_s, gpu_s)


def whole_speedup(share: float, retrieval: float) -> float:
    """Of a pipeline that spends ``share`` of its time in retrieval which becomes ``retrieval`` times as fast."""
    return 1.0 / (1.0 - share + share / retrieval)


def _mean_speedup(nprobe: int, machine: str) -> float:
    """Over the paper's six budgets."""
    key, name = {"server": ("budget_h100", "h100"), "desktop": ("budget_4090", "rtx4090")}[machine]
    cpu_s = numbers(PAPER, f"cpu_{machine}")[(128, 256, 512).index(nprobe)] / 1e3
    found = [retrieval_speedup(gb, nprobe, name=name, cpu_s=cpu_s) for gb in numbers(PAPER, key)]
    return float(np.mean(found))


def claims(*, quick: bool = False) -> Iterator[Claim]:
    """Every number that the paper prints and we have. All of them are quick."""
    for part in (_overlaps, _hits, _budgets, _speedups, _schedulers):
        yield from part()


def _overlaps() -> Iterator[Claim]:
    ours = measured_here("rag")["overlap"]["162"]
    yield beside(
        PAPER,
        "overlap512",
        tuple(100.0 * ours[name]["mean"] for name in PIPELINES),
        inputs="measured here: Gemma 3 270M, 24 questions, nprobe 162 of 1,300",
        note="a small model wanders off more, and its text is shorter",
    )
    pairs = _curve(81)
    yield beside(
        PAPER,
        "overlap256",
        (100.0 * float(np.interp(1.0, pairs["prefetched"], pairs["hits"])),) * len(PIPELINES),
        inputs="ours: 5,514 real pairs without an LLM, nprobe 81 of 1,300",
        note="one number for all pipelines: our pairs are questions and their rewordings by people",
    )
    wide = _curve(162)
    yield beside(
        PAPER,
        "coverage",
        100.0 * float(np.interp(1.5, wide["prefetched"], wide["hits"])),
        inputs=_HITS,
        note="98 % where the draft is the conversation up to the turn before",
    )


def _hits() -> Iterator[Claim]:
    for machine in ("h100", "4090"):
        yield beside(
            PAPER,
            f"hits_{machine}",
            tuple(100.0 * hit_rate(gb, 512) for gb in numbers(PAPER, f"budget_{machine}")),
            inputs=_HITS,
            note="Iter predicts its next question nearly exactly; ours is the same curve for all",
        )


def _budgets() -> Iterator[Claim]:
    curve = _curve(162)
    probed = number(PAPER, "index_gb") * 1e9 * 512 / number(PAPER, "nlist")
    misses = MissCurve(nbytes=curve["prefetched"] * probed, miss_rate=1.0 - np.maximum.accumulate(curve["hits"]))
    bandwidth = numbers(PAPER, "bandwidth")[1] * 1e9
    ratios = []
    for gigabytes in numbers(PAPER, "budget_h100"):
        found = lookahead_budget(
            bandwidth_bytes_per_s=bandwidth,
            t_llm_s=gigabytes * 1e9 / bandwidth,
            miss_curve=misses,
            host_scan_s=numbers(PAPER, "cpu_server")[2] / 1e3,
            share_bytes=1 << 40,
        )
        ratios.append(found.nbytes / (gigabytes * 1e9))
    yield Claim(
        figure="older, section 4.3; newer, Appendix B",
        what="best prefetch over what fits behind generation: HyDE SubQ Iter IRG FLARE S-RAG, H100",
        paper=(1.0,) * 6,
        ours=tuple(ratios),
        inputs="public: bandwidth, CPU time, budgets; ours: miss curve",
        note="above 1: going on past generation pays on this miss curve (partitioner/lookahead_budget.py)",
    )


def _speedups() -> Iterator[Claim]:
    yield beside(
        PAPER,
        "retrieval_256",
        (_mean_speedup(256, "desktop"), _mean_speedup(256, "server")),
        inputs=_TIMES,
        note="their GPU also sorts, and their CPU part is Python threads",
    )
    cpu = [ms / 1e3 for ms in numbers(PAPER, "cpu_server")]
    share = number(PAPER, "cpu_share_512") / 100.0
    llm_s = cpu[2] * (1.0 - share) / share
    yield beside(
        PAPER,
        "whole_older",
        tuple(
            whole_speedup(seconds / (seconds + llm_s), _mean_speedup(max(nprobe, 256), "server"))
            for seconds, nprobe in zip(cpu, (128, 256, 512), strict=True)
        ),
        inputs="public: CPU times, 56 % at nprobe 512; ours: hit rates (of nprobe 256 also for 128)",
        note="mean times of one machine; the paper's mean is over two machines and three models",
    )
    shares = [value / 100.0 for value in numbers(PAPER, "cpu_share")]
    yield beside(
        PAPER,
        "latency_4090",
        whole_speedup(shares[0], _mean_speedup(256, "desktop")),
        inputs=_TIMES + "; public: 41.1 % of the time is retrieval (H100)",
    )
    gpu = [value / 100.0 for value in numbers(PAPER, "gpu_share")]
    ratio = [s / (1 - s) / (g / (1 - g)) for s, g in zip(shares, gpu, strict=True)]
    yield Claim(
        figure="newer, Figure 4",
        what="retrieval on the GPU, times as fast as on the CPU, that the printed shares imply: batch 1, 4",
        paper=None,
        ours=tuple(ratio),
        inputs="public: the four shares, the same generation in both",
        note="the printed factors are lost in the text at hand",
    )
    yield beside(
        PAPER,
        "throughput_h100",
        whole_speedup(shares[1], _mean_speedup(256, "server")),
        inputs=_TIMES + "; public: 60.5 % at batch 4",
        note="the share at batch 8 is not printed; ours leaves out that a batch shares one budget",
    )


def _schedulers() -> Iterator[Claim]:
    times = next(t for t in measured_here("schedulers")["times"] if (t["queries"], t["devices"]) == (128, 8))
    yield beside(
        PAPER, "schedulers_ms", (times["group"], times["assign"]), inputs="measured here, 8 devices of its router"
    )


def figures(folder: Path) -> list[Path]:
    """Hit rates by budget, and by prefetched lists."""
    budgets = np.linspace(0.0, 9.0, 37)
    lines = [Line(label="ours", x=budgets.tolist(), y=[hit_rate(gb, 512) for gb in budgets], marker="")]
    points = [
        (gb, hits / 100.0)
        for machine in ("h100", "4090")
        for gb, hits in zip(numbers(PAPER, f"budget_{machine}"), numbers(PAPER, f"hits_{machine}"), strict=True)
    ]
    x, y = zip(*sorted(points), strict=True)
    by_budget = Panel(
        title="hit rate by budget, nprobe 512",
        xlabel="GB of 61",
        ylabel="lists hit",
        lines=lines,
        also=lambda axis: axis.scatter(x, y, marker="s", s=12, color="0.45", label="published"),
    )
    wide = _curve(162)
    by_lists = Panel(
        title="hit rate by prefetched lists, nprobe 512",
        xlabel="prefetched over probed lists",
        ylabel="lists hit",
        lines=[
            Line(label="ours", x=wide["prefetched"], y=wide["hits"], marker=""),
            Line(label="published", x=[1.5], y=[number(PAPER, "coverage") / 100.0], published=True, marker="s"),
        ],
    )
    return [draw(folder / "telerag-hit-rates.svg", [by_budget, by_lists])]
