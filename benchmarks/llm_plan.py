"""Plans beside a real LLM: the paper's straight line through one KV-cache size against a curve that was measured.

    build/vllm/bin/python -m benchmarks.llm_plan --index build/demo/index --json benchmarks/results/llm_plan.json

Run it where vLLM is installed (``make test-vllm``). vLLM's throughput is measured at parts of the memory that index and
KV cache share, and a plan is made for each of several sizes of the index: once knowing only the largest cache (the
line), once the curve. What a plan predicts is the rate that retrieval and LLM both sustain; the truth is the smaller of
what the plan says of retrieval and what vLLM then does with exactly the cache that the plan leaves it. The curve is not
measured at those sizes. On a CPU both are small: a Llama of random weights, whose requests take as much cache as any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, show, write
from hybridindex.facade import open_index
from hybridindex.profiler.llm_offline import SweepRequest, sweep_kv_cache
from tests.vllm.tiny_llama import make_tiny_llama


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--index", type=Path, required=True, help="with a stored profile of this machine")
    parser.add_argument("--shared-mb", type=int, default=64, help="memory that index and KV cache share")
    parser.add_argument("--coverage", type=float, nargs="*", default=[0.1, 0.2, 0.3])
    parser.add_argument("--parts", type=float, nargs="*", default=[0.125, 0.25, 0.5, 1.0], help="of it, for the curve")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slo-ms", type=float, default=100.0)


def main() -> None:
    options = arguments(__doc__ or "", _options)
    shared = options.shared_mb << 20
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_llama(Path(folder) / "llama")
        request = SweepRequest(
            model=str(Path(folder) / "llama"),
            kv_cache_bytes=tuple(int(part * shared) for part in options.parts),
            input_tokens=256,
            output_tokens=128,
            n_requests=options.requests,
            engine_args={
                "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 64,
                "enforce_eager": True,
            },
        )  # fmt: skip

        def tell(what: str, done: int, total: int) -> None:
            sys.stderr.write(f"{what}: {done} of {total}\n")

        curve = sweep_kv_cache(request, progress=tell).profile
        line = replace(curve, points=())
        rows: list[dict[str, Any]] = []
        with open_index(options.index) as index:
            plans = [
                {
                    name: index.plan(options.slo_ms, shared, llm=llm, coverage=coverage)
                    for name, llm in (("line", line), ("curve", curve))
                }
                for coverage in options.coverage
            ]
            # Of retrieval alone.
            alone = [index.plan(options.slo_ms, shared, coverage=c).max_sustainable_qps for c in options.coverage]
        left = [shared - made["curve"].device_bytes for made in plans]
        truth = dict(sweep_kv_cache(replace(request, kv_cache_bytes=tuple(left)), progress=tell).profile.points)
        for coverage, made, size, retrieval in zip(options.coverage, plans, left, alone, strict=True):
            row: dict[str, Any] = {
                "coverage": coverage, "kv_bytes": size, "llm_rps": truth[size], "retrieval_rps": retrieval,
                "measured_rps": min(truth[size], retrieval),
            }  # fmt: skip
            for name, plan in made.items():
                row[name] = {"predicted_rps": plan.max_sustainable_qps, "verdict": plan.verdict, "reason": plan.reason}
            rows.append(row)
    show(
        "requests/s that retrieval and LLM both sustain: predicted, and done by vLLM",
        ["coverage", "KV MiB left", "line", "curve", "vLLM", "retrieval alone"],
        [[r["coverage"], r["kv_bytes"] / 2**20, r["line"]["predicted_rps"], r["curve"]["predicted_rps"],
          r["measured_rps"], r["retrieval_rps"]] for r in rows],
    )  # fmt: skip
    write(
        options.json, "llm_plan",
        {"shared_bytes": shared, "curve": curve.points, "requests": options.requests, "slo_ms": options.slo_ms,
         "tokens": [curve.input_tokens, curve.output_tokens], "rows": rows},
    )  # fmt: skip


if __name__ == "__main__":
    main()
