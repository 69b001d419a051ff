"""What llama.cpp's server really sends, as both clients read it: the files of ``llama_server`` are its bytes.

Recorded from version 0.5.0 (0c1e57098) with Gemma 3 270M, ``--alias small,tiny``. The server itself: tests/llamacpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridindex.errors import GenerationError, InvalidInputError, LLMServerError
from hybridindex.llm.models import max_tokens_of, names_of
from hybridindex.profiler.llm.measure import LLMRequest, profile_llm_server
from hybridindex.rag.generator import Finished, OpenAIGenerator, Prompt
from tests.llm_double import LLMDouble, Route

PROMPT = Prompt(name="n", text="Write four emoji: 🦙", max_tokens=7, logprobs=True)
SMALL = LLMRequest(input_tokens=20, output_tokens=3, max_concurrency=2, prompt_lengths=(8,), max_seconds=5)


def said(name: str, status: int = 200) -> Route:
    body = (Path(__file__).parent / "llama_server" / name).read_bytes()
    return lambda handler, _: handler.answer(body, status)


@pytest.fixture
def server() -> Iterator[LLMDouble]:
    recorded = {
        "/v1/models": said("models.json"),
        "/v1/completions": said("completion.sse"),
        "/v1/chat/completions": said("chat.sse"),
        "/metrics": said("metrics.txt"),
    }
    with LLMDouble(recorded) as double:
        yield double


def test_a_character_of_several_tokens_comes_as_one_piece_with_the_last_ones_probability(server: LLMDouble) -> None:
    with OpenAIGenerator(server.url, mode="completions") as generator:
        *pieces, finished = list(generator.generate(PROMPT))
    assert [(piece.text, len(piece.logprobs)) for piece in pieces] == [(",", 1), (" ", 1), ("🦙", 1), (",", 1)]
    assert pieces[2].logprobs == (-0.729577898979187,)
    assert finished == Finished(reason="length", prompt_tokens=10, completion_tokens=7)


def test_a_chat_has_probabilities_too(server: LLMDouble) -> None:
    with OpenAIGenerator(server.url) as generator:
        *pieces, finished = list(generator.generate(PROMPT))
    assert [piece.text for piece in pieces] == ["Say", " hi"]
    assert all(-2 < value < 0 for piece in pieces for value in piece.logprobs)
    assert finished == Finished(reason="length", prompt_tokens=26, completion_tokens=2)


def test_each_of_its_aliases_is_the_model_that_is_recorded(server: LLMDouble) -> None:
    for name in ("", "small", "tiny"):
        with OpenAIGenerator(server.url, model=name) as generator:
            assert generator.ready() == generator.model == "small"
    with (
        OpenAIGenerator(server.url, model="large") as generator,
        pytest.raises(GenerationError, match="serves 'small', not 'large'"),
    ):
        generator.ready()
    with pytest.raises(LLMServerError, match="serves small, not large"):
        profile_llm_server(server.url, replace(SMALL, model="large", kv_cache_bytes=1000))


def test_it_is_measured_by_an_alias_within_the_context_that_it_tells(server: LLMDouble) -> None:
    server.routes["/v1/completions"] = server.complete
    measured = profile_llm_server(server.url, replace(SMALL, model="tiny", kv_cache_bytes=1000))
    assert measured.model == "small"
    assert measured.levels[0].kv_usage is None
    asked = len(server.completions)
    with pytest.raises(InvalidInputError, match=r"4000 \+ 100 tokens; expected 4096 at most"):
        profile_llm_server(server.url, LLMRequest(input_tokens=4000, output_tokens=100, kv_cache_bytes=1000))
    assert len(server.completions) == asked


@pytest.mark.parametrize("metrics", [said("metrics.txt"), said("no_metrics.json", 501)], ids=["with", "without"])
def test_its_metrics_tell_no_cache_and_the_refusal_says_where_to_look(server: LLMDouble, metrics: Route) -> None:
    server.routes["/metrics"] = metrics
    with pytest.raises(InvalidInputError, match=r"give --kv-cache-bytes .*llama-server -lv 4 logs as KV buffer size"):
        profile_llm_server(server.url, SMALL)


def test_a_crowd_that_fills_its_context_is_told_how_many_are_too_many(server: LLMDouble) -> None:
    # One counted answer, then those of the first level and of its first request.
    left = itertools.count(-2 - 4)
    full = said("exceeded.sse")

    def crowded(handler, body):
        (full if next(left) >= 0 else server.complete)(handler, body)

    server.routes["/v1/completions"] = crowded
    why = r"at concurrency 2: .* within the answer: 'Context size has been exceeded\.' \(--max-concurrency 1 stops"
    with pytest.raises(LLMServerError, match=why):
        profile_llm_server(server.url, replace(SMALL, kv_cache_bytes=1000))
    server.routes["/v1/completions"] = full
    with (
        OpenAIGenerator(server.url, mode="completions") as generator,
        pytest.raises(GenerationError, match=r"gave up: 'Context size has been exceeded\.'$"),
    ):
        list(generator.generate(PROMPT))


def test_it_echoes_no_prompt_whatever_it_is_asked(server: LLMDouble) -> None:
    server.routes["/v1/completions"] = said("echo.json")
    with (
        OpenAIGenerator(server.url) as generator,
        pytest.raises(GenerationError, match=r"echoes .*llama\.cpp does not"),
    ):
        generator.score("a", " b")


def test_while_it_loads_it_says_so(server: LLMDouble) -> None:
    server.routes["/v1/models"] = said("loading.json", 503)
    with OpenAIGenerator(server.url) as generator, pytest.raises(GenerationError, match="'Loading model'") as caught:
        generator.ready()
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("model", "names", "most"),
    [
        ({"id": "a", "max_model_len": 9, "meta": {"n_ctx": 5}}, ("a",), 9),
        ({"id": "a", "aliases": None, "meta": None}, ("a",), None),
        ({"id": "a", "aliases": ["b", 3], "meta": {"n_ctx": 5, "n_ctx_train": 99}}, ("a", "b", "3"), 5),
        ({"id": 1, "max_model_len": None}, ("1",), None),
        ({"id": "a", "max_model_len": True}, ("a",), None),
        ({"id": "a", "meta": {"n_ctx": 0}}, ("a",), None),
    ],
)
def test_what_a_list_says_of_a_model(model: dict[str, object], names: tuple[str, ...], most: int | None) -> None:
    assert (names_of(model), max_tokens_of(model)) == (names, most)
