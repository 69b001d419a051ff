"""Digests of single lists: as the format says, trusted only where they are whole; an index without them is as good."""

from __future__ import annotations

import errno
import hashlib

import numpy as np
import pytest
import xxhash

from hybridindex.errors import CorruptIndexError
from hybridindex.filesystem import watched_by
from hybridindex.index import open_index
from hybridindex.index.rewrite import write_layout
from hybridindex.index.storage import list_digests
from hybridindex.index.storage.list_digests import digest_lists, list_spans, read_digests, render_digests
from tests.clustered import NLIST, clustered, small_index
from tests.faults import FaultyDisk, of


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("digests") / "i"
    # With lists that are empty.
    small_index(path, n=40, codec="sq8").close()
    return path


def generation(path):
    return path / "gen-000001"


@pytest.mark.parametrize("codec", ["flat", "pqfs8"])
@pytest.mark.parametrize("chunk", [64, 1000, 8 << 20])
def test_a_writer_digests_codes_and_ids_of_each_list(tmp_path, codec, chunk, monkeypatch):
    monkeypatch.setattr(list_digests, "_CHUNK_BYTES", chunk)
    with small_index(tmp_path / "i", codec=codec) as index:
        expected = [
            [xxhash.xxh3_64_intdigest(index.stored_codes(i)), xxhash.xxh3_64_intdigest(index.list_ids(i))]
            for i in range(NLIST)
        ]
        whole = index.manifest.files["lists.bin"].xxh3_128
        spans = list_spans(index.extents(), index.code_size, index.manifest.layout)
        found = digest_lists(generation(tmp_path / "i") / "lists.bin", spans)
    rows = np.load(generation(tmp_path / "i") / "lists.xxh3.npy")
    assert rows.dtype == "<u8"
    assert rows[1:-1].tolist() == expected == found[1].tolist()
    assert "".join(f"{half:016x}" for half in rows[0].tolist()) == whole == found[0]
    assert "".join(f"{half:016x}" for half in rows[-1].tolist()) == xxhash.xxh3_128_hexdigest(rows[:-1].tobytes())


def test_a_table_that_is_damaged_or_of_another_file_is_not_used(path, tmp_path):
    table = generation(path) / "lists.xxh3.npy"
    with open_index(path) as index:
        whole, digests = index.manifest.files["lists.bin"].xxh3_128, index.integrity.digests
    copy = tmp_path / "t.npy"
    copy.write_bytes(render_digests(whole, digests))
    assert copy.read_bytes() == table.read_bytes()
    assert np.array_equal(read_digests(copy, whole, NLIST), digests)
    assert read_digests(copy, hashlib.md5(b"").hexdigest(), NLIST) is None
    assert read_digests(copy, whole, NLIST + 1) is None
    assert read_digests(tmp_path / "none.npy", whole, NLIST) is None
    good = copy.read_bytes()
    for at in range(0, len(good), 37):
        copy.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        found = read_digests(copy, whole, NLIST)
        assert found is None or np.array_equal(found, digests)
        copy.write_bytes(good[:at])
        assert read_digests(copy, whole, NLIST) is None


def test_a_table_that_cannot_be_read_is_said(path, caplog):
    table = generation(path) / "lists.xxh3.npy"
    disk = FaultyDisk(counts=of("read", path=table.name), allowed=0, number=errno.EIO)
    with watched_by(disk), open_index(path) as index:
        assert index.integrity.digests is not None, "they are made while the lists are read"
    assert f"{table} cannot be read" in caplog.text


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_an_index_of_an_older_version_has_no_table_and_answers_the_same(tmp_path, verify):
    queries = clustered(5, seed=3)
    with small_index(tmp_path / "i") as index, index.integrity.mapped.file.open("rb"):
        expected, digests = index.open_faiss().search(queries, 3)[1], index.integrity.digests
    (generation(tmp_path / "i") / "lists.xxh3.npy").unlink()
    with open_index(tmp_path / "i", verify=verify) as index:
        assert np.array_equal(index.open_faiss().search(queries, 3)[1], expected)
        assert (index.integrity.digests is None) == (verify == "quick")
        assert verify == "quick" or np.array_equal(index.integrity.digests, digests)
    assert not (generation(tmp_path / "i") / "lists.xxh3.npy").exists()


def test_an_error_names_the_lists_that_differ(tmp_path):
    with small_index(tmp_path / "i") as index:
        offsets = index.extents()[:, 2]
    file = generation(tmp_path / "i") / "lists.bin"
    content = bytearray(file.read_bytes())
    for list_id in (3, 17):
        content[offsets[list_id]] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptIndexError, match=rf"\(lists 3, 17 of {NLIST}\)"):
        open_index(tmp_path / "i")
    (generation(tmp_path / "i") / "lists.xxh3.npy").unlink()
    with pytest.raises(CorruptIndexError, match="checksum in the manifest; restore"):
        open_index(tmp_path / "i")


def test_a_copy_of_damaged_bytes_is_refused(tmp_path):
    with small_index(tmp_path / "i") as index:
        with (generation(tmp_path / "i") / "lists.bin").open("r+b") as file:
            file.write(b"\xff\xff")
        with pytest.raises(CorruptIndexError, match=r"lists\.bin was damaged since it was opened"):
            write_layout(index, tmp_path / "copy", "rows")
    assert not (tmp_path / "copy").exists()
