"""Servers that are down, slow, loading, full, lying or broken: a clear error each, within the time given."""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import replace

import pytest

from hybridindex.errors import InvalidInputError, LLMServerError
from hybridindex.profiler.llm.measure import LLMRequest, profile_llm_server
from tests.llm_double import METRICS, Handler, LLMDouble

SMALL = LLMRequest(input_tokens=20, output_tokens=3, max_concurrency=2, prompt_lengths=(8,), max_seconds=5)
CHUNK = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


def stall(double: list[LLMDouble], first: bytes = b""):
    def route(handler: Handler, _body: bytes) -> None:
        handler.begin_stream()
        handler.wfile.write(first)
        handler.wfile.flush()
        double[0].closing.wait(300)

    return route


def drip(double: list[LLMDouble]):
    """Never silent for long, and never done."""

    def route(handler: Handler, _body: bytes) -> None:
        handler.begin_stream()
        while not double[0].closing.wait(0.02):
            handler.wfile.write(b": still here\n\n")

    return route


def send(body: bytes, status: int = 200):
    return lambda handler, _: handler.answer(body, status)


def stream(body: bytes):
    def route(handler: Handler, _body: bytes) -> None:
        handler.begin_stream()
        handler.wfile.write(body)

    return route


def flood(handler: Handler, _body: bytes) -> None:
    handler.begin_stream()
    for _ in range(100):
        handler.wfile.write(b"x" * (1 << 18))


def garbage(handler: Handler, _body: bytes) -> None:
    handler.wfile.write(b"\x00\xff\x00 nothing of HTTP \r\n\r\n")
    handler.close_connection = True


def compressed(handler: Handler, _body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-encoding", "gzip")
    handler.send_header("content-length", "2")
    handler.end_headers()
    handler.wfile.write(b"\x1f\x8b")


def elsewhere(handler: Handler, _body: bytes) -> None:
    handler.send_response(302)
    handler.send_header("location", "http://127.0.0.1:1/")
    handler.send_header("content-length", "0")
    handler.end_headers()


COMPLETIONS = [
    (
        "out of memory",
        send(b'{"error": {"message": "CUDA out of memory"}}', 500),
        r"status 500\): 'CUDA out of memory'",
    ),
    ("html", send(b"<html><body>502 Bad Gateway</body></html>", 502), "status 502.*Bad Gateway"),
    ("not json", stream(b"hello\n\n"), "not an event stream"),
    ("garbage", garbage, "RemoteProtocolError"),
    ("compressed", compressed, "answers compressed"),
    ("redirect", elsewhere, "status 302"),
    ("breaks off", stream(CHUNK), r"broke off after 1 chunk\(s\)"),
    ("says nothing", stream(b"data: [DONE]\n\n"), r"broke off after 0 chunk\(s\)"),
    ("error within", stream(CHUNK + b'data: {"error": "KV cache exhausted"}\n\n'), "KV cache exhausted"),
    ("flood", flood, "longer than"),
    ("no stream", send(b'{"choices": []}'), r"broke off after 0 chunk\(s\)"),
    ("refuses", send(b'{"message": "prompt is too long"}', 400), "refuses the request .*prompt is too long"),
    ("wrong key", send(b'{"error": "Unauthorized"}', 401), "another API key"),
]


@pytest.mark.parametrize(("route", "why"), [c[1:] for c in COMPLETIONS], ids=[c[0] for c in COMPLETIONS])
def test_a_broken_completion_is_an_error_that_says_what_came(route, why) -> None:
    with LLMDouble({"/v1/completions": route}) as double, pytest.raises(LLMServerError, match=why):
        profile_llm_server(double.url, SMALL)


@pytest.mark.parametrize("make", [stall, drip, lambda d: stall(d, CHUNK)], ids=["silent", "drips", "stops midway"])
def test_a_server_that_never_ends_is_left_after_the_time_given(make) -> None:
    holder: list[LLMDouble] = []
    with LLMDouble({"/v1/completions": make(holder)}) as double:
        holder.append(double)
        with pytest.raises(LLMServerError, match=r"did not answer in full within 0\.4 s"):
            profile_llm_server(double.url, SMALL, timeout_s=0.4)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"not json", "not a JSON object"),
        (b'{"data": [{"name": "x"}]}', "lists no models"),
        (b'{"data": []}', "serves none"),
        (b"[" * 200_000, "not a JSON object"),
        (b" " * (9 << 20), "more than"),
    ],
)
def test_a_model_list_that_is_none_is_an_error(body: bytes, why: str) -> None:
    with LLMDouble({"/v1/models": send(body)}) as double, pytest.raises((LLMServerError, InvalidInputError), match=why):
        profile_llm_server(double.url, SMALL)


def test_another_models_name_is_refused_with_those_that_are_served() -> None:
    with LLMDouble() as double, pytest.raises(LLMServerError, match="serves tiny, not large"):
        profile_llm_server(double.url, replace(SMALL, model="large"))
    two = send(b'{"data": [{"id": "a"}, {"id": "b"}]}')
    with LLMDouble({"/v1/models": two}) as double, pytest.raises(InvalidInputError, match="serves a, b: name one"):
        profile_llm_server(double.url, SMALL)


def test_nobody_there_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LLMServerError, match="no LLM server answers at"):
            profile_llm_server(url, SMALL)


