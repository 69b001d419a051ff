"""Names and folders, from the command line and from a settings file."""

from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.service.config import ServiceConfig
from hybridindex.service.settings import Settings, read_settings
from hybridindex.service.several.config import indexes_of, name_of


def settings(tmp_path, text):
    file = tmp_path / "s.toml"
    file.write_text(text)
    return read_settings(file)


def test_a_plain_path_has_the_name_of_its_folder_and_others_their_own(tmp_path):
    found = indexes_of([str(tmp_path / "docs"), f"src={tmp_path}/code"], Settings())
    assert {name: each.path for name, each in found.items()} == {"docs": tmp_path / "docs", "src": tmp_path / "code"}


def test_a_folder_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert list(indexes_of(["a=b"], Settings())) == ["a-b"]


def test_a_folder_whose_name_no_url_holds_gets_one_that_it_does(tmp_path):
    assert name_of(tmp_path / "my index {1}") == "my-index--1-"
    assert name_of(tmp_path / "...") == "index"


def test_tables_of_the_file_say_more_and_the_command_line_overrides_their_paths(tmp_path):
    said = settings(
        tmp_path,
        'port = 0\n[indexes.docs]\npath = "idx"\nslo_ms = 20\nrate_qps = 100\n'
        '[indexes.code]\npath = "/code"\nplan = "7"\n',
    )
    found = indexes_of([f"code={tmp_path}/new", f"more={tmp_path}/more"], said)
    assert list(found) == ["code", "more", "docs"]
    assert found["docs"].path == tmp_path / "idx"
    assert (found["docs"].slo_ms, found["docs"].rate_qps) == (20, 100)
    assert (found["code"].path, found["code"].plan) == (tmp_path / "new", "7")
    within = found["code"].within(ServiceConfig(slo_ms=5))
    assert (within.plan, within.slo_ms) == ("7", 5)


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        ([], "", r"INDEX is missing; expected an index directory, or tables \[indexes.NAME\]"),
        (["a=x", "a=y"], "", "index name 'a' is given twice"),
        (["a=x", "b=x"], "", "indexes a and b are both x; expected a folder each"),
        (["-a=x"], "", "index name is '-a'"),
        ([], "[indexes.a]\nslo_ms = 3\n", r"\[indexes.a\] path is missing"),
        ([], "[indexes.a]\npath = 'x'\nslo = 3\n", r"\[indexes.a\] slo is not a setting; expected slo_ms"),
        ([], "[indexes.a]\npath = 'x'\nslo_ms = -3\n", r"\[indexes.a\] slo_ms is -3"),
        ([], "[indexes.a]\npath = 'x'\nplan = 'old'\n", r"\[indexes.a\] plan is 'old'"),
        ([], "[indexes]\na = 'x'\n", r"indexes.a is 'x'; expected the table \[indexes.a\]"),
        ([], "indexes = 3\n", r"indexes is 3; expected the table \[indexes\]"),
        ([], "[indexes.'a b']\npath = 'x'\n", "index name is 'a b'"),
    ],
)
def test_what_is_wrong_is_said_by_name(words, text, said, tmp_path):
    with pytest.raises(InvalidInputError, match=said):
        indexes_of(words, settings(tmp_path, text))
