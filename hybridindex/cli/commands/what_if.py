"""``plan --hardware``: what a machine that is not here would do with a profiled index. Prints; stores nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.cli.commands.llm import chosen_llm
from hybridindex.cli.console import ExitCode, emit, parse_bytes, readable_bytes
from hybridindex.cli.options import WHAT_IF, PlanOptions, WhatIfOptions
from hybridindex.cli.routers import profile_to_plan
from hybridindex.cli.scale_out import Asked, ClusterOptions, show_scale_out
from hybridindex.errors import InvalidInputError
from hybridindex.store.control import ControlStore
from hybridindex.studies.hardware import model, names
from hybridindex.studies.what_if import CurvePoint, Fleet, Forecast, LLMService, Setting, forecast, parse_fleet
from hybridindex.types import DEFAULT_HEADROOM, LLMProfile, Profile

__all__ = ["MachineToSuppose", "forecast_cluster", "forecast_machine"]

#: Simulated at each rate.
_REQUESTS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineToSuppose:
    """Another machine, and the LLM on it."""

    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAMExN|FILE.jsonxN", help="Another machine, such as h100x8.", rich_help_panel=WHAT_IF),
    ] = None
    efficiency: Annotated[
        float, typer.Option(help="Fraction of the peak rates that scans and the LLM reach.", rich_help_panel=WHAT_IF)
    ] = 0.5
    input_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", rich_help_panel=WHAT_IF)] = 1024
    output_tokens: Annotated[int, typer.Option(help="Tokens per answer.", rich_help_panel=WHAT_IF)] = 256


def forecast_machine(
    index: Path,
    goal: PlanOptions,
    machine: MachineToSuppose,
    change: WhatIfOptions,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Prints the forecast. Exit status 10 when the SLO cannot be met."""
    _check(goal)
    with hx.open(index, verify="quick") as opened, opened.store(store) as control:
        # A profile of any machine: the supposed one has measured none.
        measured = profile_to_plan(opened, control, goal, None)
        found, said = _answer(goal, machine, change, measured, control)
    payload = {"profile_id": measured.id, "hardware": machine.hardware, "assumptions": said, **found.to_data()}
    emit(payload, as_json=as_json, table=Group(*_tables(found), *said))
    if not found.feasible:
        raise typer.Exit(ExitCode.INFEASIBLE)


def _check(goal: PlanOptions) -> None:
    if goal.n_devices != 1 or goal.coverage is not None or (goal.budget is not None and len(goal.budget) > 1):
        raise InvalidInputError(
            "--n-devices, --coverage or a second --budget is given with --hardware; expected the number of devices in "
            "--hardware, such as h100x8, and one --budget for all"
        )


