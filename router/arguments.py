"""Arguments of the router's public methods: checked, or refused with what would be right. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import F32

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["check_budgets", "check_bytes", "check_count", "check_milliseconds", "own_memory"]


def own_memory(given: Any, prepared: F32) -> F32:
    """``prepared`` outside the caller's memory: the caller may change its buffer before the answer is there."""
    # ``given`` is an array, or it was refused. Asking numpy whether memory is shared would let go of the interpreter,
    # and the engine would take it.
    return prepared if prepared is not given and prepared.flags.owndata else prepared.copy()


def check_count(name: str, value: Any, limit: int) -> int:
    """An integer 1..limit."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInputError(f"{name} is {value!r}; expected an integer 1..{limit}")
    if not 1 <= value <= limit:
        raise InvalidInputError(f"{name} is {value}; expected 1..{limit}")
    return int(value)


def check_milliseconds(name: str, value: Any) -> float:
    """A finite number above 0."""
    numeric = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    number = float(value) if numeric else math.nan
    if not (math.isfinite(number) and number > 0):
        raise InvalidInputError(f"{name} is {value!r}; expected a positive number of milliseconds")
    return number


def check_bytes(name: str, value: Any) -> int:
    """A whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}; expected whole bytes, 0 or more")
    return int(value)


def check_budgets(
    plan: Plan | None, devices: Sequence[str], device_budget_bytes: int | Sequence[int] | None
) -> tuple[int, ...]:
    """The budget of each device: one for all, one each, or the plan's."""
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not all(isinstance(d, str) for d in devices):
        raise InvalidInputError(f"devices is {devices!r}; expected a list of names such as ['cuda:0'] or ['cpu']")
    if not devices:
        return ()
    if plan is not None and plan.n_devices != len(devices):
        raise InvalidInputError(f"the plan is for {plan.n_devices} device(s); {len(devices)} were given: {devices}")
    if device_budget_bytes is None:
        if plan is None:
            raise InvalidInputError("device_budget_bytes is missing: devices without a plan need an explicit budget")
        return plan.request.budgets
    many = device_budget_bytes if isinstance(device_budget_bytes, Sequence | np.ndarray) else None
    if isinstance(many, str) or many is None:
        return (check_bytes("device_budget_bytes", device_budget_bytes),) * len(devices)
    budgets = tuple(check_bytes("device_budget_bytes", b) for b in many)
    if len(budgets) != len(devices):
        raise InvalidInputError(f"device_budget_bytes has {len(budgets)} entries for {len(devices)} devices")
    return budgets
