"""Ingesting again: only what changed is read, embedded and written; what is gone goes; a broken run is continued."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import CorruptIndexError, DuplicateIdError, EmbeddingError, InvalidInputError
from hybridindex.rag.collection import Collection
from hybridindex.rag.ingest import GivenText, Reading, find_sources, put_texts, update
from tests.rag.collection.world import DIM, vectors_of

WORDS = 4


class Embedder:
    """Counts what it embeds; fails when told to."""

    name = "toy"

    def __init__(self):
        self.seen = []
        self.left = None

    def embed(self, texts, /):
        if self.left is not None:
            self.left -= len(texts)
            if self.left < 0:
                raise EmbeddingError("the server went away")
        self.seen += texts
        return vectors_of(texts)


@pytest.fixture
def embedder():
    return Embedder()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("# One\n\nfirst words here\n\n# Two\n\nsecond words here\n")
    (folder / "b.txt").write_text("a line of words\nthat goes on\n\nand a paragraph")
    (folder / "deep" / "c.html").write_text("<html><script>no()</script><p>shown &amp; read</p><p>two</p></html>")
    (folder / ".hidden.txt").write_text("never")
    (folder / "image.png").write_bytes(b"no text")
    return folder


@pytest.fixture
def run(tmp_path, embedder):
    def again(*roots, words=WORDS, lines=None, **options):
        with Collection(tmp_path / "idx", embedder="toy") as collection:
            collection.create(DIM)
            sources = find_sources(roots, known=collection.store.sources())
            reading = Reading(words=words, lines=lines)
            embedder.seen.clear()
            return update(collection, sources, roots, embedder, reading, **options)

    return again


@pytest.fixture
def texts(tmp_path):
    """Text by row; every row is found by its text's vector, and no other rows are there."""

    def found():
        with Collection(tmp_path / "idx") as collection:
            items = {item.id: item for item in collection.items()}
            for item in items.values():
                (hits,) = collection.search(vectors_of([item.text]), 1)
                assert hits[0].item.text == item.text
            assert collection.index.n_live == len(items)
            return {row: item.text for row, item in items.items()}

    return found


def counts(outcome):
    return dict(+outcome.sources), dict(+outcome.chunks)


def test_nothing_is_done_twice(run, folder, texts, embedder):
    assert counts(run(folder)) == ({"added": 3}, {"added": 8})
    before = texts()
    assert sorted(before.values()) == [
        "# One first words", "# Two second words", "a line of words", "and a paragraph", "here", "here",
        "shown & read\n\ntwo", "that goes on",
    ]  # fmt: skip
    assert counts(run(folder)) == ({"unchanged": 3}, {})
    assert embedder.seen == []
    os.utime(folder / "a.md")
    assert counts(run(folder)) == ({"unchanged": 3}, {}), "its bytes are the same"
    assert texts() == before


def test_only_chunks_that_changed_are_embedded(run, folder, texts, embedder):
    run(folder, words=9)
    before = {text: row for row, text in texts().items()}
    (folder / "a.md").write_text("# Zero\n\nnew words\n\n# One\n\nfirst words here\n\n# Two\n\nother words here\n")
    assert counts(run(folder, words=9)) == (
        {"changed": 1, "unchanged": 2},
        {"added": 2, "removed": 1, "unchanged": 1},
    )
    assert embedder.seen == ["# Zero\n\nnew words", "# Two\n\nother words here"]
    after = {text: row for row, text in texts().items()}
    assert after["# One\n\nfirst words here"] == before["# One\n\nfirst words here"]
    assert "# Two\n\nsecond words here" not in after


def test_successors_follow_what_changed(run, folder, tmp_path):
    run(folder, words=9)
    (folder / "a.md").write_text(
        "# Zero\n\nnew\n\n# One\n\nfirst words here\n\n# New\n\nx\n\n# Two\n\nsecond words here\n"
    )
    run(folder, words=9)
    with Collection(tmp_path / "idx") as collection:
        items = {item.id: item for item in collection.items()}
        item = next(item for item in items.values() if item.text.startswith("# Zero"))
        said = []
        while item is not None:
            said.append(item.text.split()[1])
            item = items.get(item.successor)
    assert said == ["Zero", "One", "New", "Two"]


