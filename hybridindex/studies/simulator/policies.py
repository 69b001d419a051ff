"""Policies: our plan and what it is compared with, each as a system that can be simulated.

========================  ==============================================================================
``ours``                  the plan: fewest hot lists for the SLO, beside the LLM; lookahead and cache where given
``cpu-only``              no list on a device; the LLM has all device memory
``all-gpu``               all lists, in even shards over all devices, beside the LLM (VectorLiteRAG's ALL-GPU)
``dedicated-gpu``         one device holds the hottest lists that fit and nothing else; the LLM has the others
``hedrarag``              the hottest lists with which search and LLM sustain equal rates (HedraRAG's split)
``no-lookahead``          ours without lookahead, and so without the lists that it would leave in the cache
``no-cache``              ours; lists leave with the session that brought them
========================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.paging import scratch_for_budget
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.placement import choose_hottest, place_lpt, place_round_robin
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.studies.simulator.engine_loop import EngineRules
from hybridindex.studies.simulator.llm_server import LLMServer, fit_llm
from hybridindex.studies.simulator.lookahead_replay import LookaheadRules, replay_lookahead
from hybridindex.studies.simulator.query_pool import QueryPool, query_pool
from hybridindex.studies.simulator.stage_table import StageTable, stage_table
from hybridindex.studies.simulator.system import System
from hybridindex.types import F64, LLMProfile

__all__ = ["POLICIES", "Inputs", "Unservable", "build_system", "hedrarag_lists"]

I16 = npt.NDArray[np.int16]

POLICIES = ("ours", "cpu-only", "all-gpu", "dedicated-gpu", "hedrarag", "no-lookahead", "no-cache")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Input of every policy. Raises InvalidInputError, which names the field."""

    analysis: Analysis
    slo_s: float
    #: Requests per second to plan for.
    rate: float
    #: Devices, and bytes of each that an index may take (scratch included).
    n_devices: int = 1
    budget_bytes: int = 0
    #: Bytes of a device without the LLM that an index may take; None: no more than ``budget_bytes``.
    device_bytes: int | None = None
    llm: LLMProfile | None = None
    kv_bytes_per_token: float = 131_072.0
    replicas: int = 1
    rules: EngineRules = field(default_factory=EngineRules)
    lookahead: LookaheadRules = field(default_factory=LookaheadRules)
    contention: float = 0.0
    percentile: float = 90.0
    #: The plan of ``ours``; None: make one.
    plan: Plan | None = None
    assumptions: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("slo_s", self.slo_s, above=0.0)
        check_number("rate", self.rate, above=0.0)
        check_number("contention", self.contention, least=0.0)
        check_number("budget_bytes", self.budget_bytes, least=0.0)
        if self.device_bytes is not None:
            check_number("device_bytes", self.device_bytes, least=0.0)
        check_number("kv_bytes_per_token", self.kv_bytes_per_token, above=0.0)
        if not 1 <= self.n_devices <= 64:
            raise InvalidInputError(f"n_devices is {self.n_devices}; give 1 to 64")
        if not 1 <= self.replicas <= 64:
            raise InvalidInputError(f"replicas is {self.replicas}; give 1 to 64")
        if self.rules.max_batch is not None and self.rules.max_batch < 1:
            raise InvalidInputError(f"max_batch is {self.rules.max_batch}; give an integer >= 1, or None")
        if self.plan is not None and self.plan.nlist != self.analysis.profile.nlist:
            raise InvalidInputError(f"plan has {self.plan.nlist} lists, the profile {self.analysis.profile.nlist}")

    def make_plan(self, analysis: Analysis, coverage: float | None = None) -> Plan:
        """A plan for these inputs, from ``analysis``; ``coverage`` None: the least that suffices."""
        request = PlanRequest.resolve(
            slo_ms=self.slo_s * 1e3,
            device_budget_bytes=self.budget_bytes,
            rate_qps=self.rate,
            llm=self.llm,
            n_devices=self.n_devices,
            percentile=self.percentile,
            slo_stage="ttft" if self.llm is not None else "search",
            coverage=coverage,
            page_bytes=analysis.curve.geometry.page_bytes,
        )
        return make_plan(analysis.profile, request, analysis=analysis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unservable:
    """A policy that is not possible with these resources."""

    name: str
    reason: str


def build_system(policy: str, inputs: Inputs) -> System | Unservable:
    """The system of one of :data:`POLICIES`.

    Raises:
        InvalidInputError: ``policy`` is unknown.
    """
    if policy not in POLICIES:
        raise InvalidInputError(f"policy is {policy!r}; expected one of {', '.join(POLICIES)}")
    return _BUILD[policy](_Builder(policy, inputs))


class _Builder:
    """Builds the system of one policy from where it places lists."""

    def __init__(self, policy: str, inputs: Inputs) -> None:
        self.policy, self.inputs = policy, inputs
        self.curve = inputs.analysis.curve
        self.pool: QueryPool = query_pool(self.curve, inputs.analysis.profile.dim)
        #: Of each device that holds lists.
        self.budget_bytes = inputs.budget_bytes
        if policy == "dedicated-gpu" and inputs.device_bytes is not None:
            self.budget_bytes = inputs.device_bytes

    def none(self) -> I16:
        return np.full(self.curve.nlist, -1, dtype=np.int16)

    def no(self, reason: str) -> Unservable:
        return Unservable(name=self.policy, reason=reason)

    @property
    def scratch(self) -> int:
        return scratch_for_budget(self.budget_bytes)

    def capacity_pages(self) -> int:
        """Pages of one device."""
        return max(0, self.budget_bytes - self.scratch) // self.curve.geometry.page_bytes

    def hottest(self, count: int, n_devices: int) -> I16 | None:
        """Places the first ``count`` lists of the hot order as a plan does; None where they do not fit."""
        curve = self.curve
        work = curve.accesses_by_rank[:count] * curve.bytes_by_rank[:count]
        placed = place_lpt(work, curve.pages_by_rank[:count], [self.capacity_pages()] * n_devices)
        if placed.n_unplaced:
            return None
        return self.mapped(np.arange(count), placed.device)

    def mapped(self, ranks: npt.NDArray[np.int64], device: I16) -> I16:
        list_device = self.none()
        list_device[self.curve.order[ranks]] = device
        return list_device

    def resident_bytes(self, list_device: I16) -> int:
        on = list_device[self.curve.order] >= 0
        used = len(np.unique(list_device[list_device >= 0]))
        return int(self.curve.pages_by_rank[on].sum()) * self.curve.geometry.page_bytes + used * self.scratch

    def table(self, list_device: I16, n_devices: int, *, factor: float, extra: F64 | None = None) -> StageTable:
        return stage_table(
            self.pool,
            self.inputs.analysis.latency,
            list_device,
            n_devices,
            resident_bytes=self.resident_bytes(list_device),
            device_factor=factor,
            extra_hits=extra,
        )

    def llm(self, index_bytes: int, share: float = 1.0) -> LLMServer | None:
        given = self.inputs
        assert given.llm is not None
        return fit_llm(
            given.llm,
            index_bytes=index_bytes,
            kv_bytes_per_token=given.kv_bytes_per_token,
            replicas=given.replicas,
            share=share,
        )

    def system(
        self,
        list_device: I16,
        n_devices: int,
        *,
        shared: bool = True,
        share: float = 1.0,
        lookahead: LookaheadRules | None = None,
    ) -> System | Unservable:
        """``shared``: the LLM's devices scan too. ``share``: the LLM's part of the devices."""
        given = self.inputs
        contention = given.contention if shared and given.llm is not None else 0.0
        extra, arena = None, 0
        if lookahead is not None and lookahead.window_s > 0:
            extra, arena = self._prefetched(list_device, n_devices, lookahead), lookahead.arena_bytes
        table = self.table(list_device, n_devices, factor=1.0 + contention, extra=extra)
        llm = None
        if given.llm is not None:
            index_bytes = table.resident_bytes + arena if shared else 0
            llm = self.llm(index_bytes, share)
            if llm is None:
                total = given.llm.kv_cache_bytes
                return self.no(f"an index of {index_bytes} bytes leaves no KV cache for a request, of {total} bytes")
        return System(
            name=self.policy,
            table=table,
            rules=given.rules,
            llm=llm,
            contention=contention,
            n_devices=given.n_devices,
            assumptions=given.assumptions,
        )

    def _prefetched(self, list_device: I16, n_devices: int, rules: LookaheadRules) -> F64:
        given = self.inputs
        return replay_lookahead(
            self.pool,
            list_device >= 0,
            self.curve.geometry.pages_for(given.analysis.profile.list_sizes) * self.curve.geometry.page_bytes,
            rules,
            budget_bytes=rules.budget_bytes(given.rate, n_devices),
            sessions=max(1, round(given.rate * rules.window_s)),
            policy=HotnessPolicy(),
            seed=given.seed,
        )


def _planned(build: _Builder, lookahead: LookaheadRules) -> System | Unservable:
    given = build.inputs
    plan = given.plan or given.make_plan(given.analysis)
    return build.system(plan.list_device, given.n_devices, lookahead=lookahead)


def _all_gpu(build: _Builder) -> System | Unservable:
    curve, n = build.curve, build.inputs.n_devices
    placed = place_round_robin(
        curve.accesses_by_rank * curve.bytes_by_rank, curve.pages_by_rank, [build.capacity_pages()] * n
    )
    if placed.n_unplaced:
        needs = int(curve.prefix_pages[-1]) * curve.geometry.page_bytes
        held = n * build.capacity_pages() * curve.geometry.page_bytes
        return build.no(f"all lists take {needs} bytes of pages; {n} devices hold {held}")
    return build.system(build.mapped(np.arange(curve.nlist), placed.device), n)


def _dedicated(build: _Builder) -> System | Unservable:
    curve, n = build.curve, build.inputs.n_devices
    if build.inputs.llm is not None and n < 2:
        return build.no(f"n_devices is {n}: one for retrieval leaves none for the LLM")
    pages = build.capacity_pages()
    chosen = choose_hottest(curve.pages_by_rank[: curve.useful_count()], pages, pages)
    list_device = build.mapped(chosen, np.zeros(chosen.size, dtype=np.int16))
    return build.system(list_device, 1, shared=False, share=(n - 1) / n)


def _hedrarag(build: _Builder) -> System | Unservable:
    if build.inputs.llm is None:
        return build.no("llm is missing: the split balances search against it")
    list_device = build.hottest(_balanced(build, build.inputs.llm), build.inputs.n_devices)
    assert list_device is not None
    return build.system(list_device, build.inputs.n_devices)


def hedrarag_lists(inputs: Inputs) -> int:
    """How many of the hottest lists HedraRAG's split places.

    Raises:
        InvalidInputError: there is no LLM that it could balance search against.
    """
    if inputs.llm is None:
        raise InvalidInputError("llm is missing: HedraRAG's split balances search against it")
    return _balanced(_Builder("hedrarag", inputs), inputs.llm)


def _balanced(build: _Builder, llm: LLMProfile) -> int:
    """Every list speeds up search and slows the LLM: bisects for the smallest count at which search is not the
    slower."""
    given, curve = build.inputs, build.curve
    model = throughput_model(llm)

    def searches_more(count: int) -> bool | None:
        list_device = build.hottest(count, given.n_devices)
        if list_device is None:
            return None
        table = build.table(list_device, given.n_devices, factor=1.0 + given.contention)
        return table.capacity() >= model.at(table.resident_bytes)

    low, high = 0, curve.useful_count()
    if searches_more(0):
        high = 0
    while high - low > max(1, curve.nlist // 256):
        middle = (low + high) // 2
        enough = searches_more(middle)
        low, high = (low, middle) if enough is None or enough else (middle, high)
    return high if build.hottest(high, given.n_devices) is not None else low


_BUILD: Mapping[str, Callable[[_Builder], System | Unservable]] = {
    "ours": lambda build: _planned(build, build.inputs.lookahead),
    "cpu-only": lambda build: build.system(build.none(), build.inputs.n_devices),
    "all-gpu": _all_gpu,
    "dedicated-gpu": _dedicated,
    "hedrarag": _hedrarag,
    "no-lookahead": lambda build: _planned(build, replace(build.inputs.lookahead, window_s=0.0)),
    "no-cache": lambda build: _planned(build, replace(build.inputs.lookahead, cache=False)),
}
