"""Rows of a load test in a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridindex.errors import InvalidInputError

__all__ = ["LoadRow", "load_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """What one policy did at one offered rate. Latencies count from the due time, in milliseconds."""

    policy: str
    #: Offered requests/s.
    rate: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    #: Fraction of requests answered within the SLO; ``None`` without one.
    attainment: float | None = None
    #: Mean hit rate by bytes.
    hit_rate: float | None = None
    device_bytes: int | None = None


def load_rows(rows: Iterable[LoadRow | Mapping[str, Any]] | None) -> list[LoadRow]:
    """Rows as :class:`LoadRow`; other keys of a mapping are ignored.

    Raises:
        InvalidInputError: a row lacks a value, or one is not a number.
    """
    return [row if isinstance(row, LoadRow) else _row_of(row, place) for place, row in enumerate(rows or ())]


def _row_of(row: Mapping[str, Any], place: int) -> LoadRow:
    if not isinstance(row, Mapping):
        raise InvalidInputError(f"load[{place}] is {row!r}; expected a mapping with policy, rate and latencies")

    def number(name: str) -> float:
        value = row.get(name)
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise InvalidInputError(f"load[{place}].{name} is {value!r}; expected a number") from None

    def optional(name: str) -> float | None:
        return None if row.get(name) is None else number(name)

    policy = row.get("policy")
    if policy is None:
        raise InvalidInputError(f"load[{place}].policy is missing; expected the name of what was served")
    nbytes = optional("device_bytes")
    if nbytes is not None and not math.isfinite(nbytes):
        raise InvalidInputError(f"load[{place}].device_bytes is {nbytes}; expected a finite number")
    return LoadRow(
        policy=str(policy),
        rate=number("rate"),
        p50_ms=number("p50_ms"),
        p95_ms=number("p95_ms"),
        p99_ms=number("p99_ms"),
        attainment=optional("attainment"),
        hit_rate=optional("hit_rate"),
        device_bytes=None if nbytes is None else int(nbytes),
    )
