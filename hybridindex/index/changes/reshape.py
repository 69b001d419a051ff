"""Lists that follow their rows: short ones are dissolved, long ones split, centroids moved to the middle of what lies
around them, and every row goes to the nearest (what SPFresh's LIRE does list by list, for all at once). Which rows lie
where is decided here; :mod:`hybridindex.index.changes.compact` writes.

Where more lists were dissolved than split, long ones are split until there are as many as a build would make. Centroids
begin where they were, and a few rows of each list move them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.extension import native
from hybridindex.types import F32, I32, I64

__all__ = ["Shape", "Thresholds", "reshape"]

#: Rows of each list that centroids move by, and how often.
_MOVING_ROWS, _MOVING_ROUNDS = 128, 2
#: Rows that a split looks at for each list it makes, and how often they are grouped.
_SPLIT_ROWS, _SPLIT_ROUNDS = 256, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a list is too long or too short, in multiples of the mean."""

    #: Longer ones are split, where they grew by a half since they were written.
    split: float = 3.0
    #: Longer ones are split in any case.
    split_always: float = 6.0
    #: Shorter ones are dissolved, where they lost a half.
    dissolve: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The lists to come."""

    #: (nlist, d) float32.
    centroids: F32
    #: (nlist,) int64, the list that each comes from.
    parents: I64
    #: The list of each row, in the order in which they were read: (n,) int32.
    lists: I32
    n_split: int
    n_dissolved: int
    #: Rows that lie in another list than before, or one of its parts.
    n_moved: int


#: Decoded rows of each list, one after the other: list id -> (n, d) float32. Called several times.
Rows = Callable[[], Iterator[tuple[int, F32]]]


def reshape(
    rows: Rows,
    centroids: F32,
    sizes: I64,
    changed: I64,
    grown: npt.NDArray[np.bool_],
    *,
    mean: float,
    inner_product: bool,
    unit: bool,
    thresholds: Thresholds,
    seed: int,
) -> Shape:
    """Decides.

    Args:
        centroids: (nlist, d) float32.
        sizes: (nlist,) int64 rows of each list now.
        changed: (nlist,) int64 rows that came to each list, and went.
        grown: (nlist,) bool, whether a list is half as long again as when it was written.
        mean: rows that a list should have, 1 or more.
        inner_product: whether rows are nearest to the centroid of the largest scalar product: as searches find lists.
        unit: whether centroids are of length 1, and stay so.
    """
    total = int(sizes.sum())
    short = (sizes < thresholds.dissolve * mean) & (changed > sizes)
    if not total:  # nothing says where rows will come
        short[:] = False
    elif short.all():
        short[np.argmax(sizes)] = False
    parts = _parts(sizes, short, grown, mean, thresholds)
    new, parent = _begin(rows, centroids, parts, unit, np.random.default_rng(seed))
    step = max(1, total // (_MOVING_ROWS * len(new)))
    for _ in range(_MOVING_ROUNDS):
        _move(new, rows, step, inner_product=inner_product, unit=unit)
    nearest = _Nearest(new, inner_product)
    lists = np.empty(total, dtype=np.int32)
    at = n_moved = 0
    for list_id, own in rows():
        found = nearest(own)
        lists[at : at + len(own)] = found
        n_moved += int((parent[found] != list_id).sum())
        at += len(own)
    assert at == len(lists), "rows differ from their sizes"
    return Shape(
        centroids=new,
        parents=parent,
        lists=lists,
        n_split=int((parts > 1).sum()),
        n_dissolved=int(short.sum()),
        n_moved=n_moved,
    )


def _parts(
    sizes: I64, short: npt.NDArray[np.bool_], grown: npt.NDArray[np.bool_], mean: float, thresholds: Thresholds
) -> I64:
    """How many lists are made of each, (nlist,) int64; 0: it is dissolved, 1: it stays."""
    parts: I64 = np.where(short, 0, 1)
    long = (sizes > thresholds.split * mean) & grown | (sizes > thresholds.split_always * mean)
    usual = np.maximum(np.rint(sizes / mean).astype(np.int64), 2)
    parts[long & ~short] = usual[long & ~short]
    missing = round(int(sizes.sum()) / mean) - int(parts.sum())
    others = np.flatnonzero((parts == 1) & (sizes > 1.5 * mean))
    for each in others[np.argsort(-sizes[others], kind="stable")].tolist():
        if missing <= 0:
            break
        parts[each] = min(int(usual[each]), 1 + missing)
        missing -= int(parts[each]) - 1
    return parts


def _begin(rows: Rows, centroids: F32, parts: I64, unit: bool, generator: np.random.Generator) -> tuple[F32, I64]:
    """Centroids of the lists that stay and of the parts of others, (m, d), and the list that each comes from."""
    kept = np.flatnonzero(parts)
    made, parents = [centroids[kept]], [kept]
    place = np.full(len(centroids), -1)
    place[kept] = np.arange(len(kept))
    for list_id, own in rows() if (parts > 1).any() else ():
        if parts[list_id] > 1:
            found = _split(own, int(parts[list_id]), unit, generator)
            made[0][place[list_id]] = found[0]
            made.append(found[1:])
            parents.append(np.full(len(found) - 1, list_id))
    return np.concatenate(made), np.concatenate(parents)


def _move(centroids: F32, rows: Rows, step: int, *, inner_product: bool, unit: bool) -> None:
    """Moves centroids to the middle of the rows that are nearest to them, every ``step``-th of which is looked at."""
    nearest = _Nearest(centroids, inner_product)
    sums, counts = np.zeros(centroids.shape, dtype=np.float64), np.zeros(len(centroids), dtype=np.int64)
    at = 0
    for _, own in rows():
        sample = np.ascontiguousarray(own[-at % step :: step])
        at += len(own)
        if len(sample):
            _add(sums, counts, sample, nearest(sample))
    there = counts > 0
    means = sums[there] / counts[there, None]
    if unit:
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-30)
    centroids[there] = means.astype(np.float32)


class _Nearest:
    """Finds the nearest centroid of rows, on the calling thread alone: other cores may be somebody else's."""

    def __init__(self, centroids: F32, inner_product: bool) -> None:
        """``centroids``: as they are now; what becomes of them changes nothing."""
        self._centroids, self._inner_product = centroids.copy(), inner_product
        self._native = None if native is None else native.CoarseQuantizer(self._centroids, inner_product, "")

    def __call__(self, rows: F32) -> I64:
        """(n, d) float32 -> (n,) int64."""
        if self._native is None or not len(rows):
            return _assign(rows, self._centroids, self._inner_product)
        lists, distances = np.empty((len(rows), 1), np.int64), np.empty((len(rows), 1), np.float32)
        self._native.quantize(np.ascontiguousarray(rows), lists, distances, None)
        # What is no number is near nothing.
        return np.maximum(lists[:, 0], 0)


