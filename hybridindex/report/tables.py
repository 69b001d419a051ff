"""The report's tables, as rows of plain text; :mod:`hybridindex.report.page` escapes them and adds tags."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridindex.paging import format_bytes
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.solver import rate_in_words
from hybridindex.report.rows import LoadRow
from hybridindex.types import Profile

__all__ = [
    "NOT_MEASURED",
    "Table",
    "key_numbers",
    "latency_table",
    "load_table",
    "model_errors",
    "profile_facts",
    "trace",
]

NOT_MEASURED = "not measured"
_BATCHES = (1, 4, 16, 64)
_MAX_TRACE_ROWS = 200
_MAX_NOTE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells. Without a header, the first cell of each row is its heading."""

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()


def key_numbers(plan: Plan) -> Table:
    """The decision in figures."""
    request, batch = plan.request, max(plan.batch, 1)
    each = (
        f" ({' + '.join(format_bytes(b) for b in plan.device_bytes_each)})" if len(plan.device_bytes_each) > 1 else ""
    )
    beyond = " (extrapolated)" if plan.extrapolated(batch) else ""
    hits = [
        ("Predicted hit rate", f"{plan.predicted_hit_rate:.1%} of a query's bytes on average"),
        (f"Slowest query of {batch}", f"{plan.predicted_min_hit_rate(batch):.1%} predicted hit rate"),
    ]
    # Where no list is on a device nothing can be hit.
    if not plan.resident_lists.size:
        hits = []
    rows = [
        ("Verdict", plan.verdict.value),
        ("Asked for", f"{request.slo_stage} within {request.slo_ms:g} ms at p{request.percentile:g}"),
        (
            "Load",
            rate_in_words(plan.rate_qps) if plan.rate_qps is not None else "single queries: no rate was given",
        ),
        ("Coverage", f"{plan.coverage:.1%} of lists ({plan.resident_lists.size:,} of {plan.nlist:,})"),
        ("Coverage by bytes", f"{plan.coverage_bytes_fraction:.1%} of {format_bytes(plan.analysis.profile.nbytes)}"),
        (
            "Device memory",
            f"{format_bytes(plan.device_bytes)}{each}, pages of {format_bytes(plan.page_bytes)} and scratch",
        ),
        ("Budget", " + ".join(format_bytes(b) for b in request.budgets)),
        *hits,
        (
            f"Latency of a batch of {batch}",
            f"{plan.predicted_latency_ms(batch):.3g} ms median, "
            f"{plan.predicted_latency_ms(batch, 90):.3g} ms p90{beyond}; {plan.tau_s * 1e3:.3g} ms are allowed",
        ),
        ("Highest sustainable rate", rate_in_words(plan.max_sustainable_qps)),
    ]
    if plan.bits is not None:
        parts = plan.bytes_by_precision
        said = f"{format_bytes(parts['codes'])} of codes, {format_bytes(parts['rows'])} of rows beside them"
        hit = f", which compare {plan.predicted_row_hit_rate:.1%} of the candidates" if parts["rows"] else ""
        rows.append(("By precision, without scratch", said + hit))
    if plan.predicted_row_faults is not None:
        assert request.row_cache_bytes is not None
        said = f"{plan.predicted_row_faults:.3g} pages a query, with {format_bytes(request.row_cache_bytes)} of memory"
        rows.append(("Rows on disk", said))
    if plan.nearest_slo_ms is not None:
        rows.append(("Nearest SLO that can be met", f"{plan.nearest_slo_ms:.4g} ms"))
    if plan.n_unplaced:
        rows.append(("Wanted lists that fit nowhere", f"{plan.n_unplaced:,}"))
    return Table(rows=rows)


def latency_table(plan: Plan) -> Table:
    """Predictions at several batch sizes."""
    batches = sorted({*_BATCHES, max(plan.batch, 1)})
    hits = ("mean hit rate", "slowest query's hit rate") if plan.resident_lists.size else ()
    return Table(
        header=("batch", "median", "p90", *hits, ""),
        rows=[
            (
                f"{batch:,}",
                f"{plan.predicted_latency_ms(batch):.3g} ms",
                f"{plan.predicted_latency_ms(batch, 90):.3g} ms",
                *((f"{plan.predicted_hit_rate:.1%}", f"{plan.predicted_min_hit_rate(batch):.1%}") if hits else ()),
                ", ".join(
                    word
                    for word, holds in (
                        ("planned for", batch == plan.batch),
                        ("extrapolated", plan.extrapolated(batch)),
                    )
                    if holds
                ),
            )
            for batch in batches
        ],
    )


