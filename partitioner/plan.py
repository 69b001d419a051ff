"""A plan: which lists become resident where, decided from one profile for one target. Not yet applied to anything.

Covers :func:`make_plan`, the :class:`Plan` it returns, its predictions and its record form. The explanation in words
is in :mod:`hybridindex.partitioner.explain`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.lookahead_budget import LookaheadBudget, lookahead_budget, miss_curve_of
from hybridindex.partitioner.models.coverage import QueryWork
from hybridindex.partitioner.models.hitrate import distribution
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.models.transfer import fit_transfers
from hybridindex.partitioner.placement import choose_hottest, place_lpt
from hybridindex.partitioner.request import PlanRequest, check_batch
from hybridindex.partitioner.solver import Problem, Solution, SolverStep, solve
from hybridindex.partitioner.sustain import max_sustainable_qps, self_consistent_epsilon
from hybridindex.types import I64, Profile

__all__ = ["Plan", "Verdict", "make_plan", "problem_of"]

RECORD_VERSION = 3
#: Fields of a plan that a record keeps as they are.
_PLAIN_FIELDS = (
    "reason",
    "profile_id",
    "index_fingerprint",
    "hardware_fingerprint",
    "nlist",
    "nprobe",
    "k",
    "coverage",
    "coverage_bytes_fraction",
    "device_bytes",
    "page_bytes",
    "n_unplaced",
    "imbalance",
    "predicted_hit_rate",
    "tau_s",
    "batch",
    "rate_qps",
    "max_sustainable_qps",
    "epsilon_solved",
    "coverage_at_epsilon_solved",
    "nearest_slo_ms",
    "hit_rate_model",
    "host_model",
)


class Verdict(StrEnum):
    """Whether the target can be met. Equal to its plain string."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A decision with its inputs. An infeasible plan is the best effort within the budget, and can be routed."""

    verdict: Verdict
    #: One sentence: why this verdict, and every cap that took effect.
    reason: str
    request: PlanRequest
    profile_id: int | None
    index_fingerprint: str
    hardware_fingerprint: str
    nlist: int
    nprobe: int
    k: int
    #: Fractions of lists and of code bytes that are resident.
    coverage: float
    coverage_bytes_fraction: float
    #: Total over devices: pages of the resident lists, and scratch where anything is resident.
    device_bytes: int
    #: Bytes per device, the same way.
    device_bytes_each: tuple[int, ...]
    page_bytes: int
    #: (m,) int64 list ids, hottest first.
    resident_lists: I64
    #: (nlist,) int16 device of each list, -1 = host.
    list_device: npt.NDArray[np.int16]
    #: Lists that were wanted but fit on no device.
    n_unplaced: int
    #: Most loaded device's access work over the even share.
    imbalance: float
    #: Mean hit rate by bytes.
    predicted_hit_rate: float
    #: What search may take once queueing is set aside, and the batch size that it runs at.
    tau_s: float
    batch: int
    #: Requests/s the plan was solved for; ``None`` when neither rate nor LLM was given.
    rate_qps: float | None
    #: Highest requests/s that measured batch sizes sustain within tau_s (and beside the LLM, what it takes).
    max_sustainable_qps: float
    #: Epsilon that the batching model gives for this plan, and the coverage solved with it; ``None`` without a rate.
    epsilon_solved: float | None
    coverage_at_epsilon_solved: float | None
    #: Smallest SLO that could be met with the same budget; ``None`` when feasible, or when no SLO can.
    nearest_slo_ms: float | None
    trace: tuple[SolverStep, ...]
    #: Hit-rate model in use, and (median, worst) absolute error of each on unseen queries.
    hit_rate_model: str
    hit_rate_errors: Mapping[str, tuple[float, float]]
    #: Host scan model in use, and the median relative error of each on unseen samples.
    host_model: str
    host_model_errors: Mapping[str, float]
    analysis: Analysis = field(repr=False)
    _work: QueryWork = field(repr=False)

    @property
    def coverage_bytes(self) -> float:
        """Fraction of code bytes that are resident."""
        return self.coverage_bytes_fraction

    @property
    def feasible(self) -> bool:
        return self.verdict is Verdict.FEASIBLE

    @property
    def n_devices(self) -> int:
        return self.request.n_devices

    def predicted_min_hit_rate(self, batch: int) -> float:
        """E[smallest hit rate by bytes in a batch], by the model that validated best (Eq. 2).

        Raises:
            InvalidInputError: ``batch`` is no integer >= 1.
        """
        check_batch(batch)
        model = distribution(self.analysis.curve, self._work, self.analysis.hit_rates.best)
        return min(model.expected_min(batch), self.predicted_hit_rate)

    def predicted_min_hit_rate_quantile(self, batch: int, probability: float) -> float:
        """The hit rate that every query of a batch reaches with ``probability``."""
        if not 0.0 < probability <= 1.0:
            raise InvalidInputError(f"probability is {probability}; give a value in (0, 1]")
        model = distribution(self.analysis.curve, self._work, self.analysis.hit_rates.best)
        return model.min_quantile(batch, probability)

    def predicted_latency_ms(self, batch: int, percentile: float | None = None) -> float:
        """Milliseconds of one routed batch, without queueing: the median, or another percentile.

        Raises:
            InvalidInputError: ``batch`` is no integer >= 1, or ``percentile`` not between 0 and 100.
        """
        check_batch(batch)
        return self.analysis.latency.predict(self.analysis.curve, self._work, batch, percentile).seconds * 1e3

    def lookahead_budget(self, window_ms: float, *, share_bytes: int, batch: int = 1) -> LookaheadBudget:
        """Bytes that a session should move ahead of its search while the LLM generates for ``window_ms``.

        Args:
            window_ms: generation time that copies can hide behind; see ``LLMProfile.generation_s``.
            share_bytes: most bytes of the arena that lookahead may take.
            batch: queries that will share the search.

        Raises:
            InvalidInputError: a negative window or share, or ``batch`` below 1.
            ProfileError: the profile has no timed copies.
        """
        check_batch(batch)
        if not (math.isfinite(window_ms) and window_ms >= 0):
            raise InvalidInputError(f"window_ms is {window_ms}; give a finite number of milliseconds >= 0")
        analysis, curve = self.analysis, self.analysis.curve
        transfer = fit_transfers(analysis.profile.transfers, pinned=False)
        nothing = curve.of_lists(np.empty(0, dtype=np.int64))
        everything = curve.of_lists(np.arange(curve.nlist, dtype=np.int64))
        own = sum(self.device_bytes_each) - sum(
            s for s, used in zip(self.request.scratch, self.device_bytes_each, strict=True) if used
        )
        return lookahead_budget(
            bandwidth_bytes_per_s=transfer.bytes_per_s,
            t_llm_s=window_ms / 1e3,
            miss_curve=miss_curve_of(curve, resident_bytes=own),
            host_scan_s=float(analysis.latency.parts(curve, nothing, batch).host_s.mean()),
            device_scan_s=float(analysis.latency.parts(curve, everything, batch).device_s.mean()),
            share_bytes=share_bytes,
        )

    def extrapolated(self, batch: int) -> bool:
        """True when predictions at ``batch`` go beyond what was measured."""
        return self.analysis.latency.extrapolated(batch)

    def explain(self) -> str:
        """Ten lines: what was decided, from what, and what would change it."""
        from hybridindex.partitioner.explain import explain_plan

        return explain_plan(self)

    def to_record(self) -> dict[str, Any]:
        """{"data": JSON-able dict, "arrays": name -> ndarray}; with the profile it restores the plan exactly."""
        data: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        data["version"] = RECORD_VERSION
        data["verdict"] = str(self.verdict)
        data["request"] = self.request.to_data()
        data["device_bytes_each"] = list(self.device_bytes_each)
        data["hit_rate_errors"] = {name: list(pair) for name, pair in self.hit_rate_errors.items()}
        data["host_model_errors"] = {n: e if math.isfinite(e) else None for n, e in self.host_model_errors.items()}
        data["trace"] = [step.to_data() for step in self.trace]
        return {"data": data, "arrays": {"resident_lists": self.resident_lists, "list_device": self.list_device}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], profile: Profile, *, analysis: Analysis | None = None) -> Plan:
        """Restore a plan; its predictions equal those of the plan that was recorded.

        Raises:
            ProfileMismatchError: ``profile`` was measured on another index or machine.
        """
        data = dict(record["data"])
        for name, own in (
            ("index_fingerprint", profile.index_fingerprint),
            ("hardware_fingerprint", profile.hardware.fingerprint),
        ):
            if data[name] != own:
                raise ProfileMismatchError(f"the plan's {name} is {data[name]!r}, the profile's {own!r}")
        if data.pop("version") != RECORD_VERSION:
            raise InvalidInputError(f"plan record has version {record['data']['version']}; {RECORD_VERSION} is known")
        request = PlanRequest.from_data(data.pop("request"))
        resident = np.asarray(record["arrays"]["resident_lists"], dtype=np.int64)
        base = analysis if analysis is not None else analyse(profile, page_bytes=request.page_bytes)
        configured = base.configured(page_bytes=request.page_bytes, n_devices=request.n_devices)
        errors = data.pop("host_model_errors")
        return cls(
            verdict=Verdict(data.pop("verdict")),
            request=request,
            device_bytes_each=tuple(data.pop("device_bytes_each")),
            hit_rate_errors={name: (pair[0], pair[1]) for name, pair in data.pop("hit_rate_errors").items()},
            host_model_errors={name: math.inf if e is None else e for name, e in errors.items()},
            trace=tuple(SolverStep.from_data(step) for step in data.pop("trace")),
            resident_lists=resident,
            list_device=np.asarray(record["arrays"]["list_device"], dtype=np.int16),
            analysis=configured,
            _work=configured.curve.of_lists(resident),
            **data,
        )


