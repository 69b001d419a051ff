"""The oracle of the whole suite: what a plain IVF search over the same probes may answer, in float64.

An answer is right when every returned id is a candidate of the probed lists, its distance is its own decoded distance
within 2e-4 * (1 + |D|), or as ``precise`` asks, it is no worse than the k-th best candidate by more than that, results
are sorted by (distance, id), no candidate is returned twice, and only missing candidates leave empty places.
"""

from __future__ import annotations

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import F32, I64

TOLERANCE = 2e-4
#: Of float32 arithmetic, whatever the order of its sums: ``precise`` of what computes distances of rows.
ROUNDED = 1e-6


def candidate_distances(index: IVFIndex, query: F32, lists: I64) -> tuple[I64, np.ndarray]:
    """Ids and float64 distances of everything in ``lists`` to one transformed query."""
    lists = lists[lists >= 0]
    if len(lists) == 0:
        return np.empty(0, np.int64), np.empty(0)
    ids = np.concatenate([index.list_ids(int(i)) for i in lists])
    rows = np.concatenate([index.decode_list(int(i)) for i in lists]).astype(np.float64)
    x = query.astype(np.float64)
    return ids, rows @ x if index.metric == "ip" else ((rows - x) ** 2).sum(axis=1)


def sums_of_terms(index: IVFIndex, query: F32, lists: I64) -> np.ndarray:
    """What the rounding of a distance's terms is measured with, of everything in ``lists``: the sum of |x y|; of l2
    that of (|x| + |y|) |x - y|, as x itself is rounded when it is decoded. sq8 adds an offset, which may be far larger.
    """
    rows = np.concatenate([index.decode_list(int(i)) for i in lists[lists >= 0]]).astype(np.float64)
    x, size = query.astype(np.float64), np.abs(rows)
    if index.codec == "sq8":
        codec = index.device_codec()
        assert codec is not None
        size = size + np.abs(codec.offset)
    terms: np.ndarray = (
        size @ np.abs(x) if index.metric == "ip" else ((size + np.abs(x)) * np.abs(rows - x)).sum(axis=1)
    )
    return terms


def check_answer(
    index: IVFIndex, queries: F32, probes: I64, k: int, distances: F32, ids: I64, *, precise: float | None = None
) -> None:
    """Asserts an (n, k) answer to transformed ``queries`` (n, scan_dim) over ``probes`` (n, p).

    ``precise``: of each distance, the error over what rounding its terms may make of it, at most
    (:func:`sums_of_terms`); float32 takes some 1e-7 a step, TF32 10^3 times as much.
    """
    assert ids.shape == distances.shape == (len(queries), k)
    assert ids.dtype == np.int64
    assert distances.dtype == np.float32
    keep_max = index.metric == "ip"
    for query, lists, row_distances, row_ids in zip(queries, probes, distances, ids, strict=True):
        all_ids, exact = candidate_distances(index, query, lists)
        n_found = min(k, len(all_ids))
        assert (row_ids[:n_found] >= 0).all(), "an empty place although candidates are left"
        assert (row_ids[n_found:] == -1).all()
        assert (row_distances[n_found:] == (-np.inf if keep_max else np.inf)).all()
        if n_found == 0:
            continue
        found_ids, found = row_ids[:n_found], row_distances[:n_found].astype(np.float64)
        assert len(np.unique(found_ids)) == n_found, "an id was returned twice"
        position = {int(i): at for at, i in enumerate(all_ids)}
        own = exact[[position[int(i)] for i in found_ids]]
        allowed = TOLERANCE * (1 + np.abs(own))
        if precise is not None:
            allowed = precise * sums_of_terms(index, query, lists)[[position[int(i)] for i in found_ids]] + 1e-30
        np.testing.assert_array_less(np.abs(found - own), allowed)
        ranked = np.sort(exact)[::-1] if keep_max else np.sort(exact)
        kth = ranked[n_found - 1]
        worse_by = kth - own if keep_max else own - kth
        assert (worse_by <= allowed).all(), "a returned vector is worse than one that was left out"
        step = np.diff(found)
        assert (step <= 0).all() if keep_max else (step >= 0).all(), "not sorted by distance"
        assert (np.diff(found_ids)[step == 0] > 0).all(), "ties are not ordered by id"
