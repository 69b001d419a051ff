"""A plan: which lists become resident where, decided from one profile for one target. Not yet applied to anything.

Covers :func:`make_plan` and the :class:`Plan` it returns, with its record form. Predictions are in
:mod:`hybridindex.partitioner.decision`, the explanation in words in :mod:`hybridindex.partitioner.explain`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.decision import Decision, Verdict
from hybridindex.partitioner.explain import explain_plan
from hybridindex.partitioner.models.coverage import QueryWork
from hybridindex.partitioner.models.hitrate import modelled
from hybridindex.partitioner.models.throughput import waiting_factor
from hybridindex.partitioner.placement import choose_hottest, place_lpt
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import Problem, Solution, SolverStep, in_words, problem_of, rate_in_words, solve
from hybridindex.types import I64, Profile

__all__ = ["Plan", "Verdict", "make_plan"]

RECORD_VERSION = 4
#: The version before: its steps had other columns, and its predictions used the held-back queries themselves.
_EARLIER_VERSION = 3
#: Fields of a plan that a record converts, keeps as arrays, or computes again; it keeps the others as they are.
_CONVERTED_FIELDS = {"verdict", "request", "device_bytes_each", "hit_rate_errors", "host_model_errors", "trace"}
_PLAIN_FIELDS = [
    f.name
    for f in dataclasses.fields(Decision)
    if f.name not in _CONVERTED_FIELDS | {"resident_lists", "list_device", "analysis", "_work"}
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(Decision):
    """A decision that can be explained in words and stored."""

    def explain(self) -> str:
        """Eleven lines: what was decided, from what, and what would change it."""
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
        version = data.pop("version")
        if version not in (_EARLIER_VERSION, RECORD_VERSION):
            raise InvalidInputError(f"plan record has version {version}; {RECORD_VERSION} is known")
        if version == _EARLIER_VERSION:
            data |= {"trace": [], "hit_rate_model": "empirical"}
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
            _work=modelled(configured.curve, configured.curve.of_lists(resident), data["hit_rate_model"]),
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


def _decide(analysis: Analysis, request: PlanRequest) -> Plan:
    curve = analysis.curve
    problem = problem_of(analysis, request)
    capacity = request.capacity_pages(curve.geometry.page_bytes)
    # Where the LLM alone breaks the SLO nothing is left for search: the smallest positive target finds the best effort.
    slo_s = max(request.search_slo_s, 1e-12)
    solution = solve(problem, slo_s) if request.coverage is None else None
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

    work = problem.work_of(resident)
    each = tuple(
        int(used) * curve.geometry.page_bytes + scratch if used > 0 else 0
        for used, scratch in zip(placement.pages_used.tolist(), request.scratch, strict=True)
    )
    # A device without a list takes no scratch. The solver does not know which, so the LLM's rate is decided as it did.
    taken = sum(each) if work.prefix is None else problem.prefix_bytes(work.prefix)
    if problem.llm is not None and problem.llm.extrapolated(taken):
        notes.extend(problem.llm.unmeasured(taken))
    final = problem.step(work, int(resident.size), taken, slo_s)
    met = final.accepted and request.search_slo_s > 0
    trace = (*(solution.trace if solution is not None else ()), final)
    # Both decide by one comparison; what is accepted must not be a rounding error above it.
    most = max(problem.max_qps(work, taken, slo_s), (final.rate_qps or 0.0) if met else 0.0)
    reason, nearest = _reason(problem, request, solution, final, met, work, taken)
    epsilon, coverage_at_epsilon = _batching_model(problem, request, solution, work, final.rate_qps)
    mean_hit = float(curve.of_lists(resident).hit_rate.mean())
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
        tau_s=slo_s
        / (1.0 + request.headroom)
        / (1.0 + next(e for e in (request.epsilon, epsilon, 1.0) if e is not None)),
        batch=final.batch,
        rate_qps=final.rate_qps,
        max_sustainable_qps=most,
        epsilon_solved=epsilon,
        coverage_at_epsilon_solved=coverage_at_epsilon,
        nearest_slo_ms=nearest,
        trace=trace,
        hit_rate_model=problem.hit_rates,
        hit_rate_errors=analysis.hit_rates.summary(),
        host_model=analysis.latency.host.model.name,
        host_model_errors=dict(analysis.latency.host.errors),
        analysis=analysis,
        _work=work,
    )


def _batching_model(
    problem: Problem, request: PlanRequest, solution: Solution | None, work: QueryWork, rate: float | None
) -> tuple[float | None, float | None]:
    """Epsilon of the batching model at ``rate``, and the coverage solved with it; ``None`` each where there is no rate,
    or the coverage is fixed."""
    if rate is None or rate <= 0 or request.search_slo_s <= 0:
        return None, None
    epsilon = waiting_factor(rate, problem.settle(work, rate).mean_s, request.percentile)
    if solution is None:
        return epsilon, None
    if request.epsilon is not None:
        solution = solve(problem.at_epsilon(None), request.search_slo_s)
    return epsilon, solution.count / problem.curve.nlist


def _wanted(
    problem: Problem, request: PlanRequest, solution: Solution | None, capacity: tuple[int, ...]
) -> tuple[I64, list[str]]:
    """Ranks in hot order (m,) int64, ascending, of the lists to load; and the caps that took effect."""
    curve = problem.curve
    notes: list[str] = []
    limit = problem.most_pages
    if solution is not None and solution.feasible:
        count = max(solution.count, _filled(problem, request, solution.slo_s))
        return np.arange(count, dtype=np.int64), notes
    if solution is None:
        assert request.coverage is not None
        target = min(curve.nlist, math.ceil(request.coverage * curve.nlist - 1e-9))
    else:
        # Best effort: the lists that the solver found useful and, where memory was the limit, colder ones that fit.
        target = solution.count if solution.count < problem.cap_count() else curve.useful_count()
    if int(curve.prefix_pages[target]) <= limit:
        chosen = np.arange(target, dtype=np.int64)
    else:
        chosen = choose_hottest(curve.pages_by_rank[:target], limit, max(capacity))
        if solution is None:
            notes.append(
                f"coverage {request.coverage:g} asks for {target} lists and "
                f"{problem.prefix_bytes(target)} bytes; memory caps it at {chosen.size} lists"
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


def _filled(problem: Problem, request: PlanRequest, slo_s: float) -> int:
    """Lists that ``request`` fills its bytes with; 0 where they would break the SLO."""
    curve = problem.curve
    pages = min(request.fill_bytes // curve.geometry.page_bytes, problem.most_pages)
    count = min(int(np.searchsorted(curve.prefix_pages, pages, side="right")) - 1, curve.useful_count())
    return count if count > 0 and problem.prefix_step(count, slo_s).accepted else 0


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
    slo_ms = final.bound_s * 1e3
    how = "the fixed coverage" if request.coverage is not None else "the smallest coverage"
    if solution is not None and solution.feasible and final.count > solution.count:
        how = "the coverage that its share of the bytes holds"
    if met:
        load = "" if final.rate_qps is None else f"sustains {rate_in_words(final.rate_qps)} and "
        return f"{how} {load}{in_words(final)}, within {slo_ms:.3g} ms", None
    # A new plan is sure to meet the solver's own nearest target. The factor absorbs rounding.
    nearest_s = solution.nearest_s if solution is not None else None
    if nearest_s is None:
        nearest_s = problem.nearest(work, device_bytes)
    nearest = request.slo_ms_of(nearest_s * (1.0 + 1e-9)) if nearest_s is not None else None
    if request.search_slo_s <= 0:
        llm_ms = request.llm.ttft_s * 1e3 if request.llm else 0.0
        why = f"the LLM alone takes {llm_ms:.4g} ms of the {request.slo_ms:.4g} ms"
    elif solution is not None and not solution.feasible:
        why = solution.reason
    elif not final.sustained:
        why = f"{how} does not sustain {rate_in_words(final.rate_qps or 0.0)}"
    else:
        why = f"{how} {in_words(final)} where {slo_ms:.3g} ms are allowed"
    if nearest is None:
        most = problem.max_qps(work, device_bytes, math.inf)
        return f"{why}; no SLO can be met at this rate: at most {rate_in_words(most)} are sustained", None
    return f"{why}; the nearest SLO that can be met is {nearest:.4g} ms", nearest
