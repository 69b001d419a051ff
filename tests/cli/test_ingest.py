"""ingest: a file of texts becomes an index that chat asks, with any embedder; both say so where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from hybridindex.cli.console import ExitCode
from hybridindex.rag import embed
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.embed import EMBEDDER
from tests.llm_double import LLMDouble
from tests.rag.world import DIM, TOPICS, embedder, ids, texts

QUESTION = "what is a planet"


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
            "'openai:other', and the documents were embedded by 'openai:toy'",
        ),
        (["--embedder", "none"], ExitCode.BAD_INPUT, "embedder is 'none'; expected demo, "),
    ):
        refused = cli("chat", tmp_path / "idx", *asked, *more)
        assert (refused.code, complaint in refused.err) == (code, True), refused.err
    # Another model behind the same name.
    double.vectors_of = lambda asked: [[1.0, 2.0]] * len(asked)
    refused = cli("chat", tmp_path / "idx", *asked, "--embedder-url", double.url)
    assert refused.code == ExitCode.BAD_INPUT
    assert "'openai:toy' gives 2 dimensions, the index has 16, embedded by 'openai:toy'" in refused.err


def passages_of(cli, double, index):
    asked = ["--llm", double.url, "--mode", "completions", "--pipeline", "plain", "-q", QUESTION, "-k", 3, "--json"]
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
        (index / "documents.sqlite").unlink()
        (index / "gen-000001" / "documents.sqlite").rename(index / "documents.sqlite")
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
        ('{"text": "a"}\nwords', ["--embedder", "openai:m"], ExitCode.BAD_INPUT, "line 2, is no JSON"),
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
