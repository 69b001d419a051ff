"""Which lists calibration queries probe: sampling, smoothing over time, and figures about skew for people.

The hot order comes from one half of the queries, every estimate from the other. Hit-rate models are
the partitioner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

import numpy as np

from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.types import F32, F64, I32, I64, AccessSample, Profile

__all__ = [
    "DEFAULT_DECAY",
    "Quantizer",
    "SampleSizeRow",
    "SkewRow",
    "access_counts",
    "hot_order",
    "sample_access",
    "sample_size_error",
    "skew_summary",
    "smooth",
    "split_halves",
]

#: Weight of what earlier profiles counted. Not small: the last day alone predicts worse than all days.
DEFAULT_DECAY = 0.5
_CHUNK_QUERIES = 1024


class Quantizer(Protocol):
    """Maps queries to lists: an open index, or its coarse model alone."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def nlist(self) -> int: ...

    def transform(self, queries: F32) -> F32:
        """(n, dim) float32 -> (n, scan_dim) float32."""

    def quantize(self, transformed: F32, nprobe: int) -> tuple[I64, F32]:
        """(n, scan_dim) float32 -> lists (n, nprobe) int64, -1 = none, and distances float32."""


class SkewRow(TypedDict):
    """Share of accesses (probes) and of work (code bytes scanned) that falls on the hottest lists."""

    #: Fraction of lists.
    lists: float
    #: Fraction of the index's code bytes that these lists hold.
    bytes: float
    #: On the queries that chose the order: too optimistic.
    accesses_fit: float
    work_fit: float
    #: On the other half of the queries.
    accesses_held: float
    work_held: float


class SampleSizeRow(TypedDict):
    """Error of a smaller calibration sample: the median over random samples of the worst coverage."""

    #: Fraction of the calibration queries.
    fraction: float
    n_queries: int
    #: Hit rate lost by choosing the hot lists from the sample instead of from all of the fit half.
    order_loss: float
    #: |coverage curve as the sample estimates it - the same hot lists on all held-out queries|.
    curve_error: float


