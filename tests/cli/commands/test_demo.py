"""demo: what it measured is printed, written and reported."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np

from hybridindex.demo import run
from hybridindex.demo.dataset import SourceCount
from tests.clustered import DIM, clustered


def test_the_demo_serves_both_policies_and_writes_what_it_measured(cli, planned_index, tmp_path, monkeypatch):
    mean = np.zeros(DIM, np.float32)
    data = SimpleNamespace(
        count=2500,
        dim=DIM,
        mean=mean,
        notes=("[terms] apply",),
        sources=(SourceCount(name="wikipedia", passages=2500, licence="free"),),
        log_queries=clustered(400, seed=5),
        centered=lambda vectors: vectors,
    )
    shutil.copytree(planned_index, tmp_path / "demo" / "index")
    made_from = {"count": 2500, "dim": DIM, "nlist": 2500 // 40, "mean": 0.0}
    (tmp_path / "demo" / "index.json").write_text(json.dumps(made_from))
    monkeypatch.setattr(run, "load_dataset", lambda cache, progress: data)
    monkeypatch.setattr(run, "write_demo_documents", lambda *_: None)
    monkeypatch.setattr(run, "SECONDS_PER_RATE", 0.2)
    monkeypatch.setattr(run, "LOADS", (0.4,))
    drawn = []
    monkeypatch.setattr(
        "hybridindex.report.write_report",
        lambda folder, **shown: drawn.append(shown) or SimpleNamespace(html=folder / "report.html"),
    )
    answer = cli("demo", "-o", tmp_path / "demo", "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    assert [(row["policy"], row["n_failed"]) for row in answer.json["load"]] == [("host", 0), ("hybrid", 0)]
    assert answer.json["load"][1]["device_bytes"] > answer.json["load"][0]["device_bytes"] == 0
    assert answer.json["notes"][0] == "[terms] apply"
    assert "stand-in" in answer.json["notes"][1]
    assert "host against hybrid" not in answer.out
    assert answer.json.pop("report") == str(tmp_path / "demo" / "report.html")
    assert list(drawn[0]["notes"]) == answer.json["notes"]
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == answer.json
    shown = cli("demo", "-o", tmp_path / "demo", "--device", "cpu")
    assert "host against hybrid, device: cpu (stand-in)" in shown.out
    assert "[terms] apply" in shown.err
    assert "summary.json" in shown.err
