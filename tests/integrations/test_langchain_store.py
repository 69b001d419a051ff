"""The vector store inside LangChain itself: LangChain's own tests, filters, what stays after closing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed: make test-ecosystem")
pytest.importorskip("langchain_tests", reason="langchain-tests is not installed: make test-ecosystem")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import VectorStoreIntegrationTests

import hybridindex as hx
from hybridindex.errors import InvalidInputError
from hybridindex.integrations.langchain import HybridIndexVectorStore
from hybridindex.rag.documents import Document as Passage
from hybridindex.rag.documents import write_documents

COLUMNS = {
    "year": "int",
    "lang": "string",
    "price": "float",
    "open": "bool",
    "tags": "list of strings",
    "at": "timestamp",
}
EMBEDDING = DeterministicFakeEmbedding(size=16)


class TestConformance(VectorStoreIntegrationTests):
    """What LangChain asks of every vector store, synchronous and asynchronous."""

    @pytest.fixture
    def vectorstore(self, tmp_path):
        with HybridIndexVectorStore(tmp_path / "idx", self.get_embeddings()) as store:
            yield store


@pytest.fixture
def store(tmp_path):
    with HybridIndexVectorStore(tmp_path / "idx", EMBEDDING, columns=COLUMNS) as store:
        store.add_documents(documents())
        yield store


def documents():
    return [
        Document(
            id=f"d{n}",
            page_content=f"text {n}",
            metadata={
                "year": 2000 + n, "lang": "de" if n % 3 == 0 else "it's", "price": n / 2, "open": n % 2 == 0,
                "tags": ["even" if n % 2 == 0 else "odd", f"t{n}"], "at": f"2024-01-{n + 1:02d}", "more": {"n": n},
            },
        )
        for n in range(12)
    ] + [Document(id="bare", page_content="nothing")]  # fmt: skip


#: Filter -> which of the numbers, and whether the document without metadata, it leaves.
FILTERS = [
    ({"year": 2003}, {3}, False),
    ({"year": {"$eq": 2003}}, {3}, False),
    ({"year": {"$ne": 2003}}, set(range(12)) - {3}, True),
    ({"year": {"$gt": 2003, "$lte": 2005}}, {4, 5}, False),
    ({"year": {"$lt": 2002}, "open": True}, {0}, False),
    ({"year": {"$in": [2001, 2002, 1]}}, {1, 2}, False),
    ({"year": {"$in": []}}, set(), False),
    ({"year": {"$nin": [2001, 2002]}}, set(range(12)) - {1, 2}, True),
    ({"year": {"$nin": []}}, set(range(12)), True),
    ({"lang": "it's"}, {n for n in range(12) if n % 3}, False),
    ({"lang": {"$ne": "it's"}}, {0, 3, 6, 9}, True),
    ({"price": {"$gte": 4.5}}, {9, 10, 11}, False),
    ({"price": {"$lt": -1e-9}}, set(), False),
    ({"open": {"$ne": True}}, {1, 3, 5, 7, 9, 11}, True),
    ({"tags": "even"}, {0, 2, 4, 6, 8, 10}, False),
    ({"tags": {"$in": ["t1", "t2"]}}, {1, 2}, False),
    ({"tags": {"$nin": ["odd"]}}, {0, 2, 4, 6, 8, 10}, True),
    ({"at": {"$gte": "2024-01-11"}}, {10, 11}, False),
    ({"year": None}, set(), True),
    ({"year": {"$exists": True}}, set(range(12)), False),
    ({"lang": {"$like": "d%"}}, {0, 3, 6, 9}, False),
    ({"$or": [{"year": 2001}, {"$and": [{"open": True}, {"lang": "de"}]}]}, {0, 1, 6}, False),
    ({"$not": {"year": {"$lt": 2010}}}, {10, 11}, True),
    ({"$not": {"year": {"$gte": 2001}, "open": True}}, {0, 1, 3, 5, 7, 9, 11}, True),
    ({"$not": {"$or": [{"year": {"$gte": 2002}}, {"year": 2000}]}}, {1}, True),
    ({"year": {"$not": {"$gte": 2002}}}, {0, 1}, True),
    ({}, set(range(12)), True),
]


@pytest.mark.parametrize(("asked", "numbers", "bare"), FILTERS, ids=[str(f[0]) for f in FILTERS])
def test_filters_leave_what_they_say(store, asked, numbers, bare):
    found = {d.id for d in store.similarity_search("text 1", k=50, filter=asked)}
    assert found == {f"d{n}" for n in numbers} | ({"bare"} if bare else set())


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"colour": "red"}, r"'colour', which is not a column of the index.*year \(int\)"),
        ({"year": {"$near": 3}}, r"'\$near'.*expected one of \$eq"),
        ({"$xor": []}, r"'\$xor'"),
        ({"$and": []}, r"\$and of \[\]"),
        ({"year": "new"}, "'year', which holds int, with 'new'"),
        ({"year": {"$in": 3}}, "is in 3; expected a list"),
        (lambda _: True, "expected a dictionary"),
        ({"year": float("nan")}, "finite"),
        ({"tags": {"$gt": "a"}}, "a list of strings"),
    ],
)
def test_wrong_filters_are_named(store, asked, complaint):
    with pytest.raises(InvalidInputError, match=complaint):
        store.similarity_search("text 1", filter=asked)


def test_documents_come_back_as_they_were_and_stay(store, tmp_path):
    assert store.get_by_ids(["d3", "nope", "d1"]) == [documents()[3], documents()[1]]
    ((nearest, score), *_) = store.similarity_search_with_score("text 5", k=3)
    assert nearest == documents()[5]
    assert score == pytest.approx(1, abs=1e-5)
    store.delete(["d5"])
    store.close()
    with HybridIndexVectorStore(tmp_path / "idx", EMBEDDING) as again:
        assert again.get_by_ids(["d5"]) == []
        assert "d5" not in {d.id for d in again.similarity_search("text 5", k=50)}
        assert again.similarity_search("text 5", k=50, filter={"year": 2003}) == [documents()[3]]
        assert again.delete() is True
        assert again.similarity_search("text 1") == []


def test_a_retriever_and_relevance(store):
    retriever = store.as_retriever(search_kwargs={"k": 2, "filter": {"open": True}})
    assert retriever.invoke("text 2")[0].id == "d2"
    assert asyncio.run(retriever.ainvoke("text 2"))[0].id == "d2"
    ((nearest, relevance), *_) = store.similarity_search_with_relevance_scores("text 2", k=12)
    assert (nearest.id, round(relevance, 4)) == ("d2", 1)
    diverse = store.as_retriever(search_type="mmr", search_kwargs={"k": 3, "fetch_k": 6})
    assert len({d.id for d in diverse.invoke("text 2")}) == 3


def test_an_index_that_something_else_made(tmp_path):
    texts = [f"text {n}" for n in range(6)]
    vectors = np.array(EMBEDDING.embed_documents(texts), dtype=np.float32)
    with hx.build(vectors, tmp_path / "idx", normalize=True) as made:
        passages = [Passage(id=n, text=text) for n, text in enumerate(texts)]
        write_documents(
            made.path / "documents.sqlite", passages, index_fingerprint=made.fingerprint, embedder="", dim=16
        )
    with HybridIndexVectorStore(tmp_path / "idx", EMBEDDING) as store:
        ((found, relevance),) = store.similarity_search_with_relevance_scores("text 3", k=1)
        assert (found.id, round(relevance, 4)) == ("3", 1)
        assert store.get_by_ids(["3", "6"]) == [found]
        found.page_content = "text 7"
        store.add_documents([found])
        assert [d.id for d in store.similarity_search("text 7", k=9)].count("3") == 1
        store.delete(["3", "4"])
        assert {d.id for d in store.similarity_search("text 3", k=9)} == {"0", "1", "2", "5"}


def test_from_texts_and_what_does_not_fit(tmp_path):
    store = HybridIndexVectorStore.from_texts(
        ["a", "b", "a again"], EMBEDDING, [{"year": 1}, {}, {"year": 3}], ids=["1", "2", "1"], path=tmp_path / "idx",
        columns={"year": "int"},
    )  # fmt: skip
    with store:
        assert [d.page_content for d in store.get_by_ids(["1", "2"])] == ["a again", "b"]
        with pytest.raises(InvalidInputError, match=r"metadata 'year' is 'x'; the index has a column .* holds int"):
            store.add_texts(["c"], [{"year": "x"}], ids=["3"])
        assert store.get_by_ids(["3"]) == []
        with pytest.raises(InvalidInputError, match="metadatas has 1 entries for 2 texts"):
            store.add_texts(["c", "d"], [{}])
        with pytest.raises(InvalidInputError, match="metadata 'x' is object, not JSON"):
            store.add_texts(["c"], [{"x": object()}])
    with pytest.raises(InvalidInputError, match="path is missing"):
        HybridIndexVectorStore.from_texts(["a"], EMBEDDING)
    with pytest.raises(InvalidInputError, match=r"column 'lang' .string. is wanted, but the index has year"):
        HybridIndexVectorStore(tmp_path / "idx", EMBEDDING, columns={"lang": "string"})


def test_a_collection_that_was_given_is_the_store_and_stays_open(store, tmp_path):
    given = store.collection
    with HybridIndexVectorStore.from_texts(["more"], EMBEDDING, collection=given) as face:
        assert face.collection is given
        assert given.count() == 14
    with HybridIndexVectorStore(tmp_path / "idx", EMBEDDING, collection=given) as face:
        face.add_texts(["again"])
    assert given.count() == 15
    for wrong, complaint in (
        (
            lambda: HybridIndexVectorStore(tmp_path / "other", EMBEDDING, collection=given),
            "path is '.*other', the coll",
        ),
        (lambda: HybridIndexVectorStore(None, EMBEDDING, collection=given, nprobe=9), "has its own nprobe; give"),
        (lambda: HybridIndexVectorStore(None, EMBEDDING, columns=COLUMNS, collection=given), "has its own columns"),
        (lambda: HybridIndexVectorStore(None, EMBEDDING), "path is missing"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            wrong()
    assert not (tmp_path / "other").exists()


def test_one_id_in_place_of_a_list_deletes_nothing(store):
    store.add_texts(["a", "b"], ids=["1", "2"])
    with pytest.raises(InvalidInputError, match="ids is '12'; expected a list of ids"):
        store.delete("12")
    assert [d.id for d in store.get_by_ids(["1", "2"])] == ["1", "2"]


def test_a_text_may_have_no_metadata(store):
    store.add_texts(["a", "b"], [None, {"year": 1}], ids=["1", "2"])
    assert [d.metadata for d in store.get_by_ids(["1", "2"])] == [{}, {"year": 1}]