def test_a_loading_server_is_waited_for_as_long_as_asked() -> None:
    loaded = threading.Event()
    calls = []

    def models(handler: Handler, _body: bytes) -> None:
        calls.append(1)
        if len(calls) > 2:
            loaded.set()
        if loaded.is_set():
            handler.answer(b'{"data": [{"id": "tiny"}]}')
        else:
            handler.answer(b'{"error": {"code": 503, "message": "Loading model"}}', 503)

    with LLMDouble({"/v1/models": models}) as double:
        with pytest.raises(LLMServerError, match=r"is loading or overloaded .*Loading model"):
            profile_llm_server(double.url, SMALL)
        assert profile_llm_server(double.url, SMALL, wait_s=20).model == "tiny"


@pytest.mark.parametrize("status", [404, 405, 501])
def test_without_vllm_metrics_the_kv_size_has_to_be_given(status: int) -> None:
    with LLMDouble({"/metrics": send(b'{"error": {"message": "not supported"}}', status)}) as double:
        with pytest.raises(InvalidInputError, match="has no vLLM metrics; give --kv-cache-bytes"):
            profile_llm_server(double.url, SMALL)
        assert not double.completions
        measured = profile_llm_server(double.url, replace(SMALL, kv_cache_bytes=1000, n_devices=2))
    assert measured.profile.kv_cache_bytes == 2000
    assert measured.levels[0].kv_usage is None
    assert "metrics" not in measured.notes  # a server without them is no fault


def test_a_cache_without_bytes_is_refused_with_the_line_of_the_log_that_has_them() -> None:
    unsized = METRICS.replace('"67108864"', '"None"').encode()
    why = r'16384 KV-cache tokens and not their bytes.*"Available KV cache memory: … GiB".*--kv-cache-bytes$'
    with LLMDouble({"/metrics": send(unsized)}) as double, pytest.raises(InvalidInputError, match=why):
        profile_llm_server(double.url, SMALL)


UNREADABLE = [
    ("refused", lambda _: send(b'{"error": "Unauthorized"}', 401), "another API key"),
    ("too large", lambda _: send(b" " * (9 << 20)), "more than 8388608 bytes"),
    ("silent", stall, r"did not answer in full within 0\.1 s"),
    ("broken", lambda _: garbage, "RemoteProtocolError"),
]


@pytest.mark.parametrize(("make", "why"), [c[1:] for c in UNREADABLE], ids=[c[0] for c in UNREADABLE])
def test_metrics_that_cannot_be_read_are_noted_where_the_size_is_given(make, why, monkeypatch) -> None:
    if make is stall:
        monkeypatch.setattr("hybridindex.profiler.llm.server._METRICS_S", 0.1)
    holder: list[LLMDouble] = []
    with LLMDouble({"/metrics": make(holder)}) as double:
        holder.append(double)
        with pytest.raises(LLMServerError, match=f"{why}.*with --kv-cache-bytes it is not needed"):
            profile_llm_server(double.url, SMALL)
        measured = profile_llm_server(double.url, replace(SMALL, kv_cache_bytes=1000))
    assert measured.profile.kv_cache_bytes == 1000
    assert re.search(why, measured.notes["metrics"])


def test_metrics_that_fail_under_load_are_asked_no_more_and_cost_the_measurement_nothing() -> None:
    looks = []

    def once(handler: Handler, _body: bytes) -> None:
        looks.append(1)
        handler.answer(METRICS.encode() if len(looks) == 1 else b"busy", 200 if len(looks) == 1 else 500)

    with LLMDouble({"/metrics": once}) as double:
        measured = profile_llm_server(double.url, SMALL)
    assert (measured.profile.kv_cache_bytes, len(looks)) == (64 << 20, 2)
    assert "status 500" in measured.notes["metrics"]
    assert {level.preemptions for level in measured.levels} == {None}


def test_a_strict_server_gets_no_fields_that_it_does_not_know() -> None:
    with LLMDouble() as double:

        def strict(handler: Handler, body: bytes) -> None:
            asked = json.loads(body)
            if {"ignore_eos", "stream_options"} & set(asked):
                handler.answer(b'{"error": {"message": "extra fields not permitted"}}', 422)
            else:
                double.complete(handler, body)

        double.routes["/v1/completions"] = strict
        measured = profile_llm_server(double.url, SMALL)
    assert measured.profile.output_tokens == 3  # counted by chunks
    assert all("ignore_eos" not in asked for asked in double.completions)


def test_a_crowd_that_breaks_the_server_is_named_and_what_was_measured_is_kept(tmp_path) -> None:
    checkpoint = tmp_path / "llm.checkpoint"
    with LLMDouble() as double:
        good = double.routes["/v1/completions"]

        gate = threading.Barrier(2, timeout=300)

        def crowd(handler: Handler, body: bytes) -> None:
            if len(double.completions) >= 6:  # 2 of the first request, 4 of the first level
                gate.wait()
                handler.answer(b'{"error": "out of memory"}', 500)
            else:
                good(handler, body)

        double.routes["/v1/completions"] = crowd
        with pytest.raises(LLMServerError, match=r"at concurrency 2: .*out of memory"):
            profile_llm_server(double.url, SMALL, checkpoint=checkpoint)
        assert checkpoint.exists()
        double.routes["/v1/completions"] = good
        double.completions.clear()
        once = LLMRequest(input_tokens=20, output_tokens=3, max_concurrency=1, prompt_lengths=(8,), max_seconds=5)
        measured = profile_llm_server(double.url, once, checkpoint=checkpoint)
    assert len(measured.levels) == 1
    assert len(double.completions) == 2 + 3  # the first request and prompt lengths; the level is not measured again
    assert not checkpoint.exists()
