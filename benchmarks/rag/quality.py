"""What schedules of retrieval are worth: perplexity of documents of the corpus as they would have continued them.

Passages of the document itself and around it are left out, or a search would find the answer. All schedules probe
equally many lists but one, which probes half as many: about what a deadline leaves of a search that takes 1.6 times as
long as its window. Differences are judged by document: perplexities of two documents differ far more than those of two
schedules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rag.answer_quality import Scorer, periodic_likelihood
from benchmarks.rag.corpus import Reference
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.periodic import PeriodicRetrieval, Schedule
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps

__all__ = ["likelihoods"]

Rows = dict[str, Any]

HALF = "pipelined, half of the lists"


def likelihoods(
    open_retriever: Callable[[frozenset[int], int], Retriever], generator: OpenAIGenerator, scorer: Scorer,
    plan: PeriodicRetrieval, nprobe: int, texts: Sequence[Reference], kept: Path, progress: Callable[[str], object],
) -> Rows:  # fmt: skip
    """Per schedule, over all tokens. ``kept``: a file of what is known, so that an interrupted run goes on."""
    plans = {str(schedule): replace(plan, schedule=schedule) for schedule in Schedule}
    plans["pipelined, not shifted"] = replace(plan, schedule=Schedule.PIPELINED, shift=False)
    # What PipeRAG compares with: RETRO retrieves once per 64 tokens.
    plans["synchronous, every 64"] = replace(plan, schedule=Schedule.SYNCHRONOUS, interval=64)
    plans["pipelined, every 16"] = replace(plan, schedule=Schedule.PIPELINED, interval=16)
    plans[HALF] = replace(plan, schedule=Schedule.PIPELINED)
    known: dict[str, list[float]] = json.loads(kept.read_text()) if kept.exists() else {}

    def key_of(number: int, name: str) -> str:
        return f"{number} {plans[name].placement} {plans[name].interval} {nprobe} {name}"

    for number, reference in enumerate(texts):
        for name, one in plans.items():
            key = key_of(number, name)
            if key not in known:
                retriever = open_retriever(reference.ids, max(1, nprobe // 2) if name == HALF else nprobe)
                with Steps(reference.question, retriever, generator) as steps:
                    found = periodic_likelihood(one, steps, scorer, reference.text)
                known[key] = [found.tokens, found.log_likelihood]
                kept.write_text(json.dumps(known))
        progress(f"reference {number} of {len(texts)}")
    rows = {name: np.array([known[key_of(number, name)] for number in range(len(texts))]) for name in plans}
    return {"placement": plan.placement, "interval": plan.interval, "references": len(texts), **_rows(rows)}


def _rows(by_schedule: dict[str, Any]) -> Rows:
    """From (references, 2) tokens and log likelihoods. ``against``: nats a token gained over another schedule."""
    rng = np.random.default_rng(0)
    found: Rows = {}
    for name, values in by_schedule.items():
        tokens, logs = values[:, 0], values[:, 1]
        against = {}
        for other, theirs in by_schedule.items():
            gain = logs - theirs[:, 1]
            drawn = rng.integers(0, len(gain), (2000, len(gain)))
            means = gain[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)
            against[other] = {
                "nats_per_token": float(gain.sum() / tokens.sum()),
                "interval_95": np.quantile(means, [0.025, 0.975]).tolist(),
                "better": float(np.mean(gain > 0)),
            }
        found[name] = {
            "perplexity": math.exp(-logs.sum() / tokens.sum()),
            "tokens": int(tokens.sum()),
            "each": np.exp(-logs / tokens).tolist(),
            "against": against,
        }
    return found