def split_halves(n: int, seed: int) -> tuple[I64, I64]:
    """Row numbers of the fit and of the held half, both in random order."""
    shuffled = np.random.default_rng(seed).permutation(n)
    return shuffled[: n // 2], shuffled[n // 2 :]


def access_counts(probes: I32, nlist: int) -> F64:
    """(n, p) probes, -1 = none -> (nlist,) float64 accesses."""
    return np.bincount(probes[probes >= 0], minlength=nlist).astype(np.float64)


def hot_order(list_accesses: F64) -> I64:
    """(nlist,) int64 list ids, most accesses first, ties by id; the order that plans use."""
    return np.argsort(-list_accesses, kind="stable")


def smooth(previous: F64, fresh: F64, *, decay: float = DEFAULT_DECAY, scale: float = 1.0) -> F64:
    """Counts cumulated over profiles: ``fresh + decay * scale * previous``, each (nlist,) float64.

    ``previous`` may itself be smoothed: a profile that lies n profiles back weighs decay^n. ``scale`` makes counts at
    different nprobe comparable. A larger sample weighs more.

    Raises:
        InvalidInputError: ``decay`` outside 0..1, ``scale`` not positive, or different numbers of lists.
    """
    if not 0.0 <= decay <= 1.0:
        raise InvalidInputError(f"decay is {decay}; expected 0 (forget) to 1 (never forget)")
    if not scale > 0.0:
        raise InvalidInputError(f"scale is {scale}; expected a positive factor")
    if previous.shape != fresh.shape:
        raise InvalidInputError(f"previous counts are of {previous.size} lists, fresh ones of {fresh.size}")
    return fresh + decay * scale * previous


def sample_access(
    index: Quantizer,
    fit_queries: F32,
    held_queries: F32,
    nprobe: int,
    *,
    history: Profile | None = None,
    decay: float = DEFAULT_DECAY,
    progress: Callable[[int, int], None] | None = None,
) -> AccessSample:
    """Quantizes both halves of the transformed queries (m, scan_dim).

    Raises:
        ProfileMismatchError: ``history`` is of another index.
    """
    if history is not None and history.index_fingerprint != index.fingerprint:
        raise ProfileMismatchError(
            f"history was measured on index {history.index_fingerprint}, this is index {index.fingerprint}; "
            "give an earlier profile of this index, or none"
        )
    total = len(fit_queries) + len(held_queries)
    probes = np.empty((total, nprobe), dtype=np.int32)
    done = 0
    for half in (fit_queries, held_queries):
        for start in range(0, len(half), _CHUNK_QUERIES):
            part = half[start : start + _CHUNK_QUERIES]
            probes[done : done + len(part)] = index.quantize(part, nprobe)[0]
            done += len(part)
            if progress is not None:
                progress(done, total)
    fit, held = probes[: len(fit_queries)], probes[len(fit_queries) :]
    accesses = access_counts(fit, index.nlist)
    if history is not None:
        scale = nprobe / history.nprobe
        accesses = smooth(history.access.list_accesses, accesses, decay=decay, scale=scale)
    return AccessSample(fit_probes=fit, held_probes=held, list_accesses=accesses)


def skew_summary(profile: Profile, fractions: Sequence[float] = (0.05, 0.1, 0.2, 0.5)) -> list[SkewRow]:
    """Shares of the hottest lists: of accesses as in the paper (Fig. 5), and of bytes, which is the work."""
    access, nlist, list_bytes = profile.access, profile.nlist, profile.list_bytes
    order = hot_order(access.list_accesses)
    fit, held = access_counts(access.fit_probes, nlist), access_counts(access.held_probes, nlist)
    rows = []
    for fraction in fractions:
        hot = order[: max(1, round(fraction * nlist))]
        rows.append(
            SkewRow(
                lists=fraction,
                bytes=_share(list_bytes.astype(np.float64), hot),
                accesses_fit=_share(fit, hot),
                work_fit=_share(fit * list_bytes, hot),
                accesses_held=_share(held, hot),
                work_held=_share(held * list_bytes, hot),
            )
        )
    return rows


def sample_size_error(
    access: AccessSample,
    list_bytes: I64,
    fractions: Sequence[float] = (0.005, 0.02, 0.1, 0.5),
    *,
    coverages: Sequence[float] = (0.05, 0.1, 0.2, 0.4, 0.6),
    draws: int = 8,
    seed: int = 0,
) -> list[SampleSizeRow]:
    """Error of the coverage curve (share of scanned bytes on the hottest lists) against the calibration sample's size.

    As in a profile, half of a sample orders the lists and half estimates the curve.
    The paper finds 0.5 % of the queries enough. Samples have four queries at least; ``n_queries`` says how many.
    """
    nlist = len(list_bytes)
    rng = np.random.default_rng(seed)
    n_all = len(access.fit_probes) + len(access.held_probes)
    counts = [max(1, round(c * nlist)) for c in coverages]
    truth = access_counts(access.held_probes, nlist) * list_bytes
    best = _curve(truth, hot_order(access_counts(access.fit_probes, nlist)), counts)
    rows = []
    for fraction in fractions:
        half = min(max(2, round(fraction * n_all / 2)), len(access.fit_probes), len(access.held_probes))
        losses, errors = [], []
        for _ in range(draws):
            fit = access.fit_probes[rng.choice(len(access.fit_probes), half, replace=False)]
            held = access.held_probes[rng.choice(len(access.held_probes), half, replace=False)]
            order = hot_order(access_counts(fit, nlist))
            real = _curve(truth, order, counts)
            losses.append(float((best - real).max()))
            errors.append(float(np.abs(_curve(access_counts(held, nlist) * list_bytes, order, counts) - real).max()))
        rows.append(
            SampleSizeRow(
                fraction=fraction,
                n_queries=2 * half,
                order_loss=max(0.0, float(np.median(losses))),
                curve_error=float(np.median(errors)),
            )
        )
    return rows


def _share(weights: F64, chosen: I64) -> float:
    total = float(weights.sum())
    return float(weights[chosen].sum()) / total if total > 0 else 0.0


def _curve(weights: F64, order: I64, counts: Sequence[int]) -> F64:
    total = max(float(weights.sum()), 1e-300)
    return np.asarray(np.cumsum(weights[order])[np.asarray(counts) - 1] / total, dtype=np.float64)
