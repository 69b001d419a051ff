"""Files of a generation with a name beside the generations: links lead into the current one, and follow a rollback."""

from __future__ import annotations

import pytest

from hybridindex.index.storage.beside import follow, generation_file, lead_to


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
