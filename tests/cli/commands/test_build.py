"""Ctrl-C during build says whether the index stands."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.cli.console import ExitCode
from tests.clustered import clustered


def interrupted(*_args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_after_the_commit_says_that_the_index_stands(cli, tmp_path, monkeypatch, as_json):
    np.save(tmp_path / "v.npy", clustered(200, seed=1))
    words = ("build", tmp_path / "v.npy", tmp_path / "idx", "--replace", *(["--json"] if as_json else []))
    before_the_commit = "hybridindex.index.storage.generation.point"
    after_it = "hybridindex.cli.commands.index.describe"
    for generation, place, said in (
        (None, before_the_commit, "no partial result was left"),
        (1, after_it, "generation 1 was committed"),
        (1, before_the_commit, "no partial result was left"),
        (2, after_it, "generation 2 was committed"),
    ):
        with monkeypatch.context() as during:
            during.setattr(place, interrupted)
            stopped = cli(*words)
        assert stopped.code == ExitCode.INTERRUPTED
        assert said in (stopped.json["error"]["message"] if as_json else stopped.err)
        if generation is not None:
            assert cli("verify", tmp_path / "idx", "--json").json["generation"] == generation