def forecast_cluster(
    index: Path,
    goal: PlanOptions,
    machine: MachineToSuppose,
    change: WhatIfOptions,
    cluster: ClusterOptions,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Prints what clusters of such machines would do with searches. Exit status 10 when none of them keeps the SLO."""
    from hybridindex.studies.simulator import poisson

    _check(goal)
    if goal.slo_stage not in {None, "search"}:
        raise InvalidInputError(f"--slo-stage is {goal.slo_stage!r}; expected search: --nodes supports searches only")
    for option, told in (
        ("--headroom", goal.headroom != DEFAULT_HEADROOM),
        ("--epsilon", goal.epsilon is not None),
        ("--hit-rate-model", goal.hit_rate_model != "best"),
    ):
        if told:
            raise InvalidInputError(f"--nodes simulates searches of clusters and makes no plan; omit {option}")
    with hx.open(index, verify="quick") as opened, opened.store(store) as control:
        setting, said = _setting(goal, machine, change, profile_to_plan(opened, control, goal, None), control)
    asked = Asked(
        rate=setting.rate_qps,
        slo_ms=goal.slo_ms,
        attainment=goal.percentile / 100,
        workloads=lambda rate: poisson(rate, _REQUESTS, seed=0),
        load_words=f"{_REQUESTS} requests, poisson arrivals, one query each",
    )
    devices = setting.n_devices, setting.budget_bytes
    more = {"hardware": machine.hardware}
    show_scale_out(setting.analysis, devices, asked, cluster, said, as_json=as_json, more=more)


def _answer(
    goal: PlanOptions, machine: MachineToSuppose, change: WhatIfOptions, profile: Profile, control: ControlStore
) -> tuple[Forecast, list[str]]:
    """The forecast, and sentences that say what was measured and what is assumed."""
    setting, said = _setting(goal, machine, change, profile, control)
    return forecast(setting), said


def _setting(
    goal: PlanOptions, machine: MachineToSuppose, change: WhatIfOptions, profile: Profile, control: ControlStore
) -> tuple[Setting, list[str]]:
    """One such machine, and the sentences."""
    from hybridindex.partitioner.analysis import analyse
    from hybridindex.studies.simulator.other_machine import WhatIf, suppose

    assert machine.hardware is not None
    fleet = parse_fleet(machine.hardware)
    if goal.rate is None:
        raise InvalidInputError("--rate is missing; expected the requests per second to plan for")
    llm, service = _llm(goal.llm, machine, fleet, control)
    analysis, said = suppose(
        analyse(profile),
        WhatIf(
            device_bandwidth=fleet.chip.memory_bytes_per_s,
            device_efficiency=machine.efficiency,
            host_speed=change.host_speed,
            index_scale=change.index_scale,
        ),
    )
    page_bytes = analysis.curve.geometry.page_bytes
    whole = int(fleet.usable_bytes)
    beside = whole if llm is None else min(whole, llm.kv_cache_bytes // fleet.count)
    budget = parse_bytes(goal.budget[0]) if goal.budget else None
    setting = Setting(
        analysis=analysis.configured(page_bytes=page_bytes, n_devices=fleet.count),
        rate_qps=goal.rate,
        slo_ms=goal.slo_ms,
        n_devices=fleet.count,
        budget_bytes=beside if budget is None else min(budget, whole),
        device_bytes=whole,
        llm=llm,
        service=service,
        llm_devices=1 if service is None else service.chips_per_engine,
        slo_stage=_stage(goal.slo_stage, llm),
        percentile=goal.percentile,
        epsilon=goal.epsilon,
        hit_rate_model=goal.hit_rate_model,  # type: ignore[arg-type]
        headroom=goal.headroom,
    )
    return setting, [*said, *_llm_words(llm, service, machine.efficiency)]


def _stage(stage: str | None, llm: LLMProfile | None) -> Any:
    return stage if stage is not None else "search" if llm is None else "ttft"


def _llm(
    choice: str | None, machine: MachineToSuppose, fleet: Fleet, control: ControlStore
) -> tuple[LLMProfile | None, LLMService | None]:
    """A measured profile, or a model's by roofline. A file with ``parameters`` describes a model."""
    if choice is None:
        return None, None
    stored = choice == "latest" or choice.isdecimal()
    is_file = choice.endswith(".json")
    if choice not in names("models") and not stored and not is_file:
        raise InvalidInputError(
            f"--llm is {choice[:80]!r}; expected a model ({', '.join(names('models'))}), a model's or a profile's "
            "FILE.json, 'latest', or the id of a stored LLM profile"
        )
    if stored or (is_file and not _is_model(choice)):
        return chosen_llm(choice, control, None), None
    service = LLMService(
        model=model(choice),
        fleet=fleet,
        input_tokens=machine.input_tokens,
        output_tokens=machine.output_tokens,
        efficiency=machine.efficiency,
    )
    return service.profile(), service


def _is_model(file: str) -> bool:
    try:
        data = json.loads(filesystem.read_text(file))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "parameters" in data


def _llm_words(llm: LLMProfile | None, service: LLMService | None, efficiency: float) -> list[str]:
    if llm is None:
        return []
    if service is None:
        return [
            f"measured: the LLM, {llm.throughput_rps:.4g} requests/s of {llm.input_tokens}+{llm.output_tokens} tokens"
        ]
    return [
        f"assumed: {service.model.name} in 16 bits on {service.engines} engines of {service.chips_per_engine} "
        f"{service.fleet.chip.name}, kernels at {efficiency:g} of the peak rates; {llm.input_tokens} prompt and "
        f"{llm.output_tokens} answer tokens: {llm.throughput_rps:.4g} requests/s with "
        f"{readable_bytes(llm.kv_cache_bytes)} of KV cache, first token after {llm.ttft_s * 1e3:.3g} ms"
    ]


def _tables(found: Forecast) -> list[Any]:
    """Designs, curve, sensitivity, sentences."""
    setting = found.setting
    title = f"{setting.rate_qps:g} requests/s, {setting.slo_stage} p{setting.percentile:g} within {setting.slo_ms:g} ms"
    latency = "search ms" if setting.llm is None else "TTFT ms"
    # Two placements: the one for the rate asked for, and the one for the highest rate within the SLO.
    designs = Table(
        "design", "meets", "index", "coverage", latency, "req/s within SLO", "at most", "with index", "limited by",
        title=title,
    )  # fmt: skip
    for design in found.designs:
        name = f"{design.name}{' *' if design is found.chosen else ''}"
        if design.point is None:
            designs.add_row(name, "-", design.refused)
            continue
        designs.add_row(
            name,
            "yes" if design.meets(setting) else "no",
            *_cells(design.point),
            f"{design.point.compliant_qps:.4g}",
            f"{design.compliant_qps:.4g}",
            *(("", "") if design.best is None else (readable_bytes(design.best.device_bytes), design.best.limited_by)),
        )
    beside = "hot lists" if setting.llm is None else "hot lists beside the LLM"
    curve = Table("coverage", "index", "hit rate", latency, "search req/s", "LLM req/s", title=beside)
    for point in found.curve:
        nbytes, coverage, ttft = _cells(point)
        llm = "-" if math.isinf(point.llm_qps) else f"{point.llm_qps:.4g}"
        curve.add_row(coverage, nbytes, f"{point.hit_rate:.3f}", ttft, f"{point.search_qps:.4g}", llm)
    inputs = Table(
        "input",
        "req/s within SLO",
        "index bytes",
        latency.removesuffix(" ms"),
        title="percent change per percent change of the input",
    )
    for name, outcomes in found.sensitivity.items():
        inputs.add_row(name, *("-" if value is None else f"{value:+.2f}" for value in outcomes.values()))
    sentences = [found.why]
    if found.nearest is not None:
        near = found.nearest
        rate = "none" if near.rate_qps is None else f"{near.rate_qps:.4g} requests/s"
        slo = "none" if near.slo_ms is None else f"{near.slo_ms:.4g} ms"
        sentences.append(f"infeasible: {near.binds} binds: {near.reason}")
        sentences.append(f"nearest feasible: rate {rate} within this SLO, or SLO {slo} at this rate")
    return [designs, curve, inputs, *sentences]


def _cells(point: CurvePoint) -> tuple[str, str, str]:
    ttft = "never" if point.ttft_ms is None else f"{point.ttft_ms:.4g}"
    return readable_bytes(point.device_bytes), f"{point.coverage:.1%}", ttft