def make_plan(profile: Profile, request: PlanRequest, *, analysis: Analysis | None = None) -> Plan:
    """Decide which lists to keep on devices so that search meets its SLO with the fewest bytes.

    Args:
        analysis: :func:`hybridindex.partitioner.analysis.analyse` of the same profile, to save its time.

    Raises:
        InvalidInputError: ``profile`` is no profile.
        ProfileError: the profile is too small or incomplete.
    """
    if not isinstance(profile, Profile):
        raise InvalidInputError(f"profile is {profile!r}; give the Profile that profiling returned")
    base = analysis if analysis is not None else analyse(profile, page_bytes=request.page_bytes)
    return _decide(base.configured(page_bytes=request.page_bytes, n_devices=request.n_devices), request)


def problem_of(analysis: Analysis, request: PlanRequest) -> Problem:
    """The solver's view of a request."""
    pages = request.capacity_pages(analysis.curve.geometry.page_bytes)
    return Problem(
        curve=analysis.curve,
        latency=analysis.latency,
        percentile=request.percentile,
        rate_qps=request.rate_qps,
        llm=throughput_model(request.llm) if request.llm is not None else None,
        scratch_bytes=sum(s for s, p in zip(request.scratch, pages, strict=True) if p > 0),
        limit_pages=sum(pages),
    )


