"""Renews a profile's accesses from recent queries; its timings stay, because the machine and the lists did.

Cross-validation within the half that orders the lists makes two choices. First, the weight of earlier counts: after a
shift of the load they mislead, otherwise they help. Second, whether *near misses*, the lists just beyond nprobe, count
in part: similar queries will probe them, so a few hundred queries order the lists as well as twice as many would,
except where the same queries come again and again. (A kernel density estimate over the coarse quantizer's ranks.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hybridindex.errors import ProfileError
from hybridindex.profiler.access import Quantizer, access_counts, hot_order, sample_access, smooth, split_halves
from hybridindex.profiler.candidates import carry_candidates
from hybridindex.types import F32, F64, I32, I64, Profile

__all__ = ["DECAYS", "Counting", "choose_counting", "near_counts", "renew_profile"]

#: Weights of earlier counts that are tried; ten times as many earlier queries count as much at 0.1.
DECAYS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
#: Near misses are the ranks up to so many times nprobe.
_NEAR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """How earlier and recent queries are counted together."""

    #: Weight of what was counted before, 0..1.
    decay: float
    #: Whether near misses count in part.
    near: bool


def near_counts(ranked: I32, nprobe: int, nlist: int) -> F64:
    """(n, w) lists in coarse order, -1 = none -> (nlist,) float64 accesses in which near misses count in part.

    A list of rank r counts 1 / (1 + exp(4 (r - nprobe) / nprobe)), half at the border: as much in all, over 2 nprobe
    ranks, as probes alone.
    """
    rank = np.arange(ranked.shape[1]) + 0.5
    weight = np.broadcast_to(1.0 / (1.0 + np.exp(4.0 * (rank - nprobe) / nprobe)), ranked.shape)
    there = ranked >= 0
    return np.bincount(ranked[there], weights=weight[there], minlength=nlist).astype(np.float64)


def choose_counting(
    previous: F64,
    ranked: I32,
    nprobe: int,
    list_bytes: I64,
    n_hot: int,
    *,
    decays: Sequence[float] = DECAYS,
    seed: int = 0,
) -> Counting:
    """The counting whose ``n_hot`` hottest lists take the most work of unseen queries.

    Two folds of ``ranked`` (m, w >= nprobe) int32, lists in coarse order, each ordered by the other: held-back queries
    take no part. Of equal ones probes alone are taken, and then the larger decay: more counts scatter less.

    Args:
        previous: (nlist,) float64, what was counted before.
        decays: those that are tried.
    """
    nlist = len(list_bytes)
    folds = [ranked[rows] for rows in split_halves(len(ranked), seed)]
    probed = [access_counts(fold[:, :nprobe], nlist) for fold in folds]
    softened = [near_counts(fold, nprobe, nlist) for fold in folds]
    best, most = Counting(decay=max(decays), near=False), -1.0
    for near, counts in ((False, probed), (True, softened)):
        for decay in sorted(decays, reverse=True):
            caught = 0.0
            for seen, unseen in zip(counts, reversed(probed), strict=True):
                # Half the queries are seen here; the same ratio of old to new as in the end.
                hot = hot_order(smooth(previous, 2 * seen, decay=decay))[:n_hot]
                caught += float((unseen * list_bytes)[hot].sum())
            if caught > most:
                best, most = Counting(decay=decay, near=near), caught
    return best


def renew_profile(
    profile: Profile,
    index: Quantizer,
    queries: F32,
    *,
    n_hot: int,
    decay: float | None = None,
    seed: int = 0,
    min_queries: int = 64,
    notes: Mapping[str, Any] | None = None,
) -> Profile:
    """``profile`` with the accesses of ``queries`` (n, dim) float32, checked, not transformed, at its nprobe.

    Its accesses so far are smoothed in. The notes say whose child it is, from how many queries, and how they counted.

    Args:
        n_hot: number of lists that devices hold: where a choice of hot lists matters.
        decay: weight of what was counted before, 0..1; None: chosen by :func:`choose_counting`.
        seed: of the split into halves.
        min_queries: fewer are refused.
        notes: facts to keep beside them.

    Raises:
        ProfileError: too few queries.
        ProfileMismatchError: ``profile`` is of another index.
    """
    if len(queries) < min_queries:
        raise ProfileError(f"{len(queries)} recent queries are known; at least {min_queries} are needed")
    transformed, nprobe = index.transform(queries), profile.nprobe
    fit, held = split_halves(len(transformed), seed)
    access = sample_access(index, transformed[fit], transformed[held], nprobe, history=profile, decay=0.0)
    ranked = index.quantize(transformed[fit], min(_NEAR * nprobe, index.nlist))[0].astype(np.int32)
    previous = profile.access.list_accesses
    decays = DECAYS if decay is None else (decay,)
    chosen = choose_counting(previous, ranked, nprobe, profile.list_bytes, max(n_hot, 1), decays=decays, seed=seed)
    fresh = near_counts(ranked, nprobe, index.nlist) if chosen.near else access.list_accesses
    renewed = {
        "parent": profile.id,
        "parent_created_at": profile.created_at,
        "queries": {"given": len(queries), "fit": len(fit), "held": len(held)},
        "decay": chosen.decay,
        "decay_chosen": decay is None,
        "near": chosen.near,
        **(notes or {}),
    }
    access = replace(access, list_accesses=smooth(previous, fresh, decay=chosen.decay))
    return replace(
        profile,
        id=None,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        access=carry_candidates(access, profile.access),
        # What was inherited is measured anew.
        notes={**{name: said for name, said in profile.notes.items() if name != "inherited"}, "renewed": renewed},
    )
