"""Eleven lines that tell a person what a plan decided, from what, and what would change it."""

from __future__ import annotations

import dataclasses

import numpy as np

from hybridindex.paging import format_bytes
from hybridindex.partitioner.decision import Decision
from hybridindex.partitioner.eq1 import coverage_of_eq1
from hybridindex.partitioner.models.coverage import QueryWork
from hybridindex.partitioner.models.hitrate import MODEL_NAMES
from hybridindex.partitioner.models.order_stats import window_starts
from hybridindex.partitioner.models.rows import rows_on_devices
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import Solution, problem_of, rate_in_words, solve

__all__ = ["explain_plan"]


def explain_plan(plan: Decision) -> str:
    """Eleven lines of plain words."""
    request, curve, latency = plan.request, plan.analysis.curve, plan.analysis.latency
    profile = plan.analysis.profile
    batch = plan.batch
    load = rate_in_words(plan.rate_qps) if plan.rate_qps is not None else "one query at a time (no rate given)"
    if request.llm is not None and request.rate_qps is None:
        load += ", what the LLM takes"
    held = f"{curve.n_held} held-back queries" + (
        f" of {curve.n_held_total}" if curve.n_held < curve.n_held_total else ""
    )
    beyond = ", beyond what was measured" if plan.extrapolated(batch) else ""
    epsilon = (
        f"; the batching model gives {plan.epsilon_solved:.2f}"
        + (f" (coverage {plan.coverage_at_epsilon_solved:.1%})" if plan.coverage_at_epsilon_solved is not None else "")
        if plan.epsilon_solved is not None and request.epsilon is not None
        else ""
    )
    llm = throughput_model(request.llm) if request.llm is not None else None
    unmeasured = [*latency.notes, *(llm.unmeasured(plan.device_bytes) if llm is not None else ())]
    lines = [
        f"Verdict: {plan.verdict.value}. {_decision(plan)} {plan.reason[0].upper()}{plan.reason[1:]}.",
        f"Asked: {request.slo_stage} p{request.percentile:g} within {request.slo_ms:g} ms at {load}, "
        f"budget {' + '.join(format_bytes(b) for b in request.budgets)} on {plan.n_devices} device(s).",
        f"Placed: {plan.resident_lists.size} of {plan.nlist} lists ({plan.coverage:.1%} of lists, "
        f"{plan.coverage_bytes_fraction:.1%} of bytes), {_held(plan)}{format_bytes(plan.device_bytes)} with pages of "
        f"{format_bytes(plan.page_bytes)} and scratch, work imbalance {plan.imbalance:.2f}.",
        f"Hits: mean {plan.predicted_hit_rate:.1%} of a query's bytes; slowest query of a batch of {batch}: "
        f"{plan.predicted_min_hit_rate(batch):.1%} ({plan.hit_rate_model} model, {_hit_rate_error(plan)}).",
        f"Latency of a batch of {batch}: {plan.predicted_latency_ms(batch):.3g} ms median, "
        f"{plan.predicted_latency_ms(batch, request.percentile):.3g} ms p{request.percentile:g}{beyond} "
        f"({plan.host_model} host model, median error {plan.host_model_errors[plan.host_model]:.1%}{_compared(plan)}).",
        f"Queueing: a batch may take {plan.tau_s * 1e3:.4g} ms, for requests wait up to "
        f"{_first(request.epsilon, plan.epsilon_solved, 1.0):.2f} times as long{epsilon}; "
        f"at most {rate_in_words(plan.max_sustainable_qps)}, {request.headroom:.0%} below what search sustains.",
        _models(plan),
        f"From: profile {profile.id if profile.id is not None else '(not stored)'} of {profile.created_at}, {held}, "
        f"nprobe {plan.nprobe}, {latency.host.n_samples} host scan timings ({profile.scanner}, "
        f"{profile.threads} threads, {profile.hardware.cpu_model}).",
        f"Not measured: {'; '.join(unmeasured) if unmeasured else 'nothing that the model needs'}.",
        _other_slo(plan),
        _other_budget(plan),
    ]
    return "\n".join(lines)


def _hit_rate_error(plan: Decision) -> str:
    errors = plan.hit_rate_errors.get(plan.hit_rate_model)
    if errors is None:
        return "too few queries to compare it with"
    return f"unseen queries: median error {errors[0]:.3f}, worst {errors[1]:.3f}"


def _compared(plan: Decision) -> str:
    """What the exact distances of candidates take of it."""
    analysis, batch = plan.analysis, max(1, plan.batch)
    if analysis.latency.rerank is None:
        return ""
    work = analysis.curve.of_lists(plan.resident_lists, plan.resident_rows)
    parts = analysis.latency.parts(analysis.curve, work, batch)
    return (
        f"; exact distances of the candidates take {float(parts.rerank_s.mean()) * 1e3:.3g} ms, median error "
        f"{analysis.latency.rerank.error:.1%}{_read(plan, work, batch)}"
    )


def _read(plan: Decision, work: QueryWork, batch: int) -> str:
    """What of them is for rows on disk."""
    latency, curve = plan.analysis.latency, plan.analysis.curve
    if work.row_faults is None or latency.row_faults is None or curve.rows is None or curve.rows.cache is None:
        return ""
    assert plan.request.row_cache_bytes is not None
    pages = float(work.row_faults.mean())
    seconds = float(latency.fault_s(work, batch, window_starts(curve.n_held)).mean())
    beyond = ", beyond what was measured" if pages * batch > latency.row_faults.max_pages else ""
    return (
        f"; {seconds * 1e3:.3g} ms of them to read rows from disk, {pages:.3g} pages a query at "
        f"{latency.row_faults.per_page_s * 1e6:.3g} us{beyond}, with {format_bytes(plan.request.row_cache_bytes)} of "
        f"memory for {format_bytes(curve.rows.cache.all_bytes)} of rows"
    )


