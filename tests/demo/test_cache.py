from __future__ import annotations

from pathlib import Path

import pytest

from hybridindex.demo import cache


def test_a_sealed_file_is_intact_and_tells_its_facts(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("content")
    cache.seal(path, {"version": 1}, count=3)
    sealed = cache.check(path, {"version": 1})
    assert sealed is not None
    assert sealed["count"] == 3


@pytest.mark.parametrize("content", ["contenT", "conten", ""])
def test_a_changed_or_cut_file_counts_as_absent(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.txt"
    path.write_text("content")
    cache.seal(path, {})
    path.write_text(content)
    assert cache.check(path) is None


@pytest.mark.parametrize("damage", ["", "[]", "{", "{}", "\x00"])
def test_a_damaged_seal_counts_as_absent(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file.txt"
    path.write_text("content")
    cache.seal(path, {})
    cache.seal_path(path).write_text(damage)
    assert cache.check(path) is None


def test_another_recipe_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("content")
    cache.seal(path, {"version": 1})
    assert cache.check(path, {"version": 2}) is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write_half() -> None:
        with cache.atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_half()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]
    assert path.read_text() == "old"
