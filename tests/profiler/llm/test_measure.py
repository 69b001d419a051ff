"""What is measured of a well-behaved server, and how measurements become one profile."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, LLMServerError
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.profiler.llm.measure import LLMRequest, merge_points, profile_llm_server
from hybridindex.types import LLMMeasurement
from tests.llm_double import METRICS, Handler, LLMDouble

REQUEST = LLMRequest(
    input_tokens=30,
    output_tokens=4,
    max_concurrency=4,
    prompt_lengths=(8, 16, 4000),
    steps={"rewrite": (10, 2)},
    max_seconds=20,
)


@pytest.fixture(scope="module")
def measured() -> LLMMeasurement:
    with LLMDouble() as double:
        return profile_llm_server(double.url + "/v1", REQUEST, key="secret")


def test_levels_are_closed_loops_of_what_was_asked_for(measured: LLMMeasurement) -> None:
    assert [level.concurrency for level in measured.levels] == [1, 2, 4][: len(measured.levels)]
    for level in measured.levels:
        assert level.n_requests >= 2 * level.concurrency
        assert (level.input_tokens, level.output_tokens) == (30, 4)
        assert 0 < level.ttft_p50_s <= level.latency_p50_s
        assert level.throughput_rps > 0
        assert level.kv_usage in (0.25, None)  # a level may be over before it is looked at
        assert level.preemptions == 0


def test_the_profile_is_the_best_level_at_the_servers_kv_size(measured: LLMMeasurement) -> None:
    best = max(level.throughput_rps for level in measured.levels)
    assert measured.profile.kv_cache_bytes == 64 << 20
    assert measured.profile.points == ((64 << 20, best),)
    assert throughput_model(measured.profile).at(0) == best
    assert measured.profile.ttft_s in [level.ttft_p90_s for level in measured.levels]


def test_steps_and_prompt_lengths_are_timed_alone_and_what_does_not_fit_is_noted(measured: LLMMeasurement) -> None:
    assert set(measured.profile.generation_s) == {"answer", "rewrite"}
    assert [tokens for tokens, _ in measured.prefill] == [8, 16]
    assert measured.notes["prompt_lengths_left_out"] == [4000]


def test_prompts_are_never_alike_and_the_key_is_sent() -> None:
    with LLMDouble() as double:
        profile_llm_server(double.url, replace(REQUEST, steps={}, prompt_lengths=()))
        prompts = [asked["prompt"] for asked in double.completions[2:]]
    assert len(set(prompts)) == len(prompts) >= 4


def test_no_prompt_of_another_run_comes_again() -> None:
    """A server's prefix cache would know it."""
    asked = replace(REQUEST, max_concurrency=1, steps={}, prompt_lengths=(8,))
    with LLMDouble() as double:
        firsts = []
        for _ in range(2):
            double.completions.clear()
            profile_llm_server(double.url, asked)
            firsts.append({str(sent["prompt"]).split()[0] for sent in double.completions})
            assert len(firsts[-1]) == len({str(sent["prompt"]) for sent in double.completions})
        assert not firsts[0] & firsts[1]
        told = []
        for _ in range(2):
            double.completions.clear()
            profile_llm_server(double.url, asked, nonce="a")
            told.append([sent["prompt"] for sent in double.completions][:3])
        assert told[0] == told[1]


@pytest.mark.parametrize("changed", ["seed", "max_seconds", "n_devices", "block_size", "max_model_len"])
def test_levels_of_another_server_or_of_other_settings_are_not_resumed(tmp_path, changed) -> None:
    path = tmp_path / "llm.checkpoint"
    request = replace(REQUEST, max_concurrency=1, steps={}, prompt_lengths=(8,), kv_cache_bytes=1 << 20)
    with LLMDouble() as double:
        good = double.routes["/v1/completions"]

        def fails_at_the_prompts(handler: Handler, body: bytes) -> None:
            if json.loads(body)["max_tokens"] == 1 and json.loads(body).get("stream"):
                handler.answer(b"{}", 500)
            else:
                good(handler, body)

        def interrupted() -> None:
            double.routes["/v1/completions"] = fails_at_the_prompts
            with pytest.raises(LLMServerError, match="status 500"):
                profile_llm_server(double.url, request, checkpoint=path)
            double.routes["/v1/completions"] = good

        interrupted()
        same = profile_llm_server(double.url, request, checkpoint=path)
        assert set(same.notes["resumed"]) == {"level 1"}
        interrupted()
        other = request
        if changed == "n_devices":
            other = replace(request, n_devices=2, kv_cache_bytes=1 << 19)
        elif changed == "block_size":
            said = METRICS.replace('block_size="128"', 'block_size="16"').encode()
            double.routes["/metrics"] = lambda handler, _: handler.answer(said, kind="text/plain")
        elif changed == "max_model_len":
            models = b'{"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]}'
            double.routes["/v1/models"] = lambda handler, _: handler.answer(models)
        else:
            other = replace(request, **{changed: 7})
        measured = profile_llm_server(double.url, other, checkpoint=path)
    assert "resumed" not in measured.notes


def test_more_tokens_than_the_model_takes_are_refused_before_any_load() -> None:
    with LLMDouble() as double:
        with pytest.raises(InvalidInputError, match=r"2000 \+ 100 tokens; expected 2048 at most"):
            profile_llm_server(double.url, LLMRequest(input_tokens=2000, output_tokens=100))
        with pytest.raises(InvalidInputError, match="step long: 2000"):
            profile_llm_server(double.url, replace(REQUEST, steps={"long": (2000, 100)}))
        assert not double.completions


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_tokens": 0},
        {"output_tokens": True},
        {"max_concurrency": 0},
        {"max_seconds": 0},
        {"prompt_lengths": (0,)},
    ],
)
def test_bad_requests_are_refused(wrong) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        LLMRequest(**wrong)


