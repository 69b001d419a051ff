"""The document store inside Haystack itself: Haystack's own tests, the retriever, pipelines that are written down."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

# Read when the package is imported: tests send nothing to anybody.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "false"
pytest.importorskip("haystack", reason="haystack-ai is not installed: make test-ecosystem")

from haystack import Document, Pipeline
from haystack.components.joiners import DocumentJoiner
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.testing.document_store import (
    CountDocumentsByFilterTest,
    DocumentStoreBaseExtendedTests,
    FilterableDocsFixtureMixin,
)
from haystack.testing.document_store_async import (
    CountDocumentsAsyncTest,
    CountDocumentsByFilterAsyncTest,
    DeleteAllAsyncTest,
    DeleteByFilterAsyncTest,
    DeleteDocumentsAsyncTest,
    FilterDocumentsAsyncTest,
    UpdateByFilterAsyncTest,
    WriteDocumentsAsyncTest,
)

from hybridindex.errors import InvalidInputError
from hybridindex.integrations.haystack_store import HybridIndexDocumentStore, HybridIndexEmbeddingRetriever
from hybridindex.rag.collection import Item

DIM = 8


class TestConformance(DocumentStoreBaseExtendedTests, CountDocumentsByFilterTest):
    """What Haystack asks of every document store, and what it offers tests for."""

    @pytest.fixture
    def document_store(self, tmp_path):
        store = HybridIndexDocumentStore(str(tmp_path / "idx"))
        yield store
        store.close()

    def test_write_documents(self, document_store):
        """Without a policy, an id that is there is an error."""
        document = Document(content="one")
        assert document_store.write_documents([document]) == 1
        with pytest.raises(DuplicateDocumentError):
            document_store.write_documents([document])


class TestAsynchronousConformance(
    CountDocumentsAsyncTest,
    CountDocumentsByFilterAsyncTest,
    WriteDocumentsAsyncTest,
    DeleteDocumentsAsyncTest,
    DeleteAllAsyncTest,
    DeleteByFilterAsyncTest,
    UpdateByFilterAsyncTest,
    FilterDocumentsAsyncTest,
    FilterableDocsFixtureMixin,
):
    @pytest.fixture
    def document_store(self, tmp_path):
        store = HybridIndexDocumentStore(str(tmp_path / "idx"))
        yield store
        store.close()

    async def test_write_documents_async(self, document_store):
        document = Document(content="one")
        assert await document_store.write_documents_async([document]) == 1
        with pytest.raises(DuplicateDocumentError):
            await document_store.write_documents_async([document])


def vectors():
    return np.random.default_rng(4).standard_normal((10, DIM))


def documents():
    return [
        Document(
            id=f"d{n}", content=f"text {n}", embedding=vector,
            meta={"year": 2000 + n, "lang": "en" if n % 2 else "de", "deep": {"n": n}},
        )
        for n, vector in enumerate(vectors().tolist())
    ]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    made = HybridIndexDocumentStore(str(tmp_path / "idx"), embedding_dim=DIM, columns={"year": "int", "lang": "string"})
    made.write_documents([*documents(), Document(id="bare", content="bare", embedding=[0.5] * DIM)])
    made.write_documents([Document(id="unembedded", content="x", meta={"year": 2003})])
    yield made
    made.close()


@pytest.fixture
def inside(store):
    return HybridIndexEmbeddingRetriever(store, top_k=3)


def field(name, operator, value):
    return {"field": name, "operator": operator, "value": value}


def test_the_nearest_documents(inside):
    query = vectors()[4].tolist()
    found = inside.run(query)["documents"]
    assert len(found) == 3
    assert (found[0].id, found[0].content, found[0].meta, found[0].embedding) == (
        "d4",
        "text 4",
        documents()[4].meta,
        None,
    )
    assert found[0].score == pytest.approx(1, abs=1e-5)
    assert asyncio.run(inside.run_async(query, top_k=1))["documents"][0].id == "d4"
    with_it = HybridIndexEmbeddingRetriever(inside._document_store, return_embedding=True).run(query)["documents"]
    assert with_it[0].embedding == query


@pytest.mark.parametrize(
    ("filters", "numbers", "bare"),
    [
        (field("meta.year", "==", 2003), {3}, False),
        (field("year", ">=", 2008), {8, 9}, False),
        (field("meta.year", "!=", 2003), set(range(10)) - {3}, True),
        (field("meta.lang", "in", ["en", "fr"]), {1, 3, 5, 7, 9}, False),
        (field("meta.lang", "not in", ["en"]), {0, 2, 4, 6, 8}, True),
        (
            {"operator": "AND", "conditions": [field("meta.lang", "==", "de"), field("meta.year", "<", 2003)]},
            {0, 2},
            False,
        ),
        ({"operator": "OR", "conditions": [field("year", "==", 2001), field("year", "==", 2002)]}, {1, 2}, False),
        (
            {"operator": "NOT", "conditions": [field("lang", "==", "de"), field("year", ">", 2001)]},
            {0, *range(1, 10, 2)},
            True,
        ),
    ],
)
def test_filters_in_the_index_agree_with_those_of_haystack(store, inside, filters, numbers, bare):
    found = {d.id for d in inside.run(vectors()[0].tolist(), filters=filters, top_k=50)["documents"]}
    assert found == {f"d{n}" for n in numbers} | ({"bare"} if bare else set())
    full = {**filters, "field": f"meta.{filters['field'].removeprefix('meta.')}"} if "field" in filters else filters
    if "field" in filters:
        assert {d.id for d in store.filter_documents(full)} - {"unembedded"} == found


def test_of_documents_with_one_id_the_first_is_kept_or_the_last(store):
    twice = [Document(id="twice", content=content, embedding=vectors()[0].tolist()) for content in ("first", "second")]
    for policy, kept in ((DuplicatePolicy.SKIP, "first"), (DuplicatePolicy.OVERWRITE, "second")):
        store.write_documents(twice, policy)
        assert [d.content for d in store.filter_documents() if d.id == "twice"] == [kept]


def test_a_duplicate_leaves_all_of_its_batch_unwritten(store):
    given = [Document(id="new", content="new", embedding=[0.5] * DIM), Document(id="unembedded", content="again")]
    with pytest.raises(DuplicateDocumentError, match="'unembedded'"):
        store.write_documents(given)
    assert store.count_documents() == 12
    assert store.write_documents(given, DuplicatePolicy.SKIP) == 1


def test_documents_that_others_wrote_are_found_by_their_numbers(store):
    (row,) = store.collection.put([Item(text="other", metadata={"year": 2050})], [[0.5] * DIM])
    number = str(row)
    with pytest.raises(DuplicateDocumentError):
        store.write_documents([Document(id=number, content="x")])
    # Its embedding was not kept, and would be lost.
    with pytest.raises(InvalidInputError, match="embeddings of 1 documents were not kept"):
        store.update_by_filter(field("meta.year", "==", 2050), {"more": 1})
    store.write_documents([Document(id=number, content="mine")], DuplicatePolicy.OVERWRITE)
    assert [d.content for d in store.filter_documents() if d.id == number] == ["mine"]
    store.delete_documents([number])
    assert store.count_documents() == 12


def test_one_id_in_place_of_a_list_deletes_nothing(store):
    store.write_documents([Document(id="x", content="x"), Document(id="y", content="y")])
    with pytest.raises(InvalidInputError, match="document_ids is 'xy'; expected a list of ids"):
        store.delete_documents("xy")
    assert store.count_documents() == 14


def test_the_nearest_document_has_the_largest_score_where_distances_are_compared(tmp_path):
    store = HybridIndexDocumentStore(str(tmp_path / "idx"), embedding_dim=DIM, metric="l2")
    try:
        store.write_documents(documents())
        found = HybridIndexEmbeddingRetriever(store).run(vectors()[4].tolist())["documents"]
        assert (found[0].id, found[0].score) == ("d4", pytest.approx(1, abs=1e-5))
        assert found[1].score == pytest.approx(1 / (1 + ((vectors()[4] - vectors()[int(found[1].id[1:])]) ** 2).sum()))
        (best,) = DocumentJoiner(top_k=1).run([found])["documents"]
        assert best.id == "d4"
    finally:
        store.close()


def test_policies_of_filters(store):
    merging = HybridIndexEmbeddingRetriever(store, filters=field("meta.lang", "==", "de"), filter_policy="merge")
    found = merging.run(vectors()[0].tolist(), filters=field("meta.year", ">", 2005))["documents"]
    assert {d.id for d in found} == {"d6", "d8"}


def test_a_pipeline_is_written_down_and_read_again(store, inside):
    pipeline = Pipeline()
    pipeline.add_component("retriever", inside)
    said = pipeline.dumps()
    store.close()
    again = Pipeline.loads(said, allowed_modules=["hybridindex.integrations.haystack_store"])
    try:
        (first, *_) = again.run({"retriever": {"query_embedding": vectors()[2].tolist()}})["retriever"]["documents"]
        assert first.id == "d2"
    finally:
        again.get_component("retriever")._document_store.close()


def test_an_embedding_may_come_later_and_go(store, inside):
    query = vectors()[3].tolist()
    store.write_documents([Document(id="unembedded", content="now", embedding=query)], DuplicatePolicy.OVERWRITE)
    assert {d.id for d in inside.run(query, top_k=2)["documents"]} == {"d3", "unembedded"}
    store.write_documents([Document(id="d3", content="no more")], DuplicatePolicy.OVERWRITE)
    assert inside.run(query, top_k=1)["documents"][0].id == "unembedded"
    assert store.count_documents() == 12
    assert store.collection.recover() == 0
    assert store.count_documents() == 12


def test_bad_input(store, inside, tmp_path):
    query = vectors()[0].tolist()
    for wrong, complaint in (
        (
            lambda: inside.run(query, filters=field("meta.deep", "==", 1)),
            r"'deep', which is not a column.*year \(int\)",
        ),
        (lambda: inside.run(query, filters={"operator": "XOR", "conditions": []}), "'XOR'"),
        (lambda: inside.run(query, filters=field("meta.year", "~", 1)), "'~'; expected one of =="),
        (lambda: HybridIndexEmbeddingRetriever("store"), "document_store is a str"),
        (lambda: HybridIndexEmbeddingRetriever(store, top_k=0), "top_k is 0"),
        (lambda: store.write_documents([Document(content="y", embedding=[1.0])]), "1 dimensions; the index has 8"),
        (lambda: HybridIndexDocumentStore(str(tmp_path / "idx"), embedding_dim=9), "embedding_dim is 9.*has 8"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            wrong()
