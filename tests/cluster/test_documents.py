"""Documents through a cluster: any node takes them, the one that writes embeds them, and all find them."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from hybridindex.client import Client
from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import NoDocumentsError
from hybridindex.index import open_index
from hybridindex.rag.collection import Collection
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.ingest import Reading, find_sources, update
from hybridindex.service.http.routes import of_documents
from hybridindex.service.http.routes.of_documents import DocumentRoutes
from tests.cluster.searches import wait_until
from tests.cluster.test_manager import KEY, running
from tests.clustered import small_index
from tests.llm_double import LLMDouble
from tests.rag.collection.world import DIM, vectors_of

EMBEDDER = "openai:toy"


class Toy:
    name = EMBEDDER

    def embed(self, texts, /):
        return vectors_of(texts)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Of an index that was ingested; nodes find the embedder's server in their environment."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(40):
        (texts / f"{n}.md").write_text(f"words of text {n}")
    with Collection(tmp_path / "idx", columns={"year": "int"}, embedder=EMBEDDER) as collection:
        collection.create(DIM)
        update(collection, find_sources([texts]), [texts], Toy(), Reading(words=20))
    with LLMDouble() as double:
        double.vectors_of = vectors_of
        monkeypatch.setenv("HYBRIDINDEX_EMBEDDER_URL", double.url)
        with open_index(tmp_path / "idx") as found:
            yield found


def text_of(index, row):
    with DocumentStore(index.path / "documents.sqlite") as store:
        return store.read([row])[row].document.text


def test_any_node_takes_documents_and_every_node_finds_them(index, tmp_path):
    with running(index, tmp_path, n_nodes=3, share=3.0) as it, ExitStack() as ends:
        clients = [ends.enter_context(Client(node.url, key=KEY)) for node in it.nodes]

        def nearest(client, text):
            return text_of(index, int(client.search(vectors_of([text]), 1, index.nlist).ids[0, 0]))

        for number, client in enumerate(clients):
            text = f"new words through node {number}"
            said = client.add_documents(
                [{"source": f"new {number}", "text": text, "metadata": {"year": 2000 + number}}]
            )
            assert said["sources"]["added"] == said["chunks"]["added"] == 1
            assert [nearest(each, text) for each in clients] == [text] * 3
        # A change of one key is made once, whichever node is asked.
        same = [{"source": "once", "text": "words of one key"}]
        said = [client.add_documents(same, idempotency_key="k") for client in clients]
        assert said[0] == said[1] == said[2]
        assert said[0]["sources"]["added"] == 1
        # The node that writes is lost: the next one embeds.
        os.kill(it.nodes[0].pid, signal.SIGKILL)
        wait_until(lambda: it.states()[0] == "down")
        assert clients[2].add_documents([{"source": "later", "text": "words that came later"}])["sources"]["added"] == 1
        assert nearest(clients[1], "words that came later") == "words that came later"
        wait_until(lambda: it.states() == ["up"] * 3)
        assert clients[0].delete_documents(["new 1", "later"]) == 2
        for client in clients:
            assert nearest(client, "words that came later") != "words that came later"
            assert nearest(client, "new words through node 2") == "new words through node 2"
        router = ClusterRouter({f"node-{i}": node.url for i, node in enumerate(it.nodes)}, dim=DIM, key=KEY)
        with router:
            found = router.search(vectors_of(["new words through node 0"]), 1, index.nlist, where="year = 2000")
            assert text_of(index, int(found.ids[0, 0])) == "new words through node 0"
            assert router.search(vectors_of(["x"]), 1, index.nlist, where="year = 1999").ids.tolist() == [[-1]]


def test_an_index_of_vectors_alone_takes_none(tmp_path):
    vectors = small_index(tmp_path / "vectors", n=600, nlist=16)
    with (
        running(vectors, tmp_path, n_nodes=2, share=2.0) as it,
        Client(it.nodes[1].url, key=KEY) as client,
        pytest.raises(NoDocumentsError, match="no documents beside its vectors"),
    ):
        client.add_documents([{"source": "x", "text": "words"}])


@pytest.mark.parametrize("name", ["add", "delete"])
def test_a_node_waits_for_another_one_that_embeds_for_long(name):
    told = []

    class Changing:
        async def object_of(self, _request, _kind):
            return b"{}", {"texts": [], "sources": []}

        async def once(self, *given):
            told.append(given[-1])

    routes = DocumentRoutes.__new__(DocumentRoutes)
    routes._changing, routes._body, routes._sources = Changing(), None, None
    routes._service = SimpleNamespace(
        config=SimpleNamespace(limits=SimpleNamespace(max_rows=1)), index=SimpleNamespace(dim=DIM)
    )
    charge = SimpleNamespace(hold=lambda _nbytes: None, most=1 << 30)
    asyncio.run(getattr(routes, name)(SimpleNamespace(scope={of_documents.CHARGE: charge})))
    assert told == [3600.0]
