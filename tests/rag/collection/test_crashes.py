"""A process that dies at any step of a change leaves no row without its text, and the next one ends what it began."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridindex.rag.collection import Collection
from tests.rag.collection.world import COLUMNS, check, items, put, state

ROOT = Path(__file__).parents[3]


@pytest.fixture
def died(tmp_path):
    """The copies of a folder in which a change died, one step later in each; the last one is whole."""

    def die(folder, change, step=1):
        command = [sys.executable, "-m", "tests.rag.collection.die", folder, change, str(step)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        return sorted(folder.parent.glob(f"{folder.name}-*"))

    return die


@pytest.fixture
def folder(tmp_path):
    with Collection(tmp_path / "f" / "idx", columns=COLUMNS) as made:
        put(made, range(5))
    return tmp_path / "f"


FIRST = {item.key: item.text for item in items(range(5))}
CHANGES = {
    "put": {**FIRST, **{item.key: item.text for item in items(range(2, 7), "second")}},
    "delete": {key: text for key, text in FIRST.items() if key not in ("k0", "k1")},
    "compact": {key: text for key, text in FIRST.items() if key != "k4"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_there_or_not(died, folder, change):
    if change == "compact":
        with Collection(folder / "idx") as collection:
            collection.delete(keys=["k4"])
    before, after = state(folder / "idx"), CHANGES[change]
    copies = died(folder, change, 3 if change == "compact" else 1)
    assert len(copies) > 5
    seen = []
    for copy in copies:
        check(copy / "idx", recovered=False)
        with Collection(copy / "idx", write=True) as collection:
            seen.append({str(item.key): item.text for item in collection.items()})
        check(copy / "idx")
        assert seen[-1] in (before, after), copy
    assert (seen[0], seen[-1]) == (before, after)
    # What was written down was made, whenever it died afterwards.
    assert seen == sorted(seen, key=lambda found: found == after)


def test_changes_go_on_without_a_recovery_of_their_own(died, folder):
    """The next change ends what was begun before it begins itself."""
    for copy in died(folder, "put", 3):
        with Collection(copy / "idx") as collection:
            put(collection, [4], "third")
            collection.delete(keys=["k3"])
        check(copy / "idx")
        found = state(copy / "idx")
        assert found["k4"] == "third 4"
        assert "k3" not in found


def test_an_index_with_its_documents_appears_at_once(died, tmp_path):
    (tmp_path / "f").mkdir()
    copies = died(tmp_path / "f", "make", 5)
    assert len(copies) > 5
    assert (copies[-1] / "idx").exists()
    for copy in copies:
        there = (copy / "idx").exists()
        with Collection(copy / "idx", columns=COLUMNS) as collection:
            assert collection.is_empty_path is not there
            if not there:
                put(collection, range(4))
        check(copy / "idx")
        assert len(state(copy / "idx")) == 4
