from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.demo import run
from hybridindex.errors import MissingDependencyError


def test_the_log_is_split_in_two_halves_in_its_order(monkeypatch) -> None:
    monkeypatch.setattr(run, "N_CALIBRATION", 20)
    log = np.arange(101, dtype=np.float32)[:, None]
    data = SimpleNamespace(log_queries=log, centered=lambda vectors: vectors + 0.5)
    calibration, test = (part[:, 0] - 0.5 for part in run._queries(data))
    assert len(calibration) == 20
    assert len(test) == 51
    assert not set(calibration) & set(test)
    for part in (calibration, test):
        assert np.all(np.diff(part) > 0)
    assert test[-1] > 90
    assert test[0] < 10


def test_all_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    gone = ("faiss", "torch")
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None if name in gone else there(name))
    output = tmp_path / "demo"
    with pytest.raises(MissingDependencyError, match=r"needs faiss, torch: .*torch.*uvx --from") as caught:
        run.run_demo(output, device="auto", hardware="h100", progress=lambda *_: None, say=lambda _: None)
    assert "faiss-cpu" in str(caught.value)
    assert not output.exists()
