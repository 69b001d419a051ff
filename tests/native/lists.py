"""Inverted lists in memory, as the native scanner reads them, and what a scan of them has to answer in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridindex import _native
from hybridindex.types import F32, I64, U8

CODES = ("f32", "f16", "bf16", "sq8")
_CODE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "sq8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """Lists of random sizes; ``rows`` (n, dim) float32 are the decoded vectors of all of them, in order."""

    data: U8
    extents: I64
    code: str
    scale: F32
    offset: F32
    centroids: F32
    rows: F32
    ids: I64

    @property
    def dim(self) -> int:
        return int(self.rows.shape[1])

    @property
    def code_size(self) -> int:
        """Bytes of one row."""
        return self.dim * _CODE_BYTES[self.code]

    @property
    def starts(self) -> I64:
        """(nlist + 1,): where the rows of each list begin."""
        return np.concatenate([[0], np.cumsum(self.extents[:, 0])])

    def scanner(self, metric: str, kernels: str = "", kind: str = "ListScanner", **changes: Any) -> Any:
        """A ListScanner over these lists."""
        arguments = {
            "data": self.data,
            "extents": self.extents,
            "code": self.code,
            "dim": self.dim,
            "scale": self.scale,
            "offset": self.offset,
            "centroids": self.centroids,
            "keep_max": metric == "ip",
            "kernels": kernels,
        }
        native: Any = _native
        return getattr(native, kind)(**(arguments | changes))

    def reranker(self, metric: str) -> Any:
        """A RowReranker of their rows."""
        return self.scanner(metric, kind="RowReranker")


def _encode(values: F32, code: str, scale: F32, offset: F32) -> tuple[U8, F32]:
    """Codes (n, bytes) of ``values`` (n, dim), and what they decode to."""
    if code == "f32":
        return values.view(np.uint8), values
    if code == "f16":
        halves = values.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    if code == "bf16":
        bits = values.view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8), (bits << 16).view(np.float32)
    codes = np.clip(np.rint((values - offset) / scale), 0, 255).astype(np.uint8)
    return codes, offset + scale * codes.astype(np.float32)


def make_lists(
    rng: np.random.Generator,
    sizes: list[int],
    dim: int,
    code: str,
    *,
    exact: bool = False,
    residual: bool = False,
    centre: float = 0.0,
    duplicates: float = 0.0,
) -> Lists:
    """Random lists with spare rows and holes full of 0xff between them.

    Args:
        exact: small whole numbers, whose distances are exact in float32 in any order of summation.
        centre: added to every number.
        duplicates: the share of rows that are copies of another.
    """
    n = sum(sizes)
    drawn = rng.integers(-6, 7, (n, dim)) if exact else rng.standard_normal((n, dim))
    values: F32 = (drawn + centre).astype(np.float32)
    if n and duplicates:
        copies = rng.random(n) < duplicates
        values[copies] = values[rng.integers(0, n, int(copies.sum()))]
    scale = offset = np.empty(0, np.float32)
    if code == "sq8":
        low = values.min(axis=0, initial=centre - 1)
        spread = values.max(axis=0, initial=centre + 1) - low
        scale = np.ones(dim, np.float32) if exact else (spread / 255).astype(np.float32)
        offset = np.floor(low).astype(np.float32) if exact else low.astype(np.float32)
    codes, rows = _encode(np.ascontiguousarray(values), code, scale, offset)
    centroids = np.zeros((len(sizes) if residual else 0, dim), np.float32)
    if residual:
        centroids[:] = rng.integers(-2, 3, centroids.shape) if exact else rng.standard_normal(centroids.shape)
        rows = rows + np.repeat(centroids, sizes, axis=0)
    code_size = dim * _CODE_BYTES[code]
    ids = rng.choice(10 * n + 1, n, replace=False).astype(np.int64)
    order = rng.permutation(len(sizes))
    extents = np.zeros((len(sizes), 3), np.int64)
    end = 0
    for i in order:
        capacity = -(-(sizes[i] + int(rng.integers(0, 9))) // 8) * 8
        end += 8 * int(rng.integers(0, 4))
        extents[i] = sizes[i], capacity, end
        end += capacity * (code_size + 8)
    data = np.full(end, 0xFF, np.uint8)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    for (size, capacity, at), first in zip(extents, starts, strict=False):
        data[at : at + size * code_size] = codes[first : first + size].ravel()
        at += capacity * code_size
        data[at : at + size * 8] = ids[first : first + size].view(np.uint8)
    return Lists(
        data=data, extents=extents, code=code, scale=scale, offset=offset, centroids=centroids, rows=rows, ids=ids
    )


def with_ids(lists: Lists, ids: I64) -> Lists:
    """The same rows under other ids."""
    data = lists.data.copy()
    for (size, capacity, at), first in zip(lists.extents, lists.starts, strict=False):
        at += capacity * lists.code_size
        data[at : at + size * 8] = ids[first : first + size].view(np.uint8)
    return replace(lists, data=data, ids=ids)


def make_queries(rng: np.random.Generator, n: int, dim: int, *, exact: bool = False, centre: float = 0.0) -> F32:
    """(n, dim) float32."""
    values = rng.integers(-5, 6, (n, dim)) if exact else rng.standard_normal((n, dim))
    return np.ascontiguousarray(values + centre, dtype=np.float32)


def make_probes(rng: np.random.Generator, n: int, p: int, nlist: int) -> I64:
    """(n, p): different lists, some of them -1."""
    probes = rng.random((n, nlist)).argsort(axis=1)[:, :p].astype(np.int64)
    probes[rng.random(probes.shape) < 0.2] = -1
    return np.ascontiguousarray(probes)


def scan(scanner: Any, queries: F32, probes: I64, k: int, pool: Any, **options: Any) -> tuple[F32, I64]:
    """(distances, ids) of one scan, into arrays full of rubbish."""
    distances = np.full((len(queries), k), np.nan, np.float32)
    ids = np.full((len(queries), k), -7, np.int64)
    scanner.scan(queries, probes, distances, ids, pool, **options)
    return distances, ids


def candidates(lists: Lists, metric: str, query: F32, probed: I64, allowed: I64 | None) -> tuple[I64, np.ndarray]:
    """Ids and float64 distances of all rows that may be answered."""
    starts = lists.starts
    at = [np.arange(starts[i], starts[i + 1]) for i in probed if i >= 0]
    picked = np.concatenate([np.empty(0, int), *at])
    if allowed is not None:
        picked = picked[np.isin(lists.ids[picked], allowed)]
    rows, x = lists.rows[picked].astype(np.float64), query.astype(np.float64)
    return lists.ids[picked], rows @ x if metric == "ip" else ((rows - x) ** 2).sum(axis=1)


def check(
    lists: Lists,
    metric: str,
    queries: F32,
    probes: I64,
    answer: tuple[F32, I64],
    *,
    allowed: I64 | None = None,
    exact: bool = False,
    tolerance: float = 2e-5,
) -> None:
    """Asserts that ``answer`` is right; to the bit where distances are ``exact``, ties by id included.

    ``tolerance`` is relative to what is summed, |q| |x| or (|q| + |x|)^2: large numbers may cancel.
    """
    sign = -1.0 if metric == "ip" else 1.0
    largest = np.linalg.norm(lists.rows.astype(np.float64), axis=1).max(initial=0)
    for query, probed, distances, ids in zip(queries, probes, *answer, strict=True):
        all_ids, own = candidates(lists, metric, query, probed, allowed)
        own = sign * own
        order = np.lexsort((all_ids, own))[: len(ids)]
        n = len(order)
        assert (ids[n:] == -1).all()
        assert (sign * distances[n:] == np.inf).all()
        if exact:
            np.testing.assert_array_equal(ids[:n], all_ids[order])
            np.testing.assert_array_equal(sign * distances[:n], own[order])
            continue
        found = sign * distances[:n].astype(np.float64)
        norm = np.linalg.norm(query.astype(np.float64))
        near = tolerance * (norm * largest if metric == "ip" else (norm + largest) ** 2)
        position = {int(i): at for at, i in enumerate(all_ids)}
        np.testing.assert_allclose(found, own[[position[int(i)] for i in ids[:n]]], rtol=0, atol=near)
        np.testing.assert_allclose(found, own[order], rtol=0, atol=near)
        assert len(set(ids[:n].tolist())) == n
        step = np.diff(found)
        assert (step >= 0).all()
        assert (np.diff(ids[:n])[step == 0] > 0).all()
