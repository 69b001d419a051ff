"""The demo's texts as a document store: which passage continues which, and what is written once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.demo.chunk import chunk_text
from hybridindex.demo.dataset import SourceCount
from hybridindex.demo.documents import demo_documents, repeated_title, write_demo_documents
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.embed import EMBEDDER, TOKENIZER
from tests.demo.small_files import toy_embedder

_LONG = " ".join(f"word{number} runs." for number in range(150))


def passages() -> list[str]:
    """Of the real chunker: an article of several passages between two short ones."""
    article = [*chunk_text(f"The Oak Tree is tall. {_LONG}", title="Oak tree")]
    assert len(article) > 2
    return ["Beech is a tree.", *article, "oak-tools: a program.", "oak: another program."]


def dataset(texts: list[str], *counts: int) -> SimpleNamespace:
    sources = tuple(SourceCount(name=f"s{n}", passages=count, licence="") for n, count in enumerate(counts))
    return SimpleNamespace(
        passages=lambda: iter(texts), sources=sources, count=len(texts), dim=8, mean=np.zeros(8, dtype=np.float32)
    )


def test_passages_of_a_document_follow_one_another() -> None:
    texts = passages()
    n = len(texts)
    found = list(demo_documents(dataset(texts, n - 2, 2)))
    assert [d.text for d in found] == texts
    assert [d.successor for d in found] == [None, *range(2, n - 2), None, None, None]
    assert [d.lead for d in found] == [0, 0, *[len("Oak tree: ")] * (n - 4), 0, 0]
    assert [d.source for d in found] == ["s0"] * (n - 2) + ["s1"] * 2


@pytest.mark.parametrize(
    ("previous", "passage", "title"),
    [
        ("Ag is silver", "Silver: it shines", "Silver: "),
        ("libfoo: a library", "libfoo: more of it", "libfoo: "),
        ("libfoo-dev: a library", "libfoo: another", ""),
        ("libfoo a library", "libfoo-dev: another", ""),
        ("2001: A Space Odyssey is a film", "2001: A Space Odyssey: It is long", "2001: "),
        ("nothing of it", "Other: text", ""),
        ("", "Other: text", ""),
        ("a: b", "a: c", ""),
        ("text", "no title here", ""),
    ],
)
def test_a_title_says_what_continues_what(previous: str, passage: str, title: str) -> None:
    assert repeated_title(previous, passage) == len(title)


def test_the_store_is_written_once_for_an_index(tmp_path: Path) -> None:
    reported: list[str] = []

    def write(fingerprint: str) -> Path:
        index = SimpleNamespace(path=tmp_path, fingerprint=fingerprint)
        return write_demo_documents(
            dataset(passages(), len(passages())), index, tmp_path, lambda stage, *_: reported.append(stage),
            toy_embedder(8).token_starts,
        )  # fmt: skip

    path = write("one")
    assert path == tmp_path / "documents.sqlite"
    assert set(reported) == {"texts"}
    with DocumentStore(path) as store:
        assert (store.info.embedder, store.info.count, store.info.dim) == (EMBEDDER, len(passages()), 8)
    reported.clear()
    write("one")
    assert reported == []
    write("two")
    assert reported
    with DocumentStore(path) as store:
        store.check_index("two")


def test_the_store_names_the_tokens_of_its_embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridindex.demo.documents.load_embedder", lambda _folder: toy_embedder(8))
    index = SimpleNamespace(path=tmp_path, fingerprint="one")
    path = write_demo_documents(dataset(passages(), len(passages())), index, tmp_path, lambda *_: None)
    with DocumentStore(path) as store:
        assert store.info.tokenizer == TOKENIZER


def test_an_empty_dataset_has_no_documents() -> None:
    assert list(demo_documents(dataset([]))) == []


def test_token_starts_are_where_tokens_start() -> None:
    text = "red  blue, green"
    (starts, none) = toy_embedder(8).token_starts([text, ""])
    assert starts.dtype == np.uint32
    assert len(none) == 0
    pieces = [text[a:b].strip() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pieces) == text.replace(" ", "")
    assert all(pieces)
