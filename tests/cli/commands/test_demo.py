"""demo: what it measured is printed, written and reported."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np

from hybridindex.demo import projection, run, same_answers
from hybridindex.demo.dataset import SourceCount
from hybridindex.rag.documents import DOCUMENTS_FILE, Document, write_documents
from tests.clustered import DIM, clustered


def documents(_data, index, *_rest):
    """Every second passage is continued by the next."""
    each = (
        Document(id=n, text=f"passage {n}", source="test", lead=0, successor=None if n % 2 else n + 1)
        for n in range(2500)
    )
    write_documents(
        index.path / DOCUMENTS_FILE, each, index_fingerprint=index.fingerprint, embedder="none", dim=index.dim
    )


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
        iter_centered=lambda: iter([clustered(2500, seed=1)]),
    )
    shutil.copytree(planned_index, tmp_path / "demo" / "index")
    made_from = {"count": 2500, "dim": DIM, "nlist": 2500 // 40, "mean": 0.0}
    (tmp_path / "demo" / "index.json").write_text(json.dumps(made_from))
    monkeypatch.setattr(run, "load_dataset", lambda cache, progress: data)
    monkeypatch.setattr(run, "write_demo_documents", documents)
    monkeypatch.setattr(same_answers, "SECONDS", 0.5)
    monkeypatch.setattr(projection, "_REQUESTS", 50)
    monkeypatch.setattr(projection, "RATES", (0.3, 0.9))
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
    same, ahead, projected = (answer.json[name] for name in ("same_answers", "lookahead", "projection"))
    assert same["differences"] == 0 < same["queries"]
    assert same["plans"] > 0
    assert ahead["pairs"] > 20
    assert ahead["with_lookahead"] > ahead["without"]
    assert set(projected["attainment"]) == set(projection.POLICIES)
    assert "projected, not measured" in projected["assumptions"][0]
    assert [each["bytes_share"] for each in answer.json["hot"]] == [0.05, 0.1, 0.2]
    assert len(drawn[0]["acts"]) == 3
    assert answer.json.pop("report") == str(tmp_path / "demo" / "report.html")
    assert list(drawn[0]["notes"]) == answer.json["notes"]
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == answer.json
    monkeypatch.setattr(run, "project", None)  # it is kept
    shown = cli("demo", "-o", tmp_path / "demo", "--device", "cpu")
    assert "host against hybrid, device: cpu (stand-in)" in shown.out
    assert "[terms] apply" in shown.err
    assert "summary.json" in shown.err


def test_hardware_that_is_not_known_is_refused_before_anything_is_fetched(cli, tmp_path):
    answer = cli("demo", "-o", tmp_path / "demo", "--hardware", "h1000")
    assert answer.code == 3
    assert "h1000" in answer.err
    assert "h100" in answer.err
    assert not (tmp_path / "demo").exists()
