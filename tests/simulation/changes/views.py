"""Looking at an open index: searches as a router without threads makes them, and every row that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hybridindex.config import SearchParams
from hybridindex.index.attributes.columns import schema_of
from hybridindex.index.attributes.stored import find_attributes
from hybridindex.index.filters.row_filter import RowFilter, RowFilters
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.batch.request import Request
from hybridindex.router.batch.stages import BatchClock
from hybridindex.router.batch.stats import StatsCounter
from hybridindex.router.direct import DirectSearch
from hybridindex.router.filtered import FilteredSearches
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.types import F32, I64, SearchResult
from tests.simulation.changes.oracle import Dump, Seen

__all__ = ["View", "dump"]


class _Kept:
    """A reply."""

    wanted = True

    def settle(self, result: SearchResult) -> None:
        self.result = result

    def announce(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise error


class View:
    """Searches of one index at all its lists. One thread's."""

    def __init__(self, index: IVFIndex) -> None:
        self.index = index
        host = HostNativeScanner(index, threads=1)
        parts: Any = SimpleNamespace(index=index, host=host, stats=StatsCounter(), host_pace=PaceEstimator())
        added = AddedScanner(index, host)
        self._filters = RowFilters(index)
        self._direct = DirectSearch(parts, added)
        self._filtered = FilteredSearches(parts, self._filters, added)

    @property
    def is_behind(self) -> bool:
        """It goes on with what it knew, and looks again."""
        return self.index.live._is_behind

    def search(self, queries: F32, k: int, *, allow: I64 | None = None, where: str | None = None) -> Seen:
        """``queries``: not transformed."""
        index = self.index
        queries = index.transform(queries)
        if allow is not None or where is not None:
            return self._exactly(queries, k, self._filters.make(allow, None, where))
        live = index.live.current()
        deleted = None if live is None else live.deleted
        spare = 0 if deleted is None else deleted.spare(k, index.count)
        found = None
        if deleted is None or deleted.share(index.count) <= 0.9:
            found = self._direct.search(queries, k, index.nlist, k + spare, live, spare)
        return self._exactly(queries, k, None) if found is None else Seen(found[0].ids, found[0].distances)

    def _exactly(self, queries: F32, k: int, wanted: RowFilter | None) -> Seen:
        reply = _Kept()
        request = Request(
            queries=queries,
            params=SearchParams(k=k),
            nprobe=self.index.nlist,
            kept=k,
            reply=reply,
            filter=wanted,
        )
        self._filtered.search(request, BatchClock())
        return Seen(reply.result.ids, reply.result.distances)


def dump(index: IVFIndex, live: LiveRows | None) -> Dump:
    """Every row, at the moment of ``live``."""
    if index.attributes_problem:  # an error of the disk, when it was opened
        index.attributes, index.attributes_problem = find_attributes(index.integrity.folder, index.manifest)
    lists = range(index.nlist)
    ids = np.concatenate([index.list_ids(each) for each in lists])
    codes = np.concatenate([index.list_codes(each) for each in lists])
    tags: list[int | None] = [None] * len(ids)
    if index.attributes is not None:
        tags = index.attributes.columns["tag"].to_pylist()
    if live is None:
        return Dump(ids, codes, tags)
    if live.deleted is not None:
        left = np.flatnonzero(~live.deleted.contains(ids))
        ids, codes, tags = ids[left], codes[left], [tags[each] for each in left.tolist()]
    if (added := live.added) is not None:
        ids, codes = np.concatenate([ids, added.ids]), np.concatenate([codes, added.codes()])
        came: list[int | None] = [None] * added.count
        if index.attributes is not None:
            table = added.attributes.table(schema_of(index.attributes.spec.columns))
            came = table.column("tag").take(added.numbers).to_pylist()
        tags = tags + came
    return Dump(ids, codes, tags)
