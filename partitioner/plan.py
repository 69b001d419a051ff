"""A plan: which lists become resident where, decided from one profile for one target. Not yet applied to anything.

Covers :func:`make_plan` and the :class:`Plan` it returns, with its record form. Predictions are in
:mod:`hybridindex.partitioner.decision`, the explanation in words in :mod:`hybridindex.partitioner.explain`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.decision import Decision, Verdict
from hybridindex.partitioner.explain import explain_plan
from hybridindex.partitioner.forms import Path
from hybridindex.partitioner.models.coverage import CoverageCurve, QueryWork
from hybridindex.partitioner.models.hitrate import modelled
from hybridindex.partitioner.models.throughput import waiting_factor
from hybridindex.partitioner.placement import PlacementResult, choose_hottest, place_lpt
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import (
    LARGEST_SLO_S,
    Problem,
    Solution,
    SolverStep,
    in_words,
    problem_of,
    rate_in_words,
    solve,
)
from hybridindex.types import I64, Profile

__all__ = ["Plan", "Verdict", "make_plan"]

RECORD_VERSION = 5
#: Read as well. 4 had no rows beside codes. Before it, steps had other columns, and predictions used the held-back
#: queries themselves.
_EARLIER_VERSIONS = (3, 4)
#: Over the nearest SLO, so that a plan for it meets it in spite of rounding; and how often one is tried.
_ROUNDED = 1.0 + 1e-9
_NEAREST_TRIES = 4
#: Fields that a record keeps as arrays.
_ARRAYS = ("resident_lists", "list_device", "resident_rows", "row_device")
#: Fields of a plan that a record converts, keeps as arrays, or computes again; it keeps the others as they are.
_CONVERTED_FIELDS = {"verdict", "request", "device_bytes_each", "hit_rate_errors", "host_model_errors", "trace"}
_PLAIN_FIELDS = [
    f.name for f in dataclasses.fields(Decision) if f.name not in _CONVERTED_FIELDS | {*_ARRAYS, "analysis", "_work"}
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
        return {"data": data, "arrays": {name: getattr(self, name) for name in _ARRAYS}}

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
        if version not in (*_EARLIER_VERSIONS, RECORD_VERSION):
            raise InvalidInputError(f"plan record has version {version}; {RECORD_VERSION} is known")
        if version < 4:
            data |= {"trace": [], "hit_rate_model": "empirical"}
        arrays = record["arrays"] if version == RECORD_VERSION else {**_no_rows(data["nlist"]), **record["arrays"]}
        request = PlanRequest.from_data(data.pop("request"))
        resident = np.asarray(arrays["resident_lists"], dtype=np.int64)
        rows = np.asarray(arrays["resident_rows"], dtype=np.int64)
        base = analysis if analysis is not None else analyse(profile, page_bytes=request.page_bytes)
        configured = base.configured_for(request)
        errors = data.pop("host_model_errors")
        return cls(
            verdict=Verdict(data.pop("verdict")),
            request=request,
            device_bytes_each=tuple(data.pop("device_bytes_each")),
            hit_rate_errors={name: (pair[0], pair[1]) for name, pair in data.pop("hit_rate_errors").items()},
            host_model_errors={name: math.inf if e is None else e for name, e in errors.items()},
            trace=tuple(SolverStep.from_data(step) for step in data.pop("trace")),
            resident_lists=resident,
            list_device=np.asarray(arrays["list_device"], dtype=np.int16),
            resident_rows=rows,
            row_device=np.asarray(arrays["row_device"], dtype=np.int16),
            analysis=configured,
            _work=modelled(configured.curve, configured.curve.of_lists(resident, rows), data["hit_rate_model"]),
            **data,
        )


def _no_rows(nlist: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a plan that keeps no rows beside codes."""
    return {"resident_rows": np.empty(0, dtype=np.int64), "row_device": np.full(nlist, -1, dtype=np.int16)}


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
    return _decide(base.configured_for(request), request)


