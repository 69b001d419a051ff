from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.report import LoadRow
from hybridindex.report.rows import load_rows


def test_mappings_become_rows_and_other_keys_are_ignored() -> None:
    row = {"policy": "host", "rate": 10, "p50_ms": 1, "p95_ms": 2, "p99_ms": 3, "attainment": None, "more": object()}
    expected = LoadRow(policy="host", rate=10.0, p50_ms=1.0, p95_ms=2.0, p99_ms=3.0)
    assert load_rows([row, expected]) == [expected, expected]
    assert load_rows(None) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p95_ms": None}, r"load\[0\].p95_ms is None; expected a number"),
        ({"rate": "fast"}, r"load\[0\].rate is 'fast'"),
        ({"policy": None}, r"load\[0\].policy is missing"),
        ({"hit_rate": "high"}, r"load\[0\].hit_rate is 'high'"),
        ({"rate": 10**400}, r"load\[0\].rate is 1000"),
        ({"device_bytes": float("nan")}, r"load\[0\].device_bytes is nan; expected a finite number"),
        ({"device_bytes": float("inf")}, r"load\[0\].device_bytes is inf"),
    ],
)
def test_wrong_value_is_named(change: dict[str, object], message: str) -> None:
    row = {"policy": "host", "rate": 10, "p50_ms": 1, "p95_ms": 2, "p99_ms": 3}
    with pytest.raises(InvalidInputError, match=message):
        load_rows([{**row, **change}])


@pytest.mark.parametrize("row", ["host", None, ["host", 10, 1, 2, 3]])
def test_what_is_no_row_is_named(row: object) -> None:
    good = {"policy": "host", "rate": 10, "p50_ms": 1, "p95_ms": 2, "p99_ms": 3}
    with pytest.raises(InvalidInputError, match=r"load\[1\] is .*; expected a mapping"):
        load_rows([good, row])  # type: ignore[list-item]
