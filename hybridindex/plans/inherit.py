"""Profiles of an index that was compacted: those of the generation before, with its lists' heirs. Latencies are of
bytes and stay true; the parts of a list that was split are each as hot as it was, and a query that probed it probes its
parts, and as many lists fewer at the end.

What is inherited says so, and how much of the index is newer than what was measured.
"""

from __future__ import annotations

import datetime
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from hybridindex.errors import ProfileError, StoreError
from hybridindex.index.ivf import IVFIndex
from hybridindex.plans.precision import precision_of, views_of
from hybridindex.store.control import ControlStore
from hybridindex.types import F32, F64, I32, I64, AccessSample, Profile

__all__ = ["inherit_profiles", "inherited", "parents_of", "share_newer", "try_to_inherit"]

_log = logging.getLogger(__name__)


def inherit_profiles(ivf: IVFIndex, store: ControlStore) -> list[int]:
    """Stores profiles for an index that was compacted from one that has some: the newest of each machine that has not
    measured the index itself; their ids.

    Raises:
        StoreError: the control store cannot be read or written.
    """
    before = ivf.manifest.notes.get("compacted")
    if not isinstance(before, str):
        return []
    made = []
    for view in views_of(ivf):
        measured = {each.hardware_fingerprint for each in store.list_profiles(index_fingerprint=view.fingerprint)}
        if precision_of(view) == "rows":
            found = store.list_profiles(index_fingerprint=before)
        else:
            bits = None if ivf.rabitq is None else ivf.rabitq.spec.bits
            found = [each for each in store.list_profiles(codes_of=before) if each.codec == f"rabitq{bits}"]
        # Of each machine; they come oldest first.
        newest = {each.hardware_fingerprint: each for each in found if each.hardware_fingerprint not in measured}
        for each in sorted(newest.values(), key=lambda one: one.id):
            saved = store.save_profile(inherited(store.load_profile(each.id), view, parents_of(ivf)))
            assert saved.id is not None
            made.append(saved.id)
            _log.info("profile %d, of generation %d, is heir of profile %d", saved.id, ivf.generation, each.id)
    return made


def try_to_inherit(ivf: IVFIndex, store: ControlStore) -> None:
    """:func:`inherit_profiles`; what goes wrong is said in the log."""
    try:
        inherit_profiles(ivf, store)
    except (StoreError, ProfileError) as error:
        _log.warning("profiles of before the compaction were not taken over: %s", error)


def parents_of(ivf: IVFIndex) -> I64:
    """(nlist,) int64, the list of the generation before that each list comes from."""
    said = ivf.manifest.notes.get("parents")
    return np.arange(ivf.nlist) if said is None else np.array(said, dtype=np.int64)


def inherited(profile: Profile, view: IVFIndex, parents: I64) -> Profile:
    """``profile``, of the generation before, as one of ``view``. Pure.

    Args:
        parents: (nlist,) int64, the list of before that each list comes from.
    """
    access = profile.access
    order = np.argsort(parents, kind="stable")
    n_parts = np.bincount(parents, minlength=profile.nlist)
    parts = _Parts(order, n_parts, np.cumsum(n_parts) - n_parts)
    held, held_candidates = parts.of_probes(access.held_probes, access.held_candidates)
    fit, _ = parts.of_probes(access.fit_probes, None)
    candidates: F64 | None = None
    if access.list_candidates is not None:
        candidates = access.list_candidates[parents] / n_parts[parents]
    changed = int(view.manifest.notes.get("came", 0))
    newer = 1 - (1 - share_newer(profile)) * (1 - changed / max(view.count, 1))
    notes: dict[str, Any] = {
        **profile.notes,
        "inherited": {"from": profile.index_fingerprint, "profile": profile.id, "share_newer": round(newer, 6)},
    }
    if "codes" in notes:
        known = {"row_bytes": int(view.rows.list_bytes.sum())} if "row_bytes" in notes["codes"] else {}
        notes["codes"] = {**notes["codes"], **known, "of": view.rows.fingerprint}
    return replace(
        profile,
        id=None,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        index_fingerprint=view.fingerprint,
        count=view.count,
        nlist=view.nlist,
        nprobe=min(profile.nprobe, view.nlist),
        list_bytes=np.array(view.list_bytes),
        list_sizes=np.array(view.list_sizes),
        access=AccessSample(
            fit_probes=fit,
            held_probes=held,
            list_accesses=access.list_accesses[parents],
            list_candidates=candidates,
            held_candidates=held_candidates,
        ),
        notes=notes,
    )


def share_newer(profile: Profile) -> float:
    """Part of the rows that came since a profile was measured, 0..1."""
    said = profile.notes.get("inherited")
    return float(said["share_newer"]) if isinstance(said, dict) else 0.0


class _Parts:
    """What became of each list."""

    def __init__(self, order: I64, counts: I64, starts: I64) -> None:
        self._order, self._counts, self._starts = order, counts, starts

    def of_probes(self, probes: I32, candidates: F32 | None) -> tuple[I32, F32 | None]:
        """Probes (n, p) of the parts, in the place of the lists, as many as there is room for; and their candidates,
        those of a list shared by its parts."""
        counts = np.where(probes >= 0, self._counts[probes], 0)
        before = np.cumsum(counts, axis=1) - counts
        new = np.full(probes.shape, -1, dtype=np.int32)
        shared = None if candidates is None else np.zeros(probes.shape, dtype=np.float32)
        for part in range(int(counts.max(initial=0))):
            row, at = np.nonzero((counts > part) & (before + part < probes.shape[1]))
            lists = probes[row, at]
            to = before[row, at] + part
            new[row, to] = self._order[self._starts[lists] + part]
            if shared is not None and candidates is not None:
                shared[row, to] = candidates[row, at] / counts[row, at]
        return new, shared