def _decide(analysis: Analysis, request: PlanRequest) -> Plan:
    curve = analysis.curve
    problem = problem_of(analysis, request)
    # Where the LLM alone breaks the SLO nothing is left for search: the smallest positive target finds the best effort.
    slo_s = max(request.search_slo_s, 1e-12)
    chosen = _choose(problem, request, slo_s)
    solution, placed, final, notes = chosen.solution, chosen.placed, chosen.step, list(chosen.notes)
    placement, resident = placed.placement, placed.resident_lists
    n_unplaced, larger = placement.n_unplaced, chosen.path.left_out(*chosen.wanted)
    if larger and final.accepted:
        notes.append(f"{larger} hotter lists {problem.why_left_out(chosen.path)} and stay on the host")
    elif larger:
        n_unplaced += larger
    if n_unplaced:
        notes.append(f"{n_unplaced} wanted lists fit on no device and stay on the host")

    work = problem.work_of(resident, placed.resident_rows)
    each = tuple(
        int(used) * curve.geometry.page_bytes + scratch if used > 0 else 0
        for used, scratch in zip(placement.pages_used.tolist(), request.scratch, strict=True)
    )
    taken = final.device_bytes
    if problem.llm is not None and problem.llm.extrapolated(taken):
        notes.extend(problem.llm.unmeasured(taken))
    met = final.accepted and request.search_slo_s > 0
    trace = (*(solution.trace if solution is not None else ()), final)
    # Both decide by one comparison; what is accepted must not be a rounding error above it.
    most = max(problem.max_qps(work, taken, slo_s), (final.rate_qps or 0.0) if met else 0.0)
    reason, nearest = _reason(problem, request, chosen, met, work)
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
        coverage_bytes_fraction=int(curve.bytes_by_rank[curve.rank[resident]].sum()) / nbytes if nbytes else 0.0,
        device_bytes=sum(each),
        device_bytes_each=each,
        page_bytes=curve.geometry.page_bytes,
        resident_lists=resident,
        list_device=placed.list_device,
        resident_rows=placed.resident_rows,
        row_device=placed.row_device,
        n_unplaced=n_unplaced,
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """What devices would hold for one target."""

    #: None: the coverage is fixed.
    solution: Solution | None
    #: See :func:`_wanted`.
    path: Path
    wanted: tuple[I64, I64]
    notes: list[str]
    placed: _Placed
    step: SolverStep

    @property
    def within_reach_s(self) -> set[float]:
        """Targets that some resident set meets: what was placed, and what the solver found."""
        known = (self.step.response_s, None if self.solution is None else self.solution.nearest_s)
        return {s for s in known if s is not None and s <= LARGEST_SLO_S}


