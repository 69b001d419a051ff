"""The vLLM that the tests here share, with what it takes to be quick on a CPU, and our commands beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.vllm.server import Served, offline, vllm_server

T = TypeVar("T")

__all__ = [
    "KV_BYTES",
    "MAX_MODEL_LEN",
    "chat",
    "command",
    "environment",
    "metric",
    "serve",
    "wait_for",
    "wait_until_still",
    "written",
]

KV_BYTES = 32 << 20
#: As much as takes seconds to write: what is broken off must not be over before.
MAX_MODEL_LEN = 4096
#: Longest time for what a server has to do after a request is gone.
SETTLE_S = 300
_STILL_LOOKS = 10
#: The first probabilities that are asked for would compile something for ten seconds.
_QUICK = {
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent / "waiting"), os.environ.get("PYTHONPATH")])),
}


def environment(**more: str) -> dict[str, str]:
    return offline(**_QUICK, **more)


def command(*words: object, module: str = "hybridindex") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=800,
    )


def chat(*words: object) -> subprocess.CompletedProcess[str]:
    """The command chat, with the tests' embedder."""
    return command("chat", *words, module="tests.vllm.chat")


def serve(model: Path, folder: Path, *more: str, **variables: str) -> AbstractContextManager[Served]:
    """vLLM with ``model`` under the name "tiny", until the block ends; ``more``: its arguments."""
    words = ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"]
    # Where it divides the prompt of a request with a seed, vLLM 0.32 on a CPU stops for good ("CPU Generator does not
    # use offset"). Two long prompts at once are enough.
    words += ["--no-enable-chunked-prefill"]
    return vllm_server(model, KV_BYTES, *words, *more, name="tiny", log=folder / "vllm.log", **_QUICK, **variables)


def wait_for(what: str, there: Callable[[], bool]) -> None:
    """Until a server in another process is as far; fails after minutes."""
    deadline = time.monotonic() + SETTLE_S
    while not there():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {SETTLE_S} s")
        # Asking costs the server as much as some tokens do.
        time.sleep(0.1)


def wait_until_still(read: Callable[[], T]) -> T:
    """What ``read`` gives when it has given the same for a second: tokens come faster than that."""
    seen: list[T] = []

    def still() -> bool:
        seen.append(read())
        return len(seen) > _STILL_LOOKS and all(value == seen[-1] for value in seen[-_STILL_LOOKS:])

    wait_for("nothing changes", still)
    return seen[-1]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of vLLM's samples of that name that have these labels."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    page = httpx.get(f"{url}/metrics", timeout=300, trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    assert found, f"no {name} with {labels} in /metrics"
    return sum(found)


def written(url: str) -> tuple[float, float]:
    """Tokens that vLLM has generated, and generations that went to their end."""
    done = metric(url, "vllm:request_success_total", finished_reason="length")
    return metric(url, "vllm:generation_tokens_total"), done
