"""Committed documents say what the committed results say."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from benchmarks import ROOT
from benchmarks.texts.render import DOCUMENTS, RESULTS, passages, replace_passage, with_passages

documents = pytest.mark.parametrize("template", DOCUMENTS)


@documents
def test_a_document_says_what_the_results_say(template):
    text = DOCUMENTS[template].read_text()
    fresh = with_passages(text, passages(template), template)
    assert fresh == text, f"{DOCUMENTS[template].name} quotes other results: python -m benchmarks.texts writes them"


@documents
def test_every_passage_has_its_template(template):
    marked = re.findall(r"<!-- (\w+): begin -->", DOCUMENTS[template].read_text())
    assert sorted(marked) == sorted(passages(template))


def test_other_results_make_another_text(tmp_path):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "early_dispatch.json"
    found = json.loads(file.read_text())
    found["rows"][0]["mean %"] = -21.0
    file.write_text(json.dumps(found))
    before, after = passages("performance.md"), passages("performance.md", tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"early_dispatch"}
    assert "\N{MINUS SIGN}21.0 %" in after["early_dispatch"]


def test_a_passage_is_replaced_between_its_markers_alone():
    text = "before\n<!-- one: begin -->\nold\n<!-- one: end -->\nafter\n"
    assert replace_passage(text, "one", "new\n") == "before\n<!-- one: begin -->\nnew\n<!-- one: end -->\nafter\n"
    with pytest.raises(ValueError, match="two: begin"):
        replace_passage(text, "two", "x")


_UNITS = (
    "\N{MULTIPLICATION SIGN}|[mu]s\\b|\N{MICRO SIGN}s\\b|(?:searches|queries|q|[MG]i?B)/s|%(?! of the (?:bytes|memory))"
)
_MEASURED = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)? ?(?:{_UNITS})")


def measurements(text: str) -> list[str]:
    """Outside of passages and code."""
    text = re.sub(r"<!-- [\w-]+: begin -->.*?<!-- [\w-]+: end -->", "", text, flags=re.S)
    return _MEASURED.findall(re.sub(r"```.*?```", "", text, flags=re.S))


def test_no_number_with_a_unit_stands_in_a_document_by_hand():
    """Times, rates, ratios and percentages are measured: a template fills them. Constants are said in words. Decisions
    say in words what was found when they were made."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = {str(page.relative_to(ROOT)): measurements(page.read_text()) for page in pages}
    assert {name: numbers for name, numbers in found.items() if numbers} == {}


def test_a_number_by_hand_is_noticed():
    text = "2.5 ms, 1,200 searches/s, 3\N{MULTIPLICATION SIGN}, 4 lists\n```\n9 ms\n```\n"
    text += "<!-- a: begin -->7 ms<!-- a: end -->"
    assert measurements(text) == ["2.5 ms", "1,200 searches/s", "3\N{MULTIPLICATION SIGN}"]