def test_sources_that_are_gone_go_below_what_was_named(run, folder, texts, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("one line\nand one")
    run(folder, other)
    before = texts()
    (folder / "b.txt").unlink()
    other.unlink()
    assert counts(run(folder)) == ({"unchanged": 2, "removed": 1}, {"removed": 3})
    assert len(texts()) == len(before) - 3, "the other one was not named"
    assert counts(run(other)) == ({"removed": 1}, {"removed": 2})
    (folder / "deep" / "c.html").unlink()
    assert counts(run(folder / "deep")) == ({"removed": 1}, {"removed": 1})
    with pytest.raises(InvalidInputError, match="no such file"):
        run(other)


def test_other_ways_to_read_read_again(run, folder, texts):
    run(folder, words=40)
    n = len(texts())
    assert counts(run(folder, words=2))[0] == {"changed": 3}
    assert len(texts()) > n
    assert counts(run(folder, words=2, lines=True))[0] == {"changed": 1, "unchanged": 2}


def test_a_run_that_was_broken_off_is_continued(run, tmp_path, texts, embedder):
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(1300)))
    embedder.left = 1100
    with pytest.raises(EmbeddingError):
        run(many)
    embedder.left = None
    assert counts(run(many)) == ({"added": 1}, {"added": 276, "unchanged": 1024})
    assert len(embedder.seen) == 276
    assert sorted(texts().values()) == sorted(f"text {n}" for n in range(1300))


def test_records_keep_the_ids_and_metadata_that_files_give(run, tmp_path, embedder):
    file = tmp_path / "x.jsonl"

    def write(*records):
        file.write_text("\n".join(map(json.dumps, records)))

    write({"id": 7, "text": "seven", "source": "s", "year": 2}, {"id": 3, "text": "three", "tags": ["a"]})
    run(file, words=None)
    with Collection(tmp_path / "idx") as collection:
        found = {item.id: item for item in collection.items()}
        assert {row: (item.text, item.source, item.metadata) for row, item in found.items()} == {
            7: ("seven", "s", {"year": 2}),
            3: ("three", "", {"tags": ["a"]}),
        }
    write({"id": 7, "text": "seven", "source": "s", "year": 2}, {"id": 3, "text": "drei"}, {"id": 9, "text": "nine"})
    assert counts(run(file, words=None)) == ({"changed": 1}, {"added": 2, "unchanged": 1})
    assert embedder.seen == ["drei", "nine"]
    other = tmp_path / "y.jsonl"
    other.write_text(json.dumps({"id": 7, "text": "other"}))
    with pytest.raises(DuplicateIdError, match=r"y.jsonl has id 7, which .*x.jsonl has"):
        run(other, words=None)
    write({"id": 5, "text": "a"}, {"id": 5, "text": "b"})
    with pytest.raises(DuplicateIdError, match="has id 5 twice"):
        run(file, words=None)


def test_a_damaged_file_of_a_folder_is_said_and_left_as_it_was(run, folder, texts):
    run(folder)
    before = texts()
    (folder / "b.txt").write_bytes(b"\xff\xfe\xfa")
    (folder / "new.pdf").write_bytes(b"%PDF-1.4 no more")
    (folder / "new.jsonl").write_text('{"text": "one"}\n{"text": "two"}\nno record')
    done = run(folder)
    assert counts(done) == ({"unchanged": 2, "failed": 3}, {})
    assert sorted(name.rpartition("/")[2] for name in done.failed) == ["b.txt", "new.jsonl", "new.pdf"]
    assert texts() == before
    with pytest.raises(InvalidInputError, match=r"new.pdf cannot be read as PDF"):
        run(folder / "new.pdf")


def test_rows_that_somebody_deleted_lose_their_texts(run, folder, tmp_path, texts):
    run(folder)
    (row, *_) = texts()
    with Collection(tmp_path / "idx") as collection:
        collection.index.delete([row])
    run(folder)
    assert row not in texts()


def test_all_kinds_of_files(run, tmp_path, embedder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["p one", "p two"], "id": [50, 51], "year": [1, None]}), tmp_path / "x.parquet")
    (tmp_path / "x.pdf").write_bytes(pdf("Words of a page"))
    (tmp_path / "x.html").write_text("<title>T</title><style>p {}</style><p>one <b>bold</b> word<p>&eacute;")
    assert counts(run(*(tmp_path / f"x.{end}" for end in ("parquet", "pdf", "html")), words=4))[0] == {"added": 3}
    with Collection(tmp_path / "idx") as collection:
        found = {item.text: item for item in collection.items()}
    assert set(found) == {"p one", "p two", "Words of a page", "T\n\none bold word", "é"}
    assert found["p one"].metadata == {"year": 1}
    assert found["Words of a page"].metadata == {"page": 1}
    assert found["Words of a page"].source == "x.pdf"
    np.testing.assert_array_equal(sorted(item.id for item in found.values() if item.text.startswith("p ")), [50, 51])


