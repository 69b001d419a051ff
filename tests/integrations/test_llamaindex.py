"""The retriever inside LlamaIndex itself: sync, async, a query engine, bad input."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed: make test-ecosystem")

from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine

from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.integrations.llamaindex import HybridIndexRetriever

QUERY = "what is a planet"


@pytest.fixture
def inside(retriever):
    return HybridIndexRetriever(retriever, k=4)


def test_nodes_are_the_passages(inside, retriever):
    (expected,) = retriever.search([QUERY], k=4)
    found = inside.retrieve(QUERY)
    assert [n.node.text for n in found] == [p.text for p in expected]
    assert [n.score for n in found] == [p.score for p in expected]
    assert found[0].node.metadata == {"id": expected[0].id, "source": "stars", "nprobe_used": 4}
    assert found[0].node.node_id == str(expected[0].id)


def test_async_agrees(inside):
    ids = [n.node.node_id for n in inside.retrieve(QUERY)]
    assert [n.node.node_id for n in asyncio.run(inside.aretrieve(QUERY))] == ids


def test_a_query_engine_reads_the_passages(inside):
    """LlamaIndex's own model for tests says its prompt again."""
    engine = RetrieverQueryEngine.from_args(inside, llm=MockLLM(max_tokens=None))
    response = engine.query(QUERY)
    for node in inside.retrieve(QUERY):
        assert node.node.text in str(response)
    assert "nprobe_used" not in str(response), "numbers of probes are nothing for a model"
    assert [n.node.metadata["nprobe_used"] for n in response.source_nodes] == [4] * 4


def test_bad_input(inside, retriever, router):
    with pytest.raises(InvalidInputError, match="query is"):
        inside.retrieve("")
    with pytest.raises(InvalidInputError, match="query is"):
        asyncio.run(inside.aretrieve(" "))
    with pytest.raises(InvalidInputError, match="k is 99999"):
        HybridIndexRetriever(retriever, k=99_999).retrieve(QUERY)
    router.close()
    with pytest.raises(RouterClosedError):
        inside.retrieve(QUERY)
