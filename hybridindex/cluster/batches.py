"""A batch whose queries are near to different nodes: what each of these is asked, and the answer of all together."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from hybridindex.partitioner.nodes.nearest import nearest_nodes, remote_costs
from hybridindex.router.remote.locality import Locality
from hybridindex.service.searches import joined
from hybridindex.types import F32, I64, SearchResult

__all__ = ["BatchPart", "divide", "put_together"]

#: Part of the work of a batch that has to become local where it is divided: each node reads a list for its own queries.
_WORTH = 0.25


class BatchPart(NamedTuple):
    """Queries that one node is asked."""

    #: (m,) int64 of the batch, ascending.
    rows: I64
    #: By node, what asking it costs beside the searches that it has under way, in such; empty: nothing is known.
    remote: Mapping[str, int]


def divide(queries: F32, nprobe: int | None, locality: Locality | None) -> list[BatchPart]:
    """Parts of (n, d) ``queries``: those near to each node, where that makes much more of the work local; else all."""
    rows = np.arange(len(queries))
    if locality is None:
        return [BatchPart(rows, {})]
    local = locality.of(queries, nprobe)
    if len(queries) == 1:
        return [BatchPart(rows, _costs(locality, local))]
    nearest = nearest_nodes(local)
    if local[rows, nearest].mean() - local.mean(axis=0).max() < _WORTH:
        return [BatchPart(rows, _costs(locality, local))]
    parts = [np.flatnonzero(nearest == node) for node in np.unique(nearest)]
    return [BatchPart(part, _costs(locality, local[part])) for part in parts]


def _costs(locality: Locality, local: F32) -> dict[str, int]:
    return dict(zip(locality.names, remote_costs(local.mean(axis=0)).tolist(), strict=True))


def put_together(parts: Sequence[BatchPart], found: Sequence[Future[SearchResult]]) -> Future[SearchResult]:
    """The answer of the whole batch; the first error where a part has failed."""
    if len(parts) == 1:
        return found[0]
    whole: Future[SearchResult] = Future()
    lock, n_open = threading.Lock(), len(found)

    def told(_: Future[SearchResult]) -> None:
        nonlocal n_open
        with lock:
            n_open -= 1
            if n_open:
                return
        if not whole.set_running_or_notify_cancel():
            return
        error = next((error for each in found if (error := each.exception()) is not None), None)
        if error is not None:
            whole.set_exception(error)
        else:
            whole.set_result(_in_order(parts, [each.result() for each in found]))

    for each in found:
        each.add_done_callback(told)
    return whole


def _in_order(parts: Sequence[BatchPart], found: Sequence[SearchResult]) -> SearchResult:
    whole, order = joined(found), np.argsort(np.concatenate([part.rows for part in parts]))
    arrays = ((each.name, getattr(whole, each.name)) for each in fields(SearchResult))
    ordered: dict[str, Any] = {name: None if array is None else array[order] for name, array in arrays}
    return SearchResult(**ordered)
