"""A daemon over an index with documents, whose embedder is a server of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridindex.client import Client, RetryPolicy
from hybridindex.config import RouterConfig
from hybridindex.rag.collection import Collection
from hybridindex.rag.ingest import Reading, find_sources, update
from hybridindex.service.config import DocumentConfig, Limits, ServiceConfig
from hybridindex.service.core import Service
from tests.llm_double import LLMDouble
from tests.rag.collection.world import DIM, vectors_of

COLUMNS = {"year": "int", "lang": "string"}
EMBEDDER = "openai:toy"


class Toy:
    """As the server embeds."""

    name = EMBEDDER

    def embed(self, texts, /):
        return vectors_of(texts)


FIRST = ["# One\n\nfirst words here", "# Two\n\nsecond words here", "a text of few words"]
ONE = {"source": "x", "text": "words"}


@pytest.fixture
def double() -> Iterator[LLMDouble]:
    with LLMDouble() as running:
        running.vectors_of = vectors_of
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts that were ingested."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.md").write_text("# One\n\nfirst words here\n\n# Two\n\nsecond words here\n")
    (folder / "b.md").write_text("a text of few words")
    return folder


@pytest.fixture
def path(tmp_path: Path, folder: Path) -> Path:
    """Of an index that was ingested, with passages of 20 words."""
    with Collection(tmp_path / "idx", columns=COLUMNS, embedder=EMBEDDER) as collection:
        collection.create(DIM)
        update(collection, find_sources([folder]), [folder], Toy(), Reading(words=20))
    return tmp_path / "idx"


@pytest.fixture
def serve(path: Path, double: LLMDouble) -> Iterator[Callable[..., Service]]:
    """``serve(limits={...}, **config)``: warmed up, closed at the test's end."""
    made: list[Service] = []

    def factory(*, limits=None, documents=None, where=None, **config) -> Service:
        told = DocumentConfig(embedder_url=double.url) if documents is None else documents
        whole = ServiceConfig(
            router=RouterConfig(devices=()), limits=Limits(**(limits or {})), documents=told, **config
        )
        service = Service.open(where or path, whole)
        made.append(service)
        service.warm_up()
        return service

    yield factory
    for service in made:
        service.close()


@pytest.fixture
def texts(path: Path) -> Callable[[], list[str]]:
    """All texts now; every row is found by its text's vector, and no other rows are there."""

    def found() -> list[str]:
        with Collection(path) as collection:
            items = list(collection.items())
            for item in items:
                (hits,) = collection.search(vectors_of([item.text]), 1)
                assert hits[0].item == item
            assert collection.index.n_live == len(items) == collection.count()
            return sorted(item.text for item in items)

    return found


@pytest.fixture
def client_of():
    def of(port, **options):
        return Client(f"http://127.0.0.1:{port}", retry=RetryPolicy(attempts=1), **options)

    return of


def ask_metrics(port):
    import httpx

    return httpx.get(f"http://127.0.0.1:{port}/metrics").text


def asked_of(double):
    """Texts that were embedded; the probe of a new process is none."""
    return [text for body, _ in double.embeddings for text in body["input"] if text != "text"]
