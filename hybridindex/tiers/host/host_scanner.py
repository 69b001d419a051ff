"""Which scanner serves the host: our native one where it supports the index, faiss's for everything else.

Answers do not depend on the choice, but for the last bits and for fast scans: where faiss would round queries, its
place is taken by one that does not. Sums of product quantizers it adds up in its own order, those of a fast scan
rounded: beside devices, which do neither, it scans none of them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, get_args

from hybridindex.config import HostScannerName
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.tiers.contract.protocol import IdFilter, OnDone, Scanner
from hybridindex.tiers.host.decoded_scanner import HostDecodedScanner, rounds_queries
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["HostScanner", "HostScannerName", "differs_from_devices", "open_host_scanner"]

_log = logging.getLogger(__name__)


class HostScanner(Scanner, Protocol):
    """A scanner that the router may also call without its checks, and whose threads it lends to quantization."""

    #: Threads of one scan, the calling one included.
    threads: int
    #: The extension's threads that help; None: faiss scans.
    pool: Any

    def scan_checked(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        *,
        filter_ids: IdFilter | None = None,
        on_done: OnDone | None = None,
    ) -> tuple[F32, I64]:
        """:meth:`scan` of contiguous arrays that were checked before, on an adopted thread. Distances in empty places
        are anything."""
        ...

    def adopt_thread(self) -> int:
        """Gives the calling thread this scanner's thread count in faiss; returns what it was."""
        ...

    def give_back_thread(self, before: int) -> None:
        """Undoes :meth:`adopt_thread`."""
        ...

    def quantize(self, index: IVFIndex, queries: F32, nprobe: int) -> tuple[I64, F32]:
        """:meth:`hybridindex.index.ivf.IVFIndex.quantize` with this scanner's threads, on an adopted thread; with one
        while several would wait for each other."""
        ...

    def prepare(self, lists: I64) -> None:
        """Does what the first scans of these lists would do beside their distances; lists are read from disk for it."""
        ...

    def close(self) -> None:
        """Ends threads of its own."""
        ...


def differs_from_devices(index: IVFIndex, name: str) -> str:
    """Why the host scanner ``name`` finds other distances than devices; empty where it does not."""
    if name != "faiss" or index.pq_form is None or HostNativeScanner.unsupported(index) is not None:
        return ""
    return (
        f"host_scanner is 'faiss', whose distances of codec {index.codec} are not those of devices: answers would "
        "depend on where lists lie; expected 'auto' or 'native', or no devices"
    )


def open_host_scanner(
    index: IVFIndex, *, threads: int | None = None, name: str = "auto", beside_devices: bool = False
) -> HostScanner:
    """The host scanner of that name.

    Args:
        beside_devices: devices scan lists of the same index.

    Raises:
        InvalidInputError: no such name, bad ``threads``, or "faiss" where devices would give other answers.
        UnsupportedIndexError: "native" was asked for and cannot scan this index here.
    """
    if name not in get_args(HostScannerName):
        raise InvalidInputError(f"host_scanner is {name!r}; expected one of {', '.join(get_args(HostScannerName))}")
    reason = HostNativeScanner.unsupported(index)
    if name == "native" and reason is not None:
        raise UnsupportedIndexError(f"{index.path}: the native host scanner cannot scan it: {reason}")
    if name != "faiss" and reason is None:
        return HostNativeScanner(index, threads=threads)
    if beside_devices and (other := differs_from_devices(index, name)):
        raise InvalidInputError(other)
    if not rounds_queries(index, beside_devices=beside_devices):
        return HostFaissScanner(index, threads=threads)
    _log.warning(
        "%s: faiss's own scan rounds queries for codec %s, so rows are decoded and compared one list after the other, "
        "which is slow; the native scanner is fast%s",
        index.path,
        index.codec,
        "" if reason is None else f", but {reason}",
    )
    return HostDecodedScanner(index, threads=threads)
