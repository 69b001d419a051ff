"""``make figures`` on committed results, as far as it takes seconds."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest

from benchmarks.papers.figures.__main__ import build, renewed
from benchmarks.texts.render import RESULTS


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    shutil.copy(RESULTS / "figures.json", file)
    build(argparse.Namespace(json=file, plot=None, only=None, quick=True))
    return json.loads(file.read_text())


@pytest.mark.parametrize("paper", ["vectorliterag", "compressed", "telerag", "piperag"])
def test_committed_claims_are_those_of_the_committed_results(quick, paper):
    committed = json.loads((RESULTS / "figures.json").read_text())
    assert quick["missing"][paper] == committed["missing"][paper]
    for fresh, kept in zip(quick["claims"][paper], committed["claims"][paper], strict=True):
        assert fresh["ours"] == pytest.approx(kept["ours"], rel=1e-6), fresh["what"]
        assert {**fresh, "ours": None} == {**kept, "ours": None}


def test_what_is_simulated_stays_in_the_file():
    row = {"figure": "1", "what": "simulated", "ours": 1.0}
    was, now = {"figure": "2", "what": "measured", "ours": 2.0}, {"figure": "2", "what": "measured", "ours": 3.0}
    assert renewed([row, was], [now]) == [row, now]
    assert renewed([], [now]) == [now]
