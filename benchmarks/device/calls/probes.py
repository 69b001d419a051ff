"""Which lists the queries of a batch probe: evenly drawn, with a wanted reuse, or as a log of real requests has them.

The *reuse* of a batch is probed rows over different rows: how many of its queries probe the same list, on average.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from benchmarks.common.trace import N_PASSAGES, TRACE, read_trace
from hybridindex.types import I64

__all__ = ["even", "log_source", "of_log", "with_reuse"]

#: Beside the checkout, or in it, where the checkout was carried to another machine.
LOGS = (TRACE, ROOT / "shared" / "data" / "ragpulse" / TRACE.name)
#: Of passages where there is no log: Zipf's, much as that of the log.
_ZIPF = 1.3


def even(nlist: int, n: int, nprobe: int, rng: np.random.Generator) -> I64:
    """(n, nprobe) lists, drawn evenly: the least that a batch of so many probes shares, on average."""
    found: I64 = np.stack([rng.choice(nlist, nprobe, replace=False) for _ in range(n)])
    return found


def with_reuse(nlist: int, n: int, nprobe: int, reuse: int, rng: np.random.Generator) -> I64:
    """Each of the probed lists is probed by about ``reuse`` queries. Fewer probes where there are too few lists."""
    nprobe = max(1, min(nprobe, nlist * reuse // n))
    pool = rng.permutation(nlist)[: max(nprobe, n * nprobe // reuse)]
    # Round and round through the pool: each list as often as any other.
    return np.asarray(pool[np.arange(n * nprobe).reshape(n, nprobe) % len(pool)], dtype=np.int64)


def of_log(nlist: int, n: int, nprobe: int, rng: np.random.Generator) -> I64:
    """Neighbouring requests of the log, a query for each passage, probing the lists about the passage's place."""
    passages = _passages()
    start = int(rng.integers(0, len(passages) - n + 1))
    place = passages[start : start + n] * nlist // N_PASSAGES
    return np.asarray((place[:, None] + np.arange(nprobe) - nprobe // 2) % nlist, dtype=np.int64)


def log_source() -> str:
    """What :func:`of_log` reads."""
    return "RAGPulse, days 0 to 3" if _log() else f"no log here: Zipf, exponent {_ZIPF:g}"


def _log() -> Path | None:
    return next((file for file in LOGS if file.exists()), None)


@cache
def _passages() -> I64:
    if file := _log():
        return np.concatenate([np.asarray(arrival.passages, dtype=np.int64) for arrival in read_trace(file)])
    rng = np.random.default_rng(0)
    found: I64 = rng.permutation(N_PASSAGES)[np.minimum(rng.zipf(_ZIPF, 1 << 15), N_PASSAGES) - 1]
    return found
