"""What a share knows of all rows: ids and attributes, whatever lists it holds."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import CorruptIndexError, InvalidInputError, NotHeldError
from hybridindex.index import open_index
from hybridindex.index.changes.write import delete
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.index.filters.row_numbers import row_numbers
from hybridindex.index.filters.write_attributes import remove_attributes, write_attributes
from hybridindex.index.opening import verify
from hybridindex.index.share.share import create_share, renew_share
from hybridindex.index.share.source import FILES, FolderSource
from hybridindex.index.storage.manifest import IDS_FILE
from hybridindex.router import Router
from tests.clustered import clustered, share_of_ids, small_index
from tests.index.share.shares import QUERIES, K

N = 3000
YEARS = np.random.default_rng(3).integers(1990, 2030, N)
WHERE = "year >= 2015"


@pytest.fixture
def whole(tmp_path):
    with small_index(tmp_path / "whole") as index:
        write_attributes(index, {"year": YEARS})
        yield index


def damage(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def ids_file(path):
    return path / "gen-000001" / IDS_FILE


@pytest.mark.parametrize("codec", ["flat", "sq8", "pqfs12"])
def test_filters_of_a_share_are_those_of_the_index(tmp_path, codec):
    with small_index(tmp_path / "whole", codec=codec) as whole:
        write_attributes(whole, {"year": YEARS})
        create_share(tmp_path / "share", FolderSource(tmp_path / "whole"))
        create_share(tmp_path / "copy", FolderSource(tmp_path / "share"))
        for name in ("share", "copy"):
            with open_index(tmp_path / name) as share:
                assert not share.share.held.any()
                for given in ((share_of_ids(0.1), None, None), (None, share_of_ids(0.3), WHERE), (None, None, WHERE)):
                    made, wanted = RowFilters(share).make(*given), RowFilters(whole).make(*given)
                    np.testing.assert_array_equal(made.mask, wanted.mask)
                    np.testing.assert_array_equal(made.counts, wanted.counts)


def test_rows_are_looked_up_once_whatever_comes_and_goes(whole, tmp_path):
    source = FolderSource(whole.path)
    create_share(tmp_path / "share", source)
    with open_index(tmp_path / "share") as share:
        numbers, seen = row_numbers(share)
        share.share.hold(range(8), source)
        again, now = row_numbers(share)
        assert again is numbers
        assert now > seen


def test_alone_it_answers_from_lists_that_it_holds(whole, tmp_path):
    source = FolderSource(whole.path)
    create_share(tmp_path / "share", source)
    held = np.arange(0, whole.nlist, 2)
    mine = np.concatenate([whole.list_ids(each) for each in held])
    with open_index(tmp_path / "share") as share, Router(whole) as one_machine:
        share.share.hold(held.tolist(), source)
        with Router(share) as router:
            found = router.search(QUERIES, K, whole.nlist, allow_ids=mine, where=WHERE)
            wanted = one_machine.search(QUERIES, K, whole.nlist, allow_ids=mine, where=WHERE)
            np.testing.assert_array_equal(found.ids, wanted.ids)
            with pytest.raises(NotHeldError):
                router.search(QUERIES, K, whole.nlist, where=WHERE)


def test_damaged_or_missing_ids_refuse_filters_and_nothing_else(whole, tmp_path):
    source = FolderSource(whole.path)
    for name, spoil, words in (
        ("damaged", damage, r"the ids of list \d+ in .* differ from their digest"),
        ("short", lambda file: file.write_bytes(file.read_bytes()[:-8]), "23992 bytes; expected 24000"),
        ("missing", lambda file: file.unlink(), "is missing"),
    ):
        create_share(tmp_path / name, source)
        verify(tmp_path / name)
        spoil(ids_file(tmp_path / name))
        with open_index(tmp_path / name) as share:
            share.share.hold(range(whole.nlist), source)
            with Router(share) as router:
                router.search(clustered(2), K)
                with pytest.raises(CorruptIndexError, match=words):
                    router.search(clustered(2), K, deny_ids=[1])
        with pytest.raises(CorruptIndexError, match=words):
            verify(tmp_path / name)
        renew_share(tmp_path / name, source)
        verify(tmp_path / name)


def test_sources_with_wrong_ids_or_attributes_are_refused(whole, tmp_path):
    files = FolderSource(whole.path).files()

    class Source:
        def __init__(self, **changed):
            self.changed = changed

        def files(self):
            return {**files, **self.changed}

    with pytest.raises(CorruptIndexError, match=f"{IDS_FILE} of the source"):
        create_share(tmp_path / "ids", Source(**{IDS_FILE: bytes(len(files[IDS_FILE]))}))
    (arrow,) = set(files) - set(FILES) - {"attributes.json"}
    with pytest.raises(CorruptIndexError, match=r"attributes-.* of the source differs"):
        create_share(tmp_path / "attributes", Source(**{arrow: b"no"}))


def test_attributes_follow_those_of_the_index(whole, tmp_path):
    path, folder = tmp_path / "share", tmp_path / "share" / "gen-000001"
    create_share(path, FolderSource(whole.path))
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    renew_share(path, FolderSource(whole.path))
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    write_attributes(whole, {"lang": np.where(YEARS % 2, "en", "de")})
    renew_share(path, FolderSource(whole.path))
    with open_index(path) as share:
        assert share.attributes.spec.columns == {"lang": "string"}
        assert RowFilters(share).make(None, None, "lang = 'en'").total == (YEARS % 2).sum()
    damage(next(folder.glob("attributes-*")))
    renew_share(path, FolderSource(whole.path))
    with open_index(path) as share:
        share.attributes.check()
    remove_attributes(whole)
    renew_share(path, FolderSource(whole.path))
    assert not list(folder.glob("attributes*"))
    with open_index(path) as share, pytest.raises(InvalidInputError, match="has no attributes"):
        RowFilters(share).make(None, None, WHERE)


def test_damaged_attributes_of_the_index_cost_a_share_nothing_else(whole, tmp_path, caplog):
    create_share(tmp_path / "before", FolderSource(whole.path))
    damage(next((whole.path / "gen-000001").glob("attributes-*")))
    create_share(tmp_path / "after", FolderSource(whole.path))
    renew_share(tmp_path / "before", FolderSource(whole.path))
    assert "shares get no attributes" in caplog.text
    for name in ("before", "after"):
        with open_index(tmp_path / name) as share:
            assert share.attributes is None
            assert RowFilters(share).make(share_of_ids(0.1), None).total == len(share_of_ids(0.1))


def test_a_share_is_renewed_whose_index_has_changed_rows(whole, tmp_path):
    create_share(tmp_path / "share", FolderSource(whole.path))
    delete(whole, [1])
    renew_share(tmp_path / "share", FolderSource(whole.path))
    verify(tmp_path / "share")


def test_only_a_share_of_the_same_index_is_renewed(whole, tmp_path):
    with small_index(tmp_path / "other", n=2000) as other:
        create_share(tmp_path / "share", FolderSource(other.path))
    with pytest.raises(InvalidInputError, match="is not a share of the source's index"):
        renew_share(tmp_path / "share", FolderSource(whole.path))
