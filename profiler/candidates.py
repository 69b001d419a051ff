"""In which lists the candidates of searches by codes lie: the exact distances that rows on a device would take over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.types import F32, F64, I32, I64, AccessSample

if TYPE_CHECKING:
    from hybridindex.profiler.searching import Searching

__all__ = ["carry_candidates", "count_candidates", "counts_by_probe"]

_CHUNK_QUERIES = 64


def count_candidates(
    searching: Searching,
    access: AccessSample,
    queries: tuple[F32, F32],
    k: int,
    *,
    max_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[AccessSample, int]:
    """``access`` with the candidates of its queries, (fit, held), transformed; and how many queries were scanned.

    Scans as many as the time allows, 64 of each half at least. The others are taken to have as many in a list as those
    that were scanned.
    """
    halves = access.fit_probes, access.held_probes
    counted = [np.zeros(probes.shape, dtype=np.float32) for probes in halves]
    done, started = [0, 0], clock()
    kept = searching.kept(k, halves[0].shape[1])
    while any(n < len(half) for n, half in zip(done, halves, strict=True)):
        for which, probes in enumerate(halves):
            part = slice(done[which], done[which] + _CHUNK_QUERIES)
            chunk, mine = queries[which][part], probes[part].astype(np.int64)
            if len(chunk):
                _, found = searching.scanner.scan(chunk, mine, searching.coarse_of(chunk, mine), kept)
                counted[which][part] = counts_by_probe(mine, found)
            done[which] += len(chunk)
        if clock() - started >= max_seconds:
            break
    nlist = access.list_accesses.size
    seen = np.concatenate([half[:n] for half, n in zip(halves, done, strict=True)])
    had = np.concatenate([counts[:n] for counts, n in zip(counted, done, strict=True)])
    each = _each(_sums(seen, np.ones_like(had), nlist), _sums(seen, had, nlist))
    total = float(had.sum(axis=1).mean())
    for probes, counts, n in zip(halves, counted, done, strict=True):
        counts[n:] = _expected(probes[n:], each, total)
    fresh = _each(_sums(halves[0], np.ones_like(counted[0]), nlist), _sums(halves[0], counted[0], nlist))
    # As the accesses, which may have a history.
    sample = replace(access, list_candidates=access.list_accesses * fresh, held_candidates=counted[1])
    return sample, sum(done)


def carry_candidates(access: AccessSample, before: AccessSample) -> AccessSample:
    """``access``, of other queries, with the candidates that those of ``before`` had on average in each list."""
    if before.list_candidates is None or before.held_candidates is None:
        return access
    each = _each(before.list_accesses, before.list_candidates)
    total = float(before.held_candidates.sum(axis=1).mean())
    return replace(
        access,
        list_candidates=access.list_accesses * each,
        held_candidates=_expected(access.held_probes, each, total),
    )


def counts_by_probe(probes: I64, positions: I64) -> F32:
    """Of positions (n, r) int64, -1 = none, how many lie in each of the lists (n, p) int64, -1 = none: (n, p)."""
    n = len(probes)
    # A list that is no query's stands for "none".
    width = int(probes.max(initial=0)) + 2
    row = np.arange(n)[:, None] * width
    wanted = (row + np.where(probes >= 0, probes, width - 1)).ravel()
    order = np.argsort(wanted, kind="stable")
    had = (row + (positions >> POSITION_BITS))[positions >= 0]
    places = np.searchsorted(wanted[order], had)
    counts = np.zeros(wanted.size, dtype=np.float32)
    counts[order] = np.bincount(places, minlength=wanted.size)
    return counts.reshape(probes.shape)


def _sums(probes: I32, weights: F32, nlist: int) -> F64:
    there = probes >= 0
    return np.bincount(probes[there], weights=weights[there], minlength=nlist).astype(np.float64)


def _each(accesses: F64, candidates: F64) -> F64:
    """Candidates per access; 0 where there is none."""
    return np.divide(candidates, accesses, out=np.zeros(accesses.size), where=accesses > 0)


def _expected(probes: I32, each: F64, total: float) -> F32:
    """``each`` of the lists that queries probe, (n, p), so that every query has ``total`` candidates."""
    told = np.where(probes >= 0, each[probes], 0.0)
    sums = told.sum(axis=1, keepdims=True)
    return (told * (total / np.where(sums > 0, sums, 1.0))).astype(np.float32)
