from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hybridindex.demo import run


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
