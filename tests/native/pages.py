"""Lists of :mod:`tests.native.lists` in the pages of an arena, and a scan of them; answers are checked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hybridindex import _native
from hybridindex.types import F32, I32, I64, U8
from tests.native.lists import Lists, with_ids

Order = Literal["runs", "scattered", "backwards", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """``lists`` have their positions, list << 32 | row, for ids."""

    lists: Lists
    arena: U8
    rows_per_page: int
    pages: list[I32]


def _numbers(rng: np.random.Generator, n: int, order: Order) -> I32:
    numbers = np.arange(n, dtype=np.int32)
    if order == "backwards":
        return numbers[::-1].copy()
    if order == "scattered":
        return rng.permutation(numbers)
    if order == "mixed":  # runs of a few pages, in any order
        parts = np.split(numbers, np.flatnonzero(rng.random(n) < 0.4))
        return np.concatenate([parts[i] for i in rng.permutation(len(parts))])
    return numbers


def paged(
    rng: np.random.Generator, lists: Lists, rows_per_page: int, order: Order = "runs", *, slack: int = 0
) -> Pages:
    """An arena of exactly the pages needed, ``slack`` bytes behind the rows of each; 0xff where no row is."""
    nlist = len(lists.extents)
    positions = [(i << 32) + np.arange(lists.extents[i, 0]) for i in range(nlist)]
    lists = with_ids(lists, np.concatenate([np.empty(0, np.int64), *positions]))
    code_size = lists.code_size
    needed = -(-lists.extents[:, 0] // rows_per_page)
    arena = np.full((int(needed.sum()), rows_per_page * code_size + slack), 0xFF, np.uint8)
    pages = np.split(_numbers(rng, len(arena), order), np.cumsum(needed)[:-1]) if nlist else []
    for (size, _, at), own in zip(lists.extents, pages, strict=True):
        codes = lists.data[at : at + size * code_size]
        for number, page in enumerate(own):
            part = codes[number * rows_per_page * code_size :][: rows_per_page * code_size]
            arena[page, : len(part)] = part
    return Pages(lists=lists, arena=arena, rows_per_page=rows_per_page, pages=pages)


def scan_arguments(made: Pages, metric: str, queries: F32, probes: I64, k: int, kernels: str = "") -> dict[str, Any]:
    """What ``scan_pages`` takes; distances and positions are full of rubbish."""
    lists = made.lists
    probed, member_starts, members, _ = _native.group_probes(probes, lists.extents)
    own = [made.pages[i] for i in probed]
    return {
        "arena": made.arena,
        "rows_per_page": made.rows_per_page,
        "code": lists.code,
        "scale": lists.scale,
        "offset": lists.offset,
        "list_ids": probed,
        "sizes": lists.extents[probed, 0],
        "page_starts": np.cumsum([0, *map(len, own)], dtype=np.int64),
        "pages": np.concatenate([np.empty(0, np.int32), *own]),
        "member_starts": member_starts,
        "members": members,
        "centroids": lists.centroids[probed] if len(lists.centroids) else lists.centroids,
        "queries": queries,
        "keep_max": metric == "ip",
        "distances": np.full((len(queries), k), np.nan, np.float32),
        "positions": np.full((len(queries), k), -7, np.int64),
        "kernels": kernels,
    }


def scan_pages(made: Pages, metric: str, queries: F32, probes: I64, k: int, kernels: str = "") -> tuple[F32, I64]:
    """(distances, positions) of one scan."""
    arguments = scan_arguments(made, metric, queries, probes, k, kernels)
    _native.scan_pages(**arguments)
    return arguments["distances"], arguments["positions"]
