"""From recorded runs: how much drafts and final queries probe alike, and what lookahead would save on a GPU.

The first is counted with the index's centroids. For the second each run is replayed on the stand-in device with
lookahead and without; hit rates are measured there, at a pace at which the stand-in's copies end, and so is the host's
time. What a GPU would take is a *projection*: no profile of one exists, so its copies and scans are taken at stated
bandwidths (:class:`Assumed`), and generation is scaled so that host retrieval is the stated share of the time.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.rag.record import OPTIONS
from hybridindex.api import Index
from hybridindex.rag.pipelines import PIPELINES
from hybridindex.rag.records import Generated, LookedAhead, Retrieved
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import ReplayGenerator, RunTrace
from hybridindex.router import BatchReport, Router
from hybridindex.router.batch.stages import COARSE, HOST_SCAN, MERGE, RERANK, SPLIT
from hybridindex.types import I64

__all__ = ["TELERAG", "Assumed", "overlaps", "replays"]

#: TeleRAG's Table 1: lowest and highest of NQ, HotpotQA, TriviaQA; percent at 512 of 4096 lists.
TELERAG = {
    "hyde": (75.7, 78.6),
    "sub_question": (65.3, 66.6),
    "iterative": (86.8, 93.4),
    "iter_retgen": (85.7, 91.2),
    "flare": (80.3, 82.9),
    "self_rag": (100.0, 100.0),
}

#: Lists prefetched for a draft, in parts of nprobe: where TeleRAG's curve turns.
AMOUNTS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Of the GPU in the projection; stated, not measured."""

    copy_gb_per_s: float = 50.0
    scan_gb_per_s: float = 2000.0
    launch_us: float = 100.0
    #: Of host retrieval in the whole time without lookahead, by which generation is scaled: as in the paper.
    retrieval_shares: tuple[float, ...] = (0.4, 0.5, 0.6)


#: How many times faster than recorded hit rates are measured.
_SPEED = 20.0
#: A batch's report may come after its answer.
_REPORT_S = 10.0


def pairs_of(run: RunTrace) -> Iterator[tuple[LookedAhead, Retrieved]]:
    """Each search that had a draft, with the last one before it."""
    draft = None
    for event in run.events:
        if isinstance(event, LookedAhead):
            draft = event
        elif isinstance(event, Retrieved) and draft is not None:
            yield draft, event
            draft = None


