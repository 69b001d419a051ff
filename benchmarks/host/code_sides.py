"""Sides of :mod:`benchmarks.host.code_plans`: rows and codes of one collection, each profiled at the nprobe that equal
recall takes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import hybridindex
from benchmarks.common.clusters import Clusters, built_lists, import_lists, make_spectrum, real_clusters
from benchmarks.rivals.tuning import found, smallest
from hybridindex.api import Index
from hybridindex.config import PrecisionName
from hybridindex.index.compress import compress
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import Problem, problem_of
from hybridindex.plans.planner import devices_of
from hybridindex.plans.precision import view_to_profile
from hybridindex.plans.replan import PlanChanges, replan
from hybridindex.studies.simulator.other_machine import WhatIf, suppose
from hybridindex.types import F32, I64, Profile

__all__ = ["K", "Maker", "Queries", "Side", "collection"]

K = 10
#: Of each device: room for every plan.
_BUDGET_BYTES = 4 << 30
_POPULAR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """A log in parts: to choose nprobe, candidates and profiles with, and later ones that none of these saw."""

    calibration: F32
    #: The first of ``calibration``, with their true neighbours.
    tune: F32
    truth: I64
    held: F32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """What searches of one kind scan, and what was measured of them."""

    #: "flat" or "sq8": the rows.
    rows: str
    #: Of codes; None: rows are scanned.
    bits: int | None
    index: Index
    #: That was profiled.
    device: str
    profile: Profile
    #: On the device that was profiled, and on the supposed one.
    here: Analysis
    supposed: Analysis
    assumptions: tuple[str, ...]
    request: PlanRequest

    @property
    def name(self) -> str:
        return self.rows if self.bits is None else f"{self.bits} bit, {self.rows}"

    @property
    def precision(self) -> PrecisionName:
        return "rows" if self.bits is None else "codes"

    @property
    def row_bytes(self) -> int:
        """Of one row, which a candidate costs."""
        return self.index.ivf.rows.code_size

    def asked(self, **changes: object) -> PlanRequest:
        """The request for a plan of this side."""
        return replace(self.request, **changes)  # type: ignore[arg-type]

    def problem(self) -> Problem:
        """What the solver decides, on the supposed device."""
        analysis = self.supposed.configured(page_bytes=self.request.page_bytes, n_devices=1)
        return problem_of(analysis, self.request)

    def plan(self, *, supposed: bool = True, **changes: object) -> Plan:
        """A plan on the supposed device, or on that which was profiled."""
        analysis = self.supposed if supposed else self.here
        return make_plan(self.profile, self.asked(**changes), analysis=analysis)


def collection(name: str, megabytes: int) -> tuple[Clusters, Queries]:
    """The demo's embeddings ("real"), more of them ("full"), with the query log; or a dimension: vectors with the
    spectrum of embeddings, and queries about few popular ones."""
    rng = np.random.default_rng(0)
    if name in ("real", "full"):
        data, log = real_clusters("demo" if name == "real" else "full")
        log = log[rng.permutation(len(log))]
    else:
        dim = int(name)
        vectors = make_spectrum(dim, (megabytes << 20) // (4 * dim))
        data, log = built_lists(vectors), _popular_queries(dim, 12_000, rng)
    return data, _queries(data.vectors, np.ascontiguousarray(log))


def _popular_queries(dim: int, count: int, rng: np.random.Generator) -> F32:
    topics, own = make_spectrum(dim, _POPULAR, seed=1), make_spectrum(dim, count, seed=2)
    weight = 1.0 / np.arange(1, _POPULAR + 1)
    made = own + topics[rng.choice(_POPULAR, count, p=weight / weight.sum())]
    found: F32 = made / np.linalg.norm(made, axis=1, keepdims=True)
    return found


def _queries(vectors: F32, log: F32, calibration: int = 4096, tune: int = 512) -> Queries:
    import faiss

    exact = faiss.IndexFlat(vectors.shape[1], faiss.METRIC_INNER_PRODUCT)
    exact.add(vectors)
    return Queries(
        calibration=log[:calibration],
        tune=log[:tune],
        truth=exact.search(log[:tune], K)[1],
        held=log[calibration : 3 * calibration],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """How sides are made."""

    queries: Queries
    #: Recall of every side, against the true neighbours.
    level: float
    #: That is profiled; and what plans suppose in its place.
    device: str
    what_if: WhatIf
    #: For one profile.
    seconds: float

    def sides(self, data: Clusters, folder: Path, bits: Sequence[int], undo: ExitStack) -> Iterator[Side]:
        """Rows of both codecs, and codes of every size beside each; ``undo`` closes their indexes."""
        for rows in ("flat", "sq8"):
            path = folder / rows
            index = undo.enter_context(import_lists(data.vectors, data.lists, data.centres, rows, "ip", path))
            yield self._side(rows, None, index)
            for size in bits:
                # Links: the rows lie in memory once.
                copy = Path(shutil.copytree(path, folder / f"{rows}-{size}", copy_function=os.link))
                index = undo.enter_context(hybridindex.open(copy, verify="quick"))
                compress(index.ivf, size, queries=self.queries.calibration)
                yield self._side(rows, size, index)

    def _side(self, rows: str, bits: int | None, index: Index) -> Side:
        precision: PrecisionName = "rows" if bits is None else "codes"
        nprobe = self._nprobe(index, precision)
        start = time.perf_counter()
        profile = index.profile(
            self.queries.calibration,
            nprobe,
            precision=precision,
            k=K,
            devices=[self.device],
            max_seconds=self.seconds,
            save=False,
        )
        view = view_to_profile(index.ivf, precision)
        asked = PlanChanges(slo_ms=1e6, device_budget_bytes=_BUDGET_BYTES)
        request = replan(None, asked, devices_of(view, 1))
        here = analyse(profile, page_bytes=request.page_bytes)
        supposed, assumptions = suppose(here, self.what_if)
        side = Side(
            rows=rows,
            bits=bits,
            index=index,
            device=self.device,
            profile=profile,
            here=here,
            supposed=supposed,
            assumptions=assumptions,
            request=request,
        )
        sys.stderr.write(f"{side.name}: nprobe {nprobe}, profiled in {time.perf_counter() - start:.0f} s\n")
        return side

    def _nprobe(self, index: Index, precision: PrecisionName) -> int:
        """The least that reaches the recall, to 3 %."""
        tune, truth = self.queries.tune, self.queries.truth
        with index.router(precision=precision) as router:
            nprobe = smallest(
                lambda value: float(found(router.search(tune, K, value).ids, truth).mean()), self.level, 1, index.nlist
            )
        if nprobe is None:
            raise SystemExit(f"recall {self.level} is not reached by {precision} of {index.path}")
        return nprobe
