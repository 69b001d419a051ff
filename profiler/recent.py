"""Renews a profile's accesses from recent queries; its timings stay, because the machine and the lists did.

What earlier queries counted is added with a weight that cross-validation chooses: after a shift of the load old counts
mislead, without one they help, and yesterday alone predicts worse than all days.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hybridindex.errors import ProfileError
from hybridindex.profiler.access import Quantizer, access_counts, hot_order, sample_access, smooth, split_halves
from hybridindex.types import F32, F64, I32, I64, Profile

__all__ = ["DECAYS", "choose_decay", "renew_profile"]

#: Weights of the past that are tried, per query: a past of ten times as many queries counts as much at 0.1.
DECAYS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)


def choose_decay(previous: F64, fit_probes: I32, list_bytes: I64, n_hot: int, seed: int = 0) -> float:
    """The weight of ``previous`` (nlist,) whose ``n_hot`` hottest lists take the most work of unseen queries.

    Two folds of ``fit_probes`` (m, nprobe), each ordered by the other: held-back queries take no part. Of equal weights
    the larger is taken: more counts scatter less.
    """
    nlist = len(list_bytes)
    folds = [fit_probes[rows] for rows in split_halves(len(fit_probes), seed)]
    counts = [access_counts(fold, nlist) for fold in folds]
    caught = np.zeros(len(DECAYS))
    for number, decay in enumerate(DECAYS):
        for seen, unseen in (counts, counts[::-1]):
            # Half the queries are seen here; the same ratio of old to new as in the end.
            hot = hot_order(smooth(previous, 2 * seen, decay=decay))[:n_hot]
            caught[number] += (unseen * list_bytes)[hot].sum()
    return DECAYS[len(DECAYS) - 1 - int(np.argmax(caught[::-1]))]


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

    Its accesses so far are smoothed in. The notes say whose child it is, from how many queries, and with what weight.

    Args:
        n_hot: number of lists that devices hold: where a choice of hot lists matters.
        decay: weight of what was counted before, 0..1; None: chosen by :func:`choose_decay`.
        seed: of the split into halves.
        min_queries: fewer are refused.
        notes: facts to keep beside them.

    Raises:
        ProfileError: too few queries.
        ProfileMismatchError: ``profile`` is of another index.
    """
    if len(queries) < min_queries:
        raise ProfileError(f"{len(queries)} recent queries are known; at least {min_queries} are needed")
    transformed = index.transform(queries)
    fit, held = split_halves(len(transformed), seed)
    access = sample_access(index, transformed[fit], transformed[held], profile.nprobe, history=profile, decay=0.0)
    previous = profile.access.list_accesses
    weight = decay
    if weight is None:
        weight = choose_decay(previous, access.fit_probes, profile.list_bytes, max(n_hot, 1), seed)
    renewed = {
        "parent": profile.id,
        "parent_created_at": profile.created_at,
        "queries": {"given": len(queries), "fit": len(fit), "held": len(held)},
        "decay": weight,
        "decay_chosen": decay is None,
        **(notes or {}),
    }
    return replace(
        profile,
        id=None,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        access=replace(access, list_accesses=smooth(previous, access.list_accesses, decay=weight)),
        notes={**profile.notes, "renewed": renewed},
    )
