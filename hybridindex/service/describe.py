"""Values of the library as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from hybridindex.partitioner.plan import Plan
from hybridindex.plans.stored import plan_summary

__all__ = ["describe"]


def describe(value: Any) -> Any:
    """Dataclasses become objects without their private fields, plans their summaries, arrays their lengths."""
    if isinstance(value, Plan):
        return plan_summary(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: describe(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [describe(v) for v in value]
    if isinstance(value, np.ndarray):
        return {"length": len(value) if value.ndim else 1}
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)
