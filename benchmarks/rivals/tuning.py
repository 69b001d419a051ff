"""The smallest setting of a system that reaches a recall, and which of several such settings is the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.rivals.system import Answer, System
from hybridindex.types import F32, F64, I64

__all__ = ["choose_mode", "found", "rate", "reaching", "smallest"]


def found(ids: I64, truth: I64) -> F64:
    """Of each query, the share of the true neighbours that were found."""
    return np.array([len(np.intersect1d(a, b)) / truth.shape[1] for a, b in zip(ids, truth, strict=True)])


def rate(answer: Answer, queries: F32, batch: int, seconds: float) -> float:
    """Queries per second in batches of this size, for about ``seconds``; at least two batches."""
    done, start = 0, time.perf_counter()
    while True:
        at = done % (len(queries) - batch + 1)
        answer(queries[at : at + batch])
        done += batch
        taken = time.perf_counter() - start
        if taken >= seconds and done >= 2 * batch:
            return done / taken


def choose_mode(system: System, answer: Answer, queries: F32, batch: int, seconds: float) -> int | None:
    """The fastest parallel mode, best of three tries each."""
    if not system.modes:
        return None
    speed = {}
    for mode in system.modes:
        system.set_mode(mode)
        speed[mode] = max(rate(answer, queries, batch, seconds) for _ in range(3))
    return max(speed, key=speed.__getitem__)


def smallest(recall_at: Callable[[int], float], level: float, low: int, high: int) -> int | None:
    """The least value in low..high with this recall, to 3 %; None where ``high`` has not.

    Values double until one reaches the recall: large ones are slow, and seldom needed.
    """
    below, value = low - 1, low
    while recall_at(value) < level:
        if value >= high:
            return None
        below, value = value, min(2 * value, high)
    while value - below > max(1, value // 32):
        middle = (value + below) // 2
        if recall_at(middle) < level:
            below = middle
        else:
            value = middle
    return value


def reaching(system: System, recall_at: Callable[[int, int], float], level: float) -> list[tuple[int, int]]:
    """Settings with this recall: for each value of the second dial the smallest first one.

    Left out: what needs more of the second dial for no less of the first, and what needs more than three times the
    least of the first.
    """
    settings: list[tuple[int, int]] = []
    low, high = system.grid[0], system.grid[-1]
    for second in reversed(system.finer):
        first = smallest(lambda value, second=second: recall_at(value, second), level, low, high)  # type: ignore[misc]
        if first is None:
            break  # less of the second dial finds even less
        if not settings:
            high = min(high, 3 * first)
        elif first <= settings[-1][0]:
            settings.pop()
        settings.append((first, second))
        low = first
    return settings[::-1]
