"""RAG beside a real LLM: what drafts foretell, what lookahead and PipeRAG hide, and what stale windows cost.

    python -m benchmarks.rag --index IDX --llm http://127.0.0.1:8191 --record
    python -m benchmarks.rag --index IDX --llm http://127.0.0.1:8191 --measure --json benchmarks/results/rag.json

``--record`` runs the six pipelines on real questions and keeps the runs; ``--measure`` does the parts below and keeps
each once it is done, so that an interrupted run goes on; ``--again PART`` measures one anew. Start it on one core and
the server on the other (docs/rag.md). The parts are in rag_overlap, rag_stale and rag_periodic beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments, show, write
from benchmarks.data import benchmark_cache
from benchmarks.rag_overlap import Assumed, overlaps, replays
from benchmarks.rag_periodic import Larger, balance, likelihoods, references, written
from benchmarks.rag_record import questions, record, recorded
from benchmarks.rag_stale import deadlines, similarities
from hybridindex.demo.documents import DOCUMENTS_FILE
from hybridindex.demo.embed import load_embedder
from hybridindex.facade import open_index
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.retriever import CenteredEmbedder, Retriever

PARTS = ("overlap", "staleness", "deadlines", "replay", "piperag", "quality")


def _options(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--balance", type=float, default=0.8, help="a full search against a chunk's generation")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--references", type=int, default=2)


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
            OpenAIGenerator(options.llm, mode="completions", timeout_s=600, idle_s=300, extra={"ignore_eos": True})
        )
        plain = owned.enter_context(OpenAIGenerator(options.llm, mode="completions", timeout_s=600, idle_s=300))
        beside = owned.enter_context(index.router(None, ["cpu"], device_budget_bytes=64 << 20, cache_fraction=0))
        host = owned.enter_context(index.router(None, [], threads=1))
        if options.record:
            retriever = Retriever(beside, centered, texts, k=2, nprobe=options.nprobe)
            record(traces, retriever, plain, questions(options.questions), options.at_once)
        if not options.measure:
            return
        runs = recorded(traces)
        plan = PeriodicRetrieval(
            interval=options.interval, max_tokens=options.tokens, min_nprobe=8, token_starts=embedder.token_starts,
            placement="append",
        )  # fmt: skip

        def on_host(hidden: frozenset[int] = frozenset(), k: int = 1, factor: int = 1) -> Retriever:
            return Retriever(Larger(host, factor, hidden), centered, texts, k=k, nprobe=options.nprobe)

        held_out = references(texts, 48, 8, index.count)
        say(f"{len(runs)} recorded runs, {len(held_out)} held-out documents")
        asked = list(dict.fromkeys(run.question for run in runs))
        list_bytes = float(np.mean(np.sort(index.list_bytes)[::-1]))

        def piperag() -> dict[str, Any]:
            chunk_s, search_s = balance(on_host(), llm, plan, asked[0])
            factor = max(1, round(options.balance * chunk_s / search_s))
            say(f"a chunk takes {chunk_s:.2f} s, a search {search_s * 1e3:.1f} ms: the corpus is taken {factor} times")
            found = written(lambda: on_host(factor=factor), llm, plan, asked[: options.repeats], 1, say)
            return {"factor": factor, "chunk_s": chunk_s, "search_s": search_s, "interval": plan.interval, **found}

        todo: dict[str, Callable[[], dict[str, Any]]] = {
            "overlap": lambda: {
                str(n): overlaps(index, on_host(), runs, n) for n in (index.nlist * 512 // 4096, options.nprobe)
            },
            "staleness": lambda: similarities(on_host, texts, held_out[::3], embedder.token_starts, embedder),
            "deadlines": lambda: deadlines(
                on_host(k=5, factor=24), (asked * 4)[:80],
                [16, 32, 48, 64, 96, 128, 160, 192, 224, 256], [0.25, 0.5, 0.75]
            ),
            "replay": lambda: replays(
                Retriever(beside, centered, texts, k=2, nprobe=options.nprobe), runs, list_bytes * options.nprobe,
                Assumed(),
            ),
            "piperag": piperag,
            "quality": lambda: likelihoods(
                on_host, plain, PeriodicRetrieval(
                    interval=options.interval, token_starts=embedder.token_starts, placement="replace"
                ), held_out[: options.references], say,
            ),
        }  # fmt: skip
        wanted = options.only or PARTS
        parts = {name: measured(options.kept, name, name in options.again, todo[name]) for name in wanted}
        model = llm.model
    tables(parts)
    write(options.json, "rag", {"model": model, "nprobe": options.nprobe, "nlist": index.nlist, **parts})


def tables(parts: dict[str, Any]) -> None:
    """What of the parts is worth a look."""
    for nprobe, rows in parts.get("overlap", {}).items():
        if isinstance(rows, dict):
            show(
                f"draft and final probes alike, nprobe {nprobe}",
                ["pipeline", "overlap", "TeleRAG %", "queries"],
                [[n, f"{r['mean']:.1%}", str(r["telerag_percent"]), r["queries"]] for n, r in rows.items()],
            )
    if "staleness" in parts:
        show(
            "stale windows against the newest",
            ["tokens", "cosine", "shifted", "uncentred", "same passage", "PipeRAG"],
            [[r["staleness"], r["cosine"], r["cosine_shifted"], r["cosine_uncentred"],
              f"{r['same_passage']:.0%}", r["piperag"]]
             for r in parts["staleness"]["rows"]],
        )  # fmt: skip
    if "deadlines" in parts:
        show(
            "searches with deadlines",
            ["window ms", "in time", "nprobe", "largest that fits"],
            [[r["window_ms"], f"{r['in_time']:.1%}", r["nprobe_used"], r["largest_fitting_p95"]]
             for r in parts["deadlines"]["rows"]],
        )  # fmt: skip
    replay = {n: row for n, row in parts.get("replay", {}).items() if isinstance(row, dict) and row["searches"]}
    show(
        "lookahead, replayed (the last column is a projection)",
        ["pipeline", "hit rate", "host ms without", "host ms left", "retrieval share", "projected ratio"],
        [[n, f"{r['hit_rate']:.1%}", r["host_ms_without"], r["host_ms_left"], f"{r['retrieval_share']:.0%}",
          r["projection"]["ratio"]] for n, r in replay.items()],
    )  # fmt: skip
    if "piperag" in parts:
        show(
            "PipeRAG, really run",
            ["schedule", "seconds", "over pipelined"],
            [[n, f"{np.median(r['seconds']):.1f}", r["over_pipelined"]]
             for n, r in parts["piperag"]["schedules"].items()],
        )  # fmt: skip
    quality = {name: row for name, row in parts.get("quality", {}).items() if isinstance(row, dict)}
    show("held-out documents", ["schedule", "perplexity"], [[n, r["perplexity"]] for n, r in quality.items()])


if __name__ == "__main__":
    main()
