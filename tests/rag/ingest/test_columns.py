"""Metadata that become attributes: named with their kinds, or found; what fits no kind is said with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.index.attributes.columns import describe
from hybridindex.rag.ingest import Reading, Spool, find_sources
from hybridindex.rag.ingest.columns import attribute_table, find_columns, parse_columns


@pytest.fixture
def spool_of(tmp_path):
    """The spool of records of one file each, and of others."""

    def of(*files, **others: str):
        for number, records in enumerate(files):
            (tmp_path / f"{number}.jsonl").write_text("\n".join(json.dumps({"text": "x", **each}) for each in records))
        for name, text in others.items():
            (tmp_path / f"{name}.md").write_text(text)
        return Spool.write(tmp_path / "spool", find_sources([tmp_path]), Reading())[0]

    return of


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("year=int", {"year": "int"}),
        ("year=int, lang = string ,tags=list", {"year": "int", "lang": "string", "tags": "list of strings"}),
        ("a=b=float,when=date", {"a=b": "float", "when": "timestamp"}),
        ("x=list of strings", {"x": "list of strings"}),
        ("all", None),
        (" all ", None),
    ],
)
def test_what_is_named(said, found):
    assert parse_columns(said) == found


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "attributes hold ''; expected NAME=KIND, or 'all' alone"),
        ("year", "attributes hold 'year'"),
        ("=int", "attributes hold '=int'"),
        ("year=int,", "attributes hold ''"),
        ("year=int,all", "attributes hold 'all'"),
        ("year=integer", "attribute 'year' is 'integer'; expected one of int, float, string, bool, timestamp, list of"),
        ("year=", "attribute 'year' is ''"),
        ("year=int,year=float", "attribute 'year' is given twice"),
    ],
)
def test_what_is_named_wrongly(said, words):
    with pytest.raises(InvalidInputError) as refused:
        parse_columns(said)
    assert words in str(refused.value)


def test_what_is_found(spool_of):
    spool = spool_of(
        [
            {
                "year": 1,
                "score": 1,
                "lang": "en",
                "tags": ["a"],
                "new": True,
                "more": {"x": 1},
                "mixed": 1,
                "none": None,
            },
            {"year": None, "score": 2.5, "tags": [], "mixed": "x", "large": 1 << 63, "list": [1]},
            {"year": 1 << 62, "flag": 1},
        ],
        [{"flag": True, "lang": "de"}],
        other="# A text\n\nwithout metadata",
    )
    found, refused = find_columns(spool)
    assert found == {"year": "int", "score": "float", "lang": "string", "tags": "list of strings", "new": "bool"}
    assert {name: why.partition(",")[0] for name, why in refused.items()} == {
        "more": "holds dict", "mixed": "is int and string", "large": "holds int", "list": "holds list",
        "flag": "is int and bool",
    }  # fmt: skip
    assert refused["flag"].endswith("1.jsonl")
    table, ids = attribute_table(spool, found)
    assert describe(table) == found
    assert table["year"].to_pylist() == [1, None, 1 << 62, None, None]
    assert table["tags"].to_pylist() == [["a"], [], None, None, None]
    assert table["score"].to_pylist() == [1.0, 2.5, None, None, None]
    assert ids.tolist() == [0, 1, 2, 3, 4]


def test_values_of_other_kinds_are_named_with_their_file(spool_of):
    spool = spool_of([{"year": 1}], [{"id": 7, "year": 2}, {"id": 9, "year": "x", "when": "2024-05-01"}])
    with pytest.raises(InvalidInputError, match=r"1.jsonl: metadata 'year' is 'x'; the index .* holds int"):
        attribute_table(spool, {"year": "int"})
    with pytest.raises(InvalidInputError, match=r"1.jsonl: metadata 'when' is '2024-05-01'"):
        attribute_table(spool, {"when": "bool"})
    table, ids = attribute_table(spool, {"when": "timestamp"})
    assert ids.tolist() == [10, 7, 9]
    assert [value and value.year for value in table["when"].to_pylist()] == [None, None, 2024]


@pytest.mark.parametrize("value", [10**400, -(10**400), "x", True])
def test_numbers_beyond_all_floats_are_none(spool_of, value):
    with pytest.raises(InvalidInputError, match="metadata 'score' is"):
        attribute_table(spool_of([{"score": value}]), {"score": "float"})


def test_columns_that_no_index_can_have(spool_of):
    spool = spool_of([{"x" * 200: 1}])
    with pytest.raises(InvalidInputError, match="an attribute is named"):
        attribute_table(spool, find_columns(spool)[0])
    many = {f"k{n}": n for n in range(300)}
    spool = spool_of([many])
    with pytest.raises(InvalidInputError, match=r"attributes have 300 columns; expected 1..256"):
        attribute_table(spool, find_columns(spool)[0])


@pytest.mark.parametrize("record", [{"text": "half \ud800"}, {"text": "x", "title": "\udfff"}])
def test_halves_of_surrogates_are_no_text(tmp_path: Path, record):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "whole"}) + "\n" + json.dumps(record))
    with pytest.raises(InvalidInputError, match=r"x.jsonl' hold half of a surrogate pair in passage 1"):
        Spool.write(tmp_path / "spool", find_sources([tmp_path / "x.jsonl"]), Reading())
