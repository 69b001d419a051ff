"""``profile llm``, ``plan --llm``, ``vllm-args``: what they print, store and refuse. On a real vLLM: tests/vllm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli.console import ExitCode
from hybridindex.integrations import vllm
from hybridindex.integrations.vllm import share_with
from hybridindex.plans.llm_profiles import list_llm_measurements
from hybridindex.types import LLMProfile
from tests.clustered import clustered
from tests.llm_double import LLMDouble

QUICK = ("--input-tokens", 20, "--output-tokens", 3, "--max-concurrency", 2, "--max-seconds", 5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "idx"
    with hx.build(clustered(2500, seed=1), path, nlist=24, metric="l2", nprobe=6) as index:
        index.profile(clustered(300, seed=2), 6, devices=0, max_seconds=1)
    return path


@pytest.fixture
def index(made, tmp_path):
    return shutil.copytree(made, tmp_path / "idx")


def test_a_file_that_cannot_be_written_costs_no_measurement(cli, index, tmp_path) -> None:
    with LLMDouble() as double:
        words = ("--index", index, "-o", tmp_path / "none" / "llm.json")
        failed = cli("profile", "llm", "--url", double.url, *QUICK, *words, "--json")
    assert failed.code == ExitCode.BAD_INPUT, failed.err
    assert failed.json["error"]["type"] == "MissingFileError"
    assert str(tmp_path / "none" / "llm.json") in failed.json["error"]["message"]
    with hx.open(index) as opened, opened.store() as store:
        assert len(list_llm_measurements(store)) == 1


def test_an_llm_is_measured_planned_with_and_fitted(cli, index, tmp_path) -> None:
    with LLMDouble() as double:
        words = ("--index", index, "-o", tmp_path / "llm.json", "--step", "rewrite=5:2")
        measured = cli("profile", "llm", "--url", double.url, *QUICK, *words, "--json")
    assert measured.code == 0, measured.err
    assert measured.json["profile"]["kv_cache_bytes"] == 64 << 20
    assert measured.json["llm_id"] > 0
    rate = measured.json["profile"]["throughput_rps"]
    for choice in ("latest", measured.json["llm_id"], tmp_path / "llm.json"):
        planned = cli("plan", index, "--slo-ms", 500, "--budget", "16MiB", "--llm", choice, "--coverage", 0.3, "--json")
        assert planned.code in (0, ExitCode.INFEASIBLE), planned.err
        with hx.open(index) as opened, opened.store() as store:
            llm = store.load_plan(planned.json["plan_id"]).record["data"]["request"]["llm"]
        assert (llm["kv_cache_bytes"], llm["throughput_rps"]) == (64 << 20, rate)
        assert set(llm["generation_s"]) == {"answer", "rewrite"}

    fitted = cli("vllm-args", index, "--device-memory", "24GiB", "--model-bytes", "2GiB", "--json")
    assert fitted.code == 0, fitted.err
    assert fitted.json["kv_cache_memory_bytes"] == (64 << 20) - fitted.json["index_bytes"][0]
    assert fitted.json["args"][2:] == ["--gpu-memory-utilization", "0.92"]
    assert fitted.json["environment"]["HYBRIDINDEX_INDEX"] == str(index)
    only = cli("vllm-args", index, "--device-memory", "24GiB", "--args-only")
    assert only.out.split() == fitted.json["args"]
    assert only.err.splitlines()[-1] == (
        "Note: weights and activations of the model are not in the account: give --model or --model-bytes"
    )
    weights = tmp_path / "tiny-llama"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"w" * 12345)
    with_model = ("vllm-args", index, "--device-memory", "24GiB", "--model", weights)
    counted = cli(*with_model, "--args-only")
    assert counted.out.split() == fitted.json["args"]
    assert "counts as 12345 bytes of weights, as stored; activations and CUDA graphs are not" in counted.err
    assert cli(*with_model, "--json").json["model_bytes"] == 12345
    assert f"vllm serve {weights} --kv-cache-memory-bytes" in cli(*with_model).out
    os.truncate(weights / "model.safetensors", 25 << 30)
    large = cli(*with_model, "--args-only")
    assert (large.code, large.out) == (ExitCode.BAD_INPUT, "")
    assert f"the model {25 << 30} come to" in large.err
    counted_with: list[LLMProfile | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            vllm, "share_with", lambda *a, llm, **kw: counted_with.append(llm) or share_with(*a, llm=llm, **kw)
        )
        assert cli("plan", index, "--slo-ms", 500, "--budget", "16MiB", "--coverage", 0.3).code in (0, 10)
        assert cli("vllm-args", index, "--device-memory", "24GiB").code == 0
    # The plan has no LLM; its router's windows are the steps that were measured.
    assert counted_with[0] is not None
    assert set(counted_with[0].generation_s) == {"answer", "rewrite"}
    shown = cli("vllm-args", index, "--device-memory", "24GiB").out
    assert f"hybridindex serve {index} --device cuda:0" in shown
    tight = cli("vllm-args", index, "--device-memory", "64MiB")
    assert tight.code == ExitCode.BAD_INPUT
    assert "device memory is 67108864 bytes" in tight.err


def test_a_table_says_what_was_measured_and_that_it_is_not_stored(cli) -> None:
    with LLMDouble() as double:
        shown = cli("profile", "llm", "--url", double.url, *QUICK)
    assert shown.code == 0, shown.err
    assert "64.0 MiB of KV cache" in " ".join(shown.out.split())
    assert "not stored" in shown.out


def test_profile_without_a_subject_is_of_an_index(cli, index, tmp_path) -> None:
    np.save(tmp_path / "q.npy", clustered(200, seed=3))
    for words in (
        (index, "-q", tmp_path / "q.npy"),
        ("-q", tmp_path / "q.npy", index),
        ("index", index, "-q", tmp_path / "q.npy"),
    ):
        answer = cli("profile", *words, "--max-seconds", 0.5, "--no-device", "--json")
        assert answer.code == 0, answer.err
        assert answer.json["nprobe"] == 6


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["profile", "llm"], ExitCode.BAD_INPUT, "--url and --vllm-offline: expected exactly one"),
        (["profile", "llm", "--url", "ftp://x"], ExitCode.BAD_INPUT, "url is 'ftp://x'"),
        (["profile", "llm", "--url", "http://127.0.0.1:1"], ExitCode.SERVICE, "no LLM server answers"),
        (["profile", "llm", "--url", "http://h", "--step", "a=b"], ExitCode.BAD_INPUT, "--step is 'a=b'"),
        (["profile", "llm", "--url", "http://h", "--kv-cache-bytes", "1,2"], ExitCode.BAD_INPUT, "names 2 sizes"),
        (["profile", "llm", "--vllm-offline", "m"], ExitCode.BAD_INPUT, "kv_cache_bytes is ()"),
        (
            ["profile", "llm", "--vllm-offline", "m", "--kv-cache-bytes", "1MiB", "--engine-arg", "seed=1"],
            ExitCode.BAD_INPUT,
            "engine_args name seed",
        ),
        (["profile", "llm", "--url", "http://h", "--index", "{tmp}/none"], ExitCode.BAD_INPUT, "none"),
        (["plan", "{idx}", "--slo-ms", "5", "--budget", "1MiB", "--llm", "latest"], ExitCode.NO_PROFILE, "profile llm"),
        (["vllm-args", "{idx}", "--plan", "none"], ExitCode.BAD_INPUT, "--plan is 'none'"),
        (["vllm-args", "{idx}"], ExitCode.NO_PROFILE, "no plan"),
        (["vllm-args", "{idx}", "--model", "{tmp}/none"], ExitCode.BAD_INPUT, "by name give --model or --model-bytes"),
        (
            ["vllm-args", "{idx}", "--model", "{tmp}", "--model-bytes", "1GiB"],
            ExitCode.BAD_INPUT,
            "--model and --model-bytes: expected only one",
        ),
    ],
)
def test_bad_input_gives_one_clear_error(cli, index, tmp_path, words, code, message) -> None:
    answer = cli(*(w.format(tmp=tmp_path, idx=index) for w in words))
    assert answer.code == code, answer.err
    assert message in answer.err
    assert "Traceback" not in answer.err


def test_the_key_comes_from_the_environment_and_is_not_shown(cli, monkeypatch) -> None:
    seen = []

    def models(handler, _body) -> None:
        seen.append(handler.headers["authorization"])
        handler.answer(b'{"error": "no"}', 401)

    monkeypatch.setenv("HYBRIDINDEX_LLM_KEY", "sk-secret")
    with LLMDouble({"/v1/models": models}) as double:
        answer = cli("profile", "llm", "--url", double.url)
    assert seen == ["Bearer sk-secret"]
    assert answer.code == ExitCode.SERVICE
    assert "sk-secret" not in answer.out + answer.err


@pytest.fixture
def ctrl_c():
    """Heeded, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("ends", ["interrupted", "refused"])
def test_an_ended_measurement_says_what_it_goes_on_from(cli, index, ends) -> None:
    with LLMDouble() as double:
        good = double.routes["/v1/completions"]

        def until_the_prompts(handler, body) -> None:
            asked = json.loads(body)
            if not asked.get("stream") or asked["max_tokens"] > 1:
                good(handler, body)
            elif ends == "interrupted":
                # To that thread: one that goes to the process may wake another, and the event loop sleeps on.
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                double.closing.wait(300)
            else:
                handler.answer(b"{}", 500)

        double.routes["/v1/completions"] = until_the_prompts
        words = ("profile", "llm", "--url", double.url, *QUICK, "--index", index)
        answer = cli(*words)
        assert answer.code == (ExitCode.INTERRUPTED if ends == "interrupted" else ExitCode.SERVICE)
        assert f"{index / 'llm.checkpoint'} keeps the finished parts" in answer.err
        double.routes["/v1/completions"] = good
        n_before = len(double.completions)
        assert cli(*words).code == 0
        assert len(double.completions) - n_before == 2 + 3 * 3  # no level again
    refused = cli("profile", "llm", "--url", "http://127.0.0.1:1", "--index", index)
    assert "checkpoint" not in refused.err
