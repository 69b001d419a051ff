"""The vector store inside LlamaIndex itself: an index over it, filters, deletion, what stays after closing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed: make test-ecosystem")

from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from hybridindex.errors import InvalidInputError
from hybridindex.integrations.llamaindex import HybridIndexVectorStore
from hybridindex.rag.collection import Item

COLUMNS = {"year": "int", "lang": "string", "tags": "list of strings"}
DIM = 8


def vectors():
    return np.random.default_rng(3).standard_normal((12, DIM))


def nodes():
    found = []
    for n, vector in enumerate(vectors().tolist()):
        node = TextNode(
            id_=f"n{n}",
            text=f"text {n}",
            embedding=vector,
            metadata={
                "year": 2000 + n,
                "lang": "50%_" if n % 2 else "de",
                "tags": [f"t{n % 3}", "all"],
                "deep": {"n": n},
            },
        )
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=f"doc{n % 2}")
        found.append(node)
    found.append(TextNode(id_="bare", text="bare", embedding=[1.0] * DIM))
    return found


@pytest.fixture
def store(tmp_path):
    made = HybridIndexVectorStore(tmp_path / "idx", columns=COLUMNS)
    assert made.add(nodes()) == [node.node_id for node in nodes()]
    yield made
    made.close()


def ask(store, n=0, k=50, **options):
    return store.query(VectorStoreQuery(query_embedding=vectors()[n].tolist(), similarity_top_k=k, **options))


def asked(*filters, condition="and"):
    return MetadataFilters(
        filters=[
            each if isinstance(each, MetadataFilters) else MetadataFilter(key=each[0], operator=each[1], value=each[2])
            for each in filters
        ],
        condition=FilterCondition(condition),
    )


def test_nodes_come_back_whole(store):
    result = ask(store, 5, k=3)
    assert result.ids[0] == "n5"
    assert result.similarities[0] == pytest.approx(1, abs=1e-5)
    assert result.similarities == sorted(result.similarities, reverse=True)
    first, expected = result.nodes[0], nodes()[5]
    assert (first.text, first.metadata, first.ref_doc_id) == (expected.text, expected.metadata, "doc1")
    assert asyncio.run(store.aquery(VectorStoreQuery(vectors()[5].tolist(), similarity_top_k=3))).ids == result.ids


@pytest.mark.parametrize(
    ("filters", "numbers", "bare"),
    [
        (asked(("year", "==", 2003)), {3}, False),
        (asked(("year", "!=", 2003)), set(range(12)) - {3}, True),
        (asked(("year", ">", 2003), ("year", "<=", 2005)), {4, 5}, False),
        (asked(("year", "<", 2002), ("year", ">=", 2011), condition="or"), {0, 1, 11}, False),
        (asked(("year", "in", [2001, 2002])), {1, 2}, False),
        (asked(("year", "nin", [2001, 2002])), set(range(12)) - {1, 2}, True),
        (asked(("tags", "contains", "t1")), {1, 4, 7, 10}, False),
        (asked(("tags", "any", ["t1", "t2"])), {1, 2, 4, 5, 7, 8, 10, 11}, False),
        (asked(("tags", "all", ["t1", "all"])), {1, 4, 7, 10}, False),
        (asked(("lang", "text_match", "0%_")), {1, 3, 5, 7, 9, 11}, False),
        (asked(("lang", "text_match_insensitive", "DE")), {0, 2, 4, 6, 8, 10}, False),
        (asked(("year", "is_empty", None)), set(), True),
        (asked(("year", "<", 2010), ("lang", "==", "de"), condition="not"), {11}, True),
        (asked(asked(("year", "==", 2001), ("year", "==", 2002), condition="or"), ("lang", "==", "de")), {2}, False),
    ],
)
def test_filters_leave_what_they_say(store, filters, numbers, bare):
    expected = {f"n{n}" for n in numbers} | ({"bare"} if bare else set())
    assert set(ask(store, filters=filters).ids) == expected
    assert {node.node_id for node in store.get_nodes(filters=filters)} == expected


def test_ids_and_documents_narrow_a_search(store):
    assert set(ask(store, doc_ids=["doc1"]).ids) == {f"n{n}" for n in range(1, 12, 2)}
    assert set(ask(store, node_ids=["n1", "n2", "x"]).ids) == {"n1", "n2"}
    assert ask(store, doc_ids=["doc1"], node_ids=["n1", "n2"]).ids == ["n1"]
    assert len(ask(store, node_ids=[], doc_ids=[]).ids) == 13, "the retrievers of LlamaIndex mean all by it"


def test_what_is_deleted_is_found_no_more(store):
    store.delete("doc1")
    assert set(ask(store).ids) == {"bare", *(f"n{n}" for n in range(0, 12, 2))}
    store.delete_nodes(["n0", "n1"])
    store.delete_nodes(filters=asked(("year", ">=", 2008)))
    store.delete_nodes(["n2", "n4"], filters=asked(("year", "==", 2004)))
    assert set(ask(store).ids) == {"bare", "n2", "n6"}
    with pytest.raises(InvalidInputError, match="both missing"):
        store.delete_nodes()
    asyncio.run(store.aclear())
    assert ask(store).ids == []
    store.add(nodes()[:1])
    assert ask(store).ids == ["n0"]


def test_nodes_that_others_wrote_are_named_by_their_numbers(store):
    given = [Item(text="other", metadata={"year": 2050}), Item(text="more"), Item(text="named", key="13")]
    assert store.client.put(given, np.ones((3, DIM))) == [13, 14, 15]
    assert [node.text for node in store.get_nodes(["13", "14"])] == ["named", "more"]
    assert ask(store, node_ids=["14"]).ids == ["14"]
    store.delete_nodes(["14"])
    store.delete_nodes(filters=asked(("year", "==", 2050)))
    assert [node.text for node in store.get_nodes(["13", "14"])] == ["named"]
    assert store.client.count() == 14


def test_of_nodes_with_one_id_the_last_one_stays(store):
    twice = [TextNode(id_="twice", text=text, embedding=vectors()[0].tolist()) for text in ("first", "second")]
    assert store.add(twice) == ["twice", "twice"]
    assert [node.text for node in store.get_nodes(["twice"])] == ["second"]


def test_the_empty_name_is_that_of_no_document(store):
    """One node has no document."""
    store.delete("")
    assert [node.node_id for node in store.get_nodes(["bare"])] == ["bare"]
    assert ask(store, doc_ids=[""]).ids == []


def test_nothing_is_deleted_where_nothing_is_named(store):
    nested = MetadataFilters(filters=[MetadataFilters(filters=[])])
    for wrong, complaint in (
        (lambda: store.delete_nodes(filters=MetadataFilters(filters=[])), "both missing"),
        (lambda: store.delete_nodes(filters=nested), "both missing"),
        (lambda: store.delete_nodes("bare"), "node_ids is 'bare'; expected a list of ids"),
        (lambda: store.get_nodes("bare"), "node_ids is 'bare'; expected a list of ids"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            wrong()
    assert len(store.get_nodes()) == 13
    store.delete_nodes(["n1"], filters=MetadataFilters(filters=[]))
    store.delete_nodes([])
    assert len(store.get_nodes()) == 12


def test_a_collection_that_was_given_has_its_own_settings(store):
    with pytest.raises(InvalidInputError, match="a collection has its own nprobe, columns; give them to it"):
        HybridIndexVectorStore(collection=store.client, columns=COLUMNS, nprobe=9)
    face = HybridIndexVectorStore(collection=store.client)
    face.close()
    assert len(store.get_nodes()) == 13


def test_an_empty_store_answers(tmp_path):
    empty = HybridIndexVectorStore(tmp_path / "idx")
    assert ask(empty, doc_ids=["doc1"], node_ids=["n1"]).ids == []
    empty.delete("doc1")
    assert empty.get_nodes() == []
    empty.close()


def test_an_index_over_it(tmp_path):
    store = HybridIndexVectorStore(tmp_path / "idx", columns={"year": "int"})
    documents = [Document(id_=f"d{n}", text=f"words of {n}", metadata={"year": n}) for n in range(3)]
    embedding = MockEmbedding(embed_dim=4)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex.from_documents(documents, storage_context=context, embed_model=embedding)
    retriever = index.as_retriever(similarity_top_k=2, filters=asked(("year", ">=", 1)))
    assert {found.node.ref_doc_id for found in retriever.retrieve("words")} == {"d1", "d2"}
    index.delete_ref_doc("d1")
    index.insert(Document(id_="d9", text="new", metadata={"year": 9}))
    store.close()

    again = HybridIndexVectorStore(tmp_path / "idx")
    index = VectorStoreIndex.from_vector_store(again, embed_model=embedding)
    assert {found.node.ref_doc_id for found in index.as_retriever(similarity_top_k=9).retrieve("words")} == {
        "d0",
        "d2",
        "d9",
    }
    again.close()


def test_bad_input(store, tmp_path):
    for wrong, complaint in (
        (lambda: ask(store, filters=asked(("colour", "==", "red"))), r"'colour', which is not a column.*year \(int\)"),
        (lambda: ask(store, filters=asked(("tags", "any", "t1"))), "expected a list"),
        (lambda: ask(store, mode=VectorStoreQueryMode.MMR), "mode is 'mmr'"),
        (lambda: store.query(VectorStoreQuery()), "query_embedding is None"),
        (lambda: store.add([TextNode(id_="x", text="x")]), "node 'x' has no embedding"),
        (lambda: HybridIndexVectorStore(), "both given, or missing"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            wrong()
    assert FilterOperator.EQ.value == "=="
