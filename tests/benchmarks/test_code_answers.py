"""The count of answers that differ: nothing differs, and what is broken is counted."""

from __future__ import annotations

import pytest

from benchmarks.host import code_answers
from hybridindex.tiers.paged.codes.native_code_scanner import NativeCodeScanner


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(code_answers, "_OF_ONE", 100)
    return code_answers.count_differences


def test_no_answer_differs(few):
    found = few(400)
    assert found["answers"] >= 400
    assert 0 < found["of_these_while_swapping"] < found["answers"]
    assert found["placements"] > 0
    assert found["against_numpy"] > 0
    assert (found["differences"], found["differences_from_numpy"]) == (0, 0)


def test_a_device_that_estimates_otherwise_is_counted(few, monkeypatch):
    scan = NativeCodeScanner._scan_codes

    def broken(scanner, queries, probes, products, estimates, positions):
        scan(scanner, queries, probes, products, estimates, positions)
        estimates[:, ::2] += 1

    monkeypatch.setattr(NativeCodeScanner, "_scan_codes", broken)
    found = few(400)
    assert found["differences"] > 0
    assert found["differences_from_numpy"] == 0
