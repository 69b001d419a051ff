"""The commands schedule (a RAG pipeline on given chips) and hardware (lists hardware profiles)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

import hybridindex as hx
from hybridindex.cli.console import ExitCode, emit
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Json
from hybridindex.errors import InvalidInputError
from hybridindex.plans.current import latest_plan_id
from hybridindex.plans.precision import choose_view
from hybridindex.plans.stored import load_plan
from hybridindex.profiler.hardware import hardware_info
from hybridindex.studies import hardware
from hybridindex.studies.schedule import (
    Frontier,
    RAGSchema,
    Resources,
    Schedule,
    case,
    case_names,
    fastest_decoding,
    llm_extension,
    read_schema,
    search,
)
from hybridindex.studies.schedule.stage_report import compare_with_next, limiting_stage, report_stages
from hybridindex.studies.schedule.stages.tree_scan import MeasuredRetrieval

__all__ = ["register"]

#: Rows of the frontier whose requests/s differ by less are one row.
_ALIKE = 0.01
_KINDS: dict[str, Callable[[str], hardware.Chip | hardware.Server | hardware.Model]] = {
    "chips": hardware.chip,
    "servers": hardware.server,
    "models": hardware.model,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChoice:
    """Chips and retrieval servers that a schedule may use."""

    chips: Annotated[int, typer.Option(help="Most chips in total.")] = 64
    chip: Annotated[str, typer.Option(metavar="NAME|FILE.json", help="Kind of chip; see hybridindex hardware.")] = (
        "h100"
    )
    server: Annotated[str, typer.Option(metavar="NAME|FILE.json", help="Kind of retrieval servers.")] = "epyc-milan"
    servers: Annotated[int | None, typer.Option(help="Retrieval servers; default: as many as hold the chips.")] = None
    charge_servers: Annotated[float, typer.Option(help="Cost of one retrieval server, in chips.")] = 0.0
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="INDEX",
            help="Retrieval times of this index's latest plan, as the plan's profile measured them on any machine; "
            "without a plan, of the host as the newest profile measured it. Times scale with the database's bytes.",
        ),
    ] = None
    whole_servers: Annotated[
        bool, typer.Option("--whole-servers", help="Count all chips of the retrieval servers, including idle ones.")
    ] = False


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    @grouped
    def schedule(
        schema: Annotated[str, typer.Argument(metavar="SCHEMA.yaml|CASE", help="A pipeline, or case1 to case4.")],
        *,
        machines: MachineChoice,
        max_ttft_ms: Annotated[float | None, typer.Option(help="Goal: time to first token.")] = None,
        max_tpot_ms: Annotated[float | None, typer.Option(help="Goal: time per token.")] = None,
        baseline: Annotated[
            bool, typer.Option("--baseline", help="Compare with an extended LLM system (RAGO, section 7.1).")
        ] = False,
        explain: Annotated[
            int | None, typer.Option(metavar="POINT", help="Explain this point of the frontier, from 1.")
        ] = None,
        json: Json = False,
    ) -> None:
        """Find what runs where for a RAG pipeline: the frontier of first-token time and requests/s per chip.

        Exit status 10 when no schedule meets the goal; the nearest one is shown.
        """
        if max_ttft_ms is not None and not max_ttft_ms > 0:
            raise InvalidInputError(f"--max-ttft-ms is {max_ttft_ms}; expected a number above 0")
        if max_tpot_ms is not None and not max_tpot_ms > 0:
            raise InvalidInputError(f"--max-tpot-ms is {max_tpot_ms}; expected a number above 0")
        pipeline = _schema_of(schema)
        retrieval, source = (None, None) if machines.profile is None else _measured(machines.profile)
        resources = Resources(
            chip=hardware.chip(machines.chip),
            chips=machines.chips,
            server=hardware.server(machines.server),
            servers=machines.servers,
            retrieval=retrieval,
            server_cost_chips=machines.charge_servers,
            whole_servers=machines.whole_servers,
            largest_tpot_s=None if max_tpot_ms is None else max_tpot_ms / 1e3,
        )
        frontier, misses = _search(pipeline, resources)
        if explain is not None:
            compare_with_next(frontier, explain)
        chosen = frontier.best_throughput
        if max_ttft_ms is not None:
            chosen = frontier.nearest(max_ttft_ms / 1e3)
            if chosen.ttft_s > max_ttft_ms / 1e3:
                nearest_ms = chosen.ttft_s * 1e3
                misses.append(
                    f"no schedule gives the first token in {max_ttft_ms:g} ms; the nearest takes {nearest_ms:.3g} ms"
                )
        point = explain if explain is not None else frontier.schedules.index(chosen) + 1
        payload = _payload(frontier, point, misses) | {"retrieval": source}
        tables = _tables(frontier, point, misses, resources)
        if source is not None:
            tables.append(_source_words(source))
        if baseline:
            other = llm_extension(pipeline, replace(resources, largest_tpot_s=None)).best_throughput
            payload["baseline"] = _row(other)
            gain = frontier.best_throughput.qps_per_chip / other.qps_per_chip
            tables.append(
                f"extended LLM system, half of the chips each: {other.qps_per_chip:.3g} requests/s per chip, "
                f"first token after {other.ttft_s * 1e3:.3g} ms; the best schedule here gives {gain:.2f} times as many"
            )
        emit(payload, as_json=json, table=Group(*tables))
        if misses:
            raise typer.Exit(ExitCode.INFEASIBLE)

    @app.command(name="hardware")
    def show_hardware(
        name: Annotated[str | None, typer.Argument(metavar="NAME", help="A chip, server or model.")] = None,
        json: Json = False,
    ) -> None:
        """List shipped chips, servers and models; with NAME, show its numbers and their sources."""
        if name is None:
            listed = {kind: hardware.names(kind) for kind in _KINDS}
            table = Table("kind", "names")
            for kind, found in listed.items():
                table.add_row(kind, ", ".join(found))
            emit(listed, as_json=json, table=table)
            return
        found_in = next((one for one in _KINDS if name in hardware.names(one)), None)
        if found_in is None:
            every = ", ".join(one for kind in _KINDS for one in hardware.names(kind))
            raise InvalidInputError(f"NAME is {name[:80]!r}; expected one of {every}")
        profile = asdict(_KINDS[found_in](name))
        sources = profile.pop("sources")
        table = Table("field", "value", "source", title=name)
        for field, value in profile.items():
            if field != "name":
                table.add_row(
                    field, f"{value:,.6g}" if isinstance(value, float) else str(value), sources.get(field, "")
                )
        emit({"kind": found_in, **profile, "sources": sources}, as_json=json, table=table)


def _measured(path: Path) -> tuple[MeasuredRetrieval, dict[str, Any]]:
    """Of a server like the profiled machine, and which profile, plan and machine it is of; the host alone where there
    is no plan.

    Raises:
        ProfileError: there is no profile.
    """
    with hx.open(path, verify="quick") as index, index.store() as store:
        view = choose_view(index.ivf, store, "latest")
        stored = latest_plan_id(store, view.fingerprint)
        found = None if stored is None else load_plan(view, str(stored), store)
        if found is None:
            newest = store.load_profile(index_fingerprint=view.fingerprint)
            plan = index.plan(1e6, 0, newest, coverage=0.0, allow_other_hardware=True)
        else:
            plan = found[1]
        profile = plan.analysis.profile
        latency = plan.analysis.latency
        batches = tuple(1 << b for b in range(11) if not latency.extrapolated(1 << b)) or (1, 2)
        if len(batches) == 1:
            batches = (*batches, 2 * batches[0])
        seconds = tuple(plan.predicted_latency_ms(batch) / 1e3 for batch in batches)
        source = {
            "profile_id": profile.id,
            "plan_id": None if found is None else found[0],
            "cpu_model": profile.hardware.cpu_model,
            "this_machine": profile.hardware.fingerprint == hardware_info().fingerprint,
        }
        return MeasuredRetrieval(batches=batches, seconds=seconds, nbytes=float(view.list_bytes.sum())), source


def _source_words(source: Mapping[str, Any]) -> str:
    where = "" if source["this_machine"] else ", not this machine"
    how = "no plan: the host alone" if source["plan_id"] is None else f"with the lists of plan {source['plan_id']}"
    return f"retrieval as profile {source['profile_id']} measured it on {source['cpu_model']}{where}; {how}"


def _schema_of(name: str) -> RAGSchema:
    if name in case_names():
        return case(name)
    if not name.endswith((".yaml", ".yml")):
        raise InvalidInputError(f"SCHEMA is {name[:80]!r}; expected a .yaml file or one of {', '.join(case_names())}")
    return read_schema(Path(name))


def _search(pipeline: RAGSchema, resources: Resources) -> tuple[Frontier, list[str]]:
    """The frontier, and the goals that it misses."""
    try:
        return search(pipeline, resources), []
    except InvalidInputError:
        if resources.largest_tpot_s is None:
            raise
        frontier = fastest_decoding(pipeline, resources)
        nearest_ms = max(s.decoding.tpot_s for s in frontier.schedules) * 1e3
        limit_ms = resources.largest_tpot_s * 1e3
        return frontier, [f"no schedule decodes a token in {limit_ms:g} ms; the nearest takes {nearest_ms:.3g} ms"]


def _row(schedule: Schedule) -> dict[str, Any]:
    return {
        "ttft_ms": schedule.ttft_s * 1e3,
        "tpot_ms": schedule.decoding.tpot_s * 1e3,
        "qps_per_chip": schedule.qps_per_chip,
        "requests_per_s": schedule.requests_per_s,
        "chips": schedule.chips,
        "cost_chips": schedule.cost_chips,
        "placement": schedule.placement,
        "stages": report_stages(schedule),
    }


def _payload(frontier: Frontier, point: int, misses: list[str]) -> dict[str, Any]:
    chosen = frontier.schedules[point - 1]
    return {
        "feasible": not misses,
        "misses": misses,
        "servers": frontier.servers,
        "frontier": [_row(schedule) for schedule in frontier.schedules],
        "chosen": point,
        "limited_by": limiting_stage(chosen).stage,
        "next": compare_with_next(frontier, point),
    }


def _folded(schedules: Sequence[Schedule], point: int) -> Iterator[tuple[int, list[Schedule]]]:
    """Neighbours on the frontier that place and share chips alike and gain less than :data:`_ALIKE` over the first of
    them, with the number of that one, from 1. The chosen ``point`` stands alone."""
    alike: list[Schedule] = []
    for number, schedule in enumerate(schedules, 1):
        if alike and (
            point in (number, number - 1)
            or (schedule.placement, schedule.chips, schedule.decoding.tpot_s)
            != (alike[0].placement, alike[0].chips, alike[0].decoding.tpot_s)
            or schedule.qps_per_chip > alike[0].qps_per_chip * (1 + _ALIKE)
        ):
            yield number - len(alike), alike
            alike = []
        alike.append(schedule)
    if alike:
        yield len(schedules) - len(alike) + 1, alike


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _tables(frontier: Frontier, point: int, misses: list[str], resources: Resources) -> list[Any]:
    title = f"{frontier.servers} servers retrieve, at most {resources.chips} {resources.chip.name}"
    points = Table("", "TTFT ms", "requests/s per chip", "chips", "TPOT ms", "sharing chips", title=title)
    for first, alike in _folded(frontier.schedules, point):
        last, one = first + len(alike) - 1, alike[0]
        points.add_row(
            f"{_span(str(first), str(last))}{' *' if first == point else ''}",
            _span(*(f"{schedule.ttft_s * 1e3:,.1f}" for schedule in (one, alike[-1]))),
            _span(*(f"{schedule.qps_per_chip:.3g}" for schedule in (one, alike[-1]))),
            str(one.chips),
            f"{one.decoding.tpot_s * 1e3:.3g}",
            one.placement,
        )
    stages = Table("stage", "chips", "batch", "split", "latency ms", "busy", title=f"point {point}")
    chosen = frontier.schedules[point - 1]
    for stage in report_stages(chosen):
        per = " a token" if stage.stage == "decode" else ""
        stages.add_row(
            stage.stage,
            str(stage.chips) if stage.chips else "servers",
            str(stage.batch),
            stage.how if stage.chips else "",
            f"{stage.latency_ms:,.3g}{per}",
            f"{stage.busy:.0%}",
        )
    limit = limiting_stage(chosen)
    return [points, stages, f"limited by {limit.stage}; {compare_with_next(frontier, point)}", *misses]
