"""The world of the pipelines' tests: index and store are made once, routers and retrievers for each test."""

from __future__ import annotations

import pytest

from hybridindex.rag import DocumentStore, Retriever
from hybridindex.router import Router
from tests.rag.world import LandingSource, build_world, query_embedder


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    index, path, mean = build_world(tmp_path_factory.mktemp("world"))
    yield index, path, mean
    index.close()


@pytest.fixture
def documents(world):
    with DocumentStore(world[1]) as store:
        yield store


@pytest.fixture
def router(world):
    """With a stand-in device that keeps nothing when sessions end."""
    with Router(world[0], devices=["cpu"], device_budget_bytes=16 << 20, cache_fraction=0) as router:
        yield router
        router.check_invariants()


@pytest.fixture
def source(router):
    return LandingSource(router)


@pytest.fixture
def retriever(source, documents):
    return Retriever(source, query_embedder(documents), documents, k=3)
