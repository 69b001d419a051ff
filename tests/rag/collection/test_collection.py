"""Texts and rows change together: what is written is found, what is refused changes nothing, compactions keep texts."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from dataclasses import replace

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    DocumentStoreError,
    DuplicateIdError,
    InvalidInputError,
    UnreachableError,
)
from hybridindex.rag.collection import Collection, Compare, Item
from hybridindex.rag.documents import Document, DocumentStore, write_documents
from hybridindex.rag.ingest import put_texts, remove_texts
from tests.rag.collection.world import (
    COLUMNS,
    DIM,
    Embedder,
    check,
    chunks_of,
    given_texts,
    items,
    put,
    state,
    vectors_of,
)

VECTORS = vectors_of(map(str, range(9)))


@pytest.fixture
def path(tmp_path):
    with Collection(tmp_path / "idx", columns=COLUMNS) as made:
        put(made, range(5))
    return tmp_path / "idx"


def found(collection, n, version="first", k=1, **options):
    (hits,) = collection.search(vectors_of([f"{version} {n}"]), k, **options)
    return [hit.item.key for hit in hits]


def test_what_is_put_is_found_and_stays(path):
    with Collection(path) as collection:
        assert put(collection, [3, 9], "second") == [3, 5]
        assert found(collection, 3, "second") == ["k3"]
        assert collection.get(["k3", "k9", "none"]).keys() == {"k3", "k9"}
        assert set(found(collection, 0, k=9, condition=Compare("lang", "=", "second"))) == {"k3", "k9"}
        assert found(collection, 0, k=9, keys=["k1"]) == ["k1"]
        assert found(collection, 0, k=9, where="year > 2008") == ["k9"]
        assert sorted(collection.matching(Compare("lang", "<>", "second"))) == [0, 1, 2, 4]
        assert collection.delete(keys=["k1", "none"]) == 1
        assert collection.count() == 5
    check(path)
    assert "k1" not in state(path)


def test_an_empty_index_takes_the_first_texts(tmp_path):
    with Collection(tmp_path / "idx", columns=COLUMNS) as collection:
        assert collection.search(np.ones(DIM), 3) == [[]]
        assert (collection.count(), collection.clear(), collection.get(["a"]), [*collection.items()]) == (0, 0, {}, [])
        assert collection.create(DIM)
        assert not collection.create(DIM)
        assert collection.search(np.ones(DIM), 3) == [[]]
        put(collection, range(3))
        assert found(collection, 2) == ["k2"]
        collection.put([Item(text="no vector", key="x")], None)
        assert (collection.count(), collection.recover(), collection.count()) == (4, 0, 4)
        assert "x" not in found(collection, 2, k=9)
    assert "x" in state(tmp_path / "idx")


def test_what_is_refused_changes_nothing(path):
    before = state(path)
    with Collection(path) as collection:
        for wrong, error, complaint in (
            (lambda: collection.put(items([1, 1]), vectors_of("ab")), DuplicateIdError, "key 'k1' is given twice"),
            (lambda: collection.put(items([1, 8]), vectors_of("ab"), replace=False), DuplicateIdError, "'k1'"),
            (lambda: collection.put(items([1]), np.ones((1, 3))), InvalidInputError, "3 dimensions; the index has 12"),
            (lambda: collection.put(items([1]), np.full((1, DIM), np.nan)), InvalidInputError, "NaN"),
            (lambda: collection.put(items([1]), np.ones((2, DIM))), InvalidInputError, r"expected \(1, d\)"),
            (lambda: collection.put([Item(text="x", key="k1", id=4)], np.ones((1, DIM))), DuplicateIdError, "row 1"),
            (lambda: collection.put([Item(text="x" * 2_000_000)], np.ones((1, DIM))), InvalidInputError, "characters"),
            (
                lambda: collection.put([Item(text="x", metadata={"year": "new"})], np.ones((1, DIM))),
                InvalidInputError, "'year' is 'new'",
            ),
            (lambda: collection.search(np.ones(DIM), 0), InvalidInputError, "k is 0"),
            (lambda: collection.search(np.ones(DIM), 1, where="colour = 1"), InvalidInputError, "colour"),
        ):  # fmt: skip
            with pytest.raises(error, match=complaint):
                wrong()
    assert state(path) == before
    check(path)


class Target:
    """Rows go through somebody else, who fails."""

    def __init__(self, index, error):
        self.index, self.error = index, error

    def upsert(self, vectors, ids, attributes=None):
        if self.error is not None:
            raise self.error
        return self.index.upsert(vectors, ids, attributes)

    def delete(self, ids=None):
        if self.error is not None:
            raise self.error
        return self.index.delete(ids)


@pytest.mark.parametrize("name", ["text", "key", "source", "ref", "metadata"])
def test_halves_of_surrogates_are_no_text(path, name):
    given = {"text": "x", name: {"k": "\ud800"} if name == "metadata" else "\ud800"}
    before = state(path)
    with (
        Collection(path) as collection,
        pytest.raises(InvalidInputError, match=f"{name} holds? half of a surrogate pair"),
    ):
        collection.put([Item(**given)], vectors_of(["x"]))
    assert state(path) == before


def test_what_the_index_refuses_is_taken_back(path):
    before = state(path)
    with hx.open(path) as index, Collection(path, target=Target(index, BuildError("somebody writes"))) as collection:
        for change in (lambda: put(collection, [1, 8], "second"), lambda: collection.delete(keys=["k1"])):
            with pytest.raises(BuildError):
                change()
        assert collection.store.begun() == []
    assert state(path) == before
    check(path)


def test_a_change_of_texts_that_the_index_refuses_is_taken_back(path):
    with Collection(path) as collection:
        put_texts(collection, given_texts("first"), Embedder())
    before, second = chunks_of(path), given_texts("second")
    with hx.open(path) as index:
        target = Target(index, BuildError("somebody writes"))
        with Collection(path, target=target) as collection:
            for change in (
                lambda: put_texts(collection, second, Embedder()),
                lambda: remove_texts(collection, ["text 1"]),
                # Nothing new: what is left is linked anew.
                lambda: put_texts(collection, [replace(second[2], text="# same 2\n\nwords")], Embedder()),
            ):
                with pytest.raises(BuildError):
                    change()
                assert collection.store.begun() == []
                assert chunks_of(path) == before
            # It refuses the rows that should go, and not those that came.
            target.upsert = index.upsert
            with pytest.raises(BuildError):
                put_texts(collection, second[2:], Embedder())
            check(path)
            target.error = None
            assert put_texts(collection, second[2:], Embedder()).sources == {"changed": 1}
        check(path)
    after = chunks_of(path)
    assert [text for text, _ in after["text 2"]] == [
        "# same 2\n\nwords",
        *(f"# second 2 {m}\n\nwords" for m in range(3)),
    ]
    assert {name: after[name] for name in ("text 0", "text 1")} == {name: before[name] for name in ("text 0", "text 1")}


def test_what_may_have_been_done_is_done_again(path):
    with hx.open(path) as index:
        target = Target(index, UnreachableError("no answer"))
        with Collection(path, target=target) as collection:
            with pytest.raises(UnreachableError):
                put(collection, [1, 8], "second")
            check(path, recovered=False)
            target.error = None
            collection.delete(keys=["k2"])
            assert collection.store.begun() == []
    check(path)
    assert {key: text for key, text in state(path).items() if key in ("k1", "k2", "k8")} == {
        "k1": "second 1", "k8": "second 8",
    }  # fmt: skip


def test_generations_of_a_lineage_share_their_texts(path):
    with Collection(path) as collection, DocumentStore(path / "documents.sqlite") as reader:
        searched = collection.index.router(devices=())
        put(collection, [7], "second")
        assert collection.compact()
        put(collection, [8], "second")
        assert reader.find([6])[6].document.text == "second 8"
        assert found(collection, 8, "second") == ["k8"]
        searched.close()
    (shared,) = path.glob("documents-*.sqlite")
    for generation in ("gen-000001", "gen-000002"):
        assert (path / generation / "documents.sqlite").resolve() == shared
    check(path)
    assert hx.remove_replaced(path) == [1]
    check(path)
    with hx.open(path) as index:
        index.save(path.with_name("copy"))
    built = hx.build(np.eye(DIM, dtype=np.float32), path, replace=True)
    built.close()
    hx.remove_replaced(path)
    assert not list(path.glob("documents-*"))


def test_a_store_that_never_changed_is_given_to_its_lineage(tmp_path):
    texts = [f"first {n}" for n in range(4)]
    with hx.build(vectors_of(texts), tmp_path / "idx", normalize=True) as index:
        write_documents(
            tmp_path / "idx" / "documents.sqlite", [Document(id=n, text=text) for n, text in enumerate(texts)],
            index_fingerprint=index.fingerprint, embedder="toy", dim=DIM,
        )  # fmt: skip
    with DocumentStore(tmp_path / "idx" / "documents.sqlite") as reader:
        assert not reader.is_live
        with Collection(tmp_path / "idx", embedder="toy") as collection:
            put(collection, [9])
            collection.delete([0])
            assert reader.find([0, 4])[4].document.text == "first 9"
            assert 0 not in reader.find([0])
    with pytest.raises(InvalidInputError, match="'other', but the documents were embedded by 'toy'"):
        Collection(tmp_path / "idx", embedder="other")
    with pytest.raises(DocumentStoreError, match="changes with its index"):
        write_documents(tmp_path / "idx" / "documents.sqlite", [], index_fingerprint="f", embedder="e", dim=2)


def test_rows_without_keys_are_named_by_their_numbers(tmp_path):
    with Collection(tmp_path / "idx") as collection:
        collection.put([Item(text=f"first {n}", key=key) for n, key in enumerate([None, "k", None, "2"])], VECTORS[:4])
        assert {key: item.id for key, item in collection.get(["0", "1", "2", "00", "-1", "9" * 19]).items()} == {
            "0": 0, "2": 3,
        }  # fmt: skip
        assert collection.put([Item(text="second 0", key="0")], VECTORS[:1]) == [0]
        assert [item.text for item in collection.items()] == ["second 0", "first 1", "first 2", "first 3"]
        assert collection.delete(keys=["2"]) == 1
        assert collection.delete(keys=["1", "2"]) == 1
        assert [item.id for item in collection.items()] == [0, 1]


def test_ids_may_be_arrays(path):
    with Collection(path) as collection:
        assert found(collection, 3, k=9, ids=np.array([3, 4])) == ["k3", "k4"]
        assert collection.delete(np.array([0])) == 1
        assert collection.delete(np.array([1, 2])) == 2
        assert collection.delete(np.array([], dtype=np.int64)) == 0
        assert collection.count() == 2


def test_new_numbers_are_none_that_are_given(path):
    with Collection(path) as collection:
        assert collection.put([Item(text="x"), Item(text="y", id=5), Item(text="z")], VECTORS[:3]) == [6, 5, 7]


def test_who_puts_first_beside_another_puts_second(tmp_path):
    for name in ("a", "b", "c"):
        together, errors = threading.Barrier(3), []

        def write(first, path=tmp_path / name, together=together, errors=errors):
            with Collection(path, columns=COLUMNS) as collection:
                together.wait()
                try:
                    if not first:
                        collection.create(DIM)
                    put(collection, range(first, first + 20))
                except Exception as error:  # noqa: BLE001 - shown by the test
                    errors.append(error)

        threads = [threading.Thread(target=write, args=(first,)) for first in (0, 20, 40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(state(tmp_path / name)) == 60
        check(tmp_path / name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_draft_of_who_died_is_replaced(tmp_path):
    (tmp_path / ".idx.new").mkdir()
    (tmp_path / ".idx.new" / "half").touch()
    (tmp_path / ".idx.new.lock").touch()
    with Collection(tmp_path / "idx", columns=COLUMNS) as collection:
        put(collection, range(3))
    assert [file.name for file in tmp_path.iterdir()] == ["idx"]
    check(tmp_path / "idx")


def test_a_change_that_was_begun_is_made_with_the_columns_of_today(path):
    with Collection(path) as collection, collection.store.changing():
        begun = [Item(text="late", key="late", metadata={"lang": "en", "more": 1, "year": 2000})]
        collection.store.begin_put(begun, np.array([50]), VECTORS[:1])
    with hx.open(path, write=True) as index:
        index.set_attributes({"more": list(range(5)), "year": ["old"] * 5}, ids=np.arange(5))
        assert index.attributes == {"more": "int", "year": "string"}
    with Collection(path) as collection:
        assert put_plain(collection, "next") == [51]
        assert collection.store.begun() == []
        assert [item.key for item in collection.items()][-2:] == ["late", "next"]
        # Of the column that has another kind by now it has no value.
        assert collection.matching(Compare("more", "=", 1)) == [1, 50]
        assert 50 not in collection.matching(Compare("year", "<>", None))


def put_plain(collection, key):
    return collection.put([Item(text=key, key=key)], vectors_of([key]))


def test_an_index_compacted_before_its_texts_ever_changed_keeps_them(tmp_path):
    texts = [f"first {n}" for n in range(4)]
    with hx.build(vectors_of(texts), tmp_path / "idx", normalize=True) as index:
        write_documents(
            tmp_path / "idx" / "gen-000001" / "documents.sqlite",
            [Document(id=n, text=text) for n, text in enumerate(texts)],
            index_fingerprint=index.fingerprint, embedder="toy", dim=DIM,
        )  # fmt: skip
        index.delete([2])
        assert index.compact()
    hx.remove_replaced(tmp_path / "idx")
    with Collection(tmp_path / "idx") as collection:
        assert collection.recover() == 1
        assert sorted(item.text for item in collection.items()) == ["first 0", "first 1", "first 3"]


def test_threads_and_two_openings_at_once(path):
    with Collection(path) as one, Collection(path) as other:
        errors = []

        def write(collection, first):
            try:
                for n in range(first, first + 12, 3):
                    put(collection, range(n, n + 3), "second")
                    collection.search(np.ones(DIM), 3)
            except Exception as error:  # noqa: BLE001 - shown by the test
                errors.append(error)

        threads = [threading.Thread(target=write, args=(c, f)) for c, f in ((one, 10), (one, 30), (other, 50))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert one.count() == other.count() == 5 + 36
    check(path)


def test_only_one_may_write_where_one_shall(path):
    with Collection(path, write=True) as collection:
        put(collection, [9])
        with pytest.raises(BuildError, match="open for writing"):
            Collection(path, write=True)
    with pytest.raises(InvalidInputError, match="is closed"):
        collection.count()


def test_what_is_no_collection(tmp_path, path):
    hx.build(np.eye(4, dtype=np.float32), tmp_path / "bare").close()
    with pytest.raises(DocumentStoreError, match=r"has no documents.sqlite"):
        Collection(tmp_path / "bare")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with Collection(tmp_path / "full") as collection:
        with pytest.raises(InvalidInputError, match="holds something that is not an index"):
            put(collection, [1])
        with pytest.raises(InvalidInputError, match="put something first"):
            collection.index  # noqa: B018
    with pytest.raises(InvalidInputError, match="column 'x' is 'integer'; expected one of int"):
        Collection(tmp_path / "new", columns={"x": "integer"})
    with pytest.raises(InvalidInputError, match=r"column 'x' .int. is wanted, but the index has year .int., lang"):
        Collection(path, columns={"x": "int"})


def test_an_index_that_began_with_nothing_still_finds_what_is_near(tmp_path):
    with Collection(tmp_path / "idx", columns=COLUMNS) as collection:
        collection.create(DIM)
        for start in range(0, 1500, 100):
            put(collection, range(start, start + 100))
        collection.compact()
        assert len(found(collection, 77, k=20)) == 20
        put(collection, [2000])
        exact = vectors_of([item.text for item in collection.items()])
        exact /= np.linalg.norm(exact, axis=1, keepdims=True)
        queries = np.random.default_rng(1).standard_normal((20, DIM)).astype(np.float32)
        rows = [item.id for item in collection.items()]
        nearest = np.array(rows)[np.argsort(-(queries @ exact.T), axis=1)[:, :10]]
        hits = [[hit.item.id for hit in each] for each in collection.search(queries, 10)]
        recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hits, nearest.tolist(), strict=True)])
        assert recall > 0.95


def test_a_restore_has_what_is_in_the_log_of_the_texts_alone(path, tmp_path):
    with Collection(path) as collection:
        put(collection, [9])
        collection.delete(keys=["k1"])
        # Beside who writes, and of a copy of what a process that died has left.
        shutil.copytree(path, tmp_path / "left", symlinks=True)
        hx.restore(path, tmp_path / "r1").close()
    hx.restore(tmp_path / "left", tmp_path / "r2").close()
    for name in ("r1", "r2"):
        assert sorted(state(tmp_path / name)) == ["k0", "k2", "k3", "k4", "k9"]
        check(tmp_path / name)


def test_texts_that_are_damaged_are_not_restored(path, tmp_path):
    with Collection(path) as collection:
        put(collection, range(5, 200))
        made = collection.index.snapshot(tmp_path / "s")
    (file,) = made.glob("documents-*.sqlite")
    raw = bytearray(file.read_bytes())
    raw[8192:12288] = bytes(4096)
    file.write_bytes(raw)
    with pytest.raises((CorruptIndexError, BuildError)):
        hx.restore(made, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("damaged", ["'{'", "x'ff'", "'" + "[" * 100_000 + "'"])
def test_damaged_metadata_are_said(path, damaged):
    with Collection(path) as collection:
        with sqlite3.connect(path / "documents.sqlite") as db:
            db.execute(f"UPDATE details SET metadata = {damaged} WHERE key = 'k1'")
        db.close()
        for read in (lambda: list(collection.items()), lambda: found(collection, 1)):
            with pytest.raises(DocumentStoreError, match=r"documents\S*: the metadata of passage 1 are damaged"):
                read()


def test_searches_with_too_many_neighbours_or_no_numbers(path, monkeypatch):
    with Collection(path) as collection:
        assert len(found(collection, 0, k=5000)) == 5
        with pytest.raises(InvalidInputError, match="vectors are not numbers"):
            collection.search(["a"] * DIM, 1)
        monkeypatch.setattr("hybridindex.rag.collection.collection._MOST_K", 4)
        assert len(found(collection, 0, k=4)) == 4
        with pytest.raises(InvalidInputError, match=r"k is 5; expected 1\.\.4, where there are more"):
            collection.search(vectors_of(["x"]), 5)


@pytest.mark.parametrize("name", ["text", "key", "source", "ref"])
def test_what_is_no_text_is_refused(name):
    with pytest.raises(InvalidInputError, match=f"{name} is 5; expected a text"):
        Item(**({"text": "x"} | {name: 5}))
