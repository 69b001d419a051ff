"""How RAG on a real vLLM ends early: refused, hung up, a lookahead left, the server killed. Sessions always close."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridindex.client import Client
from hybridindex.errors import GenerationError
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.generator import OpenAIGenerator, Prompt
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.pipelines import run_pipeline
from hybridindex.rag.records import Generated, Piece
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps
from tests.rag.world import query_embedder
from tests.vllm.conftest import Library
from tests.vllm.server import Served
from tests.vllm.serving import MAX_MODEL_LEN, serve, wait_for, wait_until_still, written
from tests.vllm.sides import QUESTION, Side, Speaker

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not verified: no vLLM here; make test-vllm"),
    pytest.mark.timeout(900),
]

#: More than is written before somebody hangs up.
LONG = Prompt(name="answer", text="planet", max_tokens=MAX_MODEL_LEN - 64)


@contextlib.contextmanager
def hung_up(served: Served, *, whole: int = 0) -> Iterator[None]:
    """The last thing that is generated within ends in vLLM as well, before it is written; ``whole`` others do not."""
    tokens, done = written(served.url)
    yield
    after = wait_until_still(lambda: written(served.url))
    assert after[0] - tokens < LONG.max_tokens - 200
    assert after[1] == done + whole


def test_a_closed_generation_ends_in_vllm(served: Served, model: Path) -> None:
    with Speaker(served.url, model) as speaker, hung_up(served):
        stream = speaker.generate(LONG)
        assert isinstance(next(stream), Piece)
        stream.close()


def test_an_answer_that_nobody_reads_any_more_ends(side: Side, served: Served, model: Path) -> None:
    """Left while the lists of its draft may still travel, and in the middle of the generation that hides them."""
    retriever, watched = side.retriever()

    class Left(Exception):  # noqa: N818 - whatever the caller raises
        pass

    def leave(_text: str) -> None:
        raise Left

    with Speaker(served.url, model, side.mode) as speaker, hung_up(served, whole=1):
        options = {"draft_tokens": 4, "answer_tokens": LONG.max_tokens - 200}
        with pytest.raises(Left):
            run_pipeline("hyde", QUESTION, retriever, speaker, options, on_text=leave)
    assert len(watched.closed) == 1
    side.wait_until_free()


def test_a_lookahead_that_is_left_frees_its_pages(side: Side) -> None:
    """Ctrl-C right after the draft was handed over: its lists may not have begun to travel, or be half there."""

    class Leaving:
        def generate(self, prompt: Prompt, /) -> Iterator[Piece]:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    retriever, watched = side.retriever()
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            run_pipeline("hyde", QUESTION, retriever, Leaving())
    assert [stats["lookaheads"] for stats in watched.closed] == [1] * 5
    side.wait_until_free()


def test_what_vllm_refuses_is_said(near: Side, served: Served, model: Path) -> None:
    with OpenAIGenerator(served.url, model="large") as generator:
        with pytest.raises(GenerationError, match=r"serves 'tiny', not 'large'$"):
            generator.ready()
        with pytest.raises(GenerationError, match=r"is not there \(status 404\): .*`large` does not exist"):
            next(generator.generate(LONG))
    long = " ".join(["planet"] * (MAX_MODEL_LEN + 1))
    retriever, watched = near.retriever()
    for mode in ("chat", "completions"):
        with Speaker(served.url, model, mode) as speaker:
            with pytest.raises(GenerationError, match=rf"refuses the request \(status 400\): .*{MAX_MODEL_LEN} tokens"):
                run_pipeline("hyde", long, retriever, speaker)
            with pytest.raises(GenerationError, match=rf"refuses the request \(status 400\): .*{MAX_MODEL_LEN} tokens"):
                speaker.score(long, " moon")
    assert len(watched.closed) == 2
    near.wait_until_free()


@pytest.fixture
def doomed(model: Path, library: Library, tmp_path: Path) -> Iterator[tuple[Served, Library]]:
    """Another vLLM with the router inside it, to be killed; its model has no chat template."""
    plain, index = tmp_path / "plain", tmp_path / "index"
    shutil.copytree(model, plain)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copytree(library.index, index, ignore=shutil.ignore_patterns("daemon.*", "control.*"))
    inside = {"HYBRIDINDEX_INDEX": str(index), "HYBRIDINDEX_DEVICES": "cpu", "HYBRIDINDEX_BUDGET": str(8 << 20)}
    more = {"VLLM_PLUGINS": "hybridindex", "HYBRIDINDEX_PLAN": "none", "HYBRIDINDEX_THREADS": "1"}
    with serve(plain, tmp_path, **inside, **more) as running:
        yield running, Library(index=index, documents=index / library.documents.name)


def test_vllm_that_is_killed_ends_the_answers_that_it_writes(
    doomed: tuple[Served, Library], model: Path, near: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """PipeRAG on both sides, each in its second chunk, with a search beside it: vLLM's router dies too."""
    served, library = doomed
    with Speaker(served.url, model, "chat") as speaker, pytest.raises(GenerationError, match="--mode completions"):
        next(speaker.generate(LONG))

    plan = PeriodicRetrieval(interval=1500, max_tokens=4500)
    failed: dict[str, BaseException] = {}
    #: Chunks that each had whole when it ended.
    whole: dict[str, int] = {}

    def write(name: str, retriever: Retriever) -> None:
        try:
            with Speaker(served.url, model) as speaker, Steps(QUESTION, retriever, speaker) as steps:
                try:
                    plan.run(steps)
                finally:
                    whole[name] = sum(isinstance(event, Generated) for event in steps.events)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed[name] = error

    def second_chunks() -> bool:
        """Whether both have begun theirs."""
        assert not whole, f"ended before vLLM was killed: {whole}, {failed}; {served.tail()}"
        tokens, done = written(served.url)
        return done == 2 and tokens > 2 * plan.interval

    retriever, watched = near.retriever()
    with Client(f"{served.url}/hybridindex") as client, DocumentStore(library.documents) as documents:
        inside = Retriever(client, query_embedder(documents), documents)
        writers = [threading.Thread(target=write, args=both) for both in (("near", retriever), ("far", inside))]
        for writer in writers:
            writer.start()
        wait_for("both are in their second chunks", second_chunks)
        os.killpg(served.process.pid, signal.SIGKILL)
        served.process.wait(300)
        for writer in writers:
            writer.join(300)
            assert not writer.is_alive(), "it hangs"
    for name in ("near", "far"):
        assert isinstance(failed[name], GenerationError), failed[name]
        assert whole[name] == 1
        assert f"{served.url} broke off during its answer" in str(failed[name])
    assert len(watched.closed) == 1
    near.wait_until_free()
    assert "session could not be closed" in caplog.text
    with OpenAIGenerator(served.url) as generator, pytest.raises(GenerationError, match="is the LLM's server running"):
        generator.ready()
