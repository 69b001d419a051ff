"""Against a real vLLM on the CPU, on loopback: profiling, the router's routes inside it, the stat logger, the sweep.

Runs in an environment with vLLM: ``make test-vllm``. Elsewhere nothing here is verified, and it says so.
"""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import InvalidInputError, LLMServerError
from hybridindex.types import F32
from tests.vllm.conftest import NPROBE, Library
from tests.vllm.server import Served
from tests.vllm.serving import KV_BYTES, MAX_MODEL_LEN, command

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not verified: no vLLM here; make test-vllm"),
    pytest.mark.timeout(900),
]

ENGINE = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 16}


def test_the_command_profiles_it_and_a_plan_uses_the_result(served: Served, library: Library) -> None:
    words = ["--input-tokens", 200, "--output-tokens", 96, "--max-concurrency", 8, "--max-seconds", 30]
    done = command(
        "profile", "llm", "--url", served.url, "--index", library.index, *words, "--step", "rewrite=60:16", "--json"
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

    done = command("plan", library.index, "--slo-ms", 50, "--budget", "8MiB", "--llm", "latest", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert 0 < planned["rate_qps"] <= measured["profile"]["throughput_rps"]
    done = command("vllm-args", library.index, "--plan", planned["plan_id"], "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["kv_cache_memory_bytes"] <= KV_BYTES


def test_what_it_cannot_do_is_said(served: Served) -> None:
    from hybridindex.profiler.llm.measure import LLMRequest, profile_llm_server

    with pytest.raises(LLMServerError, match="serves tiny, not large"):
        profile_llm_server(served.url, LLMRequest(model="large"))
    with pytest.raises(InvalidInputError, match=f"expected {MAX_MODEL_LEN} at most"):
        profile_llm_server(served.url, LLMRequest(input_tokens=MAX_MODEL_LEN - 50, output_tokens=100))


def test_the_router_answers_below_vllms_address_as_the_index_itself(
    served: Served, library: Library, queries: Callable[..., F32]
) -> None:
    from hybridindex.client import Client

    asked = queries(20, seed=3)
    with hx.open(library.index) as index, index.router() as router, Client(f"{served.url}/hybridindex") as client:
        expected = router.search(asked, k=5, nprobe=NPROBE)
        found = client.search(asked, k=5, nprobe=NPROBE)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert found.hit_rate.max() > 0  # lists of the plan are resident


def test_routes_of_both_are_there_and_guarded_apart(served: Served, library: Library) -> None:
    import httpx

    with httpx.Client(base_url=served.url, trust_env=False, timeout=300) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert "vllm:kv_cache_usage_perc" in http.get("/metrics").text
        assert "hybridindex_" in http.get("/hybridindex/metrics").text
        assert http.get("/hybridindex/readyz").status_code == 200
        assert http.get("/hybridindex/v1/models").status_code == 404
        assert http.post("/hybridindex/v1/search", json={"queries": [[0.0]]}).json()["field"] == "queries"
        status = json.loads(command("status", library.index, "--json").stdout)
    assert status["ready"]


def test_the_stat_logger_feeds_the_window_of_sessions(served: Served, queries: Callable[..., F32]) -> None:
    import httpx

    from hybridindex.client import Client

    with httpx.Client(base_url=served.url, trust_env=False, timeout=300) as http:
        before = http.get("/hybridindex/v1/llm").json()
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 16, "ignore_eos": True}
        for _ in range(3):
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16
        after = http.get("/hybridindex/v1/llm").json()
    assert after["n_finished"] == before["n_finished"] + 3
    assert 0 < after["ttft_s"] < after["generation_s"]
    assert 0.9 * after["generation_s"] * 1e3 <= after["window_ms"] <= after["generation_s"] * 1e3
    drafted, asked = queries(2, seed=4)[:, None]
    with Client(f"{served.url}/hybridindex") as client, client.session() as session:
        session.lookahead(drafted)
        assert session.search(asked, k=3).ids.shape == (1, 3)


def test_the_end_of_vllm_closes_the_router(served: Served, library: Library) -> None:
    assert (library.index / "daemon.json").exists()
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(300)
    assert not (library.index / "daemon.json").exists(), served.tail()


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
