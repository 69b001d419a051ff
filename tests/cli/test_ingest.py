"""ingest: a file of texts becomes an index that chat asks, with any embedder; both say so where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli import ingest_parts
from hybridindex.cli.console import ExitCode
from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import DocumentStoreError, InvalidInputError
from hybridindex.rag import embed
from hybridindex.rag.collection.make import alone_with
from hybridindex.rag.documents import DocumentStore, write_documents
from hybridindex.rag.embed import EMBEDDER
from hybridindex.service.auth import KeyFile
from tests.llm_double import LLMDouble
from tests.rag.world import DIM, TOPICS, embedder, ids, texts

QUESTION = "what is a planet"


def unwrapped(text):
    """Lines end where the terminal does, and paths are of any length."""
    return " ".join(text.split())


@pytest.fixture
def double() -> Iterator[LLMDouble]:
    toy = embedder()
    with LLMDouble() as running:
        running.vectors_of = toy.embed
        yield running


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.jsonl"
    per_topic = len(texts()) // len(TOPICS)
    lines = [
        {"id": number, "text": text, "source": list(TOPICS)[row // per_topic]}
        for row, (number, text) in enumerate(zip(ids(), texts(), strict=True))
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_texts_are_ingested_by_a_server_and_asked(cli, double, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDINDEX_EMBEDDER_KEY", "secret")
    words = ["--embedder", "openai:toy", "--embedder-url", double.url]
    made = cli("ingest", file, tmp_path / "idx", *words, "--nlist", 8, "--nprobe", 3, "--json")
    assert made.code == 0, made.err
    assert made.json["embedder"] == "openai:toy"
    assert (made.json["count"], made.json["dim"], made.json["nlist"], made.json["nprobe"]) == (240, DIM, 8, 3)
    assert made.json["centered"] is False
    assert double.embeddings[0][1]["authorization"] == "Bearer secret"
    with hx.open(tmp_path / "idx") as index:
        assert index.ivf.manifest.normalized, "scores are cosines, and say so"
    with DocumentStore(tmp_path / "idx" / "documents.sqlite") as store:
        assert (store.info.embedder, store.info.dim, store.info.mean) == ("openai:toy", DIM, None)

    asked = ["--llm", double.url, "--mode", "completions", "--pipeline", "plain", "-q", QUESTION, "-k", 3, "--json"]
    answer = cli("chat", tmp_path / "idx", *asked, "--embedder-url", double.url)
    assert answer.code == 0, answer.err
    assert answer.json["pipeline"] == "plain"
    assert [passage["source"] for passage in answer.json["passages"]] == ["stars"] * 3
    assert all(passage["text"] in double.completions[-1]["prompt"] for passage in answer.json["passages"])

    for more, code, complaint in (
        ([], ExitCode.BAD_INPUT, "embedder is 'openai:toy', a server's, and there is no url"),
        (
            ["--embedder", "openai:other"],
            ExitCode.BAD_INPUT,
            "'openai:other', but the documents were embedded by 'openai:toy'",
        ),
        (["--embedder", "none"], ExitCode.BAD_INPUT, "embedder is 'none'; expected demo, "),
    ):
        refused = cli("chat", tmp_path / "idx", *asked, *more)
        assert (refused.code, complaint in unwrapped(refused.err)) == (code, True), refused.err
    # Another model behind the same name.
    double.vectors_of = lambda asked: [[1.0, 2.0]] * len(asked)
    refused = cli("chat", tmp_path / "idx", *asked, "--embedder-url", double.url)
    assert refused.code == ExitCode.BAD_INPUT
    assert "'openai:toy' gives 2 dimensions, but the index has 16, embedded by 'openai:toy'" in refused.err


def passages_of(cli, double, index, k=3):
    asked = ["--llm", double.url, "--mode", "completions", "--pipeline", "plain", "-q", QUESTION, "-k", k, "--json"]
    answer = cli("chat", index, *asked, "--embedder-url", double.url)
    assert answer.code == 0, answer.err
    with DocumentStore(index / "documents.sqlite") as store:
        beside = {passage.document.text for passage in store.first(1000)}
    found = {passage["text"] for passage in answer.json["passages"]}
    assert found <= beside
    return found


@pytest.mark.parametrize("older", [False, True])
def test_a_rollback_brings_the_documents_back_too(cli, double, file, tmp_path, older):
    index, words = tmp_path / "idx", ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    assert cli("ingest", file, index, *words, "--nlist", 8).code == 0
    if older:  # as before documents belonged to a generation
        (shared,) = index.glob("documents-*.sqlite")
        (index / "gen-000001" / "documents.sqlite").unlink()
        shared.replace(index / "documents.sqlite")
    first = passages_of(cli, double, index)
    (tmp_path / "other.txt").write_text("A planet is a star.\nAnother planet is a moon.\nA third planet, a comet.")
    assert cli("ingest", tmp_path / "other.txt", index, *words, "--nlist", 1, "--replace").code == 0
    second = passages_of(cli, double, index)
    assert not first & second
    for expected in (first, second, first):
        assert cli("rollback", index).code == 0
        assert passages_of(cli, double, index) == expected
    assert cli("gc", index, "--json").json["removed"] == [2]
    assert passages_of(cli, double, index) == first


def test_a_chat_reads_the_documents_of_what_its_daemon_serves(cli, double, file, tmp_path, launcher):
    index, words = tmp_path / "idx", ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    assert cli("ingest", file, index, *words, "--nlist", 8).code == 0
    asked = ["--llm", double.url, "--mode", "completions", "--pipeline", "plain", "-q", QUESTION, "-k", 3, "--json"]
    with launcher.daemon(index, "--port", 0):
        assert cli("ingest", file, index, *words, "--nlist", 4, "--replace").code == 0
        answer = cli("chat", index, *asked, "--embedder-url", double.url)
        assert answer.code == 0, answer.err
        assert cli("reload", index).code == 0
        answer = cli("chat", index, *asked, "--embedder-url", double.url)
        assert answer.code == 0, answer.err


def test_the_demos_embedder_is_centred_and_needs_no_name_later(cli, double, file, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "load_embedder", lambda _folder: embedder())
    made = cli("ingest", file, tmp_path / "idx", "--embedder", "demo", "--json")
    assert made.code == 0, made.err
    assert (made.json["embedder"], made.json["centered"]) == (EMBEDDER, True)
    with DocumentStore(tmp_path / "idx" / "documents.sqlite") as store:
        assert store.info.mean is not None
        np.testing.assert_allclose(store.info.mean, embedder().embed(texts()).mean(axis=0), atol=1e-5)
    asked = ["--llm", double.url, "--mode", "completions", "--pipeline", "plain", "-q", QUESTION, "--json"]
    answer = cli("chat", tmp_path / "idx", *asked)
    assert answer.code == 0, answer.err
    assert {passage["source"] for passage in answer.json["passages"]} == {"stars"}


def test_texts_are_split_and_the_next_passage_is_known(cli, double, tmp_path):
    (tmp_path / "x.txt").write_text("oak beech. birch pine forest\nwave tide")
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--words", 3, "--nlist", 1, "--center"]
    made = cli("ingest", tmp_path / "x.txt", tmp_path / "idx", *words)
    assert made.code == 0, made.err
    assert "openai:toy" in made.out
    assert "True" in made.out
    with DocumentStore(tmp_path / "idx" / "documents.sqlite") as store:
        found = [passage.document for passage in store.first(9)]
        assert [(d.text, d.successor) for d in found] == [
            ("oak beech.", 1),
            ("birch pine forest", None),
            ("wave tide", None),
        ]
        assert store.info.mean is not None


@pytest.mark.parametrize(
    ("content", "words", "code", "complaint"),
    [
        ('{"text": "a"}', [], ExitCode.BAD_INPUT, "--embedder is missing; expected demo, "),
        ('{"text": "a"}', ["--embedder", "toy"], ExitCode.BAD_INPUT, "embedder is 'toy'; expected demo"),
        ('{"text": "a"}\nwords', ["--embedder", "openai:m"], ExitCode.BAD_INPUT, "line 2, is not JSON"),
        ("", ["--embedder", "openai:m"], ExitCode.BAD_INPUT, "holds no text"),
        ('{"text": "a"}', ["--embedder", "openai:m", "--nlist", 2], ExitCode.BAD_INPUT, "--nlist is 2 but there are 1"),
        (
            '{"text": "a", "id": 4}\n{"text": "b", "id": 3}\n{"text": "c", "id": 4}', ["--embedder", "openai:m"],
            ExitCode.BAD_INPUT, "has id 4 in texts 0 and 2",
        ),
        ('{"text": "a"}', ["--embedder", "openai:m"], ExitCode.BAD_INPUT, "there is no url"),
        (
            '{"text": "a"}', ["--embedder", "openai:m", "--embedder-url", "{refusing}"],
            ExitCode.SERVICE, "is not there (status 404)",
        ),
    ],
)  # fmt: skip
def test_what_went_wrong_is_one_line_and_leaves_nothing(cli, double, tmp_path, content, words, code, complaint):
    del double.routes["/v1/embeddings"]
    (tmp_path / "x.jsonl").write_text(content)
    words = [double.url if word == "{refusing}" else word for word in words]
    found = cli("ingest", tmp_path / "x.jsonl", tmp_path / "idx", *words)
    assert found.code == code
    assert complaint in found.err
    assert not (tmp_path / "idx").exists()


def test_ingesting_again_takes_what_changed(cli, double, tmp_path):
    folder, index = tmp_path / "texts", tmp_path / "idx"
    folder.mkdir()
    for n, text in enumerate(["oak beech birch", "wave tide reef", "comet planet orbit"]):
        (folder / f"{n}.md").write_text(f"# {text}\n\n{text} {text}\n")
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    made = cli("ingest", folder, index, *words)
    assert made.code == 0, made.err
    assert made.json["sources"]["added"] == made.json["chunks"]["added"] == 3
    asked = len(double.embeddings)
    again = cli("ingest", folder, index, *words[2:])
    assert again.code == 0, again.err
    assert again.json["sources"] == {"added": 0, "changed": 0, "removed": 0, "unchanged": 3, "failed": 0}
    # The dimension is asked for when an embedder is opened or compared, nothing else.
    assert len(double.embeddings) == asked

    (folder / "0.md").write_text("# dust light\n\nnova\n")
    (folder / "1.md").unlink()
    (folder / "3.txt").write_text("flour yeast\noven")
    (folder / "4.txt").write_bytes(b"\xff")
    again = cli("ingest", folder, index, *words)
    assert again.code == 0, again.err
    assert again.json["sources"] == {"added": 1, "changed": 1, "removed": 1, "unchanged": 1, "failed": 1}
    assert again.json["chunks"] == {"added": 2, "removed": 2, "unchanged": 0}
    assert "4.txt cannot be read" in again.err.replace("\n", "") or "not read" in again.err
    with DocumentStore(index / "documents.sqlite") as store:
        assert {found.document.text for found in store.first(9)} == {
            "# dust light\n\nnova",
            "flour yeast\noven",
            "# comet planet orbit\n\ncomet planet orbit comet planet orbit",
        }
    answer = cli("compact", index, "--json")
    assert answer.code == 0, answer.err
    found = passages_of(cli, double, index)
    assert {text.split()[0] for text in found} <= {"#", "flour"}
    assert len(found) == 3

    for more, complaint in (
        (["--nlist", 2], "--nlist and --codec are only for a new index"),
        (["--center"], "--center is only for a new index"),
        (["--embedder", "openai:other"], "'openai:other', but the documents were embedded by 'openai:toy'"),
    ):
        refused = cli("ingest", folder, index, *words, *more)
        assert (refused.code, complaint in unwrapped(refused.err)) == (ExitCode.BAD_INPUT, True), refused.err
    (folder / "4.txt").unlink()
    anew = cli("ingest", folder, index, *words, "--rebuild")
    assert (anew.code, anew.json["count"], anew.json["sources"]["added"]) == (0, 3, 3)
    with DocumentStore(index / "documents.sqlite") as store:
        assert store.info.count == 3


def test_who_builds_beside_another_is_told(cli, double, file, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridindex.rag.collection.make._WAIT_S", 0)
    words = ["--embedder", "openai:toy", "--embedder-url", double.url]
    with alone_with(tmp_path / "idx"):
        refused = cli("ingest", file, tmp_path / "idx", *words)
    assert refused.code != 0
    assert "another process is creating" in unwrapped(refused.err)
    assert cli("ingest", file, tmp_path / "idx", *words).code == 0
    assert sorted(found.name for found in tmp_path.iterdir()) == ["idx", "texts.jsonl"]


def test_an_index_without_its_sources_is_built_anew(cli, double, file, tmp_path):
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    made = cli("ingest", file, tmp_path / "idx", *words)
    with DocumentStore(tmp_path / "idx" / "documents.sqlite") as store:
        passages = [found.document for found in store.first(9999)]
    for path in (tmp_path / "idx").rglob("documents*"):
        path.unlink()
    write_documents(
        tmp_path / "idx" / "documents.sqlite", passages, index_fingerprint=made.json["fingerprint"],
        embedder="openai:toy", dim=DIM,
    )  # fmt: skip
    refused = cli("ingest", file, tmp_path / "idx", *words)
    assert refused.code == ExitCode.BAD_INDEX, refused.err
    assert "has no record of its source files; rebuild it (--rebuild)" in refused.err
    assert cli("ingest", file, tmp_path / "idx", *words, "--rebuild").code == 0
    assert cli("ingest", file, tmp_path / "idx", *words).json["sources"]["unchanged"] == 1


def test_a_daemon_takes_the_rows(cli, double, file, tmp_path, launcher):
    index, words = tmp_path / "idx", ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    assert cli("ingest", file, index, *words, "--nlist", 4, "--nprobe", 4).code == 0
    (tmp_path / "new.txt").write_text("A planet is a comet, a moon and a star.")
    with launcher.daemon(index, "--port", 0):
        again = cli("ingest", tmp_path / "new.txt", index, *words)
        assert again.code == 0, again.err
        assert again.json["chunks"]["added"] == 1
        assert any("a moon and a star" in text for text in passages_of(cli, double, index, k=100))
        (tmp_path / "new.txt").unlink()
        again = cli("ingest", tmp_path / "new.txt", index, *words)
        assert again.code == 0, again.err
        assert again.json["sources"]["removed"] == 1
        assert not any("a moon and a star" in text for text in passages_of(cli, double, index, k=100))


def test_the_command_and_clients_of_a_daemon_take_turns(cli, double, tmp_path, launcher):
    """The daemon is the writer, by documents of its clients; the command knows them, and they know its files."""
    folder, index = tmp_path / "texts", tmp_path / "idx"
    folder.mkdir()
    (folder / "a.md").write_text("# One\n\na comet\n\n# Two\n\na moon\n")
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    assert cli("ingest", folder, index, *words).code == 0
    with (
        launcher.daemon(index, "--port", 0, "--embedder-url", double.url) as (_, urls),
        Client(urls[0], retry=RetryPolicy(attempts=1)) as client,
    ):
        assert client.add_documents([{"source": "mine", "text": "a planet of mine"}])["sources"]["added"] == 1
        assert client.status()["changes"]["writer"]
        (folder / "b.md").write_text("a galaxy")
        again = cli("ingest", folder, index, *words)
        assert again.code == 0, again.err
        assert (again.json["sources"]["added"], again.json["sources"]["unchanged"], again.json["count"]) == (1, 1, 4)
        found = passages_of(cli, double, index, k=100)
        assert {"a planet of mine", "a galaxy"} <= found
        # A file is a document, too, under its path.
        assert client.delete_documents([str(folder / "b.md"), "mine"]) == 2
        changed = client.add_documents([{"source": str(folder / "a.md"), "text": "a nova", "title": "a.md"}])
        assert changed["chunks"] == {"added": 1, "unchanged": 0, "removed": 2}
        assert passages_of(cli, double, index, k=100) == {"a nova"}
        again = cli("ingest", folder, index, *words)
        assert (again.json["sources"]["added"], again.json["sources"]["changed"], again.json["count"]) == (1, 1, 3)


def ids_where(index, where):
    """Rows by a condition, which may find none."""
    with hx.open(index) as opened, opened.router(devices=()) as router:
        found = router.search(np.ones(DIM, dtype=np.float32), 50, opened.nlist, where=where).ids[0]
    return sorted(found[found >= 0].tolist())


def write_records(path, *records):
    path.write_text("\n".join(json.dumps({"text": "a planet", **each}) for each in records))


def test_metadata_are_attributes_from_the_first_ingest_on(cli, double, tmp_path):
    folder, index = tmp_path / "texts", tmp_path / "idx"
    folder.mkdir()
    write_records(
        folder / "a.jsonl",
        {"id": 5, "year": 2020, "lang": "en", "tags": ["new", "old"], "when": "2024-05-01", "more": {"x": 1}},
        {"id": 7, "year": 2021, "lang": "de"},
    )
    (folder / "b.md").write_text("a comet without metadata")
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    columns = ["--attributes", "year=int,lang=string,tags=list,when=timestamp"]
    made = cli("ingest", folder, index, *words, *columns, "--nlist", 2)
    assert made.code == 0, made.err
    assert made.json["attributes"] == {
        "year": "int", "lang": "string", "tags": "list of strings", "when": "timestamp",
    }  # fmt: skip
    assert ids_where(index, "year >= 2020") == [5, 7]
    assert ids_where(index, "lang = 'en' AND \"when\" < '2025-01-01'") == [5]
    assert ids_where(index, "year IS NULL") == [8]
    # Later ingests have them, too, whether they name them or not.
    write_records(folder / "c.jsonl", {"id": 9, "year": 2022, "lang": "fr"})
    write_records(folder / "a.jsonl", {"id": 5, "year": 1999, "lang": "en"}, {"id": 7, "year": 2021, "lang": "de"})
    again = cli("ingest", folder, index, *words)
    assert again.code == 0, again.err
    assert again.json["chunks"] == {"added": 2, "removed": 0, "unchanged": 1}
    assert ids_where(index, "year >= 2020") == [7, 9]
    assert ids_where(index, "year < 2000") == [5]
    assert cli("compact", index).code == 0
    assert ids_where(index, "lang = 'fr'") == [9]
    assert cli("ingest", folder, index, *words, *columns).json["sources"]["unchanged"] == 3
    assert cli("ingest", folder, index, *words, "--attributes", "all").json["sources"]["unchanged"] == 3
    for more, complaint in (
        ("year=float", "--attributes names year=float, but the index has year=int, lang=string"),
        ("size=int", "--attributes names size=int, but the index has year=int"),
    ):
        refused = cli("ingest", folder, index, *words, "--attributes", more)
        assert (refused.code, complaint in unwrapped(refused.err)) == (ExitCode.BAD_INPUT, True), refused.err
    # A value of another kind is its file's fault, and costs that file alone.
    write_records(folder / "c.jsonl", {"id": 9, "year": "x"})
    write_records(folder / "d.jsonl", {"id": 11, "year": 2024})
    again = cli("ingest", folder, index, *words)
    assert again.code == 0, again.err
    assert again.json["sources"] == {"added": 1, "changed": 0, "removed": 0, "unchanged": 2, "failed": 1}
    assert "metadata 'year' is 'x'" in unwrapped(again.err)
    assert ids_where(index, "year >= 2022") == [9, 11]
    named = cli("ingest", folder / "c.jsonl", index, *words)
    assert (named.code, "metadata 'year' is 'x'" in unwrapped(named.err)) == (ExitCode.BAD_INPUT, True)
    # Built anew, without.
    assert cli("ingest", folder, index, *words, "--rebuild").json["attributes"] is None


def test_all_metadata_become_attributes_where_they_fit(cli, double, tmp_path):
    write_records(tmp_path / "a.jsonl", {"year": 2020, "mixed": 1, "more": {"x": 1}}, {"year": 2021, "mixed": "x"})
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    made = cli("ingest", tmp_path / "a.jsonl", tmp_path / "idx", *words, "--attributes", "all")
    assert made.code == 0, made.err
    assert made.json["attributes"] == {"year": "int"}
    assert "no attribute: 'mixed' is int and string" in unwrapped(made.err)
    assert "no attribute: 'more' holds dict" in unwrapped(made.err)
    assert ids_where(tmp_path / "idx", "year = 2021") == [1]
    (tmp_path / "b.txt").write_text("a comet")
    made = cli("ingest", tmp_path / "b.txt", tmp_path / "other", *words, "--attributes", "all")
    assert (made.code, made.json["attributes"]) == (0, None)


def test_attributes_of_parquet(cli, double, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    days = pa.array([0, 20_000], type=pa.date32())
    table = {"text": ["a planet", "a comet"], "year": [1, None], "day": days, "tags": [["a"], ["b", "c"]]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    made = cli(
        "ingest", tmp_path / "x.parquet", tmp_path / "idx", *words, "--attributes", "year=int,day=date,tags=list"
    )
    assert made.code == 0, made.err
    assert ids_where(tmp_path / "idx", "day > '2000-01-01'") == [1]
    assert ids_where(tmp_path / "idx", "year = 1") == [0]
    made = cli("ingest", tmp_path / "x.parquet", tmp_path / "other", *words, "--attributes", "all")
    assert made.json["attributes"] == {"year": "int", "day": "string", "tags": "list of strings"}


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("year", "attributes hold 'year'; expected NAME=KIND"),
        ("year=number", "attribute 'year' is 'number'; expected one of int"),
        ("year=bool", "x.jsonl: metadata 'year' is 2020"),
        ("x" * 200 + "=int", "an attribute is named"),
    ],
)
def test_wrong_attributes_cost_no_embedding(cli, double, tmp_path, said, complaint):
    write_records(tmp_path / "x.jsonl", {"year": 2020})
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--attributes", said]
    refused = cli("ingest", tmp_path / "x.jsonl", tmp_path / "idx", *words)
    assert (refused.code, complaint in unwrapped(refused.err)) == (ExitCode.BAD_INPUT, True), refused.err
    assert not double.embeddings
    assert not (tmp_path / "idx").exists()


def test_documents_of_a_daemon_have_the_attributes_of_the_ingest(cli, double, tmp_path, launcher):
    write_records(tmp_path / "a.jsonl", {"year": 2020}, {"year": 2021})
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    assert cli("ingest", tmp_path / "a.jsonl", tmp_path / "idx", *words, "--attributes", "year=int").code == 0
    with (
        launcher.daemon(tmp_path / "idx", "--port", 0, "--embedder-url", double.url) as (_, urls),
        Client(urls[0], retry=RetryPolicy(attempts=1)) as client,
    ):
        client.add_documents([{"source": "x", "text": "a moon", "metadata": {"year": 2022, "other": "kept"}}])
        found = client.search(np.ones(DIM, dtype=np.float32), 5, where="year > 2021").ids[0]
        assert (found >= 0).sum() == 1
        with pytest.raises(InvalidInputError, match="metadata 'year' is 'x'"):
            client.add_documents([{"source": "y", "text": "a moon", "metadata": {"year": "x"}}])


def test_why_a_daemon_takes_nothing_is_said(cli, double, file, tmp_path, launcher):
    index, words = tmp_path / "idx", ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    assert cli("ingest", file, index, *words, "--nlist", 4, "--nprobe", 4).code == 0
    (tmp_path / "new.txt").write_text("A planet is a comet, a moon and a star.")
    key = KeyFile(tmp_path / "keys.json").add("reads", "search")
    with launcher.daemon(index, "--port", 0, "--keys", tmp_path / "keys.json"):
        refused = cli("ingest", tmp_path / "new.txt", index, *words)
        assert refused.code == ExitCode.SERVICE
        assert "pass a key with --key or HYBRIDINDEX_KEY" in refused.err
        refused = cli("ingest", tmp_path / "new.txt", index, *words, "--key", key)
        assert refused.code == ExitCode.SERVICE
        assert "this needs a key with the role write" in refused.err
    with DocumentStore(index / "documents.sqlite") as store:
        assert store.info.count == 240
    with launcher.daemon(index, "--port", 0, "--no-write"):
        made = cli("ingest", tmp_path / "new.txt", index, *words)
        assert made.code == 0, made.err
        assert "accepts no changes: writing to the index directly" in unwrapped(made.err)
        assert made.json["count"] == 241


@pytest.mark.parametrize("where", ["write_documents", "write_attributes", "share"])
def test_a_rebuild_that_fails_leaves_the_index_with_its_texts(cli, double, tmp_path, monkeypatch, where):
    index, words = tmp_path / "idx", ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    write_records(tmp_path / "a.jsonl", {"year": 2020}, {"year": 2021})
    assert cli("ingest", tmp_path / "a.jsonl", index, *words, "--attributes", "year=int").code == 0
    before = passages_of(cli, double, index, k=100)

    def full(*_args, **_options):
        raise DocumentStoreError("no space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(ingest_parts, where, full)
        found = cli("ingest", tmp_path / "a.jsonl", index, *words, "--rebuild", "--attributes", "year=int")
    assert found.code != 0
    assert "no space left" in found.err
    assert hx.open(index).ivf.generation == 1
    assert passages_of(cli, double, index, k=100) == before
    assert cli("verify", index).code == 0
    assert cli("ingest", tmp_path / "a.jsonl", index, *words).json["sources"]["unchanged"] == 1
    again = cli("ingest", tmp_path / "a.jsonl", index, *words, "--rebuild", "--attributes", "year=int")
    assert again.json["attributes"] == {"year": "int"}
    assert ids_where(index, "year = 2021") == [1]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_rebuild_of_what_was_there_at_first_has_texts_of_its_own(cli, double, tmp_path, monkeypatch, breaks):
    folder, index = tmp_path / "texts", tmp_path / "idx"
    folder.mkdir()
    words = ["--embedder", "openai:toy", "--embedder-url", double.url, "--json"]
    for number, topic in enumerate(("planet", "comet", "moon")):
        (folder / f"{number}.md").write_text(f"a {topic}")
    assert cli("ingest", folder, index, *words).code == 0
    first = passages_of(cli, double, index, k=9)
    (folder / "0.md").write_text("a star")
    (folder / "3.md").write_text("a galaxy")
    assert cli("ingest", folder, index, *words).code == 0
    (folder / "0.md").write_text("a planet")
    (folder / "3.md").unlink()
    if breaks:

        def end(*_args):
            raise KeyboardInterrupt

        with monkeypatch.context() as failing:
            failing.setattr("hybridindex.index.storage.generation.point", end)
            assert cli("ingest", folder, index, *words, "--rebuild").code != 0
        assert cli("ingest", folder, index, *words).json["sources"]["changed"] == 1
    else:
        assert cli("ingest", folder, index, *words, "--rebuild").code == 0
    assert sorted(passages_of(cli, double, index, k=9)) == sorted(first)
    assert cli("ingest", folder, index, *words).json["sources"] == {
        "added": 0, "changed": 0, "removed": 0, "unchanged": 3, "failed": 0,
    }  # fmt: skip
    with hx.open(index) as opened:
        assert opened.n_live == 3
        opened.delete([1])
        opened.compact()
    assert len(passages_of(cli, double, index, k=9)) == 2
