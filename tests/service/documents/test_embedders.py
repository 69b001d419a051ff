"""Who embeds the documents of a daemon: where it is, what becomes of a call when it fails, and that it gives way."""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hybridindex.errors import (
    EmbeddingError,
    NoEmbedderError,
)
from hybridindex.rag.collection import Collection
from hybridindex.service.config import DocumentConfig
from tests.rag.collection.world import DIM, vectors_of
from tests.router.slow_copies import until
from tests.service.conftest import ask
from tests.service.documents.conftest import FIRST, ONE, ask_metrics
from tests.service.http.test_app import is_problem
from tests.service.live import live


@pytest.mark.parametrize(
    ("embedder", "config", "words"),
    [
        ("toy", {}, "embedded by 'toy', and the daemon has demo, sentence-transformers:MODEL or openai:MODEL"),
        ("", {}, "an embedder without a name"),
        ("openai:toy", {}, "there is no url; expected that of a server which has 'toy'"),
        ("demo", {}, "cannot be opened here: .*wordllama"),
        ("sentence-transformers:none", {}, "cannot be opened here: .*sentence-transformers"),
    ],
)
def test_an_embedder_that_is_not_here_is_named(serve, tmp_path, client_of, monkeypatch, embedder, config, words):
    from hybridindex.rag.embed import EMBEDDER as DEMO

    monkeypatch.delenv("HYBRIDINDEX_EMBEDDER_URL", raising=False)
    other, name = tmp_path / "other", DEMO if embedder == "demo" else embedder
    with Collection(other, embedder=name) as collection:
        collection.create(DIM)
    service = serve(where=other, documents=DocumentConfig(embedder_cache=tmp_path / "none", **config))
    with live(service) as port, client_of(port) as client:
        with pytest.raises(NoEmbedderError, match=words) as refused:
            client.add_documents([ONE])
        assert str(other) not in str(refused.value)
        # What needs no embedder is done.
        assert client.delete_documents(["x"]) == 0
    is_problem(ask(service, "POST", "/v1/documents", json={"documents": [ONE]}), 422)


def test_the_address_comes_from_the_environment_too(serve, double, client_of, monkeypatch):
    monkeypatch.setenv("HYBRIDINDEX_EMBEDDER_URL", double.url)
    monkeypatch.setenv("HYBRIDINDEX_EMBEDDER_KEY", "secret")
    with live(serve(documents=DocumentConfig())) as port, client_of(port) as client:
        assert client.add_documents([ONE])["sources"]["added"] == 1
    assert {headers["authorization"] for _, headers in double.embeddings} == {"Bearer secret"}


def test_another_model_of_the_same_name_is_refused(serve, double, client_of):
    double.vectors_of = lambda asked: [[1.0, 2.0]] * len(asked)
    with (
        live(serve()) as port,
        client_of(port) as client,
        pytest.raises(NoEmbedderError, match="gives 2 dimensions, and the documents have 12"),
    ):
        client.add_documents([ONE])


def test_an_embedder_that_fails_changes_nothing(serve, double, client_of, caplog, texts):
    service = serve()
    with live(service) as port, client_of(port) as client:
        client.add_documents([{"source": "x", "text": "before"}])
        good = double.routes["/v1/embeddings"]
        double.routes["/v1/embeddings"] = lambda handler, _: handler.answer(b'{"error": "no such key 123"}', 401)
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(EmbeddingError, match="'openai:toy' gives no vectors") as said,
        ):
            client.add_documents([{"source": "x", "text": "after"}])
        # Where the embedder is, and what it says, is in the log alone.
        assert double.url not in str(said.value)
        assert f"{double.url}/v1/embeddings" in caplog.text
        failed = ask(service, "POST", "/v1/documents", json={"documents": [ONE]})
        is_problem(failed, 503)
        assert failed.headers["retry-after"] == "5"
        double.routes["/v1/embeddings"] = good
        assert 'writes_refused_total{reason="embedder failed"} 2.0' in ask_metrics(port)
        assert client.add_documents([{"source": "x", "text": "after"}])["sources"]["changed"] == 1
    service.close()
    assert texts() == sorted([*FIRST, "after"])


def test_a_process_that_embeds_and_dies_is_started_again(serve, double, client_of):
    service = serve()
    with live(service) as port, client_of(port) as client:
        client.add_documents([{"source": "x", "text": "one"}])
        first = service.documents._process
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: not first.is_alive)
        assert client.add_documents([{"source": "y", "text": "two"}])["sources"]["added"] == 1
        second = service.documents._process
        assert second.pid != first.pid

        # In the middle of a call it is an error, and nothing has changed.
        gate, begun = threading.Event(), threading.Event()

        def slow(asked):
            begun.set()
            gate.wait(60)
            return vectors_of(asked)

        double.vectors_of = slow
        problems = []

        def add():
            try:
                client.add_documents([{"source": "z", "text": "three"}])
            except EmbeddingError as error:
                problems.append(error)

        thread = threading.Thread(target=add)
        thread.start()
        assert begun.wait(60)
        os.kill(second.pid, signal.SIGKILL)
        thread.join(60)
        gate.set()
        assert len(problems) == 1
        double.vectors_of = vectors_of
        assert client.add_documents([{"source": "z", "text": "three"}])["sources"]["added"] == 1
        third = service.documents._process
    service.close()
    assert not third.is_alive


def test_a_call_that_takes_too_long_ends_and_lets_the_next_one_come(serve, double, client_of, texts, caplog):
    """An embedder that hangs does not keep the calls of all clients."""
    service = serve()
    gate, begun = threading.Event(), threading.Event()

    def hang(asked):
        begun.set()
        gate.wait(30)
        return vectors_of(asked)

    with live(service) as port, client_of(port) as client:
        client.add_documents([{"source": "x", "text": "one"}])
        process, told = service.documents._process, service.documents._config
        # The next call finds the process there.
        service.documents._config = replace(told, embedder_timeout_s=0.5)
        double.vectors_of = hang
        with caplog.at_level(logging.ERROR), pytest.raises(EmbeddingError, match=r"within 0\.5 s.*embedder_timeout_s"):
            client.add_documents([{"source": "x", "text": "two"}])
        assert begun.is_set()
        assert not gate.is_set()
        assert "took longer than it may" in caplog.text
        assert not process.is_alive
        service.documents._config, double.vectors_of = told, vectors_of
        assert client.add_documents([{"source": "y", "text": "three"}])["sources"]["added"] == 1
    gate.set()
    service.close()
    assert texts() == sorted([*FIRST, "one", "three"])


def test_the_process_that_embeds_gives_way(serve, client_of):
    service = serve()
    with live(service) as port, client_of(port) as client:
        client.add_documents([ONE])
        process = service.documents._process
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        environment = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert {"OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1"} <= set(environment)
        # It ends when nothing came for a while.
        service.documents._end_idle()
        assert not process.is_alive
        assert client.add_documents([{"source": "y", "text": "two"}])["sources"]["added"] == 1
