"""The retriever inside LangChain itself: sync, async, batches, chains, bad input."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed: make test-ecosystem")

from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.integrations.langchain import HybridIndexRetriever

QUERY = "what is a planet"


@pytest.fixture
def chained(retriever):
    return HybridIndexRetriever(retriever=retriever, k=4)


def test_documents_are_the_passages(chained, retriever):
    (expected,) = retriever.search([QUERY], k=4)
    found = chained.invoke(QUERY)
    assert [d.page_content for d in found] == [p.text for p in expected]
    assert [d.id for d in found] == [str(p.id) for p in expected]
    first = expected[0]
    assert found[0].metadata == {"id": first.id, "score": first.score, "source": "stars", "nprobe_used": 4}


def test_async_and_batches_agree(chained):
    expected = chained.invoke(QUERY)
    assert asyncio.run(chained.ainvoke(QUERY)) == expected
    assert chained.batch([QUERY, "what is a reef"])[0] == expected
    assert asyncio.run(chained.abatch([QUERY, "what is a reef"]))[1][0].metadata["source"] == "seas"


def test_it_stands_in_a_chain(chained):
    chain = (
        chained
        | RunnableLambda(lambda documents: {"context": documents[0].page_content})
        | PromptTemplate.from_template("From: {context}")
    )
    assert chain.invoke(QUERY).to_string() == f"From: {chained.invoke(QUERY)[0].page_content}"


def test_a_deadline_lowers_nprobe_to_the_floor(retriever):
    chained = HybridIndexRetriever(retriever=retriever, deadline_ms=1e-6, min_nprobe=2)
    chained.invoke(QUERY)  # the host's pace is known after a search
    assert chained.invoke(QUERY)[0].metadata["nprobe_used"] == 2


@pytest.mark.parametrize("query", ["", "   "])
def test_empty_queries_are_refused(chained, query):
    with pytest.raises(InvalidInputError, match="query is"):
        chained.invoke(query)
    with pytest.raises(InvalidInputError, match="query is"):
        asyncio.run(chained.ainvoke(query))


def test_wrong_settings_are_refused(retriever):
    with pytest.raises(ValueError, match="retriever"):
        HybridIndexRetriever(retriever="not one")
    with pytest.raises(InvalidInputError, match="k is 0"):
        HybridIndexRetriever(retriever=retriever, k=0).invoke(QUERY)


def test_a_closed_router_is_an_error(chained, router):
    router.close()
    with pytest.raises(RouterClosedError):
        chained.invoke(QUERY)
