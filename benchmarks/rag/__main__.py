"""RAG beside a real LLM: what drafts foretell, what lookahead and PipeRAG hide, and what stale windows cost.

    python -m benchmarks.rag --index IDX --llm http://127.0.0.1:8191 --record
    python -m benchmarks.rag --index IDX --llm http://127.0.0.1:8191 --measure --json benchmarks/results/rag.json

``--record`` runs the six pipelines on real questions and keeps the runs; ``--measure`` does the parts below and keeps
each once it is done, so that an interrupted run goes on; ``--again PART`` measures one anew. Start it on one core and
the server on the other (docs/rag.md). The parts are in rag_overlap, rag_stale, rag_windows, rag_periodic and
rag_quality beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common.data import benchmark_cache, benchmark_dataset
from benchmarks.common.measure import arguments, write
from benchmarks.rag.corpus import Hiding, host_router, references
from benchmarks.rag.overlap import Assumed, overlaps, replays
from benchmarks.rag.periodic import balance, written
from benchmarks.rag.quality import likelihoods
from benchmarks.rag.record import questions, record, recorded
from benchmarks.rag.scorer import LocalScorer
from benchmarks.rag.sentences import SentenceEmbedder
from benchmarks.rag.stale import similarities
from benchmarks.rag.tables import tables
from benchmarks.rag.windows import Ladder, beside_llm, stated
from hybridindex.api import open_index
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentStore
from hybridindex.rag.embed import load_embedder
from hybridindex.rag.generator import OpenAIGenerator, Sampling
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.retriever import CenteredEmbedder, Embedder, Retriever

PARTS = ("overlap", "staleness", "deadlines", "replay", "piperag", "larger", "windows", "quality")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(refuse=parser.error)
    parser.add_argument("--index", type=Path, required=True, help="the demo's, with its documents.sqlite")
    parser.add_argument("--llm", required=True, metavar="URL", help="with /v1/completions, ignore_eos and echo: vLLM")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--again", choices=PARTS, action="append", default=[])
    parser.add_argument("--only", choices=PARTS, action="append", help="default all parts")
    parser.add_argument("--kept", type=Path, default=Path("build/rag"), help="traces and finished parts")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--nprobe", type=int, default=256, help="of replays and PipeRAG")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--balance", type=float, default=0.8, help="a full search against a chunk's generation")
    parser.add_argument("--repeats", type=int, default=2, help="questions of the parts with an LLM")
    parser.add_argument("--references", type=int, default=16)
    parser.add_argument("--placement", choices=("insert", "replace"), default="insert")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="of the served model: quality without its echo")
    parser.add_argument("--sentences", type=Path, metavar="FOLDER", help="all-MiniLM-L6-v2, for staleness")


def say(text: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")


def measured(kept: Path, name: str, again: bool, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The part from its file, or measured now and kept, with load and time beside it."""
    file = kept / f"{name}.json"
    if file.exists() and not again:
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    say(f"{name} ...")
    started, load = time.perf_counter(), os.getloadavg()[0]
    found = measure()
    found["load_average"] = [load, os.getloadavg()[0]]
    found["measured_s"] = time.perf_counter() - started
    file.write_text(json.dumps(found))
    say(f"{name}: {found['measured_s']:.0f} s")
    return found