def overlaps(index: Index, retriever: Retriever, runs: Sequence[RunTrace], nprobe: int) -> dict[str, Any]:
    """Per pipeline: the share of the lists of final queries that are among the nearest of the draft, for AMOUNTS."""

    def nearest(texts: Sequence[str]) -> I64:
        return np.argsort(-(retriever.embed(texts) @ index.centroids.T), axis=1)

    shares: dict[str, list[list[float]]] = {name: [] for name in OPTIONS}
    for run in runs:
        for draft, final in pairs_of(run):
            drafts, finals = nearest(draft.texts), nearest(final.texts)[:, :nprobe]
            caught = [np.isin(finals, drafts[:, : round(amount * nprobe)]).mean(axis=1) for amount in AMOUNTS]
            shares[run.pipeline] += np.transpose(caught).tolist()
    return {
        name: {
            "mean": float(np.mean(values, axis=0)[AMOUNTS.index(1.0)]),
            "quartiles": np.quantile(values, [0.25, 0.75], axis=0)[:, AMOUNTS.index(1.0)].tolist(),
            "queries": len(values),
            "telerag_percent": TELERAG[name],
            "prefetched": dict(zip(map(str, AMOUNTS), np.mean(values, axis=0).tolist(), strict=True)),
        }
        for name, values in shares.items()
        if values
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """A search of a replayed run."""

    event: Retrieved
    #: Generation between its draft and itself, at the replay's pace; 0 where it had no draft.
    window_s: float
    #: That the draft took before generation began.
    draft_s: float


def _play(run: RunTrace, retriever: Retriever, speed: float, lookahead: bool) -> list[_Played]:
    with Steps(run.question, retriever, ReplayGenerator(run.generations, speed=speed), lookahead=lookahead) as steps:
        events = PIPELINES[run.pipeline](steps, **OPTIONS[run.pipeline]).events
    played, generated, draft_s = [], 0.0, 0.0
    for event in events:
        if isinstance(event, LookedAhead):
            generated, draft_s = 0.0, event.seconds
        elif isinstance(event, Generated):
            generated += event.seconds
        elif isinstance(event, Retrieved):
            played.append(_Played(event=event, window_s=generated if draft_s else 0.0, draft_s=draft_s))
            generated = draft_s = 0.0
    return played


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One, without lookahead and with it."""

    #: Without.
    host_s: float
    #: With: all but what the device did and what waited for it; the draft is in it.
    left_s: float
    #: Mean over its queries.
    hit_rate: float
    #: That its queries' probes hold, together, and that its draft's do.
    nbytes: float
    moved_bytes: float
    window_s: float


def _host_part(played: _Played, report: BatchReport) -> float:
    """Of a search's time, what was the host's; measured stage by stage, while the stand-in scanned beside it."""
    batch_s = max(stage.ended_s for stage in report.stages) - report.started_s
    host_s = sum(stage.busy_s for stage in report.stages if stage.stage in (COARSE, SPLIT, HOST_SCAN, MERGE, RERANK))
    return played.draft_s + played.event.seconds - batch_s + min(host_s, batch_s)


def replays(
    router: Router, retriever: Retriever, runs: Sequence[RunTrace], query_bytes: float, assumed: Assumed
) -> dict[str, Any]:
    """Per pipeline, over its runs: measured hits and host times, projected ratio for each share of retrieval.

    Args:
        router: that ``retriever`` searches with; nobody else does meanwhile.
        query_bytes: that a query's probes hold, on average.
    """
    reports: queue.SimpleQueue[BatchReport] = queue.SimpleQueue()
    router.on_batch.append(reports.put)
    found: dict[str, Any] = {}
    for name in OPTIONS:
        mine = [run for run in runs if run.pipeline == name]
        searches: list[_Search] = []
        same = True
        for run in mine:
            without = _play(run, retriever, 1e9, lookahead=False)
            for _ in without:
                reports.get(timeout=_REPORT_S)
            for played, before in zip(_play(run, retriever, _SPEED, lookahead=True), without, strict=True):
                same &= played.event.ids == before.event.ids
                searches.append(
                    _Search(
                        host_s=before.event.seconds,
                        left_s=_host_part(played, reports.get(timeout=_REPORT_S)),
                        hit_rate=float(np.mean(played.event.hit_rate)),
                        nbytes=query_bytes * len(played.event.texts),
                        moved_bytes=query_bytes,
                        window_s=played.window_s * _SPEED,
                    )
                )
        if not searches:
            found[name] = {"runs": len(mine), "searches": 0}
            continue
        recorded_s = sum(g.seconds for run in mine for g in run.generations)
        host_s, left_s = (sum(getattr(search, part) for search in searches) for part in ("host_s", "left_s"))
        found[name] = {
            "runs": len(mine),
            "searches": len(searches),
            "hit_rate": float(np.mean([search.hit_rate for search in searches])),
            "host_ms_without": host_s / len(mine) * 1e3,
            "host_ms_left": left_s / len(mine) * 1e3,
            "same_results": same,
            "assumed": asdict(assumed),
            "projections": [_projection(searches, recorded_s, share, assumed) for share in assumed.retrieval_shares],
        }
    router.on_batch.remove(reports.put)
    return found


def _projection(searches: Sequence[_Search], recorded_s: float, share: float, assumed: Assumed) -> dict[str, float]:
    """Of all runs together, with generation scaled so that the host's retrieval takes ``share`` without lookahead."""
    host_s = sum(search.host_s for search in searches)
    generation_s = host_s * (1 - share) / share
    slower = generation_s / recorded_s
    found = {"share": share}
    for name, foretell in (("ratio", _waiting_s), ("ratio_if_it_began_at_once", _at_once_s)):
        with_s = sum(foretell(search, search.window_s * slower, assumed) for search in searches)
        found[name] = (generation_s + host_s) / (generation_s + with_s)
    return found


def _at_once_s(search: _Search, window_s: float, assumed: Assumed) -> float:
    """Of one that waits for nothing: the device scans what came within the window, beside it the host the rest."""
    return _scanned_s(search, min(1.0, window_s / _copied_s(search, assumed)), assumed)


def _waiting_s(search: _Search, window_s: float, assumed: Assumed) -> float:
    """Of one that waits for as many of the draft's lists as pay, as in the router (TeleRAG, Appendix B, case 2)."""
    parts: list[float] = np.linspace(0.0, 1.0, 21).tolist()
    copied_s = _copied_s(search, assumed)
    return min(max(0.0, part * copied_s - window_s) + _scanned_s(search, part, assumed) for part in parts)


def _copied_s(search: _Search, assumed: Assumed) -> float:
    return search.moved_bytes / assumed.copy_gb_per_s / 1e9


def _scanned_s(search: _Search, part: float, assumed: Assumed) -> float:
    """With that part of the draft's lists on the device."""
    device_s = part * search.hit_rate * search.nbytes / assumed.scan_gb_per_s / 1e9 + assumed.launch_us / 1e6
    return max(search.host_s - part * (search.host_s - search.left_s), device_s)