def _decide(analysis: Analysis, request: PlanRequest) -> Plan:
    curve = analysis.curve
    problem = problem_of(analysis, request)
    capacity = request.capacity_pages(curve.geometry.page_bytes)
    # At or below 0 the LLM alone breaks the SLO; the smallest positive target then finds the best effort.
    tau_s = max(request.search_slo_s, 1e-12) / (1.0 + request.epsilon)
    solution = solve(problem, tau_s) if request.coverage is None else None
    wanted, notes = _wanted(problem, request, solution, capacity)

    pages = curve.pages_by_rank[wanted]
    access_work = curve.accesses_by_rank[wanted] * curve.bytes_by_rank[wanted]
    placement = place_lpt(access_work, pages, capacity)
    on = placement.device >= 0
    resident = curve.order[wanted[on]]
    list_device = np.full(curve.nlist, -1, dtype=np.int16)
    list_device[resident] = placement.device[on]
    if placement.n_unplaced:
        notes.append(f"{placement.n_unplaced} wanted lists fit on no device and stay on the host")

    work = curve.of_lists(resident)
    each = tuple(
        int(used) * curve.geometry.page_bytes + scratch if used > 0 else 0
        for used, scratch in zip(placement.pages_used.tolist(), request.scratch, strict=True)
    )
    if problem.llm is not None and problem.llm.extrapolated(sum(each)):
        notes.extend(problem.llm.unmeasured(sum(each)))
    final = problem.step(work, int(resident.size), sum(each), tau_s, with_device=True, measured_too=True)
    met = final.accepted and request.search_slo_s > 0
    trace = (*(solution.trace if solution is not None else ()), final)
    batch = final.accepted_batch or final.batch_up
    reason, nearest = _reason(problem, request, solution, final, met, work, sum(each))
    epsilon_solved, coverage_solved = self_consistent_epsilon(problem, request, work, batch, final.rate_qps)
    mean_hit = float(work.hit_rate.mean())
    nbytes = int(curve.prefix_bytes[-1])
    return Plan(
        verdict=Verdict.FEASIBLE if met else Verdict.INFEASIBLE,
        reason="; ".join([reason, *notes]),
        request=request,
        profile_id=analysis.profile.id,
        index_fingerprint=analysis.profile.index_fingerprint,
        hardware_fingerprint=analysis.profile.hardware.fingerprint,
        nlist=curve.nlist,
        nprobe=analysis.profile.nprobe,
        k=analysis.profile.k,
        coverage=resident.size / curve.nlist,
        coverage_bytes_fraction=int(curve.bytes_by_rank[wanted[on]].sum()) / nbytes if nbytes else 0.0,
        device_bytes=sum(each),
        device_bytes_each=each,
        page_bytes=curve.geometry.page_bytes,
        resident_lists=resident,
        list_device=list_device,
        n_unplaced=placement.n_unplaced,
        imbalance=placement.imbalance,
        predicted_hit_rate=mean_hit,
        tau_s=tau_s,
        batch=batch,
        rate_qps=final.rate_qps,
        max_sustainable_qps=max_sustainable_qps(problem, work, sum(each), tau_s),
        epsilon_solved=epsilon_solved,
        coverage_at_epsilon_solved=coverage_solved,
        nearest_slo_ms=nearest,
        trace=trace,
        hit_rate_model=analysis.hit_rates.best,
        hit_rate_errors=analysis.hit_rates.summary(),
        host_model=analysis.latency.host.model.name,
        host_model_errors=dict(analysis.latency.host.errors),
        analysis=analysis,
        _work=work,
    )


