"""Writes a report: one HTML file and its pictures, each file written atomically."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import FileError, ProfileMismatchError, cannot_write
from hybridindex.paging import format_bytes
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.solver import rate_in_words
from hybridindex.report import tables
from hybridindex.report.acts import PICTURES_OF_ACTS, Act
from hybridindex.report.fig_latency import draw_latency_fit, draw_prediction_check
from hybridindex.report.fig_load import draw_load
from hybridindex.report.fig_plan import draw_hit_rate, draw_slo
from hybridindex.report.fig_profile import draw_access, draw_recall, draw_transfers
from hybridindex.report.page import Block, page, picture_block, pre_block, table_block, text_block
from hybridindex.report.rows import LoadRow, load_rows
from hybridindex.report.style import Picture, require_matplotlib
from hybridindex.types import Profile

__all__ = ["ReportFiles", "write_report"]

HTML_NAME = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """The written files."""

    html: Path
    #: In the order of the report.
    pngs: list[Path]
    #: The numbers of each picture.
    csvs: list[Path]


def write_report(
    out_dir: str | Path,
    *,
    index_info: Mapping[str, Any],
    profile: Profile,
    plan: Plan,
    load: Iterable[LoadRow | Mapping[str, Any]] | None = None,
    notes: Sequence[str] = (),
    devices: Sequence[str] = (),
    title: str = "",
    acts: Sequence[Act] = (),
) -> ReportFiles:
    """Draws all pictures and writes ``report.html``, a PNG and a CSV of each into ``out_dir``.

    The HTML contains its pictures and their numbers; the other files are for other documents. Those of an earlier
    report that this one lacks are removed.

    Args:
        out_dir: created if missing.
        index_info: name, count, dim, nlist, codec, metric. Shown as given, so it should contain no paths.
        profile: the profile that ``plan`` was made from.
        load: rows of a load test.
        notes: sentences on the data that a reader must know.
        devices: labels of the devices that served ``load``, besides those in the profile.
        title: of the page; by default it names the index.
        acts: what comes before all else.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ProfileMismatchError: ``plan`` was made from a profile of another index or machine.
        InvalidInputError: a row of ``load`` lacks a value.
        DiskFullError, NotWritableError: the directory cannot be written; says why.
    """
    require_matplotlib()
    for name, own, other in (
        ("index", plan.index_fingerprint, profile.index_fingerprint),
        ("hardware", plan.hardware_fingerprint, profile.hardware.fingerprint),
    ):
        if own != other:
            raise ProfileMismatchError(f"the plan's {name} fingerprint is {own!r}, the profile's {other!r}")
    rows = load_rows(load)
    request, analysis = plan.request, plan.analysis
    told = {picture.name for act in acts for picture in act.pictures}
    pictures = {
        picture.name: picture
        for picture in (
            draw_slo(plan),
            draw_hit_rate(plan),
            *(() if "access" in told else (draw_access(analysis),)),
            draw_load(rows, slo_ms=request.slo_ms, percentile=request.percentile),
            draw_latency_fit(analysis),
            draw_prediction_check(analysis),
            draw_recall(profile),
            draw_transfers(profile),
            *(picture for act in acts for picture in act.pictures),
        )
    }
    heading = title or f"hybridindex report: {index_info.get('name', 'index')}"
    under = (
        f"{_number(index_info.get('count', profile.count))} vectors of {index_info.get('dim', profile.dim)} dimensions "
        f"in {profile.nlist:,} lists, {index_info.get('codec', profile.codec)}, "
        f"{index_info.get('metric', profile.metric)}; {format_bytes(profile.nbytes)} of codes. "
        f"Profiled {profile.created_at}."
    )
    blocks = _blocks(plan, profile, index_info, rows, notes, devices, pictures, told)
    html = page(heading, under, [*(block for act in acts for block in act.blocks), *blocks])

    target = Path(out_dir)
    pngs, csvs = [], []
    try:
        filesystem.make_folder(target, parents=True, exist_ok=True)
        for picture in pictures.values():
            if picture.drawn is not None:
                pngs.append(target / f"{picture.name}.png")
                filesystem.replace_file(pngs[-1], picture.drawn.png)
                csvs.append(target / f"{picture.name}.csv")
                filesystem.replace_file(csvs[-1], picture.drawn.csv)
        filesystem.replace_file(target / HTML_NAME, html)
        for name in (*pictures, *PICTURES_OF_ACTS):
            if name not in pictures or pictures[name].drawn is None:
                for suffix in ("png", "csv"):
                    filesystem.unlink(target / f"{name}.{suffix}", missing_ok=True)
    except FileError as error:
        raise cannot_write(error, target, "no file in it is half written; write the report again") from error
    return ReportFiles(html=target / HTML_NAME, pngs=pngs, csvs=csvs)


def _blocks(
    plan: Plan,
    profile: Profile,
    index_info: Mapping[str, Any],
    rows: Sequence[LoadRow],
    notes: Sequence[str],
    devices: Sequence[str],
    pictures: Mapping[str, Picture],
    told: Container[str],
) -> list[Block]:
    """``told``: pictures that stand elsewhere."""
    blocks = []
    lead, warning = _warning(profile, devices)
    if warning:
        blocks.append(text_block(warning, kind="warning", lead=lead))
    blocks.append(text_block(_verdict_sentence(plan), kind=f"verdict {plan.verdict.value}", lead=plan.verdict.value))
    blocks += [text_block(note) for note in notes]
    blocks.append(table_block(tables.key_numbers(plan), heading="Key numbers"))
    blocks.append(pre_block(plan.explain(), heading="The plan in words"))
    shown = ("slo-bytes", "hit-rate", "access", "load")
    blocks += [picture_block(pictures[name]) for name in shown if name not in told]
    if rows:
        blocks.append(table_block(tables.load_table(rows)))
    blocks.append(table_block(tables.latency_table(plan), heading="Predicted latency"))
    blocks.append(
        text_block("Without queueing. Extrapolated: no batch of this size was timed, so the last slope goes on.")
    )
    blocks.append(picture_block(pictures["latency-fit"]))
    blocks.append(picture_block(pictures["latency-check"]))
    blocks.append(table_block(tables.model_errors(plan), heading="Models and their errors"))
    blocks.append(
        text_block(
            "On queries and runs that a model had not seen. Hit rate: absolute error of the batch minimum; "
            "host scan: relative error of the time."
        )
    )
    blocks.append(picture_block(pictures["recall"]))
    blocks.append(picture_block(pictures["transfers"]))
    blocks.append(table_block(tables.profile_facts(profile, index_info), heading="What was measured, and where"))
    trace = tables.trace(plan)
    blocks.append(
        table_block(
            trace,
            heading="Solver",
            folded=f"{len(plan.trace):,} coverages tried, in order"
            + (f"; the last {len(trace.rows):,} shown" if len(trace.rows) < len(plan.trace) else ""),
        )
    )
    return blocks


def _verdict_sentence(plan: Plan) -> str:
    request = plan.request
    asked = f"{'search' if request.slo_stage == 'search' else 'time to first token'} within {request.slo_ms:g} ms"
    load = f" at {rate_in_words(plan.rate_qps)}" if plan.rate_qps is not None else ""
    placed = (
        f"{plan.coverage:.1%} of the lists on the device{'s' if plan.n_devices > 1 else ''} "
        f"({format_bytes(plan.device_bytes)} of {format_bytes(sum(request.budgets))} allowed), expected to serve "
        f"{plan.predicted_hit_rate:.0%} of the scan work"
        if plan.resident_lists.size
        else "everything stays on the host"
    )
    return f"p{request.percentile:g} {asked}{load}: {placed}. {plan.reason[:1].upper()}{plan.reason[1:]}."


def _warning(profile: Profile, devices: Sequence[str]) -> tuple[str, str]:
    """Lead and text of a warning where no real device took part; else empty."""
    seen = {*devices, *(s.device for s in profile.stages if s.device), *(t.device for t in profile.transfers)}
    if any(label.lower().startswith("cpu") or "stand-in" in label.lower() for label in seen):
        return "Stand-in device.", (
            "The device in this report is not a GPU but ordinary main memory, scanned by the same processor that does "
            "the host's part. Bytes, hit rates, recall and exactness are real; device and transfer times, and latency "
            "and attainment of hybrid search, say nothing about a GPU."
        )
    if not seen and not profile.hardware.devices:
        return "No device.", (
            "This machine has no GPU and no device was timed. Bytes and hit rates are real; predicted latency counts "
            "the device's part as hidden behind the host's."
        )
    return "", ""


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