def model_errors(plan: Plan) -> Table:
    """Every model that was tried, with its error on unseen data."""
    rows = [
        (
            "hit rate",
            name.replace("_", "-"),
            f"{median:.3f}",
            f"{worst:.3f}",
            "in use" if name == plan.hit_rate_model else "",
        )
        for name, (median, worst) in plan.hit_rate_errors.items()
    ]
    rows += [
        (
            "host scan",
            name.replace("_", "-"),
            f"{error:.1%}" if math.isfinite(error) else NOT_MEASURED,
            "",
            "in use" if name == plan.host_model else "",
        )
        for name, error in plan.host_model_errors.items()
    ]
    return Table(header=("of", "model", "median error", "worst", ""), rows=rows)


def profile_facts(profile: Profile, index_info: Mapping[str, Any]) -> Table:
    """What was measured, where, and under which conditions."""
    hardware = profile.hardware
    stages = Counter(s.stage for s in profile.stages)
    timed = ", ".join(f"{count:,} {stage.replace('_', ' ')}" for stage, count in stages.items()) or NOT_MEASURED
    rows = [
        ("Index", ", ".join(f"{name} {_plain(value)}" for name, value in index_info.items() if name != "name")),
        ("nprobe, k", f"{profile.nprobe}, {profile.k}"),
        ("Profiled", f"{profile.created_at}, profile {profile.id if profile.id is not None else 'not stored'}"),
        ("Machine", f"{hardware.cpu_model}, {hardware.cores} cores, {format_bytes(hardware.memory_bytes)}"),
        ("Devices", "; ".join(hardware.devices) or "no GPU"),
        ("Host scanner", f"{profile.scanner}, {profile.threads} thread{'s' if profile.threads != 1 else ''}"),
        ("OMP_WAIT_POLICY", profile.omp_wait_policy or "not set"),
        ("Load average at start", f"{profile.load_average:.2f}"),
        (
            "Calibration queries",
            f"{profile.access.fit_probes.shape[0]:,} to choose the hot order, "
            f"{profile.access.held_probes.shape[0]:,} held back",
        ),
        ("Timed runs", timed),
        ("Copies timed", f"{len(profile.transfers):,}" if profile.transfers else NOT_MEASURED),
        ("Fingerprints", f"index {profile.index_fingerprint[:16]}, hardware {hardware.fingerprint[:16]}"),
    ]
    if hardware.versions:
        rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in hardware.versions.items())))
    rows += _note_rows(profile.notes)
    return Table(rows=rows)


def _note_rows(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Notes that fit a line; nested ones as "name value" pairs."""
    rows = []
    for name, value in notes.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {_plain(part)}" for key, part in value.items() if part is not None)
        else:
            text = _plain(value) if value is not None else ""
        if text and len(text) <= _MAX_NOTE:
            rows.append((f"Note: {name}".replace("_", " "), text.replace("_", " ")))
    return rows


def trace(plan: Plan) -> Table:
    """Every coverage that the solver tried on the path that it took, in order."""
    rows_too = any(step.rows for step in plan.trace)
    return Table(
        header=(
            "lists",
            *(("rows of",) if rows_too else ()),
            "coverage",
            "device memory",
            "rate/s",
            "batch",
            "batch takes",
            "answers in",
            "allowed",
            "",
        ),
        rows=[
            (
                f"{step.count:,}",
                *((f"{step.rows:,}",) if rows_too else ()),
                f"{step.coverage:.2%}",
                format_bytes(step.device_bytes),
                f"{step.rate_qps:.4g}" if step.rate_qps is not None else "-",
                f"{step.batch:,}",
                _milliseconds(step.latency_s),
                "-" if step.response_s is None else _milliseconds(step.response_s),
                _milliseconds(step.bound_s),
                "enough" if step.accepted else "too slow" if step.sustained else "too little",
            )
            for step in plan.trace[-_MAX_TRACE_ROWS:]
        ],
    )


def load_table(rows: Sequence[LoadRow]) -> Table:
    """The load test in figures."""
    return Table(
        header=("policy", "requests/s", "p50", "p95", "p99", "attainment", "hit rate", "device memory"),
        rows=[
            (
                row.policy,
                f"{row.rate:g}",
                *(f"{v:.3g} ms" if math.isfinite(v) else "unanswered" for v in (row.p50_ms, row.p95_ms, row.p99_ms)),
                f"{row.attainment:.1%}" if row.attainment is not None else "-",
                f"{row.hit_rate:.1%}" if row.hit_rate is not None else "-",
                format_bytes(row.device_bytes) if row.device_bytes is not None else "-",
            )
            for row in rows
        ],
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if math.isfinite(seconds) else "-"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return " ".join(_plain(part) for part in value)
    return str(value)
