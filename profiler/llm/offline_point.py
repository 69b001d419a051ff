"""One point of mu(KV) in a process of its own: ``python -P offline_point.py JOB RESULT``.

Reads a job and writes a result, JSON files both. vLLM frees its memory for good only when its process ends, hence one
process for each KV-cache size. Started by :mod:`hybridindex.profiler.llm.offline`; imports nothing of ours.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(job_file: str, result_file: str) -> None:
    """Runs one engine. What the engine refuses is a result with ``refused``, not an error."""
    job = json.loads(Path(job_file).read_text())
    try:
        result = _measure(job)
    except (ValueError, RuntimeError, MemoryError, AssertionError) as error:
        result = {"refused": f"{type(error).__name__}: {error}"}
    except ImportError as error:
        result = {"missing": str(error)}
    Path(result_file).write_text(json.dumps(result))


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        kv_cache_memory_bytes=job["kv_cache_bytes"],
        seed=job["seed"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        **job["engine_args"],
    )
    tokenizer = llm.get_tokenizer()
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(min(len(tokenizer), tokenizer.vocab_size)) if i not in special]
    draw = random.Random(job["seed"])  # noqa: S311 - tokens, not secrets

    def run(n: int, n_output: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
        prompts: list[Any] = [{"prompt_token_ids": draw.choices(ids, k=job["input_tokens"])} for _ in range(n)]
        started = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        short = [a for a in answers if len(a.outputs[0].token_ids) != n_output]
        if short:
            raise RuntimeError(f"{len(short)} of {n} answers have not {n_output} tokens")
        return seconds

    run(2, 2)  # compiles and allocates
    before = _preemptions(llm)
    seconds = run(job["n_requests"], job["output_tokens"])
    return {
        "seconds": seconds,
        "preemptions": _preemptions(llm) - before,
        "kv_tokens": getattr(llm.llm_engine.vllm_config.cache_config, "kv_cache_size_tokens", None),
    }


def _preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name.startswith("vllm:num_preemptions"))


if __name__ == "__main__":
    main(*sys.argv[1:])
