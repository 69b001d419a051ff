"""The two ceilings of the machine that a scan cannot pass: how fast memory is read, and how fast sgemm multiplies.

Both are the best of several ways and repeats: a ceiling that is too low flatters everybody who is held against it. No
way beats a plain streaming read or a large square product by skill, so the best is the machine's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hybridindex.types import F32

__all__ = ["Ceilings", "measure_ceilings"]

_REPEATS = 5
#: A second, smaller buffer, for information: on servers it may lie in the last-level cache.
_CACHED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of ``threads`` threads together."""

    threads: int
    #: GB/s (1e9) over a buffer of ``buffer_bytes``.
    read_gbps: float
    buffer_bytes: int
    #: The same over 128 MiB, which large caches hold: why small indexes can pass ``read_gbps``.
    cached_gbps: float
    #: GFLOP/s of a large float32 product.
    sgemm_gflops: float
    #: The best of every way that was tried.
    ways: dict[str, float] = field(default_factory=dict)

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of both, number by number: another load on the machine only ever lowers them."""
        return Ceilings(
            threads=self.threads,
            read_gbps=max(self.read_gbps, other.read_gbps),
            buffer_bytes=self.buffer_bytes,
            cached_gbps=max(self.cached_gbps, other.cached_gbps),
            sgemm_gflops=max(self.sgemm_gflops, other.sgemm_gflops),
            ways={name: max(rate, other.ways.get(name, 0.0)) for name, rate in self.ways.items()},
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(threads: int, buffer_bytes: int) -> Ceilings:
    """Streams over ``buffer_bytes`` of float32 and multiplies square matrices."""
    with ThreadPoolExecutor(threads) as pool:
        buffer = np.ones(buffer_bytes // 4, dtype=np.float32)
        reads = _read_ways(buffer, threads, pool)
        cached = _read_ways(buffer[: _CACHED_BYTES // 4], threads, pool)
        del buffer
        products = _product_ways(threads, 2048)
    return Ceilings(
        threads=threads,
        read_gbps=max(reads.values()),
        buffer_bytes=buffer_bytes,
        cached_gbps=max(cached.values()),
        sgemm_gflops=max(products.values()),
        ways={**reads, **products},
    )


def _read_ways(buffer: F32, threads: int, pool: ThreadPoolExecutor) -> dict[str, float]:
    parts = np.array_split(buffer, threads)
    ways: dict[str, Callable[[], object]] = {
        # numpy reductions release the GIL.
        "read: numpy sum": lambda: list(pool.map(np.sum, parts)),
        "read: numpy max": lambda: list(pool.map(np.max, parts)),
    }
    torch = _torch(threads)
    if torch is not None:
        flat = torch.from_numpy(buffer)
        matrix = flat[: len(flat) // 1024 * 1024].view(-1, 1024)
        vector = torch.ones(1024)
        ways["read: torch sum"] = flat.sum
        ways["read: torch mv"] = lambda: torch.mv(matrix, vector)
    return {name: buffer.nbytes / _best(run) / 1e9 for name, run in ways.items()}


def _product_ways(threads: int, side: int) -> dict[str, float]:
    a = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    ways: dict[str, Callable[[], object]] = {}
    torch = _torch(threads)
    if torch is not None:
        tensor = torch.from_numpy(a)
        ways["sgemm: torch"] = lambda: torch.mm(tensor, tensor)
    if torch is None or threads == len(os.sched_getaffinity(0)):
        # numpy's BLAS uses all cores and has no switch of its own.
        ways["sgemm: numpy"] = lambda: a @ a
    return {name: 2 * side**3 / _best(run) / 1e9 for name, run in ways.items()}


def _best(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _torch(threads: int) -> Any:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return torch
