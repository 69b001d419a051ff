"""Committed documents say what the committed results say."""

from __future__ import annotations

import json
import re
import shutil

import pytest

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
