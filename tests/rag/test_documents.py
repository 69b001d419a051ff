"""The document store: what is written is read, what is wrong is named, nothing is left behind."""

from __future__ import annotations

import sqlite3
import threading

import numpy as np
import pytest

from hybridindex.errors import DocumentStoreError, InvalidInputError
from hybridindex.rag.collection import Collection, Item
from hybridindex.rag.documents import Document, DocumentStore, word_starts, write_documents
from hybridindex.rag.shift import shift_passage, tail_of
from tests.rag.world import DIM, ids, texts


def write(path, *passages, **options):
    options = {"index_fingerprint": "f", "embedder": "e", "dim": 2, **options}
    return write_documents(path, passages, **options)


def test_passages_come_back_with_all_they_have(documents, world):
    info = documents.info
    assert (info.count, info.embedder, info.dim) == (len(ids()), "toy", DIM)
    np.testing.assert_array_equal(info.mean, world[2])
    documents.check_index(world[0].fingerprint)
    found = documents.read([ids()[5], ids()[0], ids()[5]])
    assert sorted(found) == [ids()[0], ids()[5]]
    document = found[ids()[5]].document
    assert (document.text, document.successor, document.source) == (texts()[5], ids()[6], "trees")
    text = document.text
    starts = found[ids()[5]].starts.tolist()
    assert [text[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] == text.split()


def test_more_ids_than_a_statement_takes(documents):
    assert sorted(documents.read(ids() * 4)) == ids()
    assert documents.read([]) == {}


def test_many_threads_read_at_once(documents):
    seen = []

    def read():
        for number in ids():
            seen.append(documents.read([number])[number].document.id == number)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 * len(ids())
    assert all(seen)


def test_a_missing_passage_is_named(documents):
    with pytest.raises(DocumentStoreError, match="has no passage 8;"):
        documents.read([7, 8])
    with pytest.raises(DocumentStoreError):
        documents.read([1 << 80])


def test_another_index_is_refused(documents):
    with pytest.raises(DocumentStoreError, match="this is index other"):
        documents.check_index("other")


@pytest.mark.parametrize(
    ("passages", "options", "field"),
    [
        ([Document(id=1, text="a"), Document(id=1, text="b")], {}, "an id twice"),
        ([Document(id=-1, text="a")], {}, "id is -1"),
        ([Document(id=1, text="a", lead=2)], {}, "lead of 1 is 2"),
        ([Document(id=1, text="a" * ((1 << 20) + 1))], {}, "text of 1 has"),
        ([], {"mean": np.zeros(3, dtype=np.float32)}, "mean has shape"),
    ],
)
def test_wrong_documents_leave_nothing(tmp_path, passages, options, field):
    with pytest.raises(InvalidInputError, match=field):
        write(tmp_path / "d.sqlite", *passages, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_store_before_it(tmp_path):
    path = tmp_path / "d ?#.sqlite"
    assert write(path, Document(id=1, text="old")) == 1

    def broken():
        yield Document(id=1, text="new")
        raise RuntimeError("the source ended")

    with pytest.raises(RuntimeError):
        write_documents(path, broken(), index_fingerprint="f", embedder="e", dim=2)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with DocumentStore(path) as store:
        assert store.read([1])[1].document.text == "old"
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store._db.execute("DELETE FROM passages")
    with pytest.raises(DocumentStoreError, match="cannot be written"):
        write(tmp_path / "nowhere" / "d.sqlite", Document(id=1, text="a"))


def test_an_empty_store_is_one(tmp_path):
    assert write(tmp_path / "d.sqlite") == 0
    with DocumentStore(tmp_path / "d.sqlite") as store:
        assert store.info.count == 0
        assert store.info.mean is None


def test_foreign_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "d.sqlite"
    with pytest.raises(DocumentStoreError, match="does not exist"):
        DocumentStore(path)
    path.write_bytes(b"no database at all, but long enough to be read as one" * 9)
    with pytest.raises(DocumentStoreError, match="not a document store"):
        DocumentStore(path)
    for change, complaint in (
        ("UPDATE about SET value = x'33' WHERE name = 'version'", "expected b'hybridindex-documents' 1 or 2"),
        ("DELETE FROM about WHERE name = 'dim'", "is damaged"),
        ("UPDATE about SET value = x'00000000' WHERE name = 'mean'", "is damaged"),
        ("UPDATE about SET value = 5 WHERE name = 'mean'", "is damaged"),
    ):
        write(path, Document(id=1, text="a"))
        with sqlite3.connect(path) as db:
            db.execute(change)
        db.close()
        with pytest.raises(DocumentStoreError, match=complaint):
            DocumentStore(path)


def test_a_flipped_page_is_an_error_when_it_is_read(tmp_path):
    path = tmp_path / "d.sqlite"
    write(path, *(Document(id=i, text="word " * 200) for i in range(200)))
    content = bytearray(path.read_bytes())
    content[4096 * 2 :] = b"\xff" * (len(content) - 4096 * 2)
    path.write_bytes(content)
    complaint = r"cannot be read|damaged|not a document store"
    with pytest.raises(DocumentStoreError, match=complaint), DocumentStore(path) as store:
        store.read(range(200))


def test_tokens_that_are_no_bytes_are_an_error_when_they_are_read(tmp_path):
    path = tmp_path / "d.sqlite"
    write(path, Document(id=1, text="a"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE passages SET starts = 5")
    db.close()
    with DocumentStore(path) as store, pytest.raises(DocumentStoreError, match="cannot be read"):
        store.read([1])


def test_a_shift_drops_what_is_stale_and_appends_what_follows(documents):
    words = [text.split() for text in texts()]
    assert shift_passage(documents, ids()[0], 0) == texts()[0]
    assert shift_passage(documents, ids()[0], 5).split() == (words[0] + words[1])[5:17]
    assert shift_passage(documents, ids()[0], 30).split() == (words[0] + words[1] + words[2] + words[3])[30:42]
    with pytest.raises(InvalidInputError, match="staleness is -1"):
        shift_passage(documents, ids()[0], -1)


def test_a_shift_ends_with_its_document(documents):
    last = 59  # of the first topic
    assert shift_passage(documents, ids()[last], 5).split() == texts()[last].split()[5:]
    assert shift_passage(documents, ids()[last], 12) == ""
    assert shift_passage(documents, ids()[last - 1], 20).split() == texts()[last].split()[8:]


def test_a_shift_leaves_out_repeated_titles(tmp_path):
    path = tmp_path / "d.sqlite"
    write(path, Document(id=1, text="a b c", successor=2), Document(id=2, text="title: d e f", lead=7))
    with DocumentStore(path) as store:
        assert shift_passage(store, 1, 2) == "c d e"


def test_a_shift_of_what_was_deleted_ends(tmp_path):
    with Collection(tmp_path / "idx") as collection:
        follows = [Item(text=f"a{n} b{n}", successor=n + 1) for n in range(3)]
        collection.put(follows, np.eye(3, dtype=np.float32))
        with DocumentStore(tmp_path / "idx" / "documents.sqlite") as store:
            assert shift_passage(store, 0, 1) == "b0 a1"
            collection.delete([1])
            assert shift_passage(store, 0, 1) == "b0"
            assert [shift_passage(store, 1, staleness) for staleness in (0, 1)] == ["", ""]
    # A store that stays has all passages that it names.
    write(tmp_path / "d.sqlite", Document(id=1, text="a b", successor=2))
    with DocumentStore(tmp_path / "d.sqlite") as store, pytest.raises(DocumentStoreError, match="has no passage 2"):
        shift_passage(store, 1, 1)


def test_long_texts_have_long_offsets(tmp_path):
    text = "word " * 20_000
    write(tmp_path / "d.sqlite", Document(id=1, text=text), Document(id=2, text="a b"))
    with DocumentStore(tmp_path / "d.sqlite") as store:
        found = store.read([1, 2])
    assert found[1].starts.tolist() == list(range(0, 100_000, 5))
    assert found[2].starts.tolist() == [0, 2]


def test_a_ring_of_successors_ends(tmp_path):
    path = tmp_path / "d.sqlite"
    write(path, Document(id=1, text="a b", successor=1))
    with DocumentStore(path) as store:
        assert shift_passage(store, 1, 1000) == ""
        assert shift_passage(store, 1, 3) == "b a"


def test_words_and_tails():
    starts = word_starts(["", " a  bc\n", "ä b"])
    assert [s.tolist() for s in starts] == [[], [1, 4], [0, 2]]
    assert tail_of("one two three", [0, 4, 8], 2) == "two three"
    assert tail_of("one two", [0, 4], 5) == "one two"
