"""The component inside Haystack itself: sync, async, a pipeline, bad input."""

from __future__ import annotations

import asyncio
import os

import pytest

# Read when the package is imported: tests send nothing to anybody.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "false"
pytest.importorskip("haystack", reason="haystack-ai is not installed: make test-ecosystem")

from haystack import Pipeline
from haystack.components.builders import PromptBuilder

from hybridindex.errors import InvalidInputError
from hybridindex.integrations.haystack import HybridIndexRetriever

QUERY = "what is a planet"
TEMPLATE = "{% for d in documents %}{{ d.content }}\n{% endfor %}Q: {{ query }}"


@pytest.fixture
def inside(retriever):
    return HybridIndexRetriever(retriever, top_k=4)


def prompted(pipeline, inside):
    pipeline.add_component("retriever", inside)
    pipeline.add_component("prompt", PromptBuilder(TEMPLATE, required_variables=["documents", "query"]))
    pipeline.connect("retriever.documents", "prompt.documents")
    return pipeline


def test_documents_are_the_passages(inside, retriever):
    (expected,) = retriever.search([QUERY], k=4)
    found = inside.run(QUERY)["documents"]
    assert [(d.id, d.content, d.score) for d in found] == [(str(p.id), p.text, p.score) for p in expected]
    assert found[0].meta == {"id": expected[0].id, "source": "stars", "nprobe_used": 4}
    assert len(inside.run(QUERY, top_k=2)["documents"]) == 2
    assert asyncio.run(inside.run_async(QUERY))["documents"] == found


def test_it_stands_in_a_pipeline(inside):
    answer = prompted(Pipeline(), inside).run({"retriever": {"query": QUERY}, "prompt": {"query": QUERY}})
    for document in inside.run(QUERY)["documents"]:
        assert document.content in answer["prompt"]["prompt"]


def test_it_stands_in_a_pipeline_run_asynchronously(inside):
    asked = {"retriever": {"query": QUERY}, "prompt": {"query": QUERY}}
    answer = asyncio.run(prompted(Pipeline(), inside).run_async(asked))
    assert inside.run(QUERY)["documents"][0].content in answer["prompt"]["prompt"]


def test_bad_input(inside):
    with pytest.raises(InvalidInputError, match="query is ''"):
        inside.run("")
    with pytest.raises(InvalidInputError, match="query is None"):
        asyncio.run(inside.run_async(None))
    with pytest.raises(InvalidInputError, match="k is 0"):
        inside.run(QUERY, top_k=0)