def _split(rows: F32, n: int, unit: bool, generator: np.random.Generator) -> F32:
    """(n, d) centroids of groups of rows: k-means, a group that is empty taken from the largest."""
    sample = rows
    if len(rows) > n * _SPLIT_ROWS:
        sample = rows[generator.choice(len(rows), n * _SPLIT_ROWS, replace=False)]
    found: F32 = sample[generator.choice(len(sample), n, replace=False)].copy()
    for _ in range(_SPLIT_ROUNDS):
        nearest = _Nearest(found, unit)
        group = nearest(sample)
        counts = np.bincount(group, minlength=n)
        for empty in np.flatnonzero(counts == 0).tolist():
            members = np.flatnonzero(group == np.argmax(counts))
            group[members[generator.integers(len(members))]] = empty
            counts = np.bincount(group, minlength=n)
        sums, counts = np.zeros(found.shape, dtype=np.float64), np.zeros(n, dtype=np.int64)
        _add(sums, counts, sample, group)
        found = (sums / counts[:, None]).astype(np.float32)
        if unit:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-30)
    return found


def _assign(rows: F32, centroids: F32, inner_product: bool) -> I64:
    """The nearest of few centroids of each row: (n,) int64."""
    score = rows @ centroids.T
    if not inner_product:
        score -= 0.5 * np.einsum("ij,ij->i", centroids, centroids)
    best: I64 = np.argmax(score, axis=1)
    return best


def _add(sums: npt.NDArray[np.float64], counts: I64, rows: F32, lists: I64) -> None:
    order = np.argsort(lists, kind="stable")
    touched, starts = np.unique(lists[order], return_index=True)
    sums[touched] += np.add.reduceat(rows[order], starts, axis=0, dtype=np.float64) if len(rows) else 0
    counts[touched] += np.diff(np.append(starts, len(rows)))
