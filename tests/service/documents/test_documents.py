"""Documents that come to a daemon as texts: what changes, what is refused, and that an ingest would do the same."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import AsyncClient, Client
from hybridindex.errors import (
    AccessDeniedError,
    BuildError,
    BusyWritingError,
    DocumentStoreError,
    InvalidInputError,
    NoDocumentsError,
    OverloadedError,
)
from hybridindex.index.changes.writer import IndexWriter
from hybridindex.rag.collection import Collection
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.ingest import Reading, find_sources, update
from hybridindex.service.auth import KeyFile, Keyring
from tests.rag.collection.world import DIM, vectors_of
from tests.service.conftest import ask, talk
from tests.service.documents.conftest import FIRST, ONE, Toy, ask_metrics, asked_of
from tests.service.http.test_app import is_problem
from tests.service.live import live


def nearest(client, text, **options):
    return int(client.search(vectors_of([text]), 1, **options).ids[0, 0])


def test_documents_come_change_and_go(serve, path, double, texts, client_of):
    service = serve()
    with live(service) as port, client_of(port) as client:
        two = [
            {"source": "x", "text": "# A\n\nalpha words\n\n# B\n\nbeta words", "metadata": {"year": 2024, "more": [1]}},
            {"source": "y", "text": "<p>shown &amp; read</p><script>no()</script>", "format": "html", "title": "Page"},
        ]
        assert client.add_documents(two) == {
            "sources": {"added": 2, "changed": 0, "unchanged": 0},
            "chunks": {"added": 3, "unchanged": 0, "removed": 0},
            "number": service.rows.state(service.index)["number"],
        }
        assert asked_of(double) == ["# A\n\nalpha words", "# B\n\nbeta words", "shown & read"]
        row = nearest(client, "# A\n\nalpha words")
        with DocumentStore(path / "documents.sqlite") as store:
            found = store.read([row, row + 1, row + 2])
            assert found[row].document.text == "# A\n\nalpha words"
            assert (found[row].document.source, found[row].document.successor) == ("x", row + 1)
            assert (found[row + 2].document.source, found[row + 2].document.successor) == ("Page", None)
        assert nearest(client, "alpha", where="year = 2024") in (row, row + 1)
        assert nearest(client, "# A\n\nalpha words", where="year = 2023") == -1

        # The same again changes nothing and embeds nothing.
        number = client.status()["changes"]["number"]
        again = client.add_documents(two)
        assert again["sources"] == {"added": 0, "changed": 0, "unchanged": 2}
        assert again["number"] == number
        assert len(asked_of(double)) == 3

        # Of one that changed, only what changed.
        two[0]["text"] = "# A\n\nalpha words\n\n# C\n\ngamma words"
        changed = client.add_documents(two[:1])
        assert changed["sources"] == {"added": 0, "changed": 1, "unchanged": 0}
        assert changed["chunks"] == {"added": 1, "unchanged": 1, "removed": 1}
        assert asked_of(double)[3:] == ["# C\n\ngamma words"]
        assert nearest(client, "# A\n\nalpha words") == row
        assert client.status()["changes"]["live"] == 6

        assert client.delete_documents(["y", "none", "y"]) == 1
        assert client.delete_documents(["y"]) == 0
        assert nearest(client, "shown & read") != row + 2
        text = ask_metrics(port)
        for line in (
            'documents_total{outcome="added"} 2.0', 'documents_total{outcome="changed"} 1.0',
            'documents_total{outcome="removed"} 1.0', "chunks_embedded_total 4.0", "rows_added_total 4.0",
            "rows_deleted_total 2.0", "rows_live 5.0",
        ):  # fmt: skip
            assert f"hybridindex_{line}" in text
    service.close()
    assert texts() == sorted([*FIRST, "# A\n\nalpha words", "# C\n\ngamma words"])


def test_the_asynchronous_client(serve):
    async def converse(port):
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            await client.add_documents([{"source": "x", "text": "one two three"}], words=2)
            found = await client.search(vectors_of(["one two"]), 1)
            return int(found.ids[0, 0]) >= 3, await client.delete_documents(["x"])

    with live(serve()) as port:
        assert asyncio.run(converse(port)) == (True, 1)


def test_an_ingest_of_the_same_sources_finds_nothing_to_do(serve, path, folder, texts, client_of):
    """A daemon and the command have one notion of a source."""
    service = serve()
    with live(service) as port, client_of(port) as client:
        file = str(folder / "a.md")
        client.add_documents(
            [
                {"source": "mine", "text": "kept"},
                # No file is there, so none is gone.
                {"source": str(folder / "never.md"), "text": "kept, too"},
                {"source": file, "text": "# Two\n\nsecond words here"},
            ]
        )
    service.close()
    assert texts() == sorted(["kept", "kept, too", "# Two\n\nsecond words here", "a text of few words"])
    with Collection(path) as collection:
        done = update(collection, find_sources([folder]), [folder], Toy(), Reading(words=20))
        assert +done.sources == {"changed": 1, "unchanged": 1}
        # What was not ingested from there stays.
        assert "mine" in collection.store.sources()
    assert texts() == sorted([*FIRST, "kept", "kept, too"])


def test_words_are_those_of_before(serve, client_of, double):
    many = " ".join(f"w{n}" for n in range(50))
    with live(serve()) as port, client_of(port) as client:
        # As the index was read: 20.
        assert client.add_documents([{"source": "x", "text": many}])["chunks"]["added"] == 3
        again = client.add_documents([{"source": "x", "text": many}], words=10)
        assert again["chunks"] == {"added": 4, "unchanged": 1, "removed": 2}
        before = len(asked_of(double))
        assert client.add_documents([{"source": "x", "text": many}])["sources"]["unchanged"] == 1
        assert client.add_documents([{"source": "x", "text": many + " end"}])["chunks"]["added"] == 1
        assert asked_of(double)[before:] == ["end"]


def test_new_documents_reach_who_reads_texts(serve, path, client_of):
    from hybridindex.rag.retriever import Retriever

    with live(serve()) as port, client_of(port) as client, DocumentStore(path / "documents.sqlite") as store:
        retriever = Retriever(client, Toy(), store, k=1)
        client.add_documents([{"source": "x", "text": "a planet is a moon"}])
        ((passage,),) = retriever.search(["a planet is a moon"])
        assert (passage.text, passage.source) == ("a planet is a moon", "x")


# What is refused


@pytest.mark.parametrize(
    ("body", "status", "field", "words"),
    [
        ({}, 400, "documents", "is missing; expected a list of objects"),
        ({"documents": []}, 400, "documents", "has 0 entries; expected a list of 1..3 objects"),
        ({"documents": [ONE] * 4}, 400, "documents", "has 4 entries; expected a list of 1..3 objects"),
        ({"documents": "x"}, 400, "documents", "is 'x'; expected a list"),
        ({"documents": [ONE, "x"]}, 400, "documents[1]", "is 'x'; expected an object"),
        ({"documents": [ONE, {"source": "y"}]}, 400, "documents[1].text", "is missing; expected a text"),
        ({"documents": [{"text": "y"}]}, 400, "documents[0].source", "is missing; expected a text of 1..1024"),
        ({"documents": [{**ONE, "text": ""}]}, 400, "documents[0].text", "is ''; expected a text"),
        ({"documents": [{**ONE, "text": 5}]}, 400, "documents[0].text", "is 5; expected a text"),
        ({"documents": [{**ONE, "source": "x" * 1025}]}, 400, "documents[0].source", "expected a text of 1..1024"),
        ({"documents": [{**ONE, "format": "pdf"}]}, 400, "documents[0].format", "is 'pdf'; expected text or html"),
        ({"documents": [{**ONE, "vector": [1]}]}, 400, "documents[0].'vector'", "is not known here; expected source"),
        ({"documents": [{**ONE, "metadata": [1]}]}, 400, "documents[0].metadata", "expected an object"),
        (
            {"documents": [{**ONE, "metadata": {"deep": json.loads("[" * 500 + "]" * 500)}}]},
            400,
            "documents[0].metadata",
            "has more than 32 levels",
        ),
        (
            {"documents": [{**ONE, "metadata": {"year": "x"}}]},
            400,
            "documents",
            "x: metadata 'year' is 'x'; the index has",
        ),
        ({"documents": [{**ONE, "metadata": {"year": 10**30}}]}, 400, "documents", "x: metadata 'year' is 1000"),
        ({"documents": [ONE, ONE]}, 400, "documents", "has the source 'x' twice"),
        ({"documents": [ONE], "words": 0}, 400, "words", "is 0; expected an integer 1..100000"),
        ({"documents": [ONE], "k": 1}, 400, "'k'", "is not known here"),
        ({"documents": [{**ONE, "text": "a b c d e"}], "words": 1}, 400, "documents", "make 5 new chunks; expected 4"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_changes(serve, body, status, field, words):
    service = serve(limits={"max_documents": 3, "max_rows": 4})
    number = service.rows.state(service.index)["number"]
    answer = ask(service, "POST", "/v1/documents", json=body)
    is_problem(answer, status, field)
    assert words in answer.json()["detail"]
    assert service.rows.state(service.index)["number"] == number
    with Collection(service.index.path) as collection:
        assert "x" not in collection.store.sources()


@pytest.mark.parametrize("where", ["source", "text", "title", "metadata"])
def test_halves_of_surrogates_are_no_text(serve, where):
    half = '{"k": "\\ud800"}' if where == "metadata" else '"\\ud800"'
    said = {"source": '"x"', "text": '"y"', where: half}
    document = ", ".join(f'"{name}": {value}' for name, value in said.items())
    body = f'{{"documents": [{{{document}}}]}}'
    answer = ask(serve(), "POST", "/v1/documents", content=body, headers={"content-type": "application/json"})
    is_problem(answer, 400, f"documents[0].{where}")


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "sources", "is missing; expected a list of texts"),
        ({"sources": []}, "sources", "is []; expected a list of 1..1000 texts"),
        ({"sources": "x"}, "sources", "is 'x'; expected a list"),
        ({"sources": [1]}, "sources", "is [1]; expected a list"),
        ({"sources": ["x"], "where": "a"}, "'where'", "is not known here"),
    ],
)
def test_what_is_wrong_with_a_deletion(serve, body, field, words):
    answer = ask(serve(), "POST", "/v1/documents/delete", json=body)
    is_problem(answer, 400, field)
    assert words in answer.json()["detail"]


def test_other_bodies_are_refused(serve):
    service = serve(limits={"max_body_bytes": 2000})
    for request, status, field in (
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "Content-Type"),
        ({"json": {"documents": [ONE]}, "params": {"words": 1}}, 400, "'words'"),
        ({"json": {"documents": [{**ONE, "text": "x" * 3000}]}}, 413, "body"),
        ({"json": {"documents": [ONE]}, "headers": {"idempotency-key": "a b"}}, 400, "Idempotency-Key"),
    ):
        is_problem(ask(service, "POST", "/v1/documents", **request), status, field)


def test_an_index_of_vectors_takes_vectors(serve, tmp_path, client_of):
    hx.build(np.eye(DIM, dtype=np.float32), tmp_path / "bare", nlist=2).close()
    service = serve(where=tmp_path / "bare")
    with live(service) as port, client_of(port) as client:
        for call in (lambda: client.add_documents([ONE]), lambda: client.delete_documents(["x"])):
            with pytest.raises(NoDocumentsError, match=r"no documents beside its vectors.*hybridindex ingest makes"):
                call()
        # Nothing was claimed for that.
        assert not client.status()["changes"]["writer"]
        assert 'writes_refused_total{reason="no documents"} 2.0' in ask_metrics(port)
    is_problem(ask(service, "POST", "/v1/documents", json={"documents": [ONE]}), 422)


def test_roles_and_keys(serve, tmp_path, client_of):
    keys = KeyFile(tmp_path / "keys.json")
    reader, writer = keys.add("reads", "search"), keys.add("writes", "write")
    service = serve()
    with live(service, Keyring(keys.path)) as port:
        with client_of(port, key=reader) as client:
            for call in (lambda: client.add_documents([ONE]), lambda: client.delete_documents(["x"])):
                with pytest.raises(AccessDeniedError, match="role write"):
                    call()
        with client_of(port, key=writer) as client:
            first = client.add_documents([ONE], idempotency_key="k")
            client.delete_documents(["x"])
            # Done once: what was deleted since does not come back.
            assert client.add_documents([ONE], idempotency_key="k") == first
            assert client.delete_documents(["x"]) == 0
            with pytest.raises(InvalidInputError, match="came with another request before"):
                client.add_documents([{**ONE, "text": "other"}], idempotency_key="k")
            with pytest.raises(InvalidInputError, match="came with another request before"):
                client.delete_documents(["x"], idempotency_key="k")


def test_deletions_are_audited(serve, tmp_path, caplog):
    keys = KeyFile(tmp_path / "keys.json")
    writer = {"authorization": f"Bearer {keys.add('writes', 'write')}"}

    async def conversation(http):
        await http.post("/v1/documents", json={"documents": [ONE]}, headers=writer)
        answer = await http.post("/v1/documents", json={"documents": [ONE]}, headers={**writer, "idempotency-key": "a"})
        assert "idempotency-replayed" not in answer.headers
        answer = await http.post("/v1/documents", json={"documents": [ONE]}, headers={**writer, "idempotency-key": "a"})
        assert answer.headers["idempotency-replayed"] == "true"
        await http.post("/v1/documents/delete", json={"sources": ["x"]}, headers=writer)

    with caplog.at_level(logging.INFO, "hybridindex.audit"):
        talk(serve(), conversation, keyring=Keyring(keys.path))
    said = [(r.client, r.action, r.outcome) for r in caplog.records if r.name == "hybridindex.audit"]
    assert said == [("writes", "/v1/documents/delete", 200)]


def test_a_daemon_that_takes_no_changes(serve, client_of):
    with live(serve(write=False)) as port, client_of(port) as client:
        with pytest.raises(AccessDeniedError, match="its setting write is false"):
            client.add_documents([ONE])
        with pytest.raises(AccessDeniedError, match="its setting write is false"):
            client.delete_documents(["x"])


def test_rows_that_come_too_fast(serve, client_of, monkeypatch, texts):
    def full(self):
        raise BusyWritingError(f"too much came to {self._newest.path}", retry_after_s=7)

    service = serve()
    with live(service) as port, client_of(port) as client:
        with monkeypatch.context() as crowded:
            crowded.setattr(IndexWriter, "_refuse_while_full", full)
            with pytest.raises(BusyWritingError, match="too much came to INDEX") as said:
                client.add_documents([{"source": "x", "text": "new"}])
            assert said.value.retry_after_s == 7
        with Collection(service.index.path) as collection:
            assert "x" not in collection.store.sources()
        assert client.add_documents([{"source": "x", "text": "new"}])["sources"]["added"] == 1
    service.close()
    assert texts() == sorted([*FIRST, "new"])


def test_another_writer_is_named(serve, path, client_of, monkeypatch):
    from hybridindex.rag.collection import store as stores

    monkeypatch.setattr(stores, "_WAIT_S", 0.2)
    service = serve()
    with live(service) as port, client_of(port) as client:
        client.add_documents([ONE])
        # An ingest in another process, which has the texts for its whole time.
        with Collection(path) as other, other.store.changing():
            with pytest.raises(BuildError, match="another process changes INDEX"):
                client.add_documents([{"source": "y", "text": "two"}])
            is_problem(ask(service, "POST", "/v1/documents", json={"documents": [{**ONE, "source": "y"}]}), 409)
        assert client.add_documents([{"source": "y", "text": "two"}])["sources"]["added"] == 1


def test_texts_that_cannot_be_read(serve, path, client_of, caplog):
    (shared,) = path.glob("documents-*.sqlite")
    shared.write_bytes(b"no database" * 1000)
    service = serve()
    with live(service) as port, client_of(port) as client:
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(DocumentStoreError, match="cannot be read or written") as said,
        ):
            client.add_documents([ONE])
        assert str(path) not in str(said.value)
        assert shared.name in caplog.text
    is_problem(ask(service, "POST", "/v1/documents", json={"documents": [ONE]}), 507)


# Beside other changes


def test_rows_that_come_beside_documents_keep_their_numbers(serve, double, client_of):
    """Both have the index choose numbers: nobody takes another's, also while texts are embedded."""
    gate, begun = threading.Event(), threading.Event()

    def slow(asked):
        if "late" in asked:
            begun.set()
            gate.wait(60)
        return vectors_of(asked)

    service = serve()
    with live(service) as port, client_of(port) as client:
        bare = client.add(vectors_of(["bare 1"]))
        client.add_documents([{"source": "x", "text": "soon"}])
        assert nearest(client, "bare 1") == bare[0]
        soon = nearest(client, "soon")
        assert soon > bare[0]
        double.vectors_of = slow
        thread = threading.Thread(
            target=client.add_documents, args=([{"source": "y", "text": "late"}, {"source": "z", "text": "after"}],)
        )
        thread.start()
        assert begun.wait(60)
        with client_of(port) as other:
            more = other.add(vectors_of(["bare 2", "bare 3"]))
        gate.set()
        thread.join(60)
        found = [nearest(client, text) for text in ("bare 1", "soon", "bare 2", "bare 3", "late", "after")]
        assert found[:4] == [bare[0], soon, *more]
        assert len(set(found)) == 6


