"""Files of texts become passages, again and again the same; what is wrong is said with its line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.rag.documents import MAX_TEXT, Document
from hybridindex.rag.ingest import GivenText, Reading, TextFile, embedded, find_sources, mean_of, read_chunks
from hybridindex.rag.ingest.readers import _sections
from hybridindex.rag.ingest.spool import Spool
from hybridindex.rag.ingest.texts import count_words, split_words


def test_lines_of_a_text_file_are_passages(tmp_path):
    (tmp_path / "x.txt").write_text("one oak\n\n  two oaks \r\nthree", encoding="utf-8")
    passages = TextFile(path=tmp_path / "x.txt")
    assert list(passages) == list(passages) == [
        Document(id=0, text="one oak"), Document(id=1, text="two oaks"), Document(id=2, text="three"),
    ]  # fmt: skip


def test_objects_have_text_source_and_id(tmp_path):
    lines = [{"text": "one", "source": "s", "id": 7, "more": 1}, {"text": "zwei\nö", "id": 3}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(TextFile(path=tmp_path / "x.jsonl")) == [
        Document(id=7, text="one", source="s"), Document(id=3, text="zwei\nö"),
    ]  # fmt: skip


def test_long_texts_are_split_at_sentences_and_linked(tmp_path):
    text = "A b c d. E f g h i j k l m n o. P"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text, "source": "s"}) + "\n" + json.dumps({"text": "Q."}))
    found = list(TextFile(path=tmp_path / "x.jsonl", words=6))
    assert [p.text for p in found] == ["A b c d.", "E f g h i j", "k l m n o. P", "Q."]
    assert [p.successor for p in found] == [1, 2, None, None]
    assert [p.id for p in found] == [0, 1, 2, 3]
    assert [p.source for p in found] == ["s"] * 3 + [""]


BAD = {
    "no JSON": ('{"text": "a"}\nwords\n', "line 2, is not JSON"),
    "no object": ("[1]", "line 1, has no text"),
    "no text": ('{"id": 1}', "line 1, has no text"),
    "blank text": ('{"text": "  "}', "line 1, has no text"),
    "text of another kind": ('{"text": 3}', "line 1, has no text"),
    "id that is a word": ('{"text": "a", "id": "x"}', "id is 'x'; expected an integer"),
    "negative id": ('{"text": "a", "id": -1}', "id is -1"),
    "ids of some": ('{"text": "a", "id": 1}\n{"text": "b"}', "line 2: every line has an id, or none"),
    "source of another kind": ('{"text": "a", "source": 3}', "source is 3"),
    "too long": (json.dumps({"text": "a" * (MAX_TEXT + 1)}), f"has {MAX_TEXT + 1} characters"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named(tmp_path, kind):
    content, message = BAD[kind]
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(InvalidInputError, match=message) as caught:
        list(TextFile(path=tmp_path / "x.jsonl"))
    assert "x.jsonl" in str(caught.value)


def test_bad_files_and_options_are_named(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xfa")
    for make, message in (
        (lambda: TextFile(path=tmp_path / "x.pdf"), "no known ending; expected .jsonl or .txt"),
        (lambda: TextFile(path=tmp_path / "x.txt", words=0), "words is 0"),
        (lambda: list(TextFile(path=tmp_path / "none.txt")), "cannot be read"),
        (lambda: list(TextFile(path=tmp_path / "x.txt")), "cannot be read"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            make()
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a b c", "id": 5}))
    with pytest.raises(InvalidInputError, match="id 5 in 3 passages"):
        list(TextFile(path=tmp_path / "x.jsonl", words=1))


SENTENCE = "我们在这里讨论检索增强GPU生成的“索引”问题。"
UNSPACED = {
    "Chinese": (SENTENCE * 40, 30),
    "Japanese": ("「カタカナー」と、ひらがな。" * 60, 30),
    "Thai": ("ภาษาไทยเป็นภาษาที่มีระดับเสียง" * 40, 200),
    "base64": ("![](data:image/png;base64," + "A" * 1_500_000 + ")", 160),
}


@pytest.mark.parametrize("kind", UNSPACED)
def test_texts_without_spaces_are_split(kind):
    text, most = UNSPACED[kind]
    for parts in (split_words(text, 20), list(_sections(text, 20))):
        assert "".join(parts) == text
        assert max(map(len, parts)) <= most
    before = f"These are words. {text} "
    assert " ".join(split_words(before, 20)).replace(" ", "") == before.replace(" ", "")


def test_sentences_of_chinese_stay_together():
    assert split_words(SENTENCE * 3, 21) == [SENTENCE] * 3
    assert list(_sections("\n\n".join([SENTENCE] * 4), 42)) == [f"{SENTENCE}\n\n{SENTENCE}"] * 2
    assert split_words("「这」是 一。", 2) == ["「这」是", "一。"]


def test_words_are_what_stands_between_spaces():
    url = "https://example.org/" + "a" * 900
    assert split_words(f"See {url}  and\n“go” — 한국어 שלום, naïve", 3) == [
        f"See {url} and",
        "“go” — 한국어",
        "שלום, naïve",
    ]


def test_a_file_with_a_passage_that_is_too_long_is_named_and_left(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("w " * 600_000)
    (tmp_path / "in" / "b.txt").write_text("two")
    (tmp_path / "in" / "c.jsonl").write_text(json.dumps({"text": "x", "source": "\ud800"}))
    spool, _, failed = Spool.write(tmp_path / "spool", find_sources([tmp_path / "in"]), Reading(words=700_000))
    assert [document.text for document in spool] == ["two"]
    (long, why), (half, whynot) = failed.items()
    assert long in why
    assert f"1199999 characters in passage 0 (from 0); expected {MAX_TEXT} at most" in why
    assert half in whynot
    assert "half of a surrogate pair in passage 0 (from 0), its source or its metadata" in whynot


class Lengths:
    def embed(self, texts, /):
        return np.array([[len(text), 1.0] for text in texts], dtype=np.float64)


def test_passages_are_embedded_in_order_with_their_ids():
    passages = [Document(id=3 * n, text="x" * (n % 7 + 1)) for n in range(1300)]
    chunks = list(embedded(iter(passages), Lengths()))
    assert max(len(ids) for _, ids in chunks) < 1300, "a batch at a time"
    vectors, ids = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(ids, np.arange(1300) * 3)
    np.testing.assert_array_equal(vectors[:, 0], [len(p.text) for p in passages])
    np.testing.assert_allclose(mean_of(passages, 1300, Lengths()), vectors.mean(axis=0), rtol=1e-6)


def test_the_mean_is_of_a_part_of_many():
    passages = [Document(id=n, text="x") for n in range(20_000)]
    seen = []

    class Counting(Lengths):
        def embed(self, texts, /):
            seen.extend(texts)
            return super().embed(texts)

    mean_of(passages, 20_000, Counting())
    assert 4096 <= len(seen) < 6000


def test_an_embedder_that_answers_something_else():
    class Bad:
        def embed(self, texts, /):
            return np.zeros(3)

    with pytest.raises(
        InvalidInputError, match=r"the embedder gave an array of shape \(3,\) of float64 for 1 texts; expected"
    ):
        list(embedded([Document(id=0, text="a")], Bad()))
    Bad.embed = lambda _self, texts: [[1.0]] * len(texts)
    with pytest.raises(
        InvalidInputError, match=r"the embedder gave a list for 1 texts; expected \(1, d\) real numbers"
    ):
        list(embedded([Document(id=0, text="a")], Bad()))
    # Numbers of which a part would be left out.
    Bad.embed = lambda _self, texts: np.ones((len(texts), 2), np.complex64)
    with pytest.raises(InvalidInputError, match=r"an array of shape \(1, 2\) of complex64"):
        list(embedded([Document(id=0, text="a")], Bad()))

    class Refusing:
        def embed(self, texts, /):
            raise InvalidInputError("text 1 is too long")

    with pytest.raises(InvalidInputError, match="passages 4 to 9: text 1 is too long"):
        list(embedded([Document(id=4, text="a"), Document(id=9, text="b")], Refusing()))


def test_a_heading_may_have_its_text_on_the_next_line():
    text = "\n\n".join(f"## Section {n}\n" + " ".join(["word"] * 50) for n in range(4))
    assert [part.split("\n")[0] for part in _sections(text, 200)] == [f"## Section {n}" for n in range(4)]
    text = "## One\n## Two\n\nwords\n\n## Three\n" + " ".join(["word"] * 300)
    assert [len(part.split()) for part in _sections(text, 200)] == [5, 200, 102]


@pytest.mark.parametrize("between", ["\n", "\n\n", "\r\n\r\n"])
def test_headings_without_text_are_divided_too(between):
    """A table of contents, say."""
    headings = [f"## Chapter {n} of many" for n in range(300)]
    parts = list(_sections(between.join(headings), 200))
    assert len(parts) == 8
    assert max(count_words(part) for part in parts) == 200
    assert " ".join(parts).split() == " ".join(headings).split()
    # Behind a text, too; few stay as they are written.
    parts = list(_sections(between.join(["words", "", *headings]), 200))
    assert max(count_words(part) for part in parts) == 200
    assert list(_sections("# One\n\n## Two", 200)) == ["# One\n\n## Two"]


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_a_mark_of_the_byte_order_is_no_text(kind):
    """As in files: whoever sends a file's text sends the same document."""
    text = {"markdown": "# One\n\nwords", "html": "<p>words</p>"}[kind]
    plain, marked = (
        [chunk.text for chunk in read_chunks(GivenText(name="x", text=each, kind=kind), Reading())]
        for each in (text, f"\ufeff{text}")
    )
    assert plain == marked


def test_many_headings_without_text_are_no_passage_that_is_too_long(tmp_path):
    (tmp_path / "a.md").write_text("\n\n".join(f"# heading {n}" for n in range(80_000)))
    (source,) = find_sources([tmp_path / "a.md"])
    chunks = list(read_chunks(source, Reading()))
    assert max(count_words(chunk.text) for chunk in chunks) == 200
    assert [chunk.continues for chunk in chunks] == [False, *[True] * (len(chunks) - 1)]


def test_a_folder_with_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "one"}\n{"text": ')
    (tmp_path / "in" / "b.txt").write_text("two")
    spool, facts, failed = Spool.write(tmp_path / "spool", find_sources([tmp_path / "in"]), Reading())
    assert [document.text for document in spool] == ["two"]
    assert (spool.count, [name.rsplit("/")[-1] for name in facts]) == (1, ["b.txt"])
    assert [name.rsplit("/")[-1] for name in failed] == ["a.jsonl"]
    (tmp_path / "in" / "b.txt").unlink()
    with pytest.raises(InvalidInputError, match=r"no text can be read: .*a\.jsonl"):
        Spool.write(tmp_path / "spool", find_sources([tmp_path / "in"]), Reading())
