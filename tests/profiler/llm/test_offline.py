"""The sweep where vLLM is missing, hangs, dies or refuses a size, by stand-ins. On a real vLLM: tests/vllm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hybridindex.errors import InvalidInputError, LLMServerError, MissingDependencyError
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.profiler.llm import offline
from hybridindex.profiler.llm.offline import SweepRequest, sweep_kv_cache

REQUEST = SweepRequest(model="m", kv_cache_bytes=(4000, 1000, 2000), n_devices=2, n_requests=6, output_tokens=3)

#: An engine of the sizes that ``OUTCOMES`` names: anything else raises, ends or hangs as told. "once ERROR" works when
#: it is started again.
ENGINE = """
import logging, os, pathlib, sys, threading, types
class SamplingParams:
    def __init__(self, **words): self.n = words["max_tokens"]
class LLM:
    def __init__(self, kv_cache_memory_bytes, **words):
        outcome = {outcomes}[kv_cache_memory_bytes]
        if outcome == "hang":
            print("loading weights", flush=True)
            threading.Event().wait()
        if outcome == "die": os._exit(9)
        if outcome.startswith("once "):
            started = pathlib.Path(__file__).with_name("started")
            outcome = "work" if started.exists() else outcome[5:]
            started.touch()
        if outcome != "work":
            print("ERROR 11-21 [core.py] " + outcome, flush=True)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        cache = types.SimpleNamespace(kv_cache_size_tokens=kv_cache_memory_bytes // 10)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))
    def get_tokenizer(self):
        class Tokenizer:
            all_special_ids, vocab_size = [0], 50
            def __len__(self): return 50
        return Tokenizer()
    def get_metrics(self): return [types.SimpleNamespace(name="vllm:num_preemptions", value=0)]
    def generate(self, prompts, sampling, use_tqdm):
        assert all(len(p["prompt_token_ids"]) == 512 and 0 not in p["prompt_token_ids"] for p in prompts)
        output = types.SimpleNamespace(token_ids=[1] * sampling.n)
        return [types.SimpleNamespace(outputs=[output]) for _ in prompts]
"""
RACE = "RuntimeError: dictionary changed size during iteration"
TOO_SMALL = "ValueError: To serve at least one request, 4 MiB KV cache is needed"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``engine({size: "work" | "hang" | "die" | an error's line})`` is what the next sweep finds as vLLM."""

    def install(outcomes: dict[int, str]) -> None:
        (tmp_path / "vllm.py").write_text(ENGINE.replace("{outcomes}", repr(outcomes)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    return install


def test_sizes_become_a_curve_and_one_that_is_too_small_is_kept_with_its_reason(engine) -> None:
    engine({1000: TOO_SMALL, 2000: "work", 4000: "work"})
    measured = sweep_kv_cache(REQUEST)
    assert measured.method == "offline"
    assert [size for size, _ in measured.profile.points] == [2000, 4000, 8000]  # of both devices
    assert measured.profile.points[0][1] == 0
    assert measured.refused == ((2000, TOO_SMALL),)
    assert measured.profile.kv_cache_bytes == 8000
    assert measured.notes["kv_cache_tokens"] == {"4000": 200, "8000": 400}
    assert throughput_model(measured.profile).at(6500) == 0.0


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("hang", r"took longer than .*\n?loading weights"),
        ("die", "ended with status 9 and no result"),
        ("OSError: no file named model.safetensors", "did not run: OSError: no file named"),
    ],
)
def test_a_broken_engine_is_an_error_and_no_zero_on_the_curve(engine, outcome: str, why: str) -> None:
    engine({1000: outcome, 2000: "work", 4000: "work"})
    with pytest.raises(LLMServerError, match=why):
        sweep_kv_cache(replace(REQUEST, timeout_s=20 if outcome != "hang" else 3))


def test_an_engine_that_lost_a_race_is_started_once_more_and_that_is_said(engine, caplog) -> None:
    engine({1000: f"once {RACE}", 2000: "work", 4000: "work"})
    measured = sweep_kv_cache(REQUEST)
    assert all(rps > 0 for _, rps in measured.profile.points)
    assert measured.notes["started_again"] == {"2000": f"vLLM with 1000 bytes of KV cache did not run: {RACE}"}
    assert "started once more" in caplog.text
    engine({1000: RACE, 2000: "work", 4000: "work"})
    with pytest.raises(LLMServerError, match=RACE):
        sweep_kv_cache(REQUEST)


def test_no_size_that_works_is_an_error(engine) -> None:
    engine(dict.fromkeys((1000, 2000, 4000), TOO_SMALL))
    with pytest.raises(LLMServerError, match="at none of 3 KV-cache sizes: ValueError: To serve"):
        sweep_kv_cache(REQUEST)


def test_an_interrupted_sweep_goes_on_where_it_was(engine, tmp_path: Path) -> None:
    engine({1000: "work", 2000: "work", 4000: "die"})
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(LLMServerError):
        sweep_kv_cache(REQUEST, checkpoint=checkpoint)
    engine({1000: "die", 2000: "die", 4000: "work"})
    measured = sweep_kv_cache(REQUEST, checkpoint=checkpoint)
    assert len(measured.profile.points) == 3
    assert list(measured.notes["resumed"]) == ["kv 1000", "kv 2000"]
    assert not checkpoint.exists()


def test_sizes_that_were_resumed_do_not_become_younger(engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(offline, "Checkpoint", partial(offline.Checkpoint, clock=lambda: now[0]))
    checkpoint = tmp_path / "checkpoint"
    for size in (2000, 4000):
        engine({n: "work" if n < size else "die" for n in REQUEST.kv_cache_bytes})
        with pytest.raises(LLMServerError, match=f"with {size} bytes"):
            sweep_kv_cache(REQUEST, checkpoint=checkpoint)
        now[0] += 13 * 3600
    engine({1000: TOO_SMALL, 2000: "die", 4000: "work"})
    assert sweep_kv_cache(REQUEST, checkpoint=checkpoint).refused == ((2000, TOO_SMALL),), "26 hours old"


def test_what_was_refused_is_tried_again(engine, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    engine(dict.fromkeys((1000, 2000, 4000), TOO_SMALL))
    with pytest.raises(LLMServerError, match="at none of 3"):
        sweep_kv_cache(REQUEST, checkpoint=checkpoint)
    engine(dict.fromkeys((1000, 2000, 4000), "work"))
    assert not sweep_kv_cache(REQUEST, checkpoint=checkpoint).refused


def test_another_machine_begins_anew(engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine({1000: "work", 2000: "work", 4000: "die"})
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(LLMServerError):
        sweep_kv_cache(REQUEST, checkpoint=checkpoint)
    other = replace(offline.hardware_info(), fingerprint="other")
    monkeypatch.setattr(offline, "hardware_info", lambda: other)
    engine({1000: TOO_SMALL, 2000: "work", 4000: "work"})
    assert sweep_kv_cache(REQUEST, checkpoint=checkpoint).refused == ((2000, TOO_SMALL),)


def test_without_vllm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where it is not installed: the import fails.
    (tmp_path / "vllm.py").write_text('raise ModuleNotFoundError("No module named vllm", name="vllm")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="pip install 'vllm"):
        sweep_kv_cache(REQUEST)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_cache_bytes": ()},
        {"kv_cache_bytes": (0,)},
        {"n_requests": 0},
        {"engine_args": {"seed": 1}},
        {"timeout_s": 0},
    ],
)
def test_bad_sweeps_are_refused(wrong) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        replace(REQUEST, **wrong)
