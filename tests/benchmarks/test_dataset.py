"""The datasets of the benchmarks on small files: what is fetched is replaced, everything behind it is real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.dataset import FULL_SOURCES, load_benchmark_dataset
from hybridindex.demo.corpus import DEMO_SOURCES
from hybridindex.demo.load import load_dataset
from hybridindex.errors import InvalidInputError
from tests.demo.outside import World
from tests.demo.small_files import toy_embedder


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    outside = tmp_path / "outside"
    outside.mkdir()
    return World(outside, monkeypatch)


def test_the_full_set_starts_with_the_demo(world: World, tmp_path: Path) -> None:
    assert len({source.name for source in FULL_SOURCES}) == len(FULL_SOURCES) > len(DEMO_SOURCES)
    demo = load_dataset(tmp_path / "cache")
    full = load_benchmark_dataset("full", tmp_path / "cache")
    assert full.count > demo.count
    np.testing.assert_array_equal(full.vectors()[: demo.count], demo.vectors())
    np.testing.assert_array_equal(full.vectors(), toy_embedder().embed(list(full.passages())))
    assert any("openjdk-17-doc" in note for note in full.notes)


def test_a_dataset_has_queries_and_pairs(world: World, tmp_path: Path) -> None:
    data = load_benchmark_dataset("demo", tmp_path / "cache")
    assert data.queries["trec-terabyte05"].texts() == data.log.texts()
    assert data.queries["nq"].texts() == ["who sings it", "who won"]
    assert data.nq_queries.shape == (2, data.dim)
    drafts, finals, _ = zip(*data.pairs.pairs(), strict=True)
    assert len(drafts) == data.pairs.count
    np.testing.assert_array_equal(data.pairs.drafts(), toy_embedder().embed(drafts))
    np.testing.assert_array_equal(data.pairs.finals(), toy_embedder().embed(finals))
    assert data.pairs.sessions().tolist() == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("victim", ["pairs.json", "pairs.drafts.npy", "nq.txt"])
def test_damaged_queries_are_mended_and_intact_ones_are_not_fetched(world: World, tmp_path: Path, victim: str) -> None:
    good = load_benchmark_dataset("demo", tmp_path / "cache")
    expected = good.pairs.pairs(), good.pairs.drafts().copy(), good.queries["nq"].texts()
    before = len(world.fetched)
    load_benchmark_dataset("demo", tmp_path / "cache")
    assert len(world.fetched) == before
    (tmp_path / "cache" / "queries" / victim).write_bytes(b"?")
    mended = load_benchmark_dataset("demo", tmp_path / "cache")
    assert len(world.fetched) > before
    assert (mended.pairs.pairs(), mended.queries["nq"].texts()) == (expected[0], expected[2])
    np.testing.assert_array_equal(mended.pairs.drafts(), expected[1])


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'demo' or 'full'"):
        load_benchmark_dataset("tiny", tmp_path)  # type: ignore[arg-type]
