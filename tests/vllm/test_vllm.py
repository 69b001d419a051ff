"""Against a real vLLM on the CPU, on loopback: profiling, the router's routes inside it, the stat logger, the sweep.

Runs in an environment with vLLM: ``make test-vllm``. Elsewhere nothing here is verified, and it says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import InvalidInputError, LLMServerError
from tests.clustered import clustered
from tests.vllm.tiny_llama import make_tiny_llama

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not verified: no vLLM here; make test-vllm"),
    pytest.mark.timeout(420),
]

KV_BYTES = 32 << 20
START_S = 240
ENGINE = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    url: str
    index: Path
    model: Path
    process: subprocess.Popen[bytes]
    log: Path


def environment(**more: str) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    return {**os.environ, **offline, "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_WAIT_POLICY": "PASSIVE", **more}


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridindex", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """vLLM with the router inside it, over an index with a plan for the stand-in device."""
    folder = tmp_path_factory.mktemp("served")
    path = folder / "idx"
    with hx.build(clustered(4000, seed=1), path, nlist=32, metric="l2", nprobe=8) as index:
        profile = index.profile(clustered(200, seed=2), 8, max_seconds=2, devices=["cpu"])
        plan = index.plan(50, 8 << 20, profile, coverage=0.3)
        with index.store() as store:
            store.save_plan(plan.to_record(), profile.id)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", str(KV_BYTES), "--enforce-eager"]
    words += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "16"]
    inside = {"VLLM_PLUGINS": "hybridindex", "HYBRIDINDEX_INDEX": str(path), "HYBRIDINDEX_DEVICES": "cpu"}
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(HYBRIDINDEX_THREADS="1", **inside),
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(url, process, log)
        yield Served(url=url, index=path, model=model, process=process, log=log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start (status {process.poll()}):\n{log.read_text(errors='replace')[-4000:]}")


def test_the_command_profiles_it_and_a_plan_uses_the_result(served: Served) -> None:
    words = ["--input-tokens", 200, "--output-tokens", 96, "--max-concurrency", 8, "--max-seconds", 30]
    done = command(
        "profile", "llm", "--url", served.url, "--index", served.index, *words, "--step", "rewrite=60:16", "--json"
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["model"] == "tiny"
    assert measured["profile"]["kv_cache_bytes"] == KV_BYTES
    assert measured["notes"]["kv_cache_tokens"] == 8192
    for level in measured["levels"]:
        assert level["output_tokens"] == 96  # every answer has the length asked for: end of text was ignored
        assert abs(level["input_tokens"] - 200) < 40
        assert 0 < level["ttft_p50_s"] < level["latency_p50_s"]
        assert level["preemptions"] is not None
    assert max(level["kv_usage"] or 0 for level in measured["levels"]) > 0
    lengths = [tokens for tokens, _ in measured["prefill"]]
    assert lengths == sorted(lengths)
    assert set(measured["profile"]["generation_s"]) == {"answer", "rewrite"}

    done = command("plan", served.index, "--slo-ms", 50, "--budget", "8MiB", "--llm", "latest", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert 0 < planned["rate_qps"] <= measured["profile"]["throughput_rps"]
    done = command("vllm-args", served.index, "--plan", planned["plan_id"], "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["kv_cache_memory_bytes"] <= KV_BYTES


def test_what_it_cannot_do_is_said(served: Served) -> None:
    from hybridindex.profiler.llm import LLMRequest, profile_llm_server

    with pytest.raises(LLMServerError, match="serves tiny, not large"):
        profile_llm_server(served.url, model="large")
    with pytest.raises(InvalidInputError, match="expected 1024 at most"):
        profile_llm_server(served.url, LLMRequest(input_tokens=1000, output_tokens=100))


def test_the_router_answers_below_vllms_address_as_the_index_itself(served: Served) -> None:
    from hybridindex.client import Client

    queries = clustered(20, seed=3)
    with hx.open(served.index) as index, index.router() as router, Client(f"{served.url}/hybridindex") as client:
        expected = router.search(queries, k=5, nprobe=8)
        found = client.search(queries, k=5, nprobe=8)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert found.hit_rate.max() > 0  # lists of the plan are resident


def test_routes_of_both_are_there_and_guarded_apart(served: Served) -> None:
    import httpx

    with httpx.Client(base_url=served.url, trust_env=False, timeout=10) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert "vllm:kv_cache_usage_perc" in http.get("/metrics").text
        assert "hybridindex_" in http.get("/hybridindex/metrics").text
        assert http.get("/hybridindex/readyz").status_code == 200
        assert http.get("/hybridindex/v1/models").status_code == 404
        assert http.post("/hybridindex/v1/search", json={"queries": [[0.0]]}).json()["field"] == "queries"
        status = json.loads(command("status", served.index, "--json").stdout)
    assert status["ready"]


def test_the_stat_logger_feeds_the_window_of_sessions(served: Served) -> None:
    import httpx

    from hybridindex.client import Client

    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http:
        before = http.get("/hybridindex/v1/llm").json()
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 16, "ignore_eos": True}
        for _ in range(3):
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16
        after = http.get("/hybridindex/v1/llm").json()
    assert after["n_finished"] == before["n_finished"] + 3
    assert 0 < after["ttft_s"] < after["generation_s"]
    assert 0.9 * after["generation_s"] * 1e3 <= after["window_ms"] <= after["generation_s"] * 1e3
    queries = clustered(2, seed=4)
    with Client(f"{served.url}/hybridindex") as client, client.session() as session:
        session.lookahead(queries[:1])
        assert session.search(queries[1:], k=3).ids.shape == (1, 3)


def test_the_end_of_vllm_closes_the_router(served: Served) -> None:
    assert (served.index / "daemon.json").exists()
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(60)
    assert not (served.index / "daemon.json").exists(), served.log.read_text(errors="replace")[-2000:]


def test_the_sweep_measures_sizes_that_work_and_keeps_the_reason_of_those_that_do_not(model: Path) -> None:
    arguments = [word for name, value in ENGINE.items() for word in ("--engine-arg", f"{name}={json.dumps(value)}")]
    lengths = ["--input-tokens", 128, "--output-tokens", 32, "--requests", 16]
    done = command(
        "profile", "llm", "--vllm-offline", model, "--kv-cache-bytes", "1MiB,16MiB", *lengths, *arguments, "--json"
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    (small, nothing), (large, rps) = measured["profile"]["points"]
    assert (small, nothing, large) == (1 << 20, 0, 16 << 20)
    assert rps > 0
    assert measured["notes"]["kv_cache_tokens"] == {str(16 << 20): 4096}
    [(refused, why)] = measured["refused"]
    assert refused == 1 << 20
    assert "KV cache" in why