def slow(double: LLMDouble, token_s: float):
    """A server of so many seconds a token, whatever the prompt."""

    def route(handler: Handler, body: bytes) -> None:
        double.closing.wait(token_s * json.loads(body)["max_tokens"])
        double.complete(handler, body)

    return route


def test_a_slow_server_gets_no_request_that_would_end_after_the_time_given() -> None:
    seen: list[tuple[str, int, int]] = []
    with LLMDouble() as double:
        double.routes["/v1/completions"] = slow(double, 0.16)
        request = replace(REQUEST, output_tokens=2, prompt_lengths=(8, 16), max_seconds=1)
        measured = profile_llm_server(double.url, request, progress=lambda *told: seen.append(told))
        # Two to learn from, one answer: 1 s is over, or too near for anything else.
        assert len(double.completions) == 3
    assert [level.n_requests for level in measured.levels] == [1]
    assert measured.notes["fewer_requests"] == {"concurrency 1": "1 of 4"}
    assert re.match("before concurrency 2, which takes about .* s: 1 s were given", measured.notes["stopped"])
    assert measured.notes["no_time_for"][0] == "step rewrite=10:2"
    assert measured.profile.generation_s == {"answer": measured.levels[0].latency_p50_s}
    assert seen[-2:] == [("concurrency 1", 1, 4), ("concurrency 1", 1, 1)]


def test_levels_get_the_time_that_short_single_requests_leave(monkeypatch) -> None:
    with LLMDouble() as double:
        # A clock of our own: each request is a second of 20.
        clock = SimpleNamespace(monotonic=lambda: float(len(double.completions)), perf_counter=time.perf_counter)
        monkeypatch.setattr("hybridindex.profiler.llm.load.time", clock)
        measured = profile_llm_server(double.url, replace(REQUEST, steps={}, prompt_lengths=(8,), max_seconds=20))
    one, two = measured.levels[:2]
    assert one.n_requests == 4
    assert two.n_requests >= 12  # with two fifths kept for the prompt it were 6


def test_each_request_is_told_as_it_ends() -> None:
    seen: list[tuple[str, int, int]] = []
    with LLMDouble() as double:
        request = replace(REQUEST, max_concurrency=1, prompt_lengths=(8,))
        profile_llm_server(double.url, request, progress=lambda *told: seen.append(told))
    for stage, total in (("concurrency 1", 4), ("step rewrite=10:2", 3), ("prompt of 8 tokens", 3)):
        assert [told for told in seen if told[0] == stage] == [(stage, i, total) for i in range(total + 1)]


def test_what_was_cut_short_is_said_after_an_interruption_too(tmp_path) -> None:
    """The second attempt finds the first one's finished stages."""
    path = tmp_path / "llm.checkpoint"
    with LLMDouble() as double:
        good = double.routes["/v1/completions"]

        def fails_at_the_prompts(handler: Handler, body: bytes) -> None:
            if json.loads(body)["max_tokens"] == 1 and json.loads(body).get("stream"):
                handler.answer(b"{}", 500)
            else:
                good(handler, body)

        request = replace(REQUEST, max_concurrency=1, prompt_lengths=(8,))
        double.routes["/v1/completions"] = fails_at_the_prompts
        with pytest.raises(LLMServerError, match="status 500"):
            profile_llm_server(double.url, request, checkpoint=path)
        whole = json.loads(np.load(path)["head"].tobytes())["stages"]
        whole["level 1"]["n_requests"], whole["step rewrite=10:2"][3] = 1, 2
        head = {**json.loads(np.load(path)["head"].tobytes()), "stages": whole}
        with path.open("wb") as file:
            np.savez(file, head=np.frombuffer(json.dumps(head).encode(), np.uint8))
        double.routes["/v1/completions"] = good
        measured = profile_llm_server(double.url, request, checkpoint=path)
    assert measured.notes["fewer_requests"] == {"concurrency 1": "1 of 4", "step rewrite=10:2": "2 of 3"}


def at(measured: LLMMeasurement, kv: int, rps: float, **changes) -> LLMMeasurement:
    profile = replace(measured.profile, kv_cache_bytes=kv, throughput_rps=rps, points=((kv, rps),))
    return replace(measured, profile=profile, **changes)


def test_measurements_at_other_kv_sizes_become_one_curve(measured: LLMMeasurement) -> None:
    runs = [
        at(measured, 4000, 1.0),
        at(measured, 1000, 10.0),
        at(measured, 4000, 100.0),
        at(measured, 500, 99.0, model="other"),
        at(measured, 600, 99.0, hardware_fingerprint="other"),
        at(measured, 2000, 20.0),
    ]
    merged = merge_points(runs)
    assert merged.points == ((1000, 10.0), (2000, 20.0), (4000, 100.0))
    assert (merged.kv_cache_bytes, merged.throughput_rps) == (4000, 100.0)
    model = throughput_model(merged)
    assert model.measured
    assert model.at(3000) == 10.0  # the linear rule says 25
    longer = replace(runs[0], profile=replace(runs[0].profile, input_tokens=300))
    assert merge_points([longer, runs[-1]]).points == ((2000, 20.0),)
    with pytest.raises(InvalidInputError, match="measurements is empty"):
        merge_points([])