def pdf(text: str) -> bytes:
    """A document of one page."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start


def test_what_was_named_wrongly(tmp_path):
    for name, complaint in (("none", "no known ending; expected a folder"), ("none.txt", "no such file or folder")):
        with pytest.raises(InvalidInputError, match=complaint):
            find_sources([tmp_path / name])


def test_numbers_that_others_take_meanwhile_are_theirs(run, folder, tmp_path, monkeypatch):
    """Rows that are added without ids while texts are embedded, in several batches."""
    monkeypatch.setattr(sys.modules["hybridindex.rag.ingest.update"], "_BATCH", 2)
    run(folder)
    (folder / "long.md").write_text("\n\n".join(f"word{n} of a paragraph" for n in range(9)))
    taken = []

    class Meanwhile(Embedder):
        def embed(self, texts, /):
            with hx.open(tmp_path / "idx") as index:
                taken.extend(index.add(vectors_of([f"raw {len(taken)}", "raw"])).tolist())
            return super().embed(texts)

    with Collection(tmp_path / "idx", embedder="toy") as collection:
        before = collection.index.n_live
        sources = find_sources([folder], known=collection.store.sources())
        outcome = update(collection, sources, [folder], Meanwhile(), Reading(words=WORDS))
        assert collection.index.n_live == before + outcome.chunks["added"] + len(taken)
        items = {item.id: item for item in collection.items()}
        assert not items.keys() & set(taken)
        chain = [item for item in items.values() if item.ref and item.ref.endswith("long.md")]
        assert len(chain) == 9
        # Each chunk leads to the one behind it.
        first = next(item for item in chain if item.id not in {other.successor for other in chain})
        seen = [first]
        while seen[-1].successor is not None:
            seen.append(items[seen[-1].successor])
        assert [item.text.split()[0] for item in seen] == [f"word{n}" for n in range(9)]
    assert not +run(folder).chunks


def test_texts_whose_rows_are_gone_are_read_again(run, folder, tmp_path, texts):
    run(folder)
    before = texts()
    with hx.open(tmp_path / "idx") as index:
        assert index.delete([*before][:2]) == 2
    assert run(folder).chunks["added"] == 2
    assert sorted(map(str, texts().values())) == sorted(map(str, before.values()))


def test_a_snapshot_has_the_texts(run, folder, tmp_path):
    run(folder)
    with hx.open(tmp_path / "idx") as index:
        index.compact()
        with Collection(tmp_path / "idx") as collection:
            gone, *left = sorted(item.id for item in collection.items())
        index.delete([gone])
        index.snapshot(tmp_path / "copy")
    hx.restore(tmp_path / "copy", tmp_path / "restored").close()
    with Collection(tmp_path / "restored") as collection, Collection(tmp_path / "idx") as original:
        original.recover()
        collection.recover()
        assert {item.id: item.text for item in collection.items()} == {item.id: item.text for item in original.items()}
        assert sorted(item.id for item in collection.items()) == left
    # A change of one changes nothing of the other.
    with Collection(tmp_path / "restored") as collection:
        collection.clear()
    with Collection(tmp_path / "idx") as original:
        assert original.count() == len(left)
    next((tmp_path / "copy").glob("documents-*.sqlite")).unlink()
    with pytest.raises(CorruptIndexError, match=r"documents\.sqlite of .* is gone"):
        hx.restore(tmp_path / "copy", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_no_number_is_left(run, folder, tmp_path):
    run(folder)
    with hx.open(tmp_path / "idx") as index:
        index.add(vectors_of(["raw"]), [2**63 - 1])
    (folder / "new.txt").write_text("words that are new")
    with pytest.raises(InvalidInputError, match="no number above it is left"):
        run(folder)


# What was written in part, and is not as it was


def lines(n, word, *, ids=True):
    return "".join(json.dumps({"text": f"{word} {i}"} | ({"id": i} if ids else {})) + "\n" for i in range(n))


@pytest.mark.parametrize("ids", [True, False])
def test_a_file_that_was_read_in_part_and_is_as_before_again(run, tmp_path, texts, ids):
    (tmp_path / "f").mkdir()
    file = tmp_path / "f" / "a.jsonl"
    file.write_text(lines(700, "old", ids=ids))
    run(tmp_path / "f", words=None)
    before = sorted(texts().values())
    file.write_text(lines(700, "new", ids=ids) + "{broken\n")
    assert counts(run(tmp_path / "f", words=None)) == ({"failed": 1}, {})
    file.write_text(lines(700, "old", ids=ids))
    run(tmp_path / "f", words=None)
    assert sorted(texts().values()) == before


@pytest.mark.parametrize("then", ["as before", "gone"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_that_was_broken_off_leaves_nothing_behind(run, tmp_path, texts, embedder, is_new, then):
    (tmp_path / "f").mkdir()
    file, other = tmp_path / "f" / "b.jsonl", tmp_path / "f" / "a.jsonl"
    other.write_text(lines(3, "other", ids=False))
    if not is_new:
        file.write_text(lines(700, "old", ids=False))
    run(tmp_path / "f", words=None)
    before = sorted(texts().values())
    file.write_text(lines(1300, "new", ids=False))
    embedder.left = 600
    with pytest.raises(EmbeddingError):
        run(tmp_path / "f", words=None)
    assert len(texts()) > len(before)
    embedder.left = None
    if then == "gone" or is_new:
        file.unlink()
        before = sorted(f"other {i}" for i in range(3))
    else:
        file.write_text(lines(700, "old", ids=False))
    run(tmp_path / "f", words=None)
    assert sorted(texts().values()) == before
    assert counts(run(tmp_path / "f", words=None))[0] == {"unchanged": 1 + (then == "as before" and not is_new)}


# Ids of several files


def test_ids_move_with_their_texts_from_file_to_file(run, tmp_path, texts):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"id": 1, "text": "one"}\n{"id": 2, "text": "two"}\n')
    run(folder, words=None)
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    assert counts(run(folder, words=None))[0] == {"added": 1, "removed": 1}
    assert texts() == {1: "one", 2: "two"}
    (folder / "b.jsonl").write_text('{"id": 1, "text": "one"}\n')
    (folder / "c.jsonl").write_text('{"id": 2, "text": "two"}\n{"id": 3, "text": "three"}\n')
    assert counts(run(folder, words=None))[0] == {"added": 1, "changed": 1}
    assert texts() == {1: "one", 2: "two", 3: "three"}
    # Into a file that comes before: only when the other has let go.
    (folder / "c.jsonl").write_text('{"id": 3, "text": "three"}\n')
    (folder / "a.jsonl").write_text('{"id": 2, "text": "two"}\n')
    done = run(folder, words=None)
    assert counts(done)[0] == {"changed": 1, "failed": 1, "unchanged": 1}
    assert "has id 2, which" in next(iter(done.failed.values()))
    assert counts(run(folder, words=None))[0] == {"added": 1, "unchanged": 2}
    assert texts() == {1: "one", 2: "two", 3: "three"}


def test_a_file_with_ids_that_are_taken_is_left_out_and_the_others_are_read(run, tmp_path, texts):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.md").write_text("of a number")
    run(folder, words=None)
    (first,) = texts()
    (folder / "b.md").write_text("of another number")
    (folder / "c.jsonl").write_text('{"id": 10, "text": "one"}\n{"id": 12, "text": "two"}\n')
    (folder / "d.jsonl").write_text('{"id": 5, "text": "five"}\n{"id": 5, "text": "again"}\n')
    (folder / "e.jsonl").write_text('{"id": 12, "text": "more"}\n')
    (folder / "f.jsonl").write_text(json.dumps({"id": first, "text": "none"}))
    done = run(folder, words=None)
    assert counts(done)[0] == {"added": 2, "failed": 3, "unchanged": 1}
    assert [name.rpartition("/")[2] for name in done.failed] == ["d.jsonl", "e.jsonl", "f.jsonl"]
    assert set(texts().values()) == {"of a number", "of another number", "one", "two"}
    assert {row: text for row, text in texts().items() if text != "of another number"} == {
        first: "of a number", 10: "one", 12: "two",
    }  # fmt: skip


def test_names_that_are_no_utf_8_are_left_out(run, folder):
    (folder / os.fsdecode(b"\xff.md")).write_text("words")
    done = run(folder)
    assert counts(done)[0] == {"added": 3, "failed": 1}
    assert "is not UTF-8" in next(iter(done.failed.values()))


def test_a_folder_that_is_gone_takes_its_texts_along(run, folder, tmp_path, texts):
    run(folder)
    folder.rename(tmp_path / "elsewhere")
    assert counts(run(folder))[0] == {"removed": 3}
    assert texts() == {}
    with pytest.raises(InvalidInputError, match=r"no such file or folder|no known ending"):
        run(folder)


def test_parquet_is_kept_as_json_says_it(run, tmp_path):
    import datetime
    from decimal import Decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "f"
    folder.mkdir()
    columns = {"text": ["a", "b"], "price": [Decimal("1.5"), None], "when": [datetime.datetime(2020, 1, 2, 3, 4)] * 2}
    pq.write_table(pa.table(columns), folder / "p.parquet")
    pq.write_table(
        pa.table({"text": ["x"], "raw": [b"\xff"], "took": [datetime.timedelta(seconds=5)]}), folder / "q.parquet"
    )
    assert counts(run(folder, words=None))[0] == {"added": 2}
    with Collection(tmp_path / "idx") as collection:
        found = {item.text: item.metadata for item in collection.items()}
    when = {"when": "2020-01-02T03:04:00"}
    assert found == {"a": {"price": 1.5} | when, "b": when, "x": {"raw": "/w==", "took": "0:00:05"}}


def test_a_date_that_python_has_not_is_said_and_other_files_are_read(run, tmp_path, texts):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "f"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a"], "when": pa.array([1 << 62], pa.timestamp("us"))}), folder / "p.parquet")
    (folder / "q.txt").write_text("one")
    with pytest.raises(InvalidInputError, match=r"p.parquet cannot be read as Parquet: date value out of range"):
        run(folder / "p.parquet")
    run(folder)
    assert set(texts().values()) == {"one"}


def test_a_mark_of_the_order_of_bytes_is_no_text(run, tmp_path, texts):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbftwo\nthree\n")
    run(tmp_path / "x.jsonl", tmp_path / "x.txt", words=None)
    assert set(texts().values()) == {"one", "two", "three"}


@pytest.mark.parametrize("then", ["back", "on"])
def test_ids_that_move_while_the_run_is_broken_off(run, tmp_path, texts, embedder, then):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "z.jsonl").write_text(lines(700, "text"))
    run(folder, words=None)
    before = texts()
    (folder / "z.jsonl").rename(folder / "a.jsonl")
    embedder.left = 600
    with pytest.raises(EmbeddingError):
        run(folder, words=None)
    embedder.left = None
    if then == "back":
        (folder / "a.jsonl").rename(folder / "z.jsonl")
    run(folder, words=None)
    assert texts() == before
    assert counts(run(folder, words=None))[0] == {"unchanged": 1}


def test_a_source_that_fails_late_is_noted_as_it_was(run, tmp_path, texts):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(3, "whole", ids=False))
    run(folder, words=None)
    with Collection(tmp_path / "idx") as collection:
        noted = collection.store.sources()
    (folder / "a.jsonl").write_text(lines(700, "new", ids=False) + "{broken\n")
    (folder / "b.jsonl").write_text(lines(700, "other", ids=False) + "{broken\n")
    assert counts(run(folder, words=None)) == ({"failed": 2}, {})
    with Collection(tmp_path / "idx") as collection:
        assert collection.store.sources() == noted
    assert sorted(texts().values()) == [f"whole {i}" for i in range(3)]


def test_numbers_of_records_without_ids_are_no_ids_of_others(run, tmp_path, texts):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a0"}\n{"text": "a1"}\n')
    (folder / "c.md").write_text("cc")
    (folder / "b.jsonl").write_text("".join(json.dumps({"id": i, "text": f"b{i}"}) + "\n" for i in range(5, 9)))
    assert counts(run(folder, words=None)) == ({"added": 3}, {"added": 7})
    assert {texts()[i] for i in range(5, 9)} == {"b5", "b6", "b7", "b8"}


def test_a_text_that_comes_twice_in_a_call_is_refused(tmp_path):
    """Its source would have the chunks of both."""
    with Collection(tmp_path / "idx", embedder="toy") as collection:
        collection.create(DIM)
        texts = [GivenText(name="a", text="one"), GivenText(name="b", text="two"), GivenText(name="a", text="three")]
        with pytest.raises(DuplicateIdError, match="source 'a' is given twice"):
            put_texts(collection, texts, Embedder())
        assert collection.count() == 0