def test_texts_whose_rows_were_deleted_as_rows_come_again(serve, client_of, texts):
    service = serve()
    with live(service) as port, client_of(port) as client:
        document = {"source": "x", "text": "# A\n\nalpha\n\n# B\n\nbeta"}
        client.add_documents([document])
        client.delete([nearest(client, "# A\n\nalpha")])
        # It is the same document, and its row is gone past it.
        again = client.add_documents([document])
        assert again["chunks"] == {"added": 1, "unchanged": 1, "removed": 0}
        client.delete([nearest(client, "# B\n\nbeta")])
        client.add_documents([{**document, "text": document["text"] + "\n\n# C\n\ngamma"}])
    service.close()
    assert texts() == sorted([*FIRST, "# A\n\nalpha", "# B\n\nbeta", "# C\n\ngamma"])


def test_compactions_and_rebuilt_indexes(serve, path, client_of):
    service = serve()
    with live(service) as port, client_of(port) as client:
        client.add_documents([{"source": "x", "text": "one"}])
        answer = client.compact()
        assert answer["serves"]
        assert client.add_documents([{"source": "x", "text": "two"}])["sources"]["changed"] == 1
        assert nearest(client, "two") != nearest(client, "a text of few words")
        # An index of vectors takes its place.
        hx.build(np.eye(DIM, dtype=np.float32), path, nlist=2, replace=True).close()
        with pytest.raises((NoDocumentsError, BuildError)):
            client.add_documents([{"source": "x", "text": "three"}])
        client.reload()
        with pytest.raises(NoDocumentsError):
            client.add_documents([{"source": "x", "text": "three"}])


