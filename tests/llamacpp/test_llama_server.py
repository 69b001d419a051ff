"""Against a real llama.cpp server on the CPU, on loopback: profiling, the pipelines, probabilities, what goes wrong.

Runs where HYBRIDINDEX_LLAMA_SERVER names a ``llama-server`` and HYBRIDINDEX_GGUF a model; elsewhere nothing here is
verified, and it says so. What a model of any size says is its own matter: that it is asked and heard is ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from hybridindex.cli.console import ExitCode
from hybridindex.errors import GenerationError, InvalidInputError, LLMServerError
from hybridindex.profiler.llm.measure import LLMRequest, profile_llm_server
from hybridindex.rag.generator import Finished, OpenAIGenerator, Prompt
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.records import Generated
from tests.cli.conftest import cli
from tests.cli.test_chat import index
from tests.rag.conftest import documents, retriever, router, source, world
from tests.rag.test_pipelines import QUESTION

__all__ = ["cli", "documents", "index", "retriever", "router", "source", "world"]

PROGRAM, MODEL = os.environ.get("HYBRIDINDEX_LLAMA_SERVER", ""), os.environ.get("HYBRIDINDEX_GGUF", "")

pytestmark = [
    pytest.mark.skipif(
        not (PROGRAM and MODEL),
        reason="not verified: HYBRIDINDEX_LLAMA_SERVER and HYBRIDINDEX_GGUF name no llama-server and no model",
    ),
    pytest.mark.timeout(900),
]

CONTEXT = 1024
START_S = 120
#: Few tokens of each step: a core writes some twenty a second.
SHORT = {
    "hyde": {"draft_tokens": 8, "answer_tokens": 8},
    "sub_question": {"list_tokens": 12, "answer_tokens": 8, "k": 1},
    "iterative": {"rounds": 2, "question_tokens": 8, "answer_tokens": 8},
    "iter_retgen": {"rounds": 2, "answer_tokens": 8},
    "flare": {"sentences": 2, "sentence_tokens": 12},
    "self_rag": {"candidates": 1, "answer_tokens": 8},
    "plain": {"answer_tokens": 8},
}
SMALL = LLMRequest(input_tokens=40, output_tokens=6, max_concurrency=2, prompt_lengths=(16, 2000), max_seconds=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(log: Path, *words: str) -> Iterator[Served]:
    """llama-server on one thread; it may still load."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PROGRAM, "-m", MODEL, "--alias", "small", "-c", str(CONTEXT), "-t", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Served(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("llamacpp") / "server.log"
    with serving(log, "--metrics") as server:
        with OpenAIGenerator(server.url) as generator:
            try:
                generator.ready(START_S)
            except GenerationError as error:
                pytest.fail(f"llama-server did not start: {error}\n{log.read_text(errors='replace')[-4000:]}")
        yield server


def test_it_is_measured(served: Served) -> None:
    with pytest.raises(InvalidInputError, match="KV buffer size"):
        profile_llm_server(served.url, SMALL)
    measured = profile_llm_server(served.url, replace(SMALL, kv_cache_bytes=64 << 20))
    assert measured.model == "small"
    for level in measured.levels:
        assert level.output_tokens == 6  # end of text was ignored
        assert abs(level.input_tokens - 40) < 12
        assert 0 < level.ttft_p50_s < level.latency_p50_s
    assert [round(tokens / 16) for tokens, _ in measured.prefill] == [1]
    assert measured.notes["prompt_lengths_left_out"] == [2000]  # it told its context
    with pytest.raises(InvalidInputError, match=f"1000 \\+ 100 tokens; expected {CONTEXT} at most"):
        profile_llm_server(served.url, LLMRequest(input_tokens=1000, output_tokens=100, kv_cache_bytes=64 << 20))
    with pytest.raises(LLMServerError, match="serves small, not large"):
        profile_llm_server(served.url, LLMRequest(model="large"))


