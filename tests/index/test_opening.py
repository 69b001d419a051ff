"""Opening proves every byte: truncated, flipped, foreign and newer directories each give one clear error."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import (
    CorruptIndexError,
    IndexFormatError,
    InvalidInputError,
    NotWritableError,
    UnreadableIndexError,
    UnsupportedIndexError,
)
from hybridindex.filesystem import watched_by
from hybridindex.index import (
    IVFIndex,
    build,
    open_index,
    opening,
    read_manifest,
    remove_replaced,
    save,
    verify,
    write_layout,
)
from hybridindex.index.storage.layout import to_blocks16
from hybridindex.index.storage.manifest import Manifest
from tests.conftest import clustered_vectors
from tests.faults import FaultyDisk, of

FILES = ["CURRENT", *(f"gen-000001/{name}" for name in ("manifest.json", "model.faiss", "lists.idx.npy", "lists.bin"))]
#: A damaged index never opens; CURRENT naming a missing generation and a manifest of another format are of these too.
REFUSED = (CorruptIndexError, UnsupportedIndexError)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("opening") / "i"
    build(clustered_vectors(100, 8), path, nlist=5, codec="sq8").close()
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_noticed(built: Path, name: str) -> None:
    raw = (built / name).read_bytes()

    @given(st.integers(0, len(raw) - 1), st.integers(1, 255))
    def check(position: int, mask: int) -> None:
        changed = bytearray(raw)
        changed[position] ^= mask
        try:
            (built / name).write_bytes(changed)
            for prove in (open_index, verify):
                with pytest.raises(IndexFormatError) as caught:
                    prove(built)
                assert caught.type in REFUSED
        finally:
            (built / name).write_bytes(raw)

    check()
    assert open_index(built).count == 100


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, -1])
@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_truncated_file_is_noticed(built: Path, tmp_path: Path, name: str, length: int, mode: str) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    raw = (path / name).read_bytes()
    (path / name).write_bytes(raw[:length])
    with pytest.raises(REFUSED):
        open_index(path, verify=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(built: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    (path / name).unlink()
    with pytest.raises(CorruptIndexError, match=os.path.basename(name)):
        open_index(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("number", "cure"), [(errno.EACCES, "give this user the right"), (errno.EIO, "its disk, or the way to it, fails")]
)
def test_what_cannot_be_read_is_not_called_damaged(built: Path, name: str, number: int, cure: str) -> None:
    for prove in (open_index, verify):
        disk = FaultyDisk(counts=of("open", path=name), allowed=0, number=number)
        with watched_by(disk), pytest.raises(UnreadableIndexError, match=f"{name} cannot be read: .*{cure}") as caught:
            prove(built)
        assert "restore" not in str(caught.value)


def test_a_disk_that_fails_while_it_is_read_is_named(built: Path) -> None:
    disk = FaultyDisk(counts=of("read", path="lists.idx.npy"), allowed=0, number=errno.EIO)
    with (
        watched_by(disk),
        pytest.raises(UnreadableIndexError, match=r"lists\.idx\.npy cannot be read: Input/output error.*kernel's log"),
    ):
        open_index(built)


def test_a_folder_that_may_not_be_listed_is_not_called_damaged(built: Path) -> None:
    disk = FaultyDisk(counts=of("list_folder"), allowed=0, number=errno.EACCES)
    with watched_by(disk), pytest.raises(UnreadableIndexError, match="give this user the right"):
        open_index(built.parent)


def test_quick_trusts_the_bytes_of_the_lists_only(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    with (path / "gen-000001/lists.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    assert open_index(path, verify="quick").count == 100
    with pytest.raises(CorruptIndexError, match=r"lists\.bin differs from its checksum"):
        open_index(path, verify="full")


@pytest.mark.parametrize(
    "name", ["../gen-000001", "gen-000001/../gen-000001", "/etc", "", "gen-1", "gen-000001\n\n", ".."]
)
def test_current_cannot_lead_elsewhere(built: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    shutil.copytree(built / "gen-000001", tmp_path / "gen-000001")
    (path / "CURRENT").write_text(name + "\n")
    with pytest.raises(CorruptIndexError, match="CURRENT"):
        open_index(path)


def test_foreign_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist"):
        open_index(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="is a file"):
        open_index(tmp_path / "file")
    with pytest.raises(UnsupportedIndexError, match="not a hybridindex directory"):
        open_index(tmp_path)
    with pytest.raises(InvalidInputError, match="verify is 'slow'"):
        open_index(tmp_path, verify="slow")  # type: ignore[arg-type]


def test_newer_format_is_refused(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    file = path / "gen-000001/manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(UnsupportedIndexError, match="format_version 99"):
        open_index(path)


def test_files_of_two_generations_do_not_mix(make_index: Callable[..., IVFIndex], tmp_path: Path) -> None:
    make_index(path=tmp_path / "a")
    make_index(path=tmp_path / "b", seed=5)
    for name in ("model.faiss", "lists.bin", "lists.idx.npy"):
        shutil.copytree(tmp_path / "a", tmp_path / "mixed")
        shutil.copy(tmp_path / "b/gen-000001" / name, tmp_path / "mixed/gen-000001" / name)
        with pytest.raises(CorruptIndexError, match=name):
            open_index(tmp_path / "mixed", verify="quick" if name != "lists.bin" else "full")
        shutil.rmtree(tmp_path / "mixed")


@pytest.mark.parametrize("read", [open_index, verify])
def test_a_reader_overtaken_by_a_rebuild_opens_the_new_generation(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], IVFIndex | Manifest]
) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    read_table = opening.read_table
    overtaken = []

    def read_late(*args: object) -> object:
        if not overtaken:
            overtaken.append(True)
            build(clustered_vectors(50, 8), path, nlist=2, replace=True)
            remove_replaced(path)
        return read_table(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "read_table", read_late)
    assert read(path).count == 50


def test_a_manifest_overtaken_by_a_rebuild_is_the_new_one(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "i"
    shutil.copytree(built, path)
    read_now = opening._read_manifest

    def read_late(generation: Path) -> Manifest:
        if generation.name == "gen-000001":
            monkeypatch.setattr(opening, "_read_manifest", read_now)
            build(clustered_vectors(50, 8), path, nlist=2, replace=True)
            remove_replaced(path)
        return read_now(generation)

    monkeypatch.setattr(opening, "_read_manifest", read_late)
    assert read_manifest(path).count == 50


def test_save_copies_and_keeps_the_fingerprint(make_index: Callable[..., IVFIndex], tmp_path: Path) -> None:
    for codec in ("flat", "pqfs"):
        index = make_index(codec)
        with save(index, tmp_path / codec) as copy:
            assert copy.fingerprint == index.fingerprint
            assert verify(tmp_path / codec).files == index.manifest.files
            np.testing.assert_array_equal(copy.mapped_lists(), index.mapped_lists())
        assert save(index, tmp_path / codec, replace=True).generation == 2


def test_save_works_after_the_directory_was_rebuilt(make_index: Callable[..., IVFIndex], tmp_path: Path) -> None:
    index = make_index(path=tmp_path / "i")
    make_index("sq8", path=tmp_path / "i", replace=True)
    assert save(index, tmp_path / "copy").fingerprint == index.fingerprint


@pytest.mark.parametrize("codec", ["flat", "fp16", "sq8"])
def test_blocks16_is_converted_once_and_visibly(
    make_index: Callable[..., IVFIndex], tmp_path: Path, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    index = make_index(codec)
    path = tmp_path / "blocks"
    manifest = write_layout(index, path, "blocks16")
    assert (manifest.layout, manifest.fingerprint) == ("blocks16", index.fingerprint)
    assert verify(path).layout == "blocks16"
    stored = np.fromfile(path / "gen-000001/lists.bin", np.uint8)
    _, _, offset = np.load(path / "gen-000001/lists.idx.npy")[3]
    element = index.code_size // index.dim
    blocks = to_blocks16(np.asarray(index.list_codes(3)), element).reshape(-1)
    np.testing.assert_array_equal(stored[offset : offset + len(blocks)], blocks)
    with caplog.at_level(logging.WARNING), open_index(path) as rows:
        assert "blocks16" in caplog.text
        assert (rows.generation, rows.manifest.layout, rows.fingerprint) == (2, "rows", index.fingerprint)
        np.testing.assert_array_equal(rows.mapped_lists(), index.mapped_lists())
    caplog.clear()
    open_index(path)
    assert caplog.text == ""


def test_blocks16_that_cannot_be_written_is_converted_aside(
    make_index: Callable[..., IVFIndex], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index()
    path = tmp_path / "blocks"
    write_layout(index, path, "blocks16")
    writer = opening.GenerationWriter

    class ReadOnly(writer):  # type: ignore[misc, valid-type]
        def __enter__(self) -> object:
            if self.path == path:
                raise NotWritableError("read-only")
            return super().__enter__()

    monkeypatch.setattr(opening, "GenerationWriter", ReadOnly)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_index(path) as rows:
        assert rows.path == path
        np.testing.assert_array_equal(rows.mapped_lists(), index.mapped_lists())
        assert len(list(tmp_path.glob("hybridindex-rows-*"))) == 1
    assert list(tmp_path.glob("hybridindex-rows-*")) == []
    assert read_manifest(path).layout == "blocks16"


@pytest.mark.parametrize("codec", ["pq", "pqfs", "bf16"])
def test_blocks16_is_refused_where_a_code_has_no_elements(
    make_index: Callable[..., IVFIndex], tmp_path: Path, codec: str
) -> None:
    with pytest.raises(InvalidInputError, match="blocks16"):
        write_layout(make_index(codec), tmp_path / "blocks", "blocks16")
    assert not (tmp_path / "blocks").exists()