def _held(plan: Decision) -> str:
    """Where searches scan codes: how many bytes of them are placed, instead of which bytes of rows."""
    if plan.bits is None:
        return ""
    profile, resident = plan.analysis.profile, plan.resident_lists
    nbytes = int(profile.list_bytes[resident].sum())
    rows = profile.notes.get("codes", {}).get("row_bytes") if rows_on_devices(profile) else None
    bits = "1 bit" if plan.bits == 1 else f"{plan.bits} bits"
    said = f"codes, {bits}: {format_bytes(nbytes)} of {format_bytes(profile.nbytes)}"
    beside = plan.resident_rows.size
    if rows is not None and nbytes:
        share = int(profile.list_sizes[resident].sum()) / max(1, int(profile.list_sizes.sum()))
        said += f", in place of {format_bytes(rows * share)} of rows{'' if beside else ', which stay on the host'}"
    if beside:
        said += (
            f"; rows of {beside} lists: {format_bytes(plan.bytes_by_precision['rows'])}, which compare "
            f"{plan.predicted_row_hit_rate:.1%} of the candidates"
        )
    return f"{said}; "


def _decision(plan: Decision) -> str:
    """What to do, in one sentence."""
    request = plan.request
    beside = f" and the rows of {plan.resident_rows.size}" if plan.resident_rows.size else ""
    held = f"{plan.resident_lists.size} of {plan.nlist} lists{beside} on devices ({format_bytes(plan.device_bytes)})"
    served = "one query at a time" if plan.rate_qps is None else rate_in_words(plan.rate_qps)
    goal = f"{served} within {request.slo_ms:g} ms at p{request.percentile:g}"
    return f"With {held} search serves {goal}." if plan.feasible else f"Even with {held} search does not serve {goal}."


def _models(plan: Decision) -> str:
    """What each hit-rate model would have decided, beside its error on queries that it has not seen."""
    if plan.request.coverage is not None:
        return "Hit-rate models: none decides; the coverage is fixed."
    told, slo_s = [], _search_s(plan.request)
    for name in MODEL_NAMES:
        problem = problem_of(plan.analysis, dataclasses.replace(plan.request, hit_rate_model=name))
        found = solve(problem, slo_s)
        beside = f" and the rows of {found.rows}" if found.rows else ""
        lists = f"{found.count} lists{beside}" if found.feasible else "infeasible"
        errors = plan.hit_rate_errors.get(name)
        error = "error unknown" if errors is None else f"error {errors[0]:.3f}"
        chosen = ", decides" if name == plan.hit_rate_model else ""
        told.append(f"{name.replace('_', '-')} {lists} ({error}{chosen})")
    rule = coverage_of_eq1(problem_of(plan.analysis, plan.request), plan.tau_s)
    paper = "no coverage suffices" if rule is None else f"{round(rule * plan.nlist)} lists"
    return f"Hit-rate models: {'; '.join(told)}; VectorLiteRAG's Eq. 1 alone, with its Beta: {paper}."


def _search_s(request: PlanRequest) -> float:
    return max(request.search_slo_s, 1e-12)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _in_words(plan: Decision, solution: Solution, nbytes: int) -> str:
    curve = plan.analysis.curve
    verdict = "" if solution.feasible else " and still miss it"
    beside = f", rows of {solution.rows / curve.nlist:.1%}" if solution.rows else ""
    return f"{format_bytes(nbytes)} ({solution.count / curve.nlist:.1%} of lists{beside}){verdict}"


def _other_slo(plan: Decision) -> str:
    problem = problem_of(plan.analysis, plan.request)
    found = [
        solve(problem, _search_s(dataclasses.replace(plan.request, slo_ms=plan.request.slo_ms * factor)))
        for factor in (0.5, 2.0)
    ]
    half, double = (_in_words(plan, one, one.device_bytes) for one in found)
    return f"Another SLO: half of it would take {half}, twice {double}." + (
        f" Nearest that can be met: {plan.nearest_slo_ms:.4g} ms." if plan.nearest_slo_ms is not None else ""
    )


def _other_budget(plan: Decision) -> str:
    if plan.feasible:
        spare = sum(plan.request.budgets) - plan.device_bytes
        return f"Another budget: {format_bytes(spare)} are spare; down to {format_bytes(plan.device_bytes)} this holds."
    request = plan.request
    if not request.scannable:
        return f"Another budget: none helps, {request.unscannable or 'no device tier scans this codec'}."
    unlimited = solve(problem_of(plan.analysis, request).without_limit(), _search_s(plan.request))
    if unlimited.feasible and request.search_slo_s > 0:
        # A larger budget has more scratch.
        if not any(request.budgets):
            request = request.within((1,) * request.n_devices)
        path, place = unlimited.path, unlimited.place
        largest = int(np.diff(path.pages)[:place].max(initial=0))
        nbytes = request.least_bytes(int(path.pages[place]), largest, plan.page_bytes)
        assert nbytes is not None
        return f"Another budget: {_in_words(plan, unlimited, nbytes)} in all would meet the SLO."
    return "Another budget: no budget meets this SLO on this machine; lower the rate or nprobe, or raise the SLO."
