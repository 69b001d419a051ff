"""The trial of a page scanner when its tier opens: before anyone waits, and while another scanner can still be taken.

A scan over the arena's empty pages compiles and launches each kernel, and takes the scratch that stays. Which scanner
is tried, and what follows, is :mod:`hybridindex.tiers.device`'s business.
"""

from __future__ import annotations

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.arena import PageArena
from hybridindex.tiers.device_torch import TorchScanner
from hybridindex.tiers.residency import Residency
from hybridindex.tiers.scan_tables import Selection
from hybridindex.types import I64

__all__ = ["try_scanner"]

_K = 10
#: Queries and k of the scans: each list is probed by one, and by as many as matrix products are worth it for; k up to
#: each power of two at which the selection changes, as far as answers of searches commonly go. Nobody's first search
#: then waits for the compiler.
_SCANS = ((1, _K), (8, _K), (1, 32), (1, 64), (1, 128))


def try_scanner(
    kind: type[TorchScanner], index: IVFIndex, codec: DeviceCodec, arena: PageArena, ordinal: int, scratch_bytes: int
) -> None:
    """Scans lists as if they were in the arena's first pages, which nobody has written or reads yet.

    Raises:
        OutOfBudgetError: the device has no room for the scratch.
        RuntimeError: no row was found.
        whatever compiling and launching raise.
    """
    lists = _some_lists(index, arena)
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
    for n, k in _SCANS:
        probes = np.tile(lists, (n, 1))
        queries = np.zeros((n, index.scan_dim), dtype=np.float32)
        try:
            _, ids = scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), k)
        except OutOfBudgetError:
            return  # a scratch too small for this k is no fault of the scanner; each scan says so
        if len(lists) and (ids[:, 0] < 0).any():
            raise RuntimeError(f"a trial scan of {len(lists)} lists found nothing")


def _some_lists(index: IVFIndex, arena: PageArena) -> I64:
    """The smallest lists that have rows and fit the arena: more rows than one selection takes on a GPU, else one."""
    order = np.argsort(index.list_sizes, kind="stable")
    fits = (index.list_sizes > 0) & (arena.geometry.pages_for(index.list_sizes) <= arena.pages.n_pages)
    order = order[fits[order]]
    rows = Selection.of(_K).chunk if arena.device.type == "cuda" else 0
    lists: I64 = order[: int(np.searchsorted(np.cumsum(index.list_sizes[order]), rows, side="right")) + 1]
    return lists
