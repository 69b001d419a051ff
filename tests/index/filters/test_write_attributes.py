"""Attributes on disk: they come back as given, replace earlier ones at once, and damage refuses conditions alone."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.errors import BuildError, CorruptIndexError, DiskFullError, HybridIndexError, InvalidInputError
from hybridindex.index import open_index
from hybridindex.index.attributes.stored import SPEC_FILE, StoredAttributes, render_spec
from hybridindex.index.filters.write_attributes import remove_attributes, write_attributes
from hybridindex.router import Router
from tests.clustered import clustered, small_index
from tests.faults import FaultyDisk, of

N, NLIST = 600, 8
YEARS = {"year": np.arange(N) % 40 + 1980, "lang": ["en", "de", None] * (N // 3)}


@pytest.fixture
def index(tmp_path):
    with small_index(tmp_path / "i", n=N, nlist=NLIST) as index:
        yield index


def by_id(index):
    columns = index.attributes.columns
    ids = np.concatenate([index.list_ids(each) for each in range(NLIST)]).tolist()
    return {name: dict(zip(ids, column.to_pylist(), strict=True)) for name, column in columns.items()}


def names(index):
    return sorted(file.name for file in index.integrity.folder.glob("attributes*"))


def test_each_row_gets_its_own(index):
    spec = write_attributes(index, YEARS)
    assert spec.columns == {"year": "int", "lang": "string"}
    for found in (by_id(index), by_id(open_index(index.path))):
        assert found["year"] == {i: i % 40 + 1980 for i in range(N)}
        assert found["lang"] == {i: ["en", "de", None][i % 3] for i in range(N)}
    assert names(index) == sorted([SPEC_FILE, spec.file])


def test_later_ones_take_the_place_of_earlier_ones_and_some_rows_may_have_none(index):
    write_attributes(index, YEARS)
    with open_index(index.path) as before:
        write_attributes(index, {"year": [1, 2]}, ids=np.array([599, 7]))
        assert by_id(index)["year"] == {i: {599: 1, 7: 2}.get(i) for i in range(N)}
        assert len(names(index)) == 2
        # Who found the earlier ones still reads them.
        assert by_id(before)["year"][3] == 1983
    assert remove_attributes(index) > 0
    assert index.attributes is None
    assert names(index) == []
    assert open_index(index.path).attributes is None


@pytest.mark.parametrize(
    ("table", "ids", "message"),
    [
        ({"a": [1, 2]}, [1], "ids are 1 and attributes have 2 rows"),
        ({"a": [1, 2]}, [1, 1], "ids come twice: 1"),
        ({"a": [1, 2]}, [1, 600], "no rows of 1 of the ids: 600"),
        ({"a": [1] * (N + 8)}, None, "no rows of 8 of the ids: 600, 601, 602, 603, 604 and 3 more"),
        ({"a": [1]}, ["x"], "ids is a list of dtype <U1"),
        ({"a": [{}]}, None, "attribute 'a' is struct"),
    ],
)
def test_what_does_not_fit_changes_nothing(index, table, ids, message):
    write_attributes(index, YEARS)
    before = names(index)
    with pytest.raises(InvalidInputError, match=message):
        write_attributes(index, table, ids)
    assert names(index) == before
    assert by_id(index)["year"][3] == 1983


def test_a_full_disk_leaves_what_was_there(index, monkeypatch):
    write_attributes(index, YEARS)
    before = names(index)

    def full(_file, _data, _offset):
        raise DiskFullError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.File, "write_at", full)
        with pytest.raises(DiskFullError):
            write_attributes(index, {"a": [1]})
    assert names(index) == before
    assert by_id(open_index(index.path))["year"][3] == 1983


@pytest.mark.parametrize("what", ["byte", "length", "spec", "other kinds", "other rows", "missing"])
def test_damaged_ones_refuse_conditions_and_nothing_else(index, what, caplog):
    spec = write_attributes(index, YEARS)
    folder = index.integrity.folder
    file, said = folder / spec.file, folder / SPEC_FILE
    raw = bytearray(file.read_bytes())
    if what == "byte":
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    elif what == "length":
        file.write_bytes(raw[:-1])
    elif what == "missing":
        file.unlink()
    elif what == "spec":
        said.write_bytes(said.read_bytes().replace(b"int", b"str", 1))
    elif what == "other kinds":
        said.write_bytes(render_spec(replace(spec, columns={"year": ["int"]})))
    else:
        hx.build(clustered(N, seed=9), index.path, nlist=NLIST, metric="l2", replace=True).close()
        for each in folder.glob("attributes*"):
            (folder.parent / "gen-000002" / each.name).write_bytes(each.read_bytes())
    with open_index(index.path) as again, Router(again, scrub_bytes_per_s=0) as router:
        router.search(clustered(2), 5)
        with pytest.raises((InvalidInputError, CorruptIndexError)):
            router.search(clustered(2), 5, where="year = 1983")
        if what != "byte":
            assert again.attributes is None
            assert "conditions on attributes are refused" in again.attributes_problem
        write_attributes(again, YEARS)
        assert router.search(clustered(2), 5, where="year = 1983").ids.max() >= 0


def test_a_generation_that_is_gone_takes_and_loses_none(index):
    hx.build(clustered(N), index.path, nlist=NLIST, metric="l2", replace=True).close()
    hx.remove_replaced(index.path)
    gone = r"gen-000001 of .* was replaced and removed; open the index again"
    with pytest.raises(BuildError, match=gone):
        write_attributes(index, YEARS)
    with pytest.raises(BuildError, match=gone):
        remove_attributes(index)


def test_repeated_ids_share_theirs(tmp_path):
    import faiss

    data = clustered(N)
    ivf = faiss.index_factory(data.shape[1], f"IVF{NLIST},Flat")
    ivf.train(data)
    ivf.add_with_ids(data, np.arange(N) // 2)
    with hx.from_faiss(ivf, tmp_path / "i", attributes={"year": np.arange(N // 2)}) as index:
        assert index.attributes == {"year": "int"}
        ids = np.concatenate([index.ivf.list_ids(each) for each in range(NLIST)])
        assert index.ivf.attributes.columns["year"].to_pylist() == ids.tolist()
        assert index.remove_attributes() > 0


def test_a_build_takes_them_with_the_vectors(tmp_path):
    ids = np.arange(N)[::-1] * 3
    with hx.build(clustered(N), tmp_path / "i", nlist=NLIST, ids=ids, attributes={"a": np.arange(N)}) as index:
        found = by_id(index.ivf)["a"]
        assert found == dict(zip(ids.tolist(), range(N), strict=True))
    with pytest.raises(InvalidInputError, match="attribute 'a' is binary"):
        hx.build(clustered(N), tmp_path / "j", nlist=NLIST, attributes={"a": [b""] * N})
    assert not (tmp_path / "j").exists()
    for n in (N - 1, N + 1):
        with pytest.raises(InvalidInputError, match=f"attributes have {n} rows, and there are {N} vectors"):
            hx.build(clustered(N), tmp_path / "j", nlist=NLIST, attributes={"a": [1] * n})
        assert not (tmp_path / "j" / "manifest.json").exists()


def test_a_build_gives_them_to_the_rows_of_a_file_or_an_iterator_that_has_ids_of_its_own(tmp_path):
    ids, data = np.arange(N)[::-1] * 3, clustered(N)
    expected = dict(zip(ids.tolist(), range(N), strict=True))
    columns = {"v": pa.FixedSizeListArray.from_arrays(pa.array(data.ravel()), data.shape[1]), "id": pa.array(ids)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    file = hx.VectorFile(tmp_path / "rows.parquet", column="v", ids_column="id")
    halves = ((data[at], ids[at]) for at in (slice(0, N // 2), slice(N // 2, N)))
    for name, vectors in (("file", file), ("iterator", halves)):
        with hx.build(vectors, tmp_path / name, nlist=NLIST, attributes={"a": np.arange(N)}) as index:
            assert by_id(index.ivf)["a"] == expected


def test_an_open_index_says_which_attributes_there_are_now(tmp_path):
    """Who asked which columns there are, and gave rows values of these, was refused for as long as its index was open:
    another index of the same directory had removed them."""
    rows = clustered(60, seed=1)
    with hx.build(rows[:50], tmp_path / "i", nlist=4, attributes={"a": np.arange(50)}) as index:
        with hx.open(tmp_path / "i") as other:
            other.remove_attributes()
            assert index.attributes == {}
            other.set_attributes({"b": ["x"] * 50})
            assert index.attributes == {"b": "string"}
        assert index.delete(where="b = 'x'") == 50


def test_attributes_of_an_open_generation_that_was_removed_stay_known(tmp_path):
    rows = clustered(60, seed=1)
    with hx.build(rows[:50], tmp_path / "i", nlist=4, attributes={"a": np.arange(50)}) as index:
        hx.build(rows[:50], tmp_path / "i", nlist=4, replace=True).close()
        hx.remove_replaced(tmp_path / "i")
        assert index.attributes == {"a": "int"}


def test_columns_are_read_once_however_many_rows_come(tmp_path, monkeypatch):
    """Each addition with attributes had the next condition read those of the whole generation again."""
    rows, reads = clustered(60, seed=1), []
    read = StoredAttributes._read
    monkeypatch.setattr(StoredAttributes, "_read", lambda self: reads.append(1) or read(self))
    with (
        hx.build(rows[:50], tmp_path / "i", nlist=4, attributes={"a": np.arange(50)}) as index,
        index.router(devices=[]) as router,
    ):
        for number in range(3):
            index.add(rows[50 + number : 51 + number], None, {"a": [50 + number]})
            found = router.search(rows[:1], 60, 4, where=f"a >= {49 - number}").ids[0]
            assert (found >= 0).sum() == 2 * number + 2
    assert len(reads) == 1


@pytest.mark.parametrize("name", [SPEC_FILE, ".arrow"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_for_a_moment_takes_no_columns_from_searches(tmp_path, name, number):
    """A row that came with attributes while the disk failed left the open index without any: all conditions were
    refused until another row came with some."""
    rows = clustered(60, seed=1)
    with (
        hx.build(rows[:50], tmp_path / "i", nlist=4, attributes={"a": np.arange(50)}) as index,
        index.router(devices=[]) as router,
    ):
        assert (router.search(rows[:1], 60, 4, where="a >= 40").ids[0] >= 0).sum() == 10
        for change in (lambda: index.add(rows[50:51], None, {"a": [50]}), lambda: index.delete(where="a >= 40")):
            disk = FaultyDisk(counts=of("open", path=name), allowed=0, number=number)
            with filesystem.watched_by(disk), pytest.raises(InvalidInputError, match="cannot be read"):
                change()
            assert disk.failed
            assert index.attributes == {"a": "int"}
            assert (router.search(rows[:1], 60, 4, where="a >= 39").ids[0] >= 0).sum() == 11
        assert index.n_live == 50


@pytest.mark.parametrize("change", ["set", "remove"])
def test_an_index_searches_what_is_on_disk_when_the_last_sync_fails(tmp_path, change):
    """The open index went on with the earlier attributes, and everybody who opened it later had others."""
    rows = clustered(60, seed=1)
    with hx.build(rows[:50], tmp_path / "i", nlist=4, attributes={"a": np.arange(50)}) as index:
        generation = index.ivf.integrity.folder.name
        disk = FaultyDisk(counts=of("sync_folder", path=generation))
        with filesystem.watched_by(disk):
            index.remove_attributes() if change == "remove" else index.set_attributes({"a": np.arange(50)})
        index.set_attributes({"a": np.arange(50)})
        last = FaultyDisk(counts=of("sync_folder", path=generation), allowed=len(disk.calls) - 1, number=errno.EIO)
        with filesystem.watched_by(last), pytest.raises(HybridIndexError):
            index.remove_attributes() if change == "remove" else index.set_attributes({"b": ["x"] * 50})
        known = index.ivf.attributes
        with hx.open(tmp_path / "i") as again:
            assert again.attributes == ({} if change == "remove" else {"b": "string"})
            assert (known and known.spec.columns) == (again.attributes or None)
