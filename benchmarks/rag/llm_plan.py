"""Plans beside a real LLM: the paper's straight line through one KV-cache size against a curve that was measured.

    build/vllm/bin/python -m benchmarks.rag.llm_plan --index build/demo/index --json benchmarks/results/llm_plan.json

Run it where vLLM is installed (``make test-vllm``). A server's throughput is profiled at parts of the memory that index
and KV cache share, and a plan is made for each of several sizes of the index: once knowing only the largest cache (the
line), once the curve. Each predicts a rate that retrieval and LLM sustain. Then a server is started with exactly the
cache that the plan leaves it, a size that the curve was not measured at, and RAG requests arrive at it by themselves:
what it really sustains is the largest rate at which 90 % of them get their first token in time. In time is, as in
VectorLiteRAG (section V), the SLO of the search plus the TTFT of the LLM alone at its throughput limit.

On a CPU cache and index are small: a Llama of random weights, whose requests take as much cache as any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import arguments, show, write
from benchmarks.rag.llm_arrivals import MODEL_NAME, Load, compliant_rate, offered
from hybridindex.api import Index, open_index
from hybridindex.partitioner.plan import Plan
from hybridindex.profiler.llm.measure import LLMRequest, merge_points, profile_llm_server
from hybridindex.types import LLMMeasurement, LLMProfile
from tests.vllm.server import Served, vllm_server
from tests.vllm.tiny_llama import make_tiny_llama

_TOKENS = 256, 128
_ENGINE = ("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "64",
           "--enforce-eager")  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--index", type=Path, required=True, help="the demo's, with a stored profile of this machine")
    parser.add_argument("--shared-mb", type=int, default=64, help="memory that index and KV cache share")
    parser.add_argument("--coverage", type=float, nargs="*", default=[0.1, 0.2, 0.3])
    parser.add_argument("--parts", type=float, nargs="*", default=[0.125, 0.25, 0.5, 1.0], help="of it, for the curve")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="of one size, at most")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals at one rate")
    parser.add_argument("--steps", type=int, default=5, help="rates tried for each plan")
    parser.add_argument("--slo-ms", type=float, default=100.0, help="of the search")


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _served(model: Path, kv_cache_bytes: int) -> AbstractContextManager[Served]:
    log = model.with_name("vllm.log")
    return vllm_server(model, kv_cache_bytes, *_ENGINE, name=MODEL_NAME, log=log, VLLM_PLUGINS="")


def _profiled(model: Path, kv_cache_bytes: int, seconds: float) -> LLMMeasurement:
    request = LLMRequest(
        input_tokens=_TOKENS[0], output_tokens=_TOKENS[1], max_concurrency=64, prompt_lengths=(), max_seconds=seconds
    )
    with _served(model, kv_cache_bytes) as served:
        found = profile_llm_server(served.url, request)
    say(f"{kv_cache_bytes / 2**20:.1f} MiB: {found.profile.throughput_rps:.2f} requests/s")
    return found


def _plans(index: Index, options: argparse.Namespace, llm: LLMProfile | None) -> list[Plan]:
    return [index.plan(options.slo_ms, options.shared_mb << 20, llm=llm, coverage=c) for c in options.coverage]


def _row(model: Path, plans: Sequence[Plan], router: Any, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    line, curve = plans
    kv_bytes = (options.shared_mb << 20) - curve.device_bytes
    with _served(model, kv_bytes) as served:
        rate, tried = compliant_rate(
            lambda rps: offered(served.url, router, load, rps, seed=round(rps * 1000)),
            1.25 * max(line.max_sustainable_qps, curve.max_sustainable_qps),
            options.steps,
        )
    say(f"{kv_bytes / 2**20:.1f} MiB: {rate:.2f} requests/s comply")
    return {
        "kv_bytes": kv_bytes,
        "line_rps": line.max_sustainable_qps,
        "curve_rps": curve.max_sustainable_qps,
        "compliant_rps": rate,
        "tried": tried,
    }


def main() -> None:
    options = arguments(__doc__ or "", _options)
    shared = options.shared_mb << 20
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "llama"
        make_tiny_llama(model)
        measured = [_profiled(model, int(part * shared), options.profile_seconds) for part in sorted(options.parts)]
        curve = merge_points(measured)
        whole = measured[-1].profile
        index = stack.enter_context(open_index(options.index, verify="quick"))
        dataset = benchmark_dataset("demo")
        load = Load(
            queries=dataset.centered(dataset.log_queries[:2048]),
            k=5,
            nprobe=64,
            input_tokens=_TOKENS[0],
            output_tokens=_TOKENS[1],
            seconds=options.seconds,
            warmup_s=options.seconds / 5,
            slo_s=options.slo_ms / 1e3 + whole.ttft_s,
        )
        rows = []
        for coverage, *plans in zip(
            options.coverage,
            _plans(index, options, replace(curve, points=())),
            _plans(index, options, curve),
            strict=True,
        ):
            with index.router(plans[1], ["cpu"], threads=1) as router:
                rows.append({"coverage": coverage, **_row(model, plans, router, load, options)})
    show(
        f"requests/s with 90 % of first tokens within {load.slo_s:.2f} s: predicted, and measured beside vLLM",
        ["coverage", "KV MiB left", "line", "curve", "measured"],
        [[r["coverage"], r["kv_bytes"] / 2**20, r["line_rps"], r["curve_rps"], r["compliant_rps"]] for r in rows],
    )
    write(
        options.json, "llm_plan",
        {"shared_bytes": shared, "curve": curve.points, "slo_s": load.slo_s, "slo_search_ms": options.slo_ms,
         "tokens": _TOKENS, "seconds": options.seconds, "rows": rows,
         "levels": [[asdict(level) for level in one.levels] for one in measured]},
    )  # fmt: skip


if __name__ == "__main__":
    main()
