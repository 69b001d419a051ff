"""Which scanner reads a tier's pages: the fastest one that takes the arena's device and codec, and that passed a trial.

The trial is made when the tier opens, while another scanner can still be chosen. It scans the arena's empty pages: this
compiles and launches each kernel, and takes the scratch memory that stays.
"""

from __future__ import annotations

import logging

import numpy as np

from hybridindex.config import MAX_K
from hybridindex.errors import DeviceError, OutOfBudgetError
from hybridindex.index.codec import DeviceCodec, DeviceKind
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.codes.native_code_scanner import NativeCodeScanner
from hybridindex.tiers.paged.codes.native_row_pages import NativeRowPages
from hybridindex.tiers.paged.codes.row_pages import RowPages
from hybridindex.tiers.paged.codes.torch_code_scanner import TorchCodeScanner
from hybridindex.tiers.paged.codes.torch_row_pages import TorchRowPages
from hybridindex.tiers.paged.codes.triton_code_scanner import TritonCodeScanner
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from hybridindex.tiers.paged.page_scanner import PageScanner
from hybridindex.tiers.paged.pq.native_pq_scanner import NativePqScanner
from hybridindex.tiers.paged.pq.torch_pq_scanner import TorchPqScanner
from hybridindex.tiers.paged.pq.triton_pq_scanner import TritonPqScanner
from hybridindex.tiers.paged.tables.scan_tables import GROUP, Selection
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.tiers.paged.triton_scanner import TritonScanner, Workspace
from hybridindex.types import I64

__all__ = ["choose_page_scanner", "choose_row_pages", "choose_scanner", "try_scanner"]

_log = logging.getLogger(__name__)

_K = 10
#: Queries and k of the scans: each list is probed by one query, and by enough for matrix products; k up to each power
#: of two at which the selection changes, in the common range. No search then waits for the compiler.
_SCANS = ((1, _K), (GROUP, _K), (1, 32), (1, 64), (1, 128))
#: More of a scan of codes, whose k are candidates: as many as these kernels serve.
_CODE_SCANS = (*_SCANS, (1, 256), (1, 512), (1, 1024), (1, MAX_K))
#: What scans anywhere, where that is not :class:`TorchScanner`.
_FALLBACKS: dict[DeviceKind, type[PageScanner]] = {"rabitq": TorchCodeScanner, "pq": TorchPqScanner}
#: Scanners that compile, and keep a scratch.
_COMPILED = (TritonScanner, TritonCodeScanner, TritonPqScanner)


def choose_page_scanner(codec: DeviceCodec, arena: PageArena) -> tuple[type[PageScanner], str]:
    """Which scanner reads an arena, and why no faster one does; empty where none is faster. Nothing is tried."""
    reason = TritonScanner.unsupported(arena)
    if codec.kind == "rabitq":
        if NativeCodeScanner.supports(arena):
            return NativeCodeScanner, reason
        return (TorchCodeScanner if reason else TritonCodeScanner), reason
    if codec.kind == "pq":
        if NativePqScanner.supports(arena):
            return NativePqScanner, reason
        return (TorchPqScanner if reason else TritonPqScanner), reason
    if NativePageScanner.supports(codec, arena):
        return NativePageScanner, reason
    return (TorchScanner if reason else TritonScanner), reason


def choose_row_pages(arena: PageArena) -> type[RowPages] | None:
    """What compares candidates with the rows in an arena, as the host does to the bit; None: the host alone does it."""
    kinds: tuple[type[RowPages], ...] = (NativeRowPages, TorchRowPages)
    return next((kind for kind in kinds if kind.supports(arena)), None)


def choose_scanner(
    index: IVFIndex, codec: DeviceCodec | None, arena: PageArena, ordinal: int, scratch_bytes: int, label: str
) -> tuple[type[PageScanner], str]:
    """:func:`choose_page_scanner` with a trial of one that compiles or takes memory; torch scans where that fails.

    Args:
        codec: None: nothing is going to be scanned.
        label: what the log calls the device.

    Raises:
        OutOfBudgetError: the device has no room for the scratch.
        DeviceError: none works.
    """
    if codec is None:
        return TorchScanner, ""
    fallback: type[PageScanner] = _FALLBACKS.get(codec.kind, TorchScanner)
    kind, reason = choose_page_scanner(codec, arena)
    if not arena.pages.n_pages or (arena.device.type == "cpu" and kind not in _COMPILED):
        return kind, reason
    while True:
        try:
            try_scanner(kind, index, codec, arena, ordinal, scratch_bytes)
            return kind, reason
        except Exception as error:
            Workspace.drop(arena)
            if isinstance(error, OutOfBudgetError):
                raise
            if kind is fallback:
                raise DeviceError(f"device {label} scans nothing, a trial failed: {error!r}") from error
            first_line = (str(error).strip() or repr(error)).splitlines()[0][:200]
            reason = f"a trial of {kind.name} failed: {first_line}"
            _log.warning("device %s: %s; torch scans there", label, reason, exc_info=True)
            kind = fallback


def try_scanner(
    kind: type[PageScanner], index: IVFIndex, codec: DeviceCodec, arena: PageArena, ordinal: int, scratch_bytes: int
) -> None:
    """Scans lists as if they were in the arena's first pages, which are neither written nor read yet.

    Raises:
        OutOfBudgetError: the device has no room for the scratch.
        RuntimeError: no row was found.
        whatever compiling and launching raise.
    """
    scans = _CODE_SCANS if codec.kind == "rabitq" else _SCANS
    lists = _some_lists(index, arena, max(k for _, k in scans))
    counts = arena.geometry.pages_for(index.list_sizes).astype(np.int32)
    named = np.zeros(index.nlist, dtype=np.bool_)
    named[lists] = True
    residency = Residency(
        version=0,
        list_device=np.where(named, ordinal, -1).astype(np.int16),
        n_resident=len(lists),
        list_log=np.zeros(index.nlist, dtype=np.int64),
        page_counts=np.where(named, counts, 0).astype(np.int32),
        page_log=np.arange(arena.pages.n_pages, dtype=np.int32),
    )
    scanner = kind(index, codec, arena, residency, ordinal, scratch_bytes)
    for n, k in scans:
        probes = np.tile(lists, (n, 1))
        queries = np.zeros((n, index.scan_dim), dtype=np.float32)
        try:
            _, ids = scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), k)
        except OutOfBudgetError:
            return  # a scratch too small for this k is no fault of the scanner; each scan says so
        if len(lists) and (ids[:, 0] < 0).any():
            raise RuntimeError(f"a trial scan of {len(lists)} lists found nothing")


def _some_lists(index: IVFIndex, arena: PageArena, k: int) -> I64:
    """The smallest lists that have rows and fit the arena: one; on a GPU more rows than a chunk of the selection of
    ``k``, so that a second level follows."""
    order = np.argsort(index.list_sizes, kind="stable")
    fits = (index.list_sizes > 0) & (arena.geometry.pages_for(index.list_sizes) <= arena.pages.n_pages)
    order = order[fits[order]]
    rows = Selection.of(k).chunk if arena.device.type == "cuda" else 0
    lists: I64 = order[: int(np.searchsorted(np.cumsum(index.list_sizes[order]), rows, side="right")) + 1]
    return lists
