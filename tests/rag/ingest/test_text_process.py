"""Texts are read and embedded in another process as in this one; whatever goes wrong there is told here by its name."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hybridindex.errors import EmbeddingError, InvalidInputError, NoEmbedderError
from hybridindex.rag.embed import EMBEDDER, load_embedder
from hybridindex.rag.embedders import EmbedderOptions
from hybridindex.rag.ingest import GivenText, Reading, read_chunks
from hybridindex.rag.ingest.text_process import TextProcess
from hybridindex.rag.tokens import word_starts
from tests.llm_double import LLMDouble
from tests.rag.collection.world import vectors_of
from tests.router.slow_copies import until

ROOT = Path(__file__).parents[3]
TEXTS = ["one two", "  three\u3000four\n\nfive", "\u00e9\U0001f600 x", "a"]
GIVEN = [
    GivenText(name="x", text="# A\n\none two three four five six\n\n# B\n\nseven", metadata={"year": 1, "more": [1]}),
    GivenText(name="y", text="<p>one &eacute;<script>no</script><p>two", kind="html", title="Page"),
    GivenText(name="z", text=" \n\t "),
    GivenText(name="\u00e9\U0001f600", text="\U0001f600 " * 50),
]


@pytest.fixture
def double():
    with LLMDouble() as running:
        running.vectors_of = vectors_of
        yield running


@pytest.fixture
def process(double):
    with TextProcess("openai:toy", EmbedderOptions(url=double.url, key="k")) as process:
        yield process


def test_it_reads_and_embeds_as_this_process_does(process, double):
    for text in GIVEN:
        for words in (None, 3):
            assert list(process.read(text, Reading(words=words))) == list(read_chunks(text, Reading(words=words)))
    found = process.embed_passages(TEXTS)
    expected = vectors_of(TEXTS)
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(process.embed(TEXTS), found)
    assert not process.has_tokens
    for here, there in zip(word_starts(TEXTS), process.word_starts(TEXTS), strict=True):
        np.testing.assert_array_equal(here, there)
    assert process.word_starts([]) == []
    assert [len(each) for each in process.word_starts(["", "a b", ""])] == [0, 2, 0]
    assert double.embeddings[0][1]["authorization"] == "Bearer k"


def test_the_demos_embedder_with_its_tokens():
    """The real one, where its weights are: ``make test-ecosystem`` installs them."""
    cache = Path(os.environ.get("HYBRIDINDEX_CACHE", ROOT / "build/cache")) / "downloads" / "wheels"
    if importlib.util.find_spec("wordllama") is None and not list(cache.glob("wordllama-*.whl")):
        pytest.skip("the demo's weights (19 MB) are not here; make test-ecosystem installs them")
    here = load_embedder(cache, fetch=False)
    with TextProcess(EMBEDDER, EmbedderOptions(wheel_folder=cache)) as process:
        assert process.has_tokens
        np.testing.assert_allclose(process.embed_passages(TEXTS), here.embed(TEXTS), atol=1e-6)
        for ours, theirs in zip(here.token_starts(TEXTS), process.token_starts(TEXTS), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("openai:toy", {}, "there is no url; expected that of a server which has 'toy'"),
        ("openai:toy", {"url": "ftp://x"}, "url is 'ftp://x'; expected http"),
        (EMBEDDER, {"wheel_folder": Path("/nowhere")}, "is neither installed nor in /nowhere, and is not downloaded"),
        ("sentence-transformers:/nowhere", {}, "sentence-transformers is needed|cannot load '/nowhere'"),
        ("toy", {}, "embedder is 'toy'; expected demo"),
    ],
)
def test_what_cannot_be_opened(name, options, words):
    with pytest.raises(NoEmbedderError, match=words):
        TextProcess(name, EmbedderOptions(**options))


def test_errors_keep_their_kinds(process, double):
    with pytest.raises(InvalidInputError, match="text 1 has 0 characters"):
        process.embed(["a", ""])
    double.routes["/v1/embeddings"] = lambda handler, _: handler.answer(b"{}", 401)
    with pytest.raises(EmbeddingError, match="401") as failed:
        process.embed(["a"])
    assert failed.value.status == 401
    with pytest.raises(EmbeddingError, match="the process that embeds failed: TypeError"):
        process._call("embed")
    with pytest.raises(EmbeddingError, match="the process that embeds failed: ValueError: no such call: none"):
        process._call("none")
    # It goes on.
    assert [len(each) for each in process.word_starts(["a b"])] == [2]


def test_a_call_ends_with_its_process(process, double):
    gate, begun = threading.Event(), threading.Event()

    def slow(texts):
        begun.set()
        gate.wait(60)
        return vectors_of(texts)

    double.vectors_of = slow
    said = []

    def ask():
        try:
            process.embed(["a"])
        except EmbeddingError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    os.kill(process.pid, signal.SIGSEGV)
    thread.join(60)
    assert said == [f"the process that embeds ended with {-signal.SIGSEGV}; the log may say why"]
    gate.set()
    assert not process.is_alive
    process.close()
    process.close()
    with pytest.raises(EmbeddingError, match="was ended"):
        process.embed(["a"])


def test_a_call_ends_in_its_time(process, double):
    """Those that end before leave nothing behind."""
    process.until_s = time.monotonic() + 60
    process.embed(["a"])
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    gate = threading.Event()

    def hang(texts):
        gate.wait(20)
        return vectors_of(texts)

    double.vectors_of = hang
    began_s = time.monotonic()
    process.until_s = began_s + 0.5
    with pytest.raises(EmbeddingError, match="took longer than it may, and was ended"):
        process.embed(["a"])
    assert time.monotonic() - began_s < 10
    gate.set()
    assert process.is_late
    assert not process.is_alive
    with pytest.raises(NoEmbedderError, match=r"cannot be opened here: .* took longer than it may"):
        TextProcess("openai:toy", EmbedderOptions(url=double.url), until_s=time.monotonic())


def test_it_ends_with_who_started_it(double):
    """Also while it waits for a model."""
    code = (
        "import sys\nfrom hybridindex.rag.embedders import EmbedderOptions\n"
        "from hybridindex.rag.ingest.text_process import TextProcess\n"
        f"process = TextProcess('openai:toy', EmbedderOptions(url={double.url!r}))\n"
        "print(process.pid, flush=True)\nprocess.embed(['a'])\n"
    )
    gate, begun = threading.Event(), threading.Event()

    def slow(texts):
        begun.set()
        gate.wait(60)
        return vectors_of(texts)

    double.vectors_of = slow
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert begun.wait(60)
        parent.kill()
    until(lambda: not os.path.exists(f"/proc/{pid}/exe"))
    gate.set()
