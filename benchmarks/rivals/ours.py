"""Our own sides: quantization and host scan called directly, and the same through ``router.search``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import hybridindex
from benchmarks.common.scanner import close_scanner, host_scanner
from benchmarks.rivals.faiss_systems import NPROBES
from benchmarks.rivals.system import Answer, K, System
from hybridindex.api import Index
from hybridindex.index.compress import compress
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32

__all__ = ["CANDIDATES", "codes", "compressed", "routed", "rows"]

#: Compared exactly by searches of codes.
CANDIDATES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
Made = TypeVar("Made")


def rows(codec: str, index: Index) -> System:
    """The native scan of rows, without a router."""
    ivf = index.ivf
    scanners: dict[int, Any] = {}
    stand_in = _once(scanners, 1, lambda: host_scanner(ivf, 1)).name == "faiss"

    def at(nprobe: int, second: int, threads: int) -> Answer:
        scanner = _once(scanners, threads, lambda: host_scanner(ivf, threads))
        return lambda x: scanner.scan(x, *scanner.quantize(ivf, x, nprobe), K)[1]

    return System(
        name=f"hybridindex {codec}" + (" (faiss stand-in)" if stand_in else ""),
        dials=("nprobe",),
        grid=_nprobes(index),
        at=at,
        close=_closing(scanners),
    )


def compressed(path: Path, bits: int, queries: F32) -> Index:
    """The index at ``path``, with codes beside its rows."""
    index = hybridindex.open(path, verify="quick")
    compress(index.ivf, bits, queries=queries)
    return index


def codes(codec: str, index: Index) -> System:
    """The native scan of codes and the exact distances of its candidates, without a router."""
    ivf, beside = index.ivf, index.ivf.rabitq
    assert beside is not None
    scanners: dict[int, HostRabitqScanner] = {}

    def at(nprobe: int, candidates: int, threads: int) -> Answer:
        scanner = _once(scanners, threads, lambda: HostRabitqScanner(ivf, beside, threads=threads))

        def answer(x: F32) -> Any:
            probes, coarse = scanner.quantize(ivf, x, nprobe)
            _, positions = scanner.scan(x, probes, scanner.centre_products(x, probes, coarse), candidates)
            return scanner.reranker.rerank(x, positions, K)[1]

        return answer

    return System(
        name=f"hybridindex {beside.spec.bits} bit, {codec}",
        dials=("nprobe", "candidates"),
        grid=_nprobes(index),
        finer=CANDIDATES,
        at=at,
        close=_closing(scanners),
    )


def routed(bare: System, index: Index) -> System:
    """The same scan through a router."""
    routers: dict[tuple[int, int], Any] = {}
    by_codes = bare.finer is CANDIDATES

    def at(nprobe: int, candidates: int, threads: int) -> Answer:
        def opened() -> Any:
            if not by_codes:
                return index.router(threads=threads, precision="rows")
            return index.router(threads=threads, precision="codes", candidates=candidates)

        router = _once(routers, (threads, candidates), opened)
        return lambda x: router.search(x, K, nprobe).ids

    return System(
        name=f"{bare.name}, router",
        dials=bare.dials,
        grid=bare.grid,
        finer=bare.finer,
        at=at,
        close=_closing(routers),
    )


def _nprobes(index: Index) -> tuple[int, ...]:
    return tuple(p for p in NPROBES if p <= index.nlist)


def _closing(made: Mapping[Any, Any]) -> Callable[[], None]:
    def close() -> None:
        for one in made.values():
            close_scanner(one)

    return close


def _once(made: dict[Any, Made], key: Any, make: Callable[[], Made]) -> Made:
    if key not in made:
        made[key] = make()
    return made[key]
