"""What is refused is said in the words of the command that was given."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.cli.console import ExitCode
from tests.clustered import clustered


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
    assert "--candidates is 50, and searches scan rows" in refused.err


def test_help_of_profile_says_where_its_options_are(cli):
    assert "hybridindex profile index -h" in cli("profile", "-h").out
