"""What counts as a contradiction between plans."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.host.plan_consistency import violations


def plan(feasible: bool = True, nbytes: int = 10, rate: float = 5.0, most: float = 9.0) -> dict[str, Any]:
    return {"feasible": feasible, "bytes": nbytes, "rate_qps": rate, "max_qps": most}


def test_plans_that_agree() -> None:
    plans = {
        (0, 0, 0): plan(feasible=False, nbytes=0, rate=10.0),
        (0, 0, 1): plan(nbytes=10),
        (1, 0, 1): plan(nbytes=4),
    }
    assert violations(plans) == []


@pytest.mark.parametrize(
    ("easier", "what"),
    [
        (plan(feasible=False, rate=10.0), "is infeasible"),
        (plan(nbytes=11), "takes more bytes"),
    ],
)
@pytest.mark.parametrize(("axis", "name"), [(0, "SLO"), (1, "budget"), (2, "rate")])
def test_an_easier_goal_that_costs_more_is_found(axis: int, name: str, easier: dict[str, Any], what: str) -> None:
    place = tuple(int(of == axis) for of in range(3))
    (found,) = violations({(0, 0, 0): plan(), place: easier})  # type: ignore[dict-item]
    assert found["what"] == f"an easier {name} {what}"


@pytest.mark.parametrize("wrong", [plan(rate=10.0), plan(feasible=False), plan(rate=0.0)])
def test_a_verdict_that_is_not_the_rate_against_the_highest_is_found(wrong: dict[str, Any]) -> None:
    (found,) = violations({(0, 0, 0): wrong})
    assert found["what"] == "verdict against rate"
