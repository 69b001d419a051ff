"""Rows that come and go: what it costs, beside other systems, and what it does to searches.

Parts, each of which can be chosen (``--parts``):

latency        p99 of searches while a tenth of the write capacity is written and deleted, and lists are compacted, over
               that of quiet searches in windows before and behind; target 1.5 times.
add            durable adds in batches of 1,000, and one by one from 16 threads; target: faster than every other system
               at equal durability. Systems take turns, each in a process that stands still while others work.
recall         after all rows were replaced by others of other topics, beside fresh builds of the same rows: recall@10
               at equal scanned bytes within 0.5 points, scanned bytes at equal recall within 10 %.
checkpoint     one row and the maintenance behind it; targets 50 ms and 1 MiB.
amplification  bytes written over a turnover, for each byte of new rows; target 8.

Searches of an index without updates are compared with those of an older commit by ``benchmarks.host.revisions``.

Other systems come with ``pip install -e '.[rivals]' chromadb pymilvus milvus-lite pgserver pgvector psycopg``, or in an
environment of their own (``--python``); those that are missing are not measured, and named. What takes long to load
stays in the cache. Parts that are run one after the other into the same file stay side by side there. Floors: our own
side over itself, quiet windows over quiet windows, and fresh builds with two seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.data import benchmark_cache
from benchmarks.common.measure import Attempts, arguments, environment, write_json
from benchmarks.host.update_adds import Scale, add, checkpoint
from benchmarks.host.update_bytes import amplification
from benchmarks.host.update_latency import latency
from benchmarks.host.update_recall import recall

PARTS = ("add", "checkpoint", "latency", "amplification", "recall")
#: Less than three minutes.
QUICK: dict[str, Any] = {
    "count": 30_000, "few": 3_000, "rounds": 3, "turn_s": 0.5, "turn_rows": 3_000, "single_s": 0.5, "repeats": 5,
    "window_s": 1.5, "windows": 2, "capacity_s": 3.0, "steps": 10, "queries": 200, "not_durable": False,
}  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help="few rows and rounds: whether it runs, not what it finds")
    parser.add_argument("--count", type=int, help="rows that are there first (default 500,000)")
    parser.add_argument("--windows", type=int, help="of each kind, of latency (default 8)")
    parser.add_argument("--window-s", type=float, help="seconds of each (default 12)")
    parser.add_argument("--dataset", default="full", help="real rows of recall: demo, full or none")
    parser.add_argument("--codecs", nargs="+", default=["flat", "sq8"], help="of recall and amplification")
    parser.add_argument("--peers", nargs="+", default=[], help="systems of add and checkpoint (default: all)")
    parser.add_argument("--python", type=Path, help="that has the packages of other systems (default: this one)")
    parser.add_argument(
        "--scratch", type=Path, default=Path("/tmp"), help="folder of the indexes, on the disk to measure"
    )


def main() -> None:
    args = arguments(__doc__, _options)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"unknown parts: {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    scale = Scale(peers=tuple(args.peers), python=args.python, cache=benchmark_cache(), scratch=args.scratch)
    if args.quick:
        scale = replace(scale, **QUICK)
    if args.count:
        scale = replace(scale, count=args.count, few=min(scale.few, args.count))
    if args.windows:
        scale = replace(scale, windows=args.windows)
    if args.window_s:
        scale = replace(scale, window_s=args.window_s)
    codecs, dataset = tuple(args.codecs), args.dataset
    if args.quick and dataset != "none":
        dataset = "demo"
    run = {
        "add": lambda: add(scale),
        "checkpoint": lambda: checkpoint(scale),
        "latency": lambda: latency(scale),
        "amplification": lambda: amplification(scale, codecs),
        "recall": lambda: recall(scale, dataset, codecs, scale.count),
    }
    attempt = Attempts()
    for part in parts:
        began = time.perf_counter()
        with attempt(part):
            result = run[part]()
            result |= {"count": scale.count, "quick": args.quick, "seconds": time.perf_counter() - began}
            _keep(args.json, part, result)
    attempt.end()


def _keep(file: Path | None, part: str, result: dict[str, Any]) -> None:
    """Beside the other parts in ``file``, each with the machine as it was."""
    if file is None:
        return
    parts: dict[str, Any] = {}
    if file.exists():
        parts = json.loads(file.read_text()).get("parts", {})
    here = environment()
    write_json(
        file, {"benchmark": "updates", "environment": here, "parts": {**parts, part: {**result, "environment": here}}}
    )


if __name__ == "__main__":
    main()