def _wanted(
    problem: Problem, request: PlanRequest, solution: Solution | None, capacity: tuple[int, ...]
) -> tuple[I64, list[str]]:
    """Places in hot order (m,) int64, ascending, of the lists to load, and the caps that took effect."""
    curve = problem.curve
    notes: list[str] = []
    limit = problem.limit_pages
    if problem.llm is not None:
        left = problem.llm.total_bytes - problem.scratch_bytes - 1
        limit = min(limit, max(left, 0) // curve.geometry.page_bytes)
    if solution is not None and solution.feasible:
        return np.arange(solution.count, dtype=np.int64), notes
    if solution is None:
        assert request.coverage is not None
        target = min(curve.nlist, math.ceil(request.coverage * curve.nlist - 1e-9))
    else:
        # Best effort: what the solver found useful; where memory was the limit, also colder lists that still fit.
        target = solution.count if solution.count < problem.cap_count() else curve.useful_count()
    if int(curve.prefix_pages[target]) <= limit:
        chosen = np.arange(target, dtype=np.int64)
    else:
        chosen = choose_hottest(curve.pages_by_rank[:target], limit, max(capacity))
        if solution is None:
            notes.append(
                f"coverage {request.coverage:g} asks for {target} lists and "
                f"{problem.device_bytes(int(curve.prefix_pages[target]))} bytes; memory caps it at {chosen.size} lists"
            )
    if limit == 0:
        notes.append(
            f"host only: {request.unscannable or 'no device tier scans this codec'}"
            if not request.scannable
            else "host only: no device budget holds a page besides its scratch, or the LLM leaves none"
            if any(request.budgets)
            else "host only: the device budget is 0"
        )
        chosen = chosen[:0]
    return chosen, notes


def _reason(
    problem: Problem,
    request: PlanRequest,
    solution: Solution | None,
    final: SolverStep,
    met: bool,
    work: QueryWork,
    device_bytes: int,
) -> tuple[str, float | None]:
    """One sentence, and the nearest SLO when this one is not met."""
    tau_ms = final.bound_up_s * 1e3
    how = "fixed" if request.coverage is not None else "smallest"
    if met:
        return (
            f"the {how} coverage answers batches of {final.batch_up} in {final.latency_up_s * 1e3:.3g} ms "
            f"at p{request.percentile:g}, within {tau_ms:.3g} ms"
            if final.accepted_batch == final.batch_up
            else f"the {how} coverage sustains {final.rate_qps or 0:.4g} requests/s "
            f"in batches of {final.accepted_batch}",
            None,
        )
    # The solver's own nearest is the one that a new plan is sure to reach; a hair more absorbs rounding.
    nearest_tau = solution.nearest_tau_s if solution is not None else None
    if nearest_tau is None:
        nearest_tau = problem.nearest_tau(work, device_bytes)
    nearest = request.slo_ms_of(nearest_tau * (1.0 + 1e-9), request.epsilon) if nearest_tau is not None else None
    if request.search_slo_s <= 0:
        llm_ms = request.llm.ttft_s * 1e3 if request.llm else 0.0
        why = f"the LLM alone takes {llm_ms:.4g} ms of the {request.slo_ms:.4g} ms"
    elif solution is not None and not solution.feasible:
        why = solution.reason
    else:
        why = (
            f"search takes {final.latency_up_s * 1e3:.3g} ms at batch {final.batch_up} "
            f"where {tau_ms:.3g} ms are allowed"
        )
    if nearest is None:
        most = max_sustainable_qps(problem, work, device_bytes, math.inf)
        return f"{why}; no SLO can be met at this rate: at most {most:.4g} requests/s are sustained", None
    return f"{why}; the nearest SLO that can be met is {nearest:.4g} ms", nearest
