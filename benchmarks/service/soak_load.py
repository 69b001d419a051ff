"""What the soak asks for and when: arrivals and queries of a real trace or a synthetic one, and the mix of requests.

Pure: seeded, no clock, no network. Sending and judging is in ``soak.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from hybridindex.types import F64, I64

__all__ = ["KINDS", "MOST_BATCH", "MOST_K", "Kind", "Load", "Trace", "make_load", "read_trace", "synthetic_trace"]

MOST_BATCH, MOST_K = 16, 16
_PASSAGES = 8302
_BATCHES, _BATCH_SHARES = (1, 2, 4, 8, 16), (0.5, 0.15, 0.15, 0.12, 0.08)


class Kind(StrEnum):
    """What one arrival is."""

    BINARY = "binary search"
    NPY = "npy search"
    JSON = "JSON search"
    DEADLINE = "search with a deadline"
    SESSION = "step of a session"
    BAD = "bad request"
    STATE = "status, plan or metrics"


#: Kind -> its share of the arrivals.
KINDS = {
    Kind.BINARY: 0.5,
    Kind.NPY: 0.05,
    Kind.JSON: 0.15,
    Kind.DEADLINE: 0.1,
    Kind.SESSION: 0.15,
    Kind.BAD: 0.045,
    Kind.STATE: 0.005,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrivals of one lap, and the passages that they retrieve, one after the other."""

    name: str
    #: (n,) seconds, ascending, and how long the lap is.
    arrivals: F64
    seconds: float
    #: (m,) passage ids 0.._PASSAGES - 1 and (n,) where each arrival's begin.
    passages: I64
    first: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One row per request."""

    #: (n,) seconds, ascending.
    due: F64
    kind: list[Kind]
    #: (n, MOST_BATCH) rows of the pool, of which the first ``batch`` are asked for.
    rows: I64
    batch: I64
    k: I64
    #: 0: the daemon's own.
    nprobe: I64
    deadline_ms: F64


def read_trace(file: Path) -> Trace:
    """A trace in the form of RAGPulse: ``t`` in whole seconds and ``passages``, one JSON object a line."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    times = np.array([line["t"] for line in lines], dtype=np.float64)
    # Whole seconds are all that is known.
    arrivals = np.sort(times + np.random.default_rng(0).random(len(times)))
    counts = [len(line["passages"]) for line in lines]
    return Trace(
        name=f"{file.parent.name}/{file.name}",
        arrivals=arrivals,
        seconds=float(np.ceil(arrivals[-1] + 1)),
        passages=np.array([p for line in lines for p in line["passages"]], dtype=np.int64),
        first=np.cumsum([0, *counts[:-1]]),
    )


def synthetic_trace(n: int = 4000, seed: int = 0) -> Trace:
    """Bursts: a rate that changes every few minutes by a lognormal factor; passages by a Zipf law."""
    rng = np.random.default_rng(seed)
    weight = np.repeat(rng.lognormal(sigma=0.9, size=400), 10)
    edges = np.concatenate([[0.0], np.cumsum(weight)]) / weight.sum()
    arrivals = np.interp(np.sort(rng.random(n)), edges, np.linspace(0, 4 * 86_400, len(edges)))
    popularity = 1 / np.arange(1, _PASSAGES + 1) ** 1.1
    return Trace(
        name="synthetic bursts",
        arrivals=arrivals,
        seconds=4 * 86_400.0,
        passages=rng.choice(_PASSAGES, 6 * n, p=popularity / popularity.sum()),
        first=6 * np.arange(n),
    )


def make_load(trace: Trace, *, requests: int, seconds: float, pool: int, most_nprobe: int, seed: int) -> Load:
    """The trace, lap after lap, in so much less time; from quarter to quarter the hot passages lie elsewhere.

    Args:
        pool: number of queries; neighbouring passages take neighbouring ones.
        most_nprobe: most probes that are asked for.
    """
    rng = np.random.default_rng(seed)
    number = np.arange(requests)
    lap, turn = np.divmod(number, len(trace.arrivals))
    laps = requests / len(trace.arrivals)
    due = (lap + trace.arrivals[turn] / trace.seconds) * (seconds / laps)
    quarter = number * 4 // requests
    flow = (trace.first[turn][:, None] + np.arange(MOST_BATCH)) % len(trace.passages)
    rows = (trace.passages[flow] * pool // _PASSAGES + (quarter * pool // 3)[:, None]) % pool
    kinds = list(KINDS)
    kind = rng.choice(len(kinds), requests, p=np.array(list(KINDS.values())) / sum(KINDS.values()))
    return Load(
        due=due,
        kind=[kinds[i] for i in kind],
        rows=rows,
        batch=rng.choice(_BATCHES, requests, p=_BATCH_SHARES),
        k=rng.integers(1, MOST_K + 1, requests),
        nprobe=np.where(rng.random(requests) < 0.3, 0, rng.integers(1, most_nprobe + 1, requests)),
        deadline_ms=rng.choice([2.0, 10.0, 50.0, 500.0], requests),
    )
