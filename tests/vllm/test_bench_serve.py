"""vLLM's own benchmark asks a real server, beside searches of a daemon."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.server import Served

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not verified: no vLLM here; make test-vllm"),
    pytest.mark.timeout(900),
]


def test_its_result_is_read(served: Served, model: Path, tmp_path: Path) -> None:
    from benchmarks.rag.bench_serve import _their_benchmark

    options = argparse.Namespace(model="tiny", tokens=[32, 8], prompts=6, request_rate=4.0)
    found = _their_benchmark(served.url, str(model), options, 1, tmp_path)
    assert found.keys() == {"ttft_ms", "ttft_p99_ms", "tpot_ms", "tokens_per_s"}
    assert 0 < found["ttft_ms"] <= found["ttft_p99_ms"]
    assert found["tokens_per_s"] > 0
    options.model = "another"
    with pytest.raises(SystemExit, match="vllm bench serve"):
        _their_benchmark(served.url, str(model), options, 1, tmp_path)


def test_a_server_of_ones_own_needs_its_tokenizer() -> None:
    command = [sys.executable, "-m", "benchmarks.rag.bench_serve", "--llm", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--tokenizer" in done.stderr
