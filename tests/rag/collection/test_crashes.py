"""A process that dies at any step of a change leaves no row without its text, and the next one ends what it began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridindex.rag.collection import Collection
from hybridindex.rag.ingest import put_texts, remove_texts
from tests.rag.collection.world import (
    COLUMNS,
    Embedder,
    check,
    chunks_of,
    given_texts,
    ingest,
    items,
    put,
    state,
)

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


# Sources


def write_texts(folder: Path, version: int) -> None:
    """Files of all kinds of changes: one that comes, one that goes, one that stays, parts of a text and of records."""
    folder.mkdir(exist_ok=True)
    (folder / "same.md").write_text("# Same\n\nfirst words here\n\n# Two\n\nsecond words here\n")
    parts = [f"# part {n}\n\nold words" if n % 3 or not version else f"# part {n}\n\nnew words" for n in range(9)]
    (folder / "parts.md").write_text("\n\n".join(parts[version:]))
    records = [{"text": f"record {n}", "year": 1990 + n + (version if n > 2 else 0)} for n in range(5 + version)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / f"of version {version}.md").write_text(f"a text of version {version} alone")
    (folder / f"of version {1 - version}.md").unlink(missing_ok=True)


def test_an_ingest_that_died_anywhere_is_ended_by_the_next(died, tmp_path):
    """Whichever step it died at, the same ingest again leaves what it would have left at once."""
    (tmp_path / "f").mkdir()
    write_texts(tmp_path / "texts", 0)
    with Collection(tmp_path / "f" / "idx", columns=COLUMNS) as made:
        made.create(12)
        ingest(made, tmp_path / "texts")
    before = texts_in(tmp_path / "f" / "idx")
    write_texts(tmp_path / "texts", 1)
    copies = died(tmp_path / "f", "ingest", 4)
    assert len(copies) > 10
    after = chunks_of(copies[-1] / "idx")
    assert set(after) == {str(file) for file in (tmp_path / "texts").iterdir()}
    whole, halfway = [before, texts_in(copies[-1] / "idx")], 0
    assert before != whole[1]
    for copy in copies:
        # No row without its text, at no time.
        check(copy / "idx", recovered=False)
        with Collection(copy / "idx") as collection:
            collection.recover()
        halfway += texts_in(copy / "idx") not in whole
        with Collection(copy / "idx") as collection:
            ingest(collection, tmp_path / "texts")
        check(copy / "idx")
        assert chunks_of(copy / "idx") == after, copy
        with Collection(copy / "idx") as collection:
            assert dict(+ingest(collection, tmp_path / "texts").sources) == {"unchanged": 4}
    assert halfway, "it never died between two batches"


TEXTS = {
    "texts": lambda collection: put_texts(collection, given_texts("second"), Embedder()),
    "removal": lambda collection: remove_texts(collection, ["text 0", "text 1"]),
}


@pytest.mark.parametrize("change", TEXTS)
def test_texts_come_and_go_together(died, folder, change):
    """After a crash all of a call is there, or nothing."""
    with Collection(folder / "idx") as collection:
        put_texts(collection, given_texts("first"), Embedder())
    before = chunks_of(folder / "idx")
    copies = died(folder, change)
    after = chunks_of(copies[-1] / "idx")
    assert before != after
    seen = []
    for copy in copies:
        check(copy / "idx", recovered=False)
        with Collection(copy / "idx") as collection:
            collection.recover()
        check(copy / "idx")
        seen.append(chunks_of(copy / "idx"))
        assert seen[-1] in (before, after), copy
        # Sent again, whether it was answered or not.
        with Collection(copy / "idx") as collection:
            TEXTS[change](collection)
        check(copy / "idx")
        assert chunks_of(copy / "idx") == after
    assert seen == sorted(seen, key=lambda found: found == after)
    assert seen[0] == before


def texts_in(path: Path) -> list[tuple[str, str]]:
    """Source and text of each chunk."""
    with Collection(path) as collection:
        return sorted((item.ref, item.text) for item in collection.items())
