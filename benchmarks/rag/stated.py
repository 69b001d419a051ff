"""Pipelines with and without lookahead, and PipeRAG's schedules, without an LLM at hand. The retrieval is real.

- **pipelines**: recorded runs (``--trace``, made by ``hybridindex chat --record`` with a real LLM) are replayed at
  their own pace against the same router, with lookahead and without. Without a trace, HyDE is played with real draft
  and final queries of the demo data: the final query stands for what an LLM would have written, in ``--ttft-ms`` and
  ``--tpot-ms`` per token, which is said in the result.
- **schedules**: a text of the corpus is "generated" chunk by chunk at that pace; retrieval once, before each chunk, or
  hidden beside the chunk before. What counts is the time that generation stood still, and nprobe.

Sides are interleaved in an order that changes each round; the same side twice gives the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.data import benchmark_cache, benchmark_dataset
from benchmarks.common.measure import arguments, show, write
from hybridindex.api import open_index
from hybridindex.cli.routers import choose_plan
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentStore
from hybridindex.rag.embed import load_embedder
from hybridindex.rag.periodic import PeriodicRetrieval, Schedule
from hybridindex.rag.pipelines import PIPELINES
from hybridindex.rag.records import Answer, Generated, Piece, Retrieved
from hybridindex.rag.retriever import CenteredEmbedder, Retriever
from hybridindex.rag.steps import Steps
from hybridindex.rag.tokens import TokenStarts
from hybridindex.rag.trace import ReplayGenerator, RunTrace, read_traces


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--index", type=Path, required=True, help="an index with its documents.sqlite: the demo's")
    parser.add_argument("--trace", type=Path, help="recorded runs; default: pairs of the demo data as HyDE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-mb", type=int, default=64)
    parser.add_argument("--nprobe", type=int, help="default the plan's, then the index's")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--ttft-ms", type=float, default=30.0, help="of stated generations")
    parser.add_argument("--tpot-ms", type=float, default=2.0)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=6)


def stated(name: str, texts: Sequence[str], ttft_s: float, tpot_s: float, finish: str = "stop") -> Generated:
    """A generation of these tokens at that pace."""
    pieces = tuple(Piece(text=t, tokens=1, at_s=ttft_s + n * tpot_s) for n, t in enumerate(texts))
    seconds = ttft_s + max(0, len(texts) - 1) * tpot_s
    digest = hashlib.sha256(b"").hexdigest()
    return Generated(
        name=name, pieces=pieces, finish=finish, prompt_tokens=0,
        completion_tokens=0, prompt_sha256=digest, max_tokens=max(1, len(texts)),
        started_s=0.0, seconds=seconds,
    )  # fmt: skip


def tokens_of(text: str, starts: TokenStarts) -> list[str]:
    places = starts([text])[0].tolist()
    return [text[a:b] for a, b in itertools.pairwise([*places, len(text)])]


def pair_runs(count: int, starts: TokenStarts, ttft_s: float, tpot_s: float) -> list[RunTrace]:
    """HyDE runs of real pairs, whole sessions apart."""
    pairs = benchmark_dataset("demo").pairs.pairs()
    chosen = np.random.default_rng(0).permutation(len(pairs))[:count]
    return [
        RunTrace(
            pipeline="hyde",
            question=pairs[i][0],
            events=(
                stated("hypothesis", tokens_of(pairs[i][1], starts), ttft_s, tpot_s),
                stated("answer", ["."], ttft_s, tpot_s),
            ),
        )
        for i in chosen.tolist()
    ]


@dataclass(slots=True)
class Side:
    """What one side took, run by run."""

    retrieval_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)

    def take(self, answer: Answer) -> None:
        searches = [event for event in answer.events if isinstance(event, Retrieved)]
        self.retrieval_ms.append(answer.retrieval_s * 1e3)
        self.total_ms.append(answer.seconds * 1e3)
        self.hit_rate += [rate for search in searches for rate in search.hit_rate]

    def row(self) -> dict[str, float]:
        low, high = np.percentile(self.retrieval_ms, [25, 75])
        return {
            "retrieval_ms": float(np.median(self.retrieval_ms)),
            "quartiles": [float(low), float(high)],  # type: ignore[dict-item]
            "total_ms": float(np.median(self.total_ms)),
            "hit_rate": float(np.mean(self.hit_rate)) if self.hit_rate else 0.0,
        }


def pipelines(retriever: Retriever, runs: Sequence[RunTrace]) -> dict[str, Any]:
    """Each run by every side, in an order that changes."""
    sides = {"without": False, "lookahead": True, "lookahead again": True}
    taken = {name: Side() for name in sides}
    rng = np.random.default_rng(1)
    for run in runs:
        for name in rng.permutation(list(sides)).tolist():
            generator = ReplayGenerator(run.generations)
            with Steps(run.question, retriever, generator, lookahead=sides[name]) as steps:
                taken[name].take(PIPELINES[run.pipeline](steps))
    found: dict[str, Any] = {name: side.row() for name, side in taken.items()}
    ratios = {
        name: np.array(side.retrieval_ms) / np.array(taken["lookahead"].retrieval_ms) for name, side in taken.items()
    }
    for name, ratio in ratios.items():
        found[name]["over_lookahead"] = float(np.median(ratio))
    return found


def schedules(
    retriever: Retriever, plan: PeriodicRetrieval, text: Sequence[str], pace: tuple[float, float], repeats: int
) -> dict[str, Any]:
    """The same text by every schedule; generation times are stated, so all else is retrieval."""
    chunks = [text[start : start + plan.interval] for start in range(0, len(text), plan.interval)]
    said = [stated("chunk", chunk, *pace, finish="length") for chunk in chunks]
    alone_ms = sum(one.seconds for one in said) * 1e3
    rows: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in Schedule}
    rng = np.random.default_rng(2)
    models = {schedule: ChunkTimeModel() for schedule in Schedule}
    for _ in range(repeats):
        for schedule in rng.permutation(list(Schedule)).tolist():
            with Steps(" ".join(text[:8]), retriever, ReplayGenerator(said)) as steps:
                written = replace(plan, schedule=Schedule(schedule)).run(steps, models[schedule])
            used = [n for e in written.answer.events if isinstance(e, Retrieved) for n in e.nprobe_used]
            rows[schedule].append((written.answer.seconds * 1e3 - alone_ms, float(np.mean(used)) if used else 0.0))
    return {
        schedule: {
            "standing_ms": float(np.median([standing for standing, _ in values])),
            "nprobe": float(np.mean([used for _, used in values])),
            "generation_ms": alone_ms,
        }
        for schedule, values in rows.items()
    }


def main() -> None:
    options = arguments(__doc__ or "", _options)
    pace = options.ttft_ms / 1e3, options.tpot_ms / 1e3
    embedder = load_embedder(benchmark_cache() / "downloads" / "wheels")
    with open_index(options.index) as index, DocumentStore(options.index / DOCUMENTS_FILE) as texts:
        texts.check_index(index.fingerprint)
        assert texts.info.mean is not None
        if options.trace is not None:
            runs = list(itertools.islice(read_traces(options.trace), options.runs))
            runs = [run for run in runs if run.pipeline in PIPELINES]
        else:
            runs = pair_runs(options.runs, embedder.token_starts, *pace)
        _, plan = choose_plan(index, "latest")
        with index.router(
            plan=None, devices=[options.device], device_budget_bytes=options.budget_mb << 20, cache_fraction=0
        ) as router:
            label = router.devices[0].label
            nprobe = options.nprobe or (plan.nprobe if plan is not None else index.nprobe)
            retriever = Retriever(router, CenteredEmbedder(embedder, texts.info.mean), texts, k=5, nprobe=nprobe)
            by_lookahead = pipelines(retriever, runs)
            ids = np.random.default_rng(3).permutation(index.count)[: options.chunks * options.interval // 60 + 1]
            text = [t for i in ids.tolist() for t in tokens_of(texts.read([i])[i].document.text, embedder.token_starts)]
            size = options.chunks * options.interval
            periodic = PeriodicRetrieval(interval=options.interval, max_tokens=size, token_starts=embedder.token_starts)
            by_schedule = schedules(retriever, periodic, text[:size], pace, max(3, options.runs // 8))
    show(
        f"pipelines, {len(runs)} runs, nprobe {nprobe}, {label}",
        ["side", "retrieval ms", "over lookahead", "total ms", "hit rate"],
        [
            [name, f"{row['retrieval_ms']:.2f}", f"{row['over_lookahead']:.2f}", f"{row['total_ms']:.0f}",
             f"{row['hit_rate']:.1%}"]
            for name, row in by_lookahead.items()
        ],
    )  # fmt: skip
    show(
        f"schedules, {options.chunks} chunks of {options.interval} tokens",
        ["schedule", "generation stood still ms", "nprobe"],
        [[name, f"{row['standing_ms']:.2f}", f"{row['nprobe']:.0f}"] for name, row in by_schedule.items()],
    )
    write(
        options.json,
        "rag_stated",
        {
            "device": label,
            "nprobe": nprobe,
            "generations": "recorded" if options.trace is not None else
            f"stated: {options.ttft_ms:g} ms to the first token, {options.tpot_ms:g} ms per token",
            "pipelines": by_lookahead,
            "schedules": by_schedule,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
