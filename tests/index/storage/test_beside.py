"""Files of a generation with a name beside the generations: links lead into the current one, and follow a rollback."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import BuildError
from hybridindex.index.storage.beside import (
    follow,
    generation_file,
    lead_to,
    lineage_of,
    remove_unshared,
    share,
    shared_file,
)
from hybridindex.processes import lock_file


@pytest.fixture
def index(tmp_path):
    """Two generations with a file each."""
    for number in (1, 2):
        folder = tmp_path / f"gen-{number:06d}"
        folder.mkdir()
        (folder / "x").write_text(str(number))
    return tmp_path


def test_a_link_leads_into_a_generation_and_follows(index):
    lead_to(index, 2, "x")
    assert (index / "x").read_text() == "2"
    follow(index, 1)
    assert (index / "x").read_text() == "1"
    assert {entry.name for entry in index.iterdir()} == {"gen-000001", "gen-000002", "x"}


def test_only_links_into_a_generation_that_has_the_file_follow(index):
    (index / "own").write_text("a user's")
    (index / "other").symlink_to("gen-000002/x")
    lead_to(index, 2, "x")
    (index / "gen-000001" / "x").unlink()
    follow(index, 1)
    assert [(index / name).read_text() for name in ("own", "other", "x")] == ["a user's", "2", "2"]


def test_what_lies_beside_belongs_to_a_generation_without_a_file_of_its_own(index):
    assert generation_file(index, 1, "x") == index / "gen-000001" / "x"
    (index / "x").write_text("an older version's")
    (index / "gen-000001" / "x").unlink()
    assert generation_file(index, 1, "x") == index / "x"
    assert generation_file(index, 2, "x") == index / "gen-000002" / "x"
    (index / "x").unlink()
    lead_to(index, 2, "x")
    assert generation_file(index, 1, "x") == index / "gen-000001" / "x", "the link leads to another's"


@pytest.fixture
def built(tmp_path):
    """An index with a file of its own, and a link to it."""
    hx.build(np.eye(4, dtype=np.float32), tmp_path / "idx").close()
    (tmp_path / "idx" / "gen-000001" / "documents.sqlite").write_text("old")
    lead_to(tmp_path / "idx", 1, "documents.sqlite")
    return tmp_path / "idx"


def test_a_lineage_shares_a_copy(built):
    with open(built / "documents.sqlite") as reader:
        shared = share(built, 1, "documents.sqlite")
        assert reader.read() == "old"
    assert share(built, 1, "documents.sqlite") == shared
    for link in (built / "documents.sqlite", built / "gen-000001" / "documents.sqlite"):
        assert link.is_symlink()
        assert link.resolve() == shared
    shared.write_text("new")
    with hx.open(built) as index:
        lineage = index.fingerprint
        index.delete([1])
        assert index.compact()
        assert shared == shared_file(built, lineage, "documents.sqlite")
        assert {lineage_of(built, lineage), lineage_of(built, index.fingerprint)} == {lineage}
        assert lineage_of(built, "unknown") == "unknown"
    assert (built / "gen-000002" / "documents.sqlite").resolve() == shared
    hx.remove_replaced(built)
    assert (built / "documents.sqlite").read_text() == "new"


def test_what_died_before_it_was_linked_is_copied_again(built):
    shared = share(built, 1, "documents.sqlite")
    (built / "gen-000001" / "documents.sqlite").unlink()
    (built / "gen-000001" / "documents.sqlite").write_text("whole")
    shared.write_text("torn")
    assert share(built, 1, "documents.sqlite").read_text() == "whole"


def test_a_rollback_leads_from_one_lineage_to_the_other(built):
    first = share(built, 1, "documents.sqlite")
    hx.build(2 * np.eye(4, dtype=np.float32), built, replace=True).close()
    (built / "gen-000002" / "documents.sqlite").write_text("second")
    lead_to(built, 2, "documents.sqlite")
    hx.rollback(built)
    assert (built / "documents.sqlite").resolve() == first
    hx.rollback(built)
    assert (built / "documents.sqlite").read_text() == "second"
    hx.remove_replaced(built)
    assert not first.exists()


def test_a_build_that_runs_is_waited_for(built, monkeypatch):
    monkeypatch.setattr("hybridindex.index.storage.beside._WAIT_S", 0.05)
    with lock_file(built / ".lock", timeout_s=1), pytest.raises(BuildError, match="another process is writing"):
        share(built, 1, "documents.sqlite")
    assert (built / "gen-000001" / "documents.sqlite").read_text() == "old"


def test_files_of_unknown_lineages_stay_while_a_manifest_cannot_be_read(built):
    share(built, 1, "documents.sqlite")
    stranger = built / "documents-0123456789abcdef.sqlite"
    stranger.write_text("whose?")
    manifest = built / "gen-000001" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    remove_unshared(built)
    assert stranger.exists()
    manifest.write_bytes(whole)
    remove_unshared(built)
    assert not stranger.exists()
    assert (built / "documents.sqlite").read_text() == "old"
