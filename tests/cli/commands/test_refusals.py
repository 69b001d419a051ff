"""What is refused is said in the words of the command that was given."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.cli.console import ExitCode
from hybridindex.index.compress import compress
from hybridindex.router import served
from tests.clustered import clustered, small_index


@pytest.mark.parametrize("plan", ["foo", "none", "9" * 30])
def test_explain_names_its_argument(cli, index_path, plan):
    refused = cli("explain", index_path, plan)
    assert refused.code == ExitCode.BAD_INPUT
    assert f"PLAN is '{plan}'" in refused.err


def test_a_report_goes_into_a_directory(cli, index_path, tmp_path):
    (tmp_path / "file").write_text("kept")
    refused = cli("report", index_path, "-o", tmp_path / "file")
    assert refused.code == ExitCode.BAD_INPUT
    assert "which is a file; expected a directory" in refused.err


@pytest.mark.parametrize("words", [["search"], ["bench", "--rate", 100, "--duration", 0.1]])
def test_candidates_of_an_index_without_codes_are_refused(cli, index_path, tmp_path, words):
    np.save(tmp_path / "q.npy", clustered(5))
    refused = cli(*words, index_path, "-q", tmp_path / "q.npy", "--candidates", 50)
    assert refused.code == ExitCode.BAD_INPUT
    assert "--candidates is 50, but searches scan rows" in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--precision", "rows", "--candidates", 50), "--candidates is 50, but searches scan rows"),
        (("--candidates", 9), "candidates is 9 and k is 10"),
    ],
    ids=["of rows", "too few"],
)
def test_wrong_candidates_are_refused_before_lists_are_read(cli, tmp_path, monkeypatch, words, said):
    """Reading the lists of a large index takes minutes."""
    read = []
    warm_lists = served.warm_lists
    monkeypatch.setattr(served, "warm_lists", lambda *given: read.append(given) or warm_lists(*given))
    np.save(tmp_path / "q.npy", clustered(5))
    with small_index(tmp_path / "idx") as index:
        compress(index)
    asked = ("search", tmp_path / "idx", "-q", tmp_path / "q.npy")
    refused = cli(*asked, *words)
    assert (refused.code, said in refused.err) == (ExitCode.BAD_INPUT, True)
    assert not read
    assert cli(*asked, "--candidates", 50).code == 0
    assert len(read) == 1


def test_help_of_profile_says_where_its_options_are(cli):
    assert "hybridindex profile index -h" in cli("profile", "-h").out
