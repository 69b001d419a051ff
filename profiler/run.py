"""Profiles an index: runs the stages of a request in order and puts the numbers together. Stores no profile.

Stages: ``recall`` (quality against nprobe), ``access``, ``host``, one per device. Each is kept in the checkpoint when
it is done, where one is wanted. The profile's notes say which stages an interrupted attempt measured, when, and at what
load.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hybridindex.errors import DeviceError, DeviceNotFoundError, InvalidInputError, ProfileMismatchError
from hybridindex.index.ivf import IVFIndex
from hybridindex.profiler.access import hot_order, sample_access, split_halves
from hybridindex.profiler.candidates import count_candidates
from hybridindex.profiler.checkpoint import Checkpoint
from hybridindex.profiler.device import time_device
from hybridindex.profiler.hardware import hardware_info, load_average, measurement_warnings, omp_wait_policy
from hybridindex.profiler.host import host_threads, time_host, time_row_faults
from hybridindex.profiler.recall import (
    MIN_QUERIES,
    Reference,
    recall_at,
    recall_by_codes,
    recall_grid,
    recommend_nprobe,
    search_exhaustively,
)
from hybridindex.profiler.request import MAX_QUERIES, ProfileRequest
from hybridindex.profiler.searching import Searching, open_reference, open_searching
from hybridindex.tiers.contract.devices import resolve_device
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.serving import tier_of
from hybridindex.types import F32, AccessSample, Profile, RecallPoint, StageSample, TransferSample

__all__ = ["Progress", "profile_index"]

_log = logging.getLogger(__name__)

#: progress(stage, done, total)
Progress = Callable[[str, int, int], None]

#: Shares of ``max_seconds``, in proportion among the stages that take place.
_RECALL_SHARE, _HOST_SHARE, _DEVICE_SHARE, _CANDIDATES_SHARE, _FAULTS_SHARE = 1.0, 3.0, 1.5, 0.5, 1.0


def profile_index(
    index: IVFIndex,
    queries: Any,
    request: ProfileRequest | None = None,
    *,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
) -> Profile:
    """Measures recall against nprobe, access skew, host latencies and devices, at one nprobe.

    Args:
        index: an open index, or its view by codes: then searches by codes are measured.
        queries: (n, dim) float32 calibration queries as users give them; 64 at least, a few thousand are better.
        request: what to measure; default: at the index's own nprobe, on the host alone.
        progress: see :data:`Progress`.
        checkpoint: a file that keeps finished stages, so that the same call resumes after an interruption. The caller
            removes it once it needs the profile no more.

    Raises:
        ProfileError: too few queries, or a recall that is not reached.
        ProfileMismatchError: the history is of another index.
        InvalidInputError: another argument is wrong.
        DeviceNotFoundError: a device does not exist here.
    """
    raw = index.check_queries(queries)
    if queries.ndim != 2:
        raise InvalidInputError(f"queries has shape {queries.shape}, one query; expected (n, {index.dim}) of many")
    asked = request or ProfileRequest()
    request = asked.for_index(len(raw), index.nlist, index.nprobe)
    history = request.history
    if history is not None and history.index_fingerprint != index.fingerprint:
        raise ProfileMismatchError(
            f"history was measured on index {history.index_fingerprint}, this is index {index.fingerprint}; "
            "give an earlier profile of this index, or none"
        )
    for name in request.devices:
        resolve_device(name)
    hardware, policy, load = hardware_info(), omp_wait_policy(), load_average()
    warnings = measurement_warnings(policy, load, hardware.cores)
    searching = open_searching(index, threads=request.threads, host_scanner=request.host_scanner, rows=request.rows)
    scanner = searching.scanner
    versions = json.dumps(sorted(hardware.versions.items()))
    facts = (index.fingerprint, hardware.fingerprint, scanner.name, str(scanner.threads), policy, versions)
    kept = Checkpoint(checkpoint, request.key(*facts, queries=raw))
    run = _Run(searching, request, raw, kept, progress or _silent)
    with closing(scanner), host_threads(scanner):
        nprobe, recall = run.recall()
        access = run.access(nprobe)
        stages = list(run.host(access))
        transfers: list[TransferSample] = []
        for name in request.devices:
            device_stages, device_transfers = run.device(name, access)
            stages += device_stages
            transfers += device_transfers
        stages += run.row_faults()
    return Profile(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        index_fingerprint=index.fingerprint,
        hardware=hardware,
        metric=index.metric,
        codec=index.codec,
        dim=index.dim,
        count=index.count,
        nlist=index.nlist,
        nprobe=nprobe,
        k=request.k,
        scanner=scanner.name,
        threads=scanner.threads,
        omp_wait_policy=policy,
        load_average=load,
        seed=request.seed,
        list_bytes=index.list_bytes,
        list_sizes=index.list_sizes,
        access=access,
        stages=tuple(stages),
        transfers=tuple(transfers),
        recall=recall,
        notes={
            **request.notes,
            "batches_too_large": [b for b in asked.batches if b not in request.batches],
            **searching.notes(request.k, nprobe),
            **run.notes,
            "resumed": kept.resumed,
            "warnings": [*warnings, *_resumed_words(kept)],
            "load_average_after": load_average(),
        },
    )


def _resumed_words(kept: Checkpoint) -> list[str]:
    """Sentences on stages that an interrupted attempt measured."""
    return [
        f"{stage} was measured at {then['measured_at']} by an interrupted attempt, at a load average of "
        f"{then['load_average']:.1f}"
        for stage, then in kept.resumed.items()
    ]


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


class _Run:
    """The stages of one profile. Each is taken from the checkpoint when it is there."""

    def __init__(
        self,
        searching: Searching,
        request: ProfileRequest,
        raw: F32,
        kept: Checkpoint,
        progress: Progress,
    ) -> None:
        index = searching.index
        self._searching, self._index, self._scanner, self._request = searching, index, searching.scanner, request
        self._on_disk = searching.scanner.on_disk if isinstance(searching.scanner, HostRabitqScanner) else None
        self._kept, self._progress = kept, progress
        fit, held = split_halves(len(raw), request.seed)
        fit, held = fit[: MAX_QUERIES // 2], held[: MAX_QUERIES // 2]
        self._fit, self._held = index.transform(raw[fit]), index.transform(raw[held])
        #: What becomes of the profile's notes.
        self.notes: dict[str, Any] = {
            "queries": {"given": len(raw), "fit": len(fit), "held": len(held)},
            "recall_target": request.recall_target,
        }
        shares = _RECALL_SHARE + _HOST_SHARE + _DEVICE_SHARE * len(request.devices)
        shares += _CANDIDATES_SHARE * searching.by_codes + _FAULTS_SHARE * (request.rows == "mapped")
        self._second_per_share = request.max_seconds / shares

    def recall(self) -> tuple[int, tuple[RecallPoint, ...]]:
        """The nprobe to profile at, which later stages use, and quality against nprobe on held-back queries."""
        request, kept = self._request, self._kept.get("recall")
        if kept is None:
            # All else follows from the nprobe that is chosen here.
            self._kept.forget()
            reference = self._search_rows()
            grid = recall_grid(self._index.nlist)
            wanted = sorted({*grid, *([request.nprobe] if request.nprobe is not None else [])})
            measure = partial(recall_at, self._index, reference)
            cure = "build the index anew with another nlist or codec"
            if self._searching.by_codes:
                measure = partial(recall_by_codes, self._searching, reference)
                cure = "search by rows, or compress the index with more bits or a smaller recall loss"
            points = tuple(measure(n) for n in wanted)
            chosen = request.nprobe or 0
            if request.recall_target is not None:
                chosen, points = recommend_nprobe(points, request.recall_target, measure, cure)
            lost = None
            if self._searching.by_codes:
                by_codes = next(point.recall for point in points if point.nprobe == chosen)
                lost = recall_at(self._index, reference, chosen).recall - by_codes
            kept = {"nprobe": chosen, "points": [asdict(p) for p in points], "lost": lost}, {}
            self._kept.put("recall", kept[0])
        facts, _ = kept
        points = tuple(RecallPoint(**p) for p in facts["points"])
        notes: dict[str, Any] = {"queries": points[0].n_queries, "reference": "the same index at nprobe = nlist"}
        if self._searching.by_codes:
            # Of the rows that the nprobe of the profile finds.
            notes |= {"reference": f"the rows of {notes['reference']}", "lost_to_candidates": facts.get("lost")}
        self._finish("recall", notes)
        self._request = replace(request, nprobe=facts["nprobe"], recall_target=None)
        return int(facts["nprobe"]), points

    def _search_rows(self) -> Reference:
        request, scanner = self._request, self._scanner
        with ExitStack() as undo:
            if self._searching.by_codes:
                scanner = open_reference(self._index, threads=scanner.threads)
                undo.callback(scanner.close)
            if self._on_disk is not None:
                undo.enter_context(self._on_disk.paused())
            return search_exhaustively(
                self._index,
                scanner,
                self._held,
                request.k,
                max_seconds=self._second_per_share * _RECALL_SHARE,
                min_queries=MIN_QUERIES if request.recall_target is not None else 1,
                tick=lambda done, total: self._progress("recall", done, total),
            )

    def access(self, nprobe: int) -> AccessSample:
        """Probed lists of both halves."""
        history, decay = self._request.history, self._request.history_decay
        kept = self._kept.get("access")
        if kept is None:
            counted: dict[str, int] | None = None
            sample = sample_access(
                self._index,
                self._fit,
                self._held,
                nprobe,
                history=history,
                decay=decay,
                progress=lambda done, total: self._progress("access", done, total),
            )
            if self._searching.by_codes:
                sample, scanned = count_candidates(
                    self._searching,
                    sample,
                    (self._fit, self._held),
                    self._request.k,
                    max_seconds=self._second_per_share * _CANDIDATES_SHARE,
                )
                counted = {"queries": scanned}
            arrays = {f.name: array for f in fields(sample) if (array := getattr(sample, f.name)) is not None}
            self._kept.put("access", {"candidates": counted}, arrays)
        else:
            counted, sample = kept[0]["candidates"], AccessSample(**kept[1])
        if counted is not None:
            self.notes["candidates"] = counted
        past = None if history is None else {"created_at": history.created_at, "id": history.id, "decay": decay}
        self._finish("access", {"history": past})
        return sample

    def host(self, access: AccessSample) -> tuple[StageSample, ...]:
        """Samples of the host stages."""
        kept = self._kept.get("host")
        if kept is None:
            timing = time_host(
                self._index,
                self._scanner,
                self._held,
                hot_order(access.list_accesses),
                self._request,
                max_seconds=self._second_per_share * _HOST_SHARE,
                tick=lambda done, total: self._progress("host", done, total),
            )
            kept = {"notes": timing.notes, "samples": [asdict(s) for s in timing.samples]}, {}
            self._kept.put("host", kept[0])
        self._finish("host", kept[0]["notes"])
        return tuple(StageSample(**s) for s in kept[0]["samples"])

    def row_faults(self) -> tuple[StageSample, ...]:
        """Samples of reading rows from disk; none where they are in memory. The last of the host's: it drops them from
        memory."""
        if self._on_disk is None:
            return ()
        kept = self._kept.get("row_faults")
        if kept is None:
            timing = time_row_faults(
                self._searching,
                self._held,
                self._request,
                max_seconds=self._second_per_share * _FAULTS_SHARE,
                tick=lambda done, total: self._progress("row_faults", done, total),
            )
            kept = {"notes": timing.notes, "samples": [asdict(s) for s in timing.samples]}, {}
            self._kept.put("row_faults", kept[0])
        if why := kept[0]["notes"].get("skipped"):
            _log.warning("what reading rows from disk takes was not measured: %s", why)
        self._finish("row_faults", kept[0]["notes"])
        return tuple(StageSample(**s) for s in kept[0]["samples"])

    def device(self, name: str, access: AccessSample) -> tuple[tuple[StageSample, ...], tuple[TransferSample, ...]]:
        """Samples of one device; none, with a note, where it cannot scan this index or fails."""
        stage = f"device {name}"
        if reason := tier_of(self._index, name).reason:
            return self._without(stage, f"scanned on the host only: {reason}")
        kept = self._kept.get(stage)
        facts: dict[str, Any]
        if kept is not None:
            facts = kept[0]
        else:
            try:
                timing = time_device(
                    self._searching,
                    name,
                    self._held,
                    hot_order(access.list_accesses),
                    self._request,
                    max_seconds=self._second_per_share * _DEVICE_SHARE,
                    tick=lambda done, total: self._progress(stage, done, total),
                )
            except DeviceNotFoundError:
                raise
            except DeviceError as error:
                return self._without(stage, str(error))
            facts = {
                "notes": timing.notes,
                "samples": [asdict(s) for s in timing.samples],
                "transfers": [asdict(t) for t in timing.transfers],
            }
            self._kept.put(stage, facts)
        self._finish(stage, facts["notes"])
        transfers = tuple(TransferSample(**t) for t in facts["transfers"])
        return tuple(StageSample(**s) for s in facts["samples"]), transfers

    def _without(self, stage: str, reason: str) -> tuple[tuple[StageSample, ...], tuple[TransferSample, ...]]:
        _log.warning("%s was not measured: %s", stage, reason)
        self._finish(stage, {"skipped": reason})
        return (), ()

    def _finish(self, stage: str, notes: dict[str, Any]) -> None:
        self.notes[stage] = notes
        self._progress(stage, 1, 1)
