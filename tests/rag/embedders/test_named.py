"""Embedders by the names that document stores have; a store and a query by two embedders are an error with both."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, MissingDependencyError
from hybridindex.rag import Document, Retriever, embed, embedded
from hybridindex.rag.embed import EMBEDDER
from hybridindex.rag.embedders import EmbedderOptions, OpenAIEmbedder, SentenceEmbedder, open_embedder
from hybridindex.rag.retriever import CenteredEmbedder
from tests.rag.world import DIM, embedder


class Model:
    """What sentence-transformers has, as far as it is used."""

    def __init__(self, name, device=None):
        if name == "none":
            raise OSError("none is not a local folder and is not a valid model identifier")
        self.name, self.device = name, device

    def encode(self, texts, *, batch_size, show_progress_bar, convert_to_numpy):
        assert (batch_size, show_progress_bar, convert_to_numpy) == (32, False, True)
        return np.array([[3.0 * len(text), 4.0 * len(text)] for text in texts], dtype=np.float64)

    def encode_query(self, texts, **options):
        return self.encode(["a" + text for text in texts], **options) * [1, -1]


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Model))


def test_a_model_of_sentence_transformers(package):
    with contextlib.ExitStack() as owned:
        found = open_embedder(owned, "sentence-transformers:org/tiny", EmbedderOptions())
        assert isinstance(found, SentenceEmbedder)
        assert found.name == "sentence-transformers:org/tiny"
        vectors = found.embed(["a", "bcd"])
        np.testing.assert_allclose(vectors, [[0.6, -0.8]] * 2, rtol=1e-6)
        assert vectors.dtype == np.float32
        passages = [Document(id=5, text="a"), Document(id=6, text="bcd")]
        ((vectors, _),) = embedded(passages, found)
        np.testing.assert_allclose(vectors, [[0.6, 0.8]] * 2, rtol=1e-6)
        ((vectors, _),) = embedded(passages, CenteredEmbedder(found, np.array([0.6, 0], np.float32)))
        np.testing.assert_allclose(vectors, [[0, 1]] * 2, atol=1e-6)
        with pytest.raises(InvalidInputError, match="cannot load 'none': none is not a local folder"):
            open_embedder(owned, "sentence-transformers:none", EmbedderOptions())


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingDependencyError, match=r"embed with its models: (pip install|in the source)"):
        SentenceEmbedder("org/tiny")


def test_names(monkeypatch):
    monkeypatch.setattr(embed, "load_embedder", lambda folder: folder)
    with contextlib.ExitStack() as owned:
        for name in ("demo", EMBEDDER):
            assert open_embedder(owned, name, EmbedderOptions()) == EmbedderOptions().wheel_folder
        served = open_embedder(owned, "openai:org/m:1", EmbedderOptions(url="http://h", key="k"))
        assert isinstance(served, OpenAIEmbedder)
        assert served.name == "openai:org/m:1"
        with pytest.raises(InvalidInputError, match="'openai:m', a server's, and there is no url"):
            open_embedder(owned, "openai:m", EmbedderOptions())
        for name in ("toy", "openai:", "sentence-transformers:", ""):
            with pytest.raises(
                InvalidInputError, match=f"embedder is '{name}'; expected demo, sentence-transformers:MODEL"
            ):
                open_embedder(owned, name, EmbedderOptions())


class Named:
    def __init__(self, name, dim=DIM):
        self.name, self._dim = name, dim

    def embed(self, texts, /):
        return np.ones((len(texts), self._dim), np.float32)


def test_the_embedder_of_queries_is_that_of_the_documents(source, documents):
    assert documents.info.embedder == "toy"
    assert Retriever(source, Named("toy"), documents).search(["oak"])
    with pytest.raises(InvalidInputError, match="the embedder is 'openai:m', but the documents were embedded by 'toy'"):
        Retriever(source, Named("openai:m"), documents)
    with pytest.raises(InvalidInputError, match="the embedder is 'openai:m', but the documents"):
        Retriever(source, CenteredEmbedder(Named("openai:m"), documents.info.mean), documents)
    with pytest.raises(InvalidInputError, match="'toy' gives 3 dimensions, but the index has 16, embedded by 'toy'"):
        Retriever(source, Named("toy", 3), documents)
    # One without a name is compared by its dimension alone.
    assert Retriever(source, CenteredEmbedder(embedder(), documents.info.mean), documents).search(["oak"])


def test_an_empty_key_is_none():
    with contextlib.ExitStack() as owned:
        options = EmbedderOptions(url="http://127.0.0.1:9", key="")
        assert isinstance(open_embedder(owned, "openai:m", options), OpenAIEmbedder)
        with pytest.raises(InvalidInputError, match="a line feed at its end"):
            open_embedder(owned, "openai:m", EmbedderOptions(url="http://127.0.0.1:9", key="sk\n"))
