"""What SQLite says of a store's file, while the store is open elsewhere, and while nobody has it."""

from __future__ import annotations

import os

import pytest

from hybridindex.store.control import ControlStore
from hybridindex.store.structure import find_damage_of_file

PAGE = 4096


@pytest.fixture
def file(tmp_path):
    with ControlStore.open(tmp_path / "control.sqlite") as store:
        for number in range(200):
            store.record_event("happened", {"number": number, "said": "x" * 50})
    return tmp_path / "control.sqlite"


def test_a_whole_file_has_no_damage_and_gets_no_files_beside_it(file):
    before = sorted(os.listdir(file.parent))
    assert find_damage_of_file(file) == []
    assert sorted(os.listdir(file.parent)) == before


def test_a_page_that_is_gone_is_found(file):
    raw = file.read_bytes()
    for page in range(2, len(raw) // PAGE):
        file.write_bytes(raw[: page * PAGE] + bytes(PAGE) + raw[(page + 1) * PAGE :])
        assert find_damage_of_file(file), page


@pytest.mark.parametrize("content", [b"no database" * 100, bytes(3 * PAGE)])
def test_what_is_no_database_is_damage(file, content):
    file.write_bytes(content)
    (problem,) = find_damage_of_file(file)
    assert "not a SQLite database" in problem


def test_what_is_only_in_the_log_belongs_to_the_store(file):
    with ControlStore.open(file) as store:
        for number in range(200):
            store.record_event("later", {"number": number})
        assert file.with_name("control.sqlite-wal").stat().st_size > 0
        assert find_damage_of_file(file) == []
        assert len(store.list_events(limit=1000)) == 400


def test_a_file_that_is_not_there_says_nothing(tmp_path):
    assert find_damage_of_file(tmp_path / "none.sqlite") == []