def main() -> None:
    options = arguments(__doc__ or "", _options)
    if not (options.record or options.measure):
        options.refuse("give --record, --measure or both: without them there is nothing to do")
    options.kept.mkdir(parents=True, exist_ok=True)
    traces = options.kept / "traces.jsonl"
    embedder = load_embedder(benchmark_cache() / "downloads" / "wheels")
    with contextlib.ExitStack() as owned:
        index = owned.enter_context(open_index(options.index, verify="quick"))
        texts = owned.enter_context(DocumentStore(options.index / DOCUMENTS_FILE))
        texts.check_index(index.fingerprint)
        assert texts.info.mean is not None
        centered = CenteredEmbedder(embedder, texts.info.mean)
        llm = owned.enter_context(
            OpenAIGenerator(
                options.llm,
                mode="completions",
                timeout_s=600,
                idle_s=300,
                sampling=Sampling(extra={"ignore_eos": True}),
            )
        )
        plain = owned.enter_context(OpenAIGenerator(options.llm, mode="completions", timeout_s=600, idle_s=300))
        if options.record:
            beside = owned.enter_context(index.router(None, ["cpu"], device_budget_bytes=64 << 20, cache_fraction=0))
            retriever = Retriever(beside, centered, texts, k=2, nprobe=options.nprobe)
            record(traces, retriever, plain, questions(options.questions), options.at_once)
        if not options.measure:
            return
        asked = questions(options.questions)
        plan = PeriodicRetrieval(
            interval=options.interval, max_tokens=options.tokens, min_nprobe=8, token_starts=embedder.token_starts,
            placement=options.placement,
        )  # fmt: skip
        held_out = references(texts, 48, 8, index.count)

        def on_host(
            stack: contextlib.ExitStack, factor: int = 1, k: int = 1, nprobe: int = options.nprobe
        ) -> Retriever:
            return Retriever(stack.enter_context(host_router(index, factor)), centered, texts, k=k, nprobe=nprobe)

        def factor_for(part: float, nprobe: int, at: PeriodicRetrieval) -> dict[str, Any]:
            """How much larger the corpus has to be for a full search to take that part of a chunk."""
            with contextlib.ExitStack() as stack:
                # Long enough for the search's own cost to vanish beside the scan.
                chunk_s, search_s = balance(on_host(stack, 32, nprobe=nprobe), llm, at, asked[0])
            factor = max(1, round(32 * part * chunk_s / search_s))
            say(f"a chunk takes {chunk_s:.2f} s, a search {search_s / 32 * 1e3:.2f} ms: {factor} times the corpus")
            return {"factor": factor, "chunk_s": chunk_s, "search_s": search_s / 32, "interval": at.interval}

        def overlap() -> dict[str, Any]:
            with contextlib.ExitStack() as stack:
                retriever, runs = on_host(stack), recorded(traces)
                return {
                    str(n): overlaps(index, retriever, runs, n)
                    for n in (index.nlist * 256 // 4096, index.nlist * 512 // 4096, options.nprobe)
                }

        def staleness() -> dict[str, Any]:
            corpus = benchmark_dataset("demo")
            views: dict[str, Embedder] = {"static, centred": centered, "static": embedder}
            if options.sentences is not None:
                views["sentences"] = SentenceEmbedder(options.sentences)
            return similarities(
                texts, corpus.centered(corpus.vectors()), held_out, embedder.token_starts, centered, views,
                (1 / 16, 1 / 4, 1.0),
            )  # fmt: skip

        def deadlines() -> dict[str, Any]:
            with contextlib.ExitStack() as stack:
                return stated(on_host(stack, 24, k=5), (asked * 4)[:80], range(16, 257, 16), (0.25, 0.5, 0.75))

        def replay() -> dict[str, Any]:
            factor = 24
            # The stand-in has the other core.
            with host_router(index, factor, ["cpu"], device_budget_bytes=64 << 20, cache_fraction=0) as router:
                retriever = Retriever(router, centered, texts, k=2, nprobe=options.nprobe)
                query_bytes = float(np.mean(index.list_bytes)) * options.nprobe * factor
                return {"factor": factor, **replays(router, retriever, recorded(traces), query_bytes, Assumed())}

        def piperag(part: float) -> dict[str, Any]:
            found = factor_for(part, options.nprobe, plan)
            with contextlib.ExitStack() as stack:
                retriever = on_host(stack, found["factor"])
                return {**found, **written(lambda: retriever, llm, plan, asked[: options.repeats], 1, say)}

        def windows() -> dict[str, Any]:
            # A full search takes twice a window: about half of the lists fit, and the ladder stands around that.
            short, most = replace(plan, interval=16), 2 * options.nprobe
            found = factor_for(2.0, most, short)
            steps = [round(options.nprobe * part) for part in (0.6, 1.1, 0.8, 1.3, 1.0, 0.7, 1.2, 0.9)]
            with contextlib.ExitStack() as stack:
                ours, free = (on_host(stack, found["factor"], nprobe=most) for _ in range(2))
                ladder = Retriever(Ladder(free.source, itertools.cycle(steps)), centered, texts, k=1, nprobe=most)
                return {**found, **beside_llm(ours, ladder, llm, short, asked[: options.repeats], say)}

        def quality() -> dict[str, Any]:
            with contextlib.ExitStack() as stack:
                host = on_host(stack)

                def without(hidden: frozenset[int], nprobe: int) -> Retriever:
                    return Retriever(Hiding(host.source, hidden), centered, texts, k=1, nprobe=nprobe)

                kept = options.kept / "quality.texts.json"
                short = references(texts, options.references, 5, index.count)
                scorer = plain if options.weights is None else LocalScorer(options.weights)
                return likelihoods(without, plain, scorer, plan, options.nprobe, short, kept, say)

        todo = {
            "overlap": overlap, "staleness": staleness, "deadlines": deadlines, "replay": replay,
            "piperag": lambda: piperag(options.balance), "larger": lambda: piperag(2 * options.balance),
            "windows": windows, "quality": quality,
        }  # fmt: skip
        wanted = options.only or PARTS
        parts = {name: measured(options.kept, name, name in options.again, todo[name]) for name in wanted}
        served = {"model": llm.model, "server": httpx.get(f"{options.llm}/version", trust_env=False).json()}
    tables(parts)
    write(options.json, "rag", {**served, "nprobe": options.nprobe, "nlist": index.nlist, **parts})


if __name__ == "__main__":
    main()
