"""Rows on disk: how many pages a query reads that the host's memory does not hold.

Memory is taken for an LRU cache of pages, by Che's approximation (Che, Tung, Wang 2002; Fricker, Robert, Roberts 2012):
a page stays for the time T in which queries touch as many different pages as memory holds. So it is there with
probability 1 - exp(-p T), p being the part of the queries that touch it. Pages of one list count as equally popular.
Rows on a device are not read on the host; their ids are. What a page takes is said by
:mod:`hybridindex.partitioner.models.latency`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybridindex.types import F64, I64, Profile

__all__ = ["CachedPages", "RowCache", "build_row_cache"]

#: Of the page cache, where a profile does not say; and of an id.
_PAGE_BYTES = 4096
_ID_BYTES = 8
#: Lists begin at multiples of it.
_ALIGNED = 64
_MAX_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedPages:
    """Pages of one kind, of rows or of ids, list by list."""

    #: (nlist,) float64 pages, and the part of the queries that touch any one of them.
    number: F64
    popularity: F64
    #: (pairs,) float64 pages that a query touches in a list.
    touched: F64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCache:
    """Page faults of held-back queries under a cache of so many bytes. Immutable but for a cache."""

    nbytes: int
    #: Of the page cache.
    page_bytes: int
    #: Held-back queries, and (pairs,) the query and the list of each pair that has candidates.
    n_queries: int
    query: npt.NDArray[np.int32]
    lists: npt.NDArray[np.int32]
    rows: CachedPages
    ids: CachedPages
    _known: dict[int, F64] = field(default_factory=dict, repr=False)

    @property
    def all_bytes(self) -> int:
        """Of all pages."""
        return math.ceil(float(self.rows.number.sum() + self.ids.number.sum())) * self.page_bytes

    def faults(self, on_device: I64, prefix: int | None = None) -> F64:
        """(n,) float64 pages that each query reads from disk, where the rows of the lists ``on_device`` (m,) are not
        read. ``prefix``: a number that names these lists; what was computed for it is kept."""
        if prefix is None or (known := self._known.get(prefix)) is None:
            known = self._compute(on_device)
            if prefix is not None:
                self._known[prefix] = known
        return known

    def _compute(self, on_device: I64) -> F64:
        here = np.ones(self.rows.number.size)
        here[on_device] = 0.0
        number = np.concatenate((self.rows.number * here, self.ids.number))
        missing = _missing(
            number, np.concatenate((self.rows.popularity, self.ids.popularity)), self.nbytes // self.page_bytes
        )
        rows, ids = np.split(missing, 2)
        read = self.rows.touched * (rows * here)[self.lists] + self.ids.touched * ids[self.lists]
        return np.bincount(self.query, weights=read, minlength=self.n_queries).astype(np.float64)


def _missing(number: F64, popularity: F64, cached: int) -> F64:
    """(m,) float64 probability that a page of each kind is not in a cache of ``cached`` pages, of which there are
    ``number`` (m,) each."""
    if cached >= number.sum():
        return np.zeros_like(number)
    used = number * (popularity > 0)
    if cached >= used.sum():
        return np.where(popularity > 0, 0.0, 1.0)
    # Newton from the left: what is touched in T rises ever more slowly, so no step goes too far.
    time = cached / float((number * popularity).sum())
    for _ in range(_MAX_STEPS):
        absent = np.exp(-popularity * time)
        lacking = cached - float((used * (1.0 - absent)).sum())
        step = lacking / float((used * popularity * absent).sum())
        time += step
        if step <= 1e-12 * time:
            break
    return np.asarray(np.exp(-popularity * time), dtype=np.float64)


def build_row_cache(
    profile: Profile,
    row_bytes: int,
    nbytes: int,
    query: npt.NDArray[np.int32],
    lists: npt.NDArray[np.int32],
    had: F64,
    n: int,
) -> RowCache:
    """The cache of ``nbytes`` for the candidates ``had`` (pairs,) of ``n`` held-back queries.

    Popularity follows from the queries that chose the order of rows: a list that only the held-back ones touch is read
    from disk each time.

    Args:
        row_bytes: of a row.
        query, lists: (pairs,) the query and the list of each pair that has candidates.
    """
    access, sizes = profile.access, profile.list_sizes.astype(np.float64)
    assert access.list_candidates is not None
    probes = np.maximum(access.list_accesses, 1e-300)
    # Queries that the accesses are of, with their history.
    width = float((access.held_probes >= 0).sum()) / max(1, len(access.held_probes))
    queries = max(float(access.list_accesses.sum()) / max(width, 1e-300), 1e-300)
    each, seen = access.list_candidates / probes, np.minimum(access.list_accesses / queries, 1.0)

    page_bytes = int(profile.notes.get("row_faults", {}).get("page_bytes", _PAGE_BYTES))

    def pages(nbytes_each: int, step: int) -> CachedPages:
        across = 1.0 + (nbytes_each - step) / page_bytes
        # Those at both ends hold parts of other lists, too.
        spread = np.where(sizes > 0, 1.0 + (sizes * nbytes_each - step) / page_bytes, 0.0)
        on_page = sizes * across / np.maximum(spread, 1.0)

        def touched(candidates: F64, of: I64 | npt.NDArray[np.int32] | slice) -> F64:
            """The part of the pages on which some row is a candidate."""
            left = 1.0 - np.minimum(candidates / np.maximum(sizes[of], 1.0), 1.0)
            return np.asarray(1.0 - left ** on_page[of], dtype=np.float64)

        return CachedPages(
            number=sizes * nbytes_each / page_bytes,
            popularity=seen * touched(each, slice(None)),
            touched=spread[lists] * touched(had, lists),
        )

    return RowCache(
        nbytes=nbytes,
        page_bytes=page_bytes,
        n_queries=n,
        query=query,
        lists=lists,
        rows=pages(row_bytes, math.gcd(row_bytes, _ALIGNED)),
        ids=pages(_ID_BYTES, _ID_BYTES),
    )