@pytest.mark.parametrize("mode", ["chat", "completions"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_pipeline_answers(retriever, served: Served, pipeline: str, mode: Literal["chat", "completions"]) -> None:
    with OpenAIGenerator(served.url, mode=mode) as generator:
        answer = run_pipeline(pipeline, QUESTION, retriever, generator, SHORT[pipeline])
    written = [event for event in answer.events if isinstance(event, Generated)]
    assert {step.finish for step in written} <= {"stop", "length"}
    assert all(0 < step.completion_tokens <= step.max_tokens and step.prompt_tokens > 0 for step in written)
    assert answer.text
    # Self-RAG may find that nothing has to be looked up.
    assert pipeline == "self_rag" or answer.passages


@pytest.mark.parametrize("mode", ["chat", "completions"])
def test_the_command_writes_with_piperag(cli, index, served: Served, mode: str) -> None:
    words = ["--pipeline", "piperag", "--mode", mode, "--plan", "none", "-k", 2, "--interval", 8, "--max-tokens", 16]
    answer = cli("chat", index, "--llm", served.url, *words, "--question", QUESTION, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["answer"]
    assert answer.json["passages"]


def test_every_token_has_its_probability(served: Served, retriever) -> None:
    for mode in ("chat", "completions"):
        with OpenAIGenerator(served.url, mode=mode) as generator:
            *pieces, finished = list(
                generator.generate(Prompt(name="n", text="One, two, three,", max_tokens=8, logprobs=True))
            )
        assert isinstance(finished, Finished)
        assert [len(piece.logprobs) for piece in pieces] == [1] * finished.completion_tokens
        assert max(value for piece in pieces for value in piece.logprobs) <= 0
    with OpenAIGenerator(served.url) as generator:
        answer = run_pipeline("flare", QUESTION, retriever, generator, {"sentences": 2, "sentence_tokens": 16})
        with pytest.raises(GenerationError, match=r"llama\.cpp does not"):
            generator.score("one two", " three")
    [tentative, *_] = [e for e in answer.events if isinstance(e, Generated) and e.name == "tentative"]
    assert all(piece.logprobs for piece in tentative.pieces)


def test_what_is_asked_wrongly_is_said(cli, index, served: Served) -> None:
    told = cli("chat", index, "--llm", served.url, "--model", "large", "--question", QUESTION)
    assert (told.code, told.out) == (ExitCode.SERVICE, "")
    assert "serves 'small', not 'large'" in told.err
    told = cli("chat", index, "--llm", served.url, "--plan", "none", "--question", "what is a reef " * 600)
    assert told.code == ExitCode.SERVICE
    assert f"exceeds the available context size ({CONTEXT} tokens)" in told.err


def test_whoever_hangs_up_is_not_written_for_any_longer(served: Served) -> None:
    import httpx

    with OpenAIGenerator(served.url) as generator:
        writing = generator.generate(Prompt(name="n", text="Once", max_tokens=900, append=True))
        next(writing)
        writing.close()
    deadline = time.monotonic() + 300
    while "\nllamacpp:requests_processing 0\n" not in httpx.get(f"{served.url}/metrics", trust_env=False).text:
        assert time.monotonic() < deadline, "the server still writes"
        time.sleep(0.05)


def test_one_that_loads_is_waited_for_and_one_that_dies_is_missed(tmp_path: Path) -> None:
    with serving(tmp_path / "server.log") as server, OpenAIGenerator(server.url) as generator:
        while True:
            with pytest.raises(GenerationError) as caught:
                generator.ready()
            if caught.value.status:
                break
        assert caught.value.status == 503
        assert "is loading or overloaded (status 503): 'Loading model'" in str(caught.value)
        assert generator.ready(START_S) == "small"
        writing = generator.generate(Prompt(name="n", text="Once", max_tokens=900, append=True))
        next(writing)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(GenerationError, match="broke off during its answer"):
            list(writing)
        with pytest.raises(GenerationError, match="is the LLM's server running there"):
            generator.ready()
