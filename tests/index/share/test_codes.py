"""A share has the codes of all rows of its index, or none; whatever lists it holds."""

from __future__ import annotations

import errno
from contextlib import suppress

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import BuildError, FileError
from hybridindex.filesystem import watched_by
from hybridindex.index import open_index, remove_codes, verify
from hybridindex.index.rabitq.spec import SPEC_FILE
from hybridindex.index.share.share import add_to_share, create_share, renew_share, switch_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from tests.clustered import small_index
from tests.coded import with_codes
from tests.faults import WRITES, FaultyDisk, of


@pytest.fixture
def whole(tmp_path):
    with with_codes(small_index(tmp_path / "whole")) as index:
        yield index


@pytest.fixture
def path(whole, tmp_path):
    create_share(tmp_path / "share", FolderSource(whole.path))
    return tmp_path / "share"


def folder(path, number=1):
    return path / f"gen-{number:06d}"


def code_files(path, number=1):
    return sorted(file.name for file in folder(path, number).glob("rabitq*"))


def damage(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def assert_same(path, whole):
    verify(path)
    with open_index(path) as share:
        assert share.rabitq is not None
        assert share.rabitq.spec == whole.rabitq.spec
        np.testing.assert_array_equal(share.rabitq.data, whole.rabitq.data)
        assert not share.share.held.any()
        with Router(share, scrub_bytes_per_s=0) as router:
            assert router.precision.startswith("codes")


def test_a_share_has_the_codes_of_lists_that_it_does_not_hold(whole, path):
    assert_same(path, whole)


def test_it_gets_the_codes_that_its_index_has_now(whole, path):
    renewed = folder(path) / SPEC_FILE
    before = renewed.stat().st_mtime_ns
    renew_share(path, FolderSource(whole.path))
    assert renewed.stat().st_mtime_ns == before, "the same codes were copied again"
    with with_codes(whole, bits=4) as other:
        renew_share(path, FolderSource(other.path))
        assert_same(path, other)
        assert len(code_files(path)) == 2
        remove_codes(other)
        renew_share(path, FolderSource(other.path))
    assert code_files(path) == []
    with open_index(path) as share:
        assert (share.rabitq, share.rabitq_problem) == (None, "")


def test_codes_of_its_own_that_were_damaged_are_copied_again(whole, path):
    damage(folder(path) / whole.rabitq.spec.file)
    renew_share(path, FolderSource(whole.path))
    assert_same(path, whole)


@pytest.mark.parametrize("what", ["spec", "codes", "missing"])
def test_damaged_codes_of_the_index_cost_a_share_nothing_else(whole, tmp_path, what, caplog):
    file = folder(whole.path) / (SPEC_FILE if what == "spec" else whole.rabitq.spec.file)
    if what == "missing":
        file.unlink()
    else:
        damage(file)
    create_share(tmp_path / "share", FolderSource(whole.path))
    assert "codes of the index" in caplog.text
    assert code_files(tmp_path / "share") == []
    with open_index(tmp_path / "share") as share:
        assert share.rabitq is None


@pytest.mark.parametrize("what", ["spec", "codes", "missing"])
def test_a_share_keeps_its_codes_where_those_of_the_index_are_lost(whole, path, what, caplog):
    file = folder(whole.path) / (SPEC_FILE if what == "spec" else whole.rabitq.spec.file)
    before = code_files(path)
    if what == "missing":
        file.unlink()
    else:
        damage(file)
    renew_share(path, FolderSource(whole.path))
    # Those of the index are not looked at as a whole where the share has the same.
    assert what == "codes" or "the codes of the index cannot be taken" in caplog.text
    assert code_files(path) == before
    verify(path)
    with open_index(path) as share:
        assert share.rabitq is not None


def test_another_generation_beside_has_its_own_codes(whole, path):
    with hx.open(whole.path, write=True) as index:
        index.delete(np.arange(100))
        index.compact()
    add_to_share(path, FolderSource(whole.path, is_followed=True))
    number = 2
    assert len(code_files(path, number)) == 2
    switch_share(path, number)
    with open_index(whole.path) as compacted:
        assert_same(path, compacted)


def test_a_disk_that_is_full_leaves_the_share_the_codes_that_it_had(whole, path, caplog):
    before = whole.rabitq.spec
    with with_codes(whole, bits=4) as other:
        source, done, failed = FolderSource(other.path), 0, True
        while failed:
            disk = FaultyDisk(counts=of(*WRITES), allowed=done, number=errno.ENOSPC)
            with watched_by(disk), suppress(BuildError, FileError):
                renew_share(path, source)
            failed, done = disk.failed > 0, done + 1
            verify(path)
            with open_index(path) as share:
                assert share.rabitq is not None
                assert share.rabitq.spec in (other.rabitq.spec, before)
        assert done > 3
        assert "the codes of the index are not taken" in caplog.text
        assert_same(path, other)
        assert len(code_files(path)) == 2
