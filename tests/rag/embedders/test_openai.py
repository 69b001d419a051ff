"""Embeddings of a server: in batches, in order, again where that may help, and one clear error where not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hybridindex.errors import EmbeddingError, InvalidInputError
from hybridindex.rag.embedders.openai import EmbeddingLimits, OpenAIEmbedder
from tests.llm_double import LLMDouble


@pytest.fixture
def double() -> Iterator[LLMDouble]:
    with LLMDouble() as running:
        yield running


def unit(texts: list[str]) -> np.ndarray:
    x = np.array([[len(text), 1.0] for text in texts])
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_texts_go_in_batches_and_come_back_in_order(double):
    texts = ["a" * n for n in range(1, 12)]
    limits = EmbeddingLimits(batch=4, request_chars=20)
    with OpenAIEmbedder(f"{double.url}/v1/", "m", key="secret", limits=limits) as embedder:
        assert embedder.name == "openai:m"
        found = embedder.embed(texts)
    np.testing.assert_allclose(found, unit(texts), rtol=1e-6)
    assert found.dtype == np.float32
    sizes = [[len(text) for text in asked["input"]] for asked, _ in double.embeddings]
    assert sizes == [[1, 2, 3, 4], [5, 6, 7], [8, 9], [10], [11]], "four texts and 20 characters at most"
    asked, headers = double.embeddings[0]
    assert (asked["model"], asked["encoding_format"]) == ("m", "float")
    assert headers["authorization"] == "Bearer secret"


def failing(double, *statuses, headers=()):
    """Answers with these statuses first."""
    left = list(statuses)

    def serve(handler, body):
        if not left:
            double.embed(handler, body)
            return
        handler.send_response(left.pop(0))
        for name, value in headers:
            handler.send_header(name, value)
        said = b'{"error": {"message": "try later"}}'
        handler.send_header("content-length", str(len(said)))
        handler.end_headers()
        handler.wfile.write(said)

    double.routes["/v1/embeddings"] = serve


def test_what_may_succeed_later_is_tried_again(double):
    waited: list[float] = []
    failing(double, 503, 429, 500, headers=[("retry-after", "3")])
    with OpenAIEmbedder(double.url, "m", sleep=waited.append) as embedder:
        np.testing.assert_allclose(embedder.embed(["abc"]), unit(["abc"]), rtol=1e-6)
    assert waited == [3.0, 3.0, 3.0]
    waited.clear()
    failing(double, *[503] * 9)
    limits = EmbeddingLimits(retries=3, most_wait_s=1.5)
    with (
        OpenAIEmbedder(double.url, "m", limits=limits, sleep=waited.append) as embedder,
        pytest.raises(EmbeddingError, match=r"/v1/embeddings is loading or overloaded \(status 503\): 'try later'"),
    ):
        embedder.embed(["abc"])
    assert waited == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("status", "words"), [(400, "refuses the request"), (401, "another API key"), (404, "not there")]
)
def test_a_refusal_is_final(double, status, words):
    failing(double, status)
    with OpenAIEmbedder(double.url, "m", sleep=pytest.fail) as embedder, pytest.raises(EmbeddingError, match=words):
        embedder.embed(["abc"])


def test_a_server_that_is_not_there(double):
    waited: list[float] = []
    limits = EmbeddingLimits(retries=1)
    with (
        OpenAIEmbedder("http://127.0.0.1:9", "m", limits=limits, sleep=waited.append) as embedder,
        pytest.raises(EmbeddingError, match=r"no answer from http://127.0.0.1:9/v1/embeddings"),
    ):
        embedder.embed(["abc"])
    assert waited == [0.5]


def test_a_server_that_is_silent(double):
    double.routes["/v1/embeddings"] = lambda _handler, _body: double.closing.wait()
    limits = EmbeddingLimits(retries=0, timeout_s=0.05)
    with (
        OpenAIEmbedder(double.url, "m", limits=limits) as embedder,
        pytest.raises(EmbeddingError, match=r"took longer than 0\.05 s"),
    ):
        embedder.embed(["abc"])
    double.closing.set()


@pytest.mark.parametrize("again", [False, True], ids=["first", "on a connection that is there"])
@pytest.mark.parametrize(
    ("pieces", "pause_s", "timeout_s", "before_s"),
    [
        ([bytes([each]) for each in b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n"], 0.3, 1, 6),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n", b"x"], 1.8, 4, 7),
    ],
    ids=["its head", "its body"],
)
def test_a_server_that_trickles_is_left_at_the_limit(double, pieces, pause_s, timeout_s, before_s, again):
    """``timeout_s`` is that of the whole request. If it were of each wait, this would end after ``before_s``."""

    def trickle(handler, _body):
        for piece in pieces:
            if double.closing.wait(pause_s):
                return
            handler.wfile.write(piece)
        double.closing.wait(20)

    limits = EmbeddingLimits(retries=0, timeout_s=timeout_s)
    with OpenAIEmbedder(double.url, "m", limits=limits) as embedder:
        if again:
            embedder.embed(["abc"])
        double.routes["/v1/embeddings"] = trickle
        began_s = time.monotonic()
        with pytest.raises(EmbeddingError, match=f"took longer than {timeout_s} s"):
            embedder.embed(["abc"])
        assert time.monotonic() - began_s < before_s
    double.closing.set()


@pytest.mark.parametrize(
    "answer",
    [
        b"words",
        b"[]",
        b"{}",
        b'{"data": []}',
        b'{"data": [{"index": 0, "embedding": [1.0]}]}',
        b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 7, "embedding": [1.0]}]}',
        b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]}',
        b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [NaN]}]}',
        b'{"data": [{"index": 0, "embedding": []}, {"index": 1, "embedding": []}]}',
        b'{"data": [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": "AAAA"}]}',
        b'{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1%s]}]}' % (b"0" * 400),
        b'{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1%s]}]}' % (b"0" * 9000),
        b'{"data": %s%s}' % (b"[" * 200_000, b"]" * 200_000),
        b'{"data": [{"index": 0, "embedding": [1e99]}, {"index": 1, "embedding": [1.0]}]}',
        b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]}',
        b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": -1, "embedding": [1.0]}]}',
        b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": true, "embedding": [1.0]}]}',
        b'{"data": {"index": 0, "embedding": [1.0]}}',
        b"\xff\xfe",
    ],
    ids=range(19),
)
def test_an_answer_that_is_none(double, answer):
    double.routes["/v1/embeddings"] = lambda handler, _: handler.answer(answer)
    with (
        OpenAIEmbedder(double.url, "m", sleep=pytest.fail) as embedder,
        pytest.raises(EmbeddingError, match=double.url),
    ):
        embedder.embed(["abc", "d"])


def test_dimensions_that_change_between_batches(double):
    double.vectors_of = lambda texts: [[1.0] * len(text) for text in texts]
    limits = EmbeddingLimits(batch=1)
    with (
        OpenAIEmbedder(double.url, "m", limits=limits) as embedder,
        pytest.raises(EmbeddingError, match=r"vectors of \[3, 1\] dimensions"),
    ):
        embedder.embed(["abc", "d"])


def test_an_answer_that_never_ends(double, monkeypatch):
    monkeypatch.setattr("hybridindex.rag.embedders.openai._MAX_ANSWER_BYTES", 1000)
    double.routes["/v1/embeddings"] = lambda handler, _: handler.answer(json.dumps([0] * 1000).encode())
    with OpenAIEmbedder(double.url, "m") as embedder, pytest.raises(EmbeddingError, match="more than 1000 bytes"):
        embedder.embed(["abc"])


def test_what_is_asked_is_checked():
    for make, message in (
        (lambda: OpenAIEmbedder("127.0.0.1", "m"), "url is '127.0.0.1'"),
        (lambda: OpenAIEmbedder("http://h", ""), "model is empty"),
        (lambda: EmbeddingLimits(batch=0), "batch is 0"),
        (lambda: EmbeddingLimits(timeout_s=0), "timeout_s is 0"),
        (lambda: EmbeddingLimits(retries=-1), "retries is -1"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            make()
    with OpenAIEmbedder("http://127.0.0.1:9", "m") as embedder:
        for texts, message in (
            (["a", ""], "text 1 has 0"),
            (["a" * 200_000], "text 0 has 200000"),
            ([], "texts is empty"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                embedder.embed(texts)