def _choose(problem: Problem, request: PlanRequest, slo_s: float) -> _Choice:
    """What a plan for ``slo_s`` places."""
    curve = problem.curve
    capacity = request.capacity_pages(curve.geometry.page_bytes)
    solution = solve(problem, slo_s) if request.coverage is None else None
    path, wanted, notes = _wanted(problem, request, solution, capacity)
    placed = _placed(curve, wanted, capacity)
    step = _step_of(problem, placed, slo_s)
    if solution is not None and solution.feasible and not step.accepted:
        # The solver adds up the pages of all devices, and something found no room on a single one.
        for longer in _longer(solution):
            others = _placed(curve, longer, capacity)
            with_others = _step_of(problem, others, slo_s)
            if with_others.accepted:
                path, wanted, placed, step = solution.path, longer, others, with_others
                break
    return _Choice(solution=solution, path=path, wanted=wanted, notes=notes, placed=placed, step=step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placed:
    """Where pieces went; as the fields of a plan."""

    placement: PlacementResult
    resident_lists: I64
    list_device: npt.NDArray[np.int16]
    resident_rows: I64
    row_device: npt.NDArray[np.int16]


def _placed(curve: CoverageCurve, wanted: tuple[I64, I64], capacity: tuple[int, ...]) -> _Placed:
    """Places ``wanted``, ranks of lists in the hot order and in the order of rows: the most bytes read first."""
    lists, rows = wanted
    work, pages = curve.accesses_by_rank[lists] * curve.bytes_by_rank[lists], curve.pages_by_rank[lists]
    beside = _no_rows(curve.nlist)
    if curve.rows is not None:
        work = np.concatenate((work, curve.rows.candidates_by_rank[rows] * curve.rows.row_bytes))
        pages = np.concatenate((pages, curve.rows.list_pages[curve.rows.order[rows]]))
    placement = place_lpt(work, pages, capacity)
    device, beside_device = np.split(placement.device, [lists.size])
    list_device = np.full(curve.nlist, -1, dtype=np.int16)
    resident = curve.order[lists[device >= 0]]
    list_device[resident] = device[device >= 0]
    if curve.rows is not None:
        there = curve.rows.order[rows[beside_device >= 0]]
        beside["resident_rows"] = there
        beside["row_device"][there] = beside_device[beside_device >= 0]
    return _Placed(placement=placement, resident_lists=resident, list_device=list_device, **beside)


def _step_of(problem: Problem, placed: _Placed, slo_s: float) -> SolverStep:
    """Does search answer in time with what was placed?"""
    work = problem.work_of(placed.resident_lists, placed.resident_rows)
    # A device without a list takes no scratch. The solver does not know which, so the LLM's rate is decided as it did.
    taken = problem.with_scratch(int(placed.placement.pages_used.sum()))
    return problem.step(work, int(placed.resident_lists.size), taken, slo_s, int(placed.resident_rows.size))


def _longer(solution: Solution) -> Iterator[tuple[I64, I64]]:
    """Longer and longer prefixes of the solution's path, as ranks like those of :func:`_wanted`."""
    path, place, more = solution.path, solution.place, 1
    while place < path.useful:
        place = min(place + more, path.useful)
        yield path.pieces(np.arange(place, dtype=np.int64))
        more *= 2


def _wanted(
    problem: Problem, request: PlanRequest, solution: Solution | None, capacity: tuple[int, ...]
) -> tuple[Path, tuple[I64, I64], list[str]]:
    """A path, and of the lists of it to load the ranks (m,) int64, ascending, in the hot order and in the order of
    rows; and the caps that took effect."""
    curve = problem.curve
    notes: list[str] = []
    limit = problem.most_pages
    if solution is not None:
        problem = problem.along(solution.path)
        if solution.feasible:
            filled = _filled(problem, request, solution)
            path, place = filled if filled is not None else (solution.path, solution.place)
            return path, path.pieces(np.arange(place, dtype=np.int64)), notes
    if solution is None:
        assert request.coverage is not None
        target = min(curve.nlist, math.ceil(request.coverage * curve.nlist - 1e-9))
    else:
        # Best effort: the lists that the solver found useful and, where memory was the limit, colder ones that fit.
        target = solution.place if solution.place < problem.cap_count() else problem.path.useful
    pages = problem.path.pages
    if int(pages[target]) <= limit:
        chosen = np.arange(target, dtype=np.int64)
    else:
        chosen = choose_hottest(np.diff(pages)[:target], limit, max(capacity))
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
    return problem.path, problem.path.pieces(chosen), notes


def _filled(problem: Problem, request: PlanRequest, solution: Solution) -> tuple[Path, int] | None:
    """The prefix, of the path that answers soonest, with which ``request`` fills its bytes; None: it takes no more than
    ``solution``, or would break the SLO."""
    pages = min(request.fill_bytes // problem.curve.geometry.page_bytes, problem.most_pages)
    found: list[tuple[float, Path, int]] = []
    for path in problem.paths:
        place = min(int(np.searchsorted(path.pages, pages, side="right")) - 1, path.useful)
        step = problem.along(path).prefix_step(place, solution.slo_s)
        if step.accepted and (step.device_bytes, place) > (solution.device_bytes, solution.place):
            assert step.response_s is not None
            found.append((step.response_s, path, place))
    return min(found, key=lambda one: one[0])[1:] if found else None


def _nearest_s(problem: Problem, request: PlanRequest, chosen: _Choice) -> float | None:
    """The smallest target, in seconds, that is found to be met by a plan for it, where ``chosen`` misses its own; None:
    no target is met. The solver adds up the pages of all devices, and a list has to fit on one."""
    known = chosen.within_reach_s
    for _ in range(_NEAREST_TRIES):
        nearest_s = min(known, default=None)
        if nearest_s is None:
            return None
        again = _choose(problem, request, nearest_s * _ROUNDED)
        if again.step.accepted:
            return nearest_s
        known = (known | again.within_reach_s) - {nearest_s}
    return min(known, default=None)


def _reason(
    problem: Problem, request: PlanRequest, chosen: _Choice, met: bool, work: QueryWork
) -> tuple[str, float | None]:
    """One sentence, and the nearest SLO when this one is not met."""
    solution, final = chosen.solution, chosen.step
    slo_ms = final.bound_s * 1e3
    how = "the fixed coverage" if request.coverage is not None else "the smallest coverage"
    if final.rows:
        how += f", with the rows of {final.rows} lists,"
    filled = request.fill_bytes and solution is not None and solution.feasible
    if filled and solution is not None and final.count + final.rows > solution.count + solution.rows:
        how = "the coverage that its share of the bytes holds"
    if met:
        load = "" if final.rate_qps is None else f"sustains {rate_in_words(final.rate_qps)} and "
        return f"{how} {load}{in_words(final)}, within {slo_ms:.3g} ms", None
    nearest_s = _nearest_s(problem, request, chosen)
    nearest = request.slo_ms_of(nearest_s * _ROUNDED) if nearest_s is not None else None
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
        most = problem.max_qps(work, final.device_bytes, math.inf)
        return f"{why}; no SLO can be met at this rate: at most {rate_in_words(most)} are sustained", None
    return f"{why}; the nearest SLO that can be met is {nearest:.4g} ms", nearest
