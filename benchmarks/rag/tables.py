"""What of ``benchmarks.rag`` is worth a look, as tables on stdout."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common.measure import show

__all__ = ["tables"]


def tables(parts: dict[str, Any]) -> None:
    """What of the parts is worth a look."""
    for nprobe, rows in parts.get("overlap", {}).items():
        if isinstance(rows, dict) and rows:
            show(
                f"draft and final probes alike, nprobe {nprobe}",
                ["pipeline", "overlap", "TeleRAG %", "queries"],
                [[n, f"{r['mean']:.1%}", str(r["telerag_percent"]), r["queries"]] for n, r in rows.items()],
            )
            parts_of_nprobe = list(next(iter(rows.values())).get("prefetched", {}))
            show(
                f"hit rate when so much of nprobe {nprobe} is prefetched",
                ["pipeline", *[f"{float(part):.0%}" for part in parts_of_nprobe]],
                [[n, *[f"{r['prefetched'][part]:.1%}" for part in parts_of_nprobe]] for n, r in rows.items()],
            )
    for name, view in parts.get("staleness", {}).get("views", {}).items():
        show(
            f"stale windows against the newest; {name}: random pairs {view['random_pairs']:.3f}, the newest window's "
            f"first and second passage {view['first_and_second']:.3f}",
            ["tokens", "same passage", "cosine", "shifted", "to what follows", "shift gains", "PipeRAG"],
            [[r["staleness"], f"{r['same_passage']:.0%}", r["cosine"], r["cosine_shifted"], r["to_following"],
              r["shift_gains_to_following"], r["piperag"]] for r in view["rows"]],
        )  # fmt: skip
    for corpus in parts.get("staleness", {}).get("corpora", []):
        show(
            f"cosines with {corpus['passages']} passages",
            ["tokens", *next(iter(corpus["cosine"].values()))],
            [[name, *row.values()] for name, row in corpus["cosine"].items()],
        )
    if "deadlines" in parts:
        show(
            "searches with deadlines",
            ["window ms", "in time", "nprobe", "largest that fits"],
            [[r["window_ms"], f"{r['in_time']:.1%}", r["nprobe_used"], r["largest_fitting_p95"]]
             for r in parts["deadlines"]["rows"]],
        )  # fmt: skip
    replay: dict[str, Any] = {
        n: row for n, row in parts.get("replay", {}).items() if isinstance(row, dict) and row["searches"]
    }
    if replay:
        show(
            "lookahead, replayed (ratios projected, by the host's share; after the slash: if searches did not wait)",
            ["pipeline", "hit rate", "host ms without", "host ms left",
             *(f"at {p['share']:.0%}" for p in next(iter(replay.values()))["projections"])],
            [[n, f"{r['hit_rate']:.1%}", r["host_ms_without"], r["host_ms_left"],
              *(f"{p['ratio']:.2f} / {p['ratio_if_it_began_at_once']:.2f}" for p in r["projections"])]
             for n, r in replay.items()],
        )  # fmt: skip
    for name in ("piperag", "larger"):
        if name not in parts:
            continue
        found = parts[name]
        part = found["factor"] * found["search_s"] / found["chunk_s"]
        show(
            f"PipeRAG, really run, a full search {part:.1f} of a chunk; "
            f"median error of foretold runs {found['projected']['median_error']:.1%}, of chunks "
            f"{found['deadlines']['chunk_time_error']['median']:.1%}",
            ["schedule", "seconds", "over pipelined", "over none", "median nprobe"],
            [[n, f"{np.median(r['seconds']):.1f}", r["over_pipelined"], r["over_none"],
              float(np.median(r["nprobe_used"])) if r["nprobe_used"] else 0]
             for n, r in found["schedules"].items()],
        )  # fmt: skip
    if "windows" in parts:
        found = parts["windows"]
        show(
            "deadlines beside the LLM",
            ["searches", "within window", "mean nprobe", "oracle's", "over oracle's"],
            [[found["searches"], f"{found['within_window']:.1%}", float(np.mean(found["nprobe_used"])),
              float(np.mean(found["oracle_nprobe"])), found["used_over_oracle"]["mean"]]],
        )  # fmt: skip
    quality = {name: row for name, row in parts.get("quality", {}).items() if isinstance(row, dict)}
    if quality:
        show(
            "held-out documents: perplexity, and nats a token gained over no retrieval",
            ["schedule", "perplexity", "nats", "95 %", "documents better"],
            [[n, r["perplexity"], r["against"]["none"]["nats_per_token"],
              str([round(v, 4) for v in r["against"]["none"]["interval_95"]]), f"{r['against']['none']['better']:.0%}"]
             for n, r in quality.items()],
        )  # fmt: skip