def test_many_clients_at_once(serve, client_of, texts):
    service = serve()
    problems = []

    def work(port, number):
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                for step in range(5):
                    client.add_documents([{"source": f"s{number}", "text": f"client {number} step {step}"}])
                    assert nearest(client, f"client {number} step {step}") >= 0
                client.add_documents([{"source": "shared", "text": f"of client {number}"}])
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            problems.append(error)

    with live(service) as port:
        threads = [threading.Thread(target=work, args=(port, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not problems
    service.close()
    found = texts()
    assert [text for text in found if text.startswith("client")] == [f"client {n} step 4" for n in range(4)]
    assert len([text for text in found if text.startswith("of client")]) == 1


def test_the_end_of_a_daemon_ends_an_embedding(serve, double, client_of, texts):
    begun, gate = threading.Event(), threading.Event()

    def slow(asked):
        if "never" in asked:
            begun.set()
            gate.wait(60)
        return vectors_of(asked)

    double.vectors_of = slow
    service = serve()
    problems = []

    def add(port):
        try:
            with client_of(port) as client:
                client.add_documents([{"source": "x", "text": "never"}])
        except OverloadedError as error:
            problems.append(str(error))

    with live(service) as port:
        thread = threading.Thread(target=add, args=(port,))
        thread.start()
        assert begun.wait(60)
        service.drain()
        is_problem(ask(service, "POST", "/v1/documents", json={"documents": [ONE]}), 503)
        service.stop_changes()
        thread.join(60)
        assert problems == ["the daemon is about to stop; nothing was changed"]
    service.close()
    gate.set()
    assert texts() == sorted(FIRST)
