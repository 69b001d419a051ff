"""The command simulate: policies side by side on a server that need not exist, from a stored profile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.cli.commands.llm import chosen_llm
from hybridindex.cli.console import CliProgress, ExitCode, emit, ms, out, parse_bytes, readable_bytes
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Json, StoreUrl, WhatIfOptions
from hybridindex.cli.scale_out import Asked, ClusterOptions, show_scale_out
from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.plans.precision import precision_of, view_to_plan
from hybridindex.store.control import ControlStore
from hybridindex.types import LLMProfile, Profile

if TYPE_CHECKING:
    from hybridindex.studies.hardware import Chip
    from hybridindex.studies.simulator import Inputs
    from hybridindex.studies.simulator.arrivals import Workload
    from hybridindex.studies.simulator.moving_load import DriftRules

__all__ = ["register"]

_MOST_DEVICES = 64
#: Speed of copies that refreshing makes, where nothing says it.
_MOVE_BYTES_PER_S = 1e9


def _devices(text: str) -> tuple[int, str | None]:
    """ "h100x8" as (8, "h100"), "8" as (8, None)."""
    match = re.fullmatch(r"(?:([A-Za-z][\w.-]*?)x)?(\d{1,3})|([A-Za-z][\w.-]*)", text)
    if match is None or not 1 <= int(match[2] or 1) <= _MOST_DEVICES:
        raise InvalidInputError(f"--devices is {text!r}; expected NAMExN such as h100x8, or N, with N from 1 to 64")
    return int(match[2] or 1), match[1] or match[3]


def _per_second(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    nbytes = parse_bytes(text)
    if nbytes <= 0:
        raise InvalidInputError(f"{option} is {text}; expected bytes per second, such as 3350GB")
    return float(nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is asked of the server, and how fast answers must be."""

    rate: Annotated[float, typer.Option(help="Requests per second.")]
    slo_ms: Annotated[float, typer.Option("--slo-ms", help="Bounds TTFT; without an LLM, the search.")]
    attainment: Annotated[float, typer.Option(help="Fraction of the requests that must meet the SLO.")] = 0.9
    arrivals: Annotated[str, typer.Option(help="poisson, bursty, or a trace FILE.jsonl.")] = "poisson"
    burstiness: Annotated[float, typer.Option(help="Bursty: rate in a burst, over the mean rate.")] = 4.0
    period_s: Annotated[float, typer.Option(help="Bursty: mean seconds from burst to burst.")] = 10.0
    requests: Annotated[int, typer.Option(help="Requests simulated at each rate.")] = 20_000
    seed: Annotated[int, typer.Option(help="Seed of arrivals and scatter.", min=0)] = 0

    def workloads(self) -> Callable[[float], Workload]:
        """The arrivals at any rate; reads a trace once."""
        from hybridindex.studies.simulator import bursty, from_trace, poisson

        if self.arrivals == "bursty":
            return lambda rate: bursty(
                rate, self.requests, burstiness=self.burstiness, period_s=self.period_s, seed=self.seed
            )
        if self.arrivals == "poisson":
            return lambda rate: poisson(rate, self.requests, seed=self.seed)
        return from_trace(Path(self.arrivals), limit=self.requests).at_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The simulated server: devices, LLM engines, batches."""

    devices: Annotated[str, typer.Option(help="NAMExN, such as h100x8; or N, like the profiled one.")] = "1"
    budget: Annotated[
        str | None, typer.Option(help="Bytes per device for the index; default: its share of the KV cache.")
    ] = None
    llm: Annotated[
        str | None, typer.Option(metavar="FILE.json|latest|ID", help="LLM profile of all devices together.")
    ] = None
    kv_bytes_per_token: Annotated[float, typer.Option(help="KV-cache bytes per token; default: as of an 8B model.")] = (
        131_072.0
    )
    replicas: Annotated[int, typer.Option(help="Equal LLM engines that share devices and load.")] = 1
    max_batch: Annotated[int | None, typer.Option(help="Most queries per batch; default: all that wait.")] = None
    contention: Annotated[float, typer.Option(help="Slowdown of scan and decode on a shared device.")] = 0.0

    def budget_bytes(self, n_devices: int, llm: LLMProfile | None, chip: Chip | None) -> int:
        """Bytes of each device for an index."""
        if self.budget is not None:
            return parse_bytes(self.budget)
        if llm is not None:
            return llm.kv_cache_bytes // n_devices
        if chip is not None:
            return int(chip.memory_bytes)
        raise InvalidInputError(
            "--budget is missing; expected bytes per device, or else --llm or a named device (--devices h100x8)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions:
    """What lookahead may use."""

    window_ms: Annotated[float, typer.Option(help="Generation time before a search that lookahead may use.")] = 0.0
    overlap: Annotated[float, typer.Option(help="Fraction of a final query's lists that its draft also probes.")] = 0.8
    arena: Annotated[str, typer.Option(help="Bytes for lookahead and cache, over all devices.")] = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """Speeds of the devices and of copies to them."""

    device_bandwidth: Annotated[str | None, typer.Option(help="Device memory bandwidth in bytes/s, e.g. 3350GB.")] = (
        None
    )
    device_efficiency: Annotated[float, typer.Option(help="Fraction of the bandwidth that scans reach.")] = 0.5
    transfer_bandwidth: Annotated[str | None, typer.Option(help="Host-to-device bandwidth in bytes/s.")] = None

    def bytes_per_s(self, chip: Chip | None) -> tuple[float | None, float | None]:
        """Of device memory and of copies; from the named chip where no option says it."""
        memory = _per_second(self.device_bandwidth, "--device-bandwidth")
        copies = _per_second(self.transfer_bandwidth, "--transfer-bandwidth")
        if chip is None:
            return memory, copies
        return memory or float(chip.memory_bytes_per_s), copies or float(chip.host_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What is compared, and what is drawn."""

    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Policy to simulate; repeatable. Default: all.")
    ] = None
    find_rate: Annotated[bool, typer.Option(help="Also find each policy's SLO-compliant rate.")] = True
    drift: Annotated[
        float | None,
        typer.Option(
            "--drift", metavar="SECONDS", help="Move the hot set then; simulate ours with and without a refresher."
        ),
    ] = None
    drift_shift: Annotated[float, typer.Option(help="How far the hot set moves, as a fraction of all lists.")] = 0.5
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the result; needs the extra report.")] = (
        None
    )

    def policies(self) -> tuple[str, ...]:
        """Checked names."""
        from hybridindex.studies.simulator import POLICIES

        names = tuple(self.policy) if self.policy else POLICIES if self.drift is None else ("ours",)
        if self.drift is not None and (names != ("ours",) or self.plot is not None):
            raise InvalidInputError("--drift simulates only ours and draws nothing; omit --plot and any other --policy")
        for name in names:
            if name not in POLICIES:
                raise InvalidInputError(f"--policy is {name!r}; expected one of {', '.join(POLICIES)}")
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """The profile that is simulated from."""

    profile: Annotated[
        str,
        typer.Option("--profile", metavar="INDEX|ID", help="A profiled index, or a profile's id in --store."),
    ]
    store: StoreUrl = None

    @contextmanager
    def opened(self) -> Iterator[tuple[ControlStore, Profile]]:
        """The control store, and the profile: the one that is named, or the newest of what a plan of the index would be
        of.

        Raises:
            ProfileError: there is none.
        """
        profile, store = self.profile, self.store
        if profile.isdecimal():
            if store is None:
                raise InvalidInputError(
                    f"--profile is the id {profile}, but --store is missing; expected both, or an index"
                )
            with ControlStore.open(store) as control:
                yield control, control.load_profile(int(profile))
            return
        if store is None and not filesystem.is_file(Path(profile) / "control.sqlite"):
            raise InvalidInputError(f"--profile is {profile}, which has no control.sqlite; expected a profiled index")
        with hx.open(Path(profile), verify="quick") as opened, opened.store(store) as control:
            view = view_to_plan(opened.ivf, control, "auto", any_hardware=True)
            if not control.list_profiles(index_fingerprint=view.fingerprint):
                raise ProfileError(
                    f"--profile: {profile} has no profile of its {precision_of(view)} in control store {control.name}; "
                    "run profile index for this index, or give the id of a profile and --store"
                )
            yield control, control.load_profile(index_fingerprint=view.fingerprint)


def simulate(
    *,
    profile: ProfileChoice,
    load: LoadOptions,
    server: ServerOptions,
    lookahead: LookaheadOptions,
    speeds: SpeedOptions,
    change: WhatIfOptions,
    study: StudyOptions,
    cluster: ClusterOptions,
    json: Json = False,
) -> None:
    """Predict TTFT, attainment and rates of policies. Exit status 10 when the first one misses the SLO.

    With --nodes: latency and rates of clusters, without an LLM. Exit status 10 when none of them meets the SLO.
    """
    from hybridindex.partitioner.analysis import analyse
    from hybridindex.studies.hardware import chip as named_chip
    from hybridindex.studies.simulator import EngineRules, Inputs
    from hybridindex.studies.simulator.arrivals import check_number
    from hybridindex.studies.simulator.compare import compare_policies
    from hybridindex.studies.simulator.lookahead_replay import LookaheadRules
    from hybridindex.studies.simulator.moving_load import DriftRules
    from hybridindex.studies.simulator.other_machine import WhatIf, suppose

    check_number("--slo-ms", load.slo_ms, above=0.0)
    check_number("--rate", load.rate, above=0.0)
    check_number("--window-ms", lookahead.window_ms, least=0.0)
    if not 0 < load.attainment <= 1:
        raise InvalidInputError(
            f"--attainment is {load.attainment:g}; expected a fraction of the requests, above 0 and at most 1"
        )
    if cluster.nodes is not None:
        _refuse_beside_nodes(server, lookahead, study)
    names = study.policies()
    n_devices, chip_name = _devices(server.devices)
    chip = None if chip_name is None else named_chip(chip_name)
    with profile.opened() as (control, measured):
        llm = None if server.llm is None else chosen_llm(server.llm, control, None)
    bandwidth, transfer = speeds.bytes_per_s(chip)
    if lookahead.window_ms > 0 and transfer is None:
        raise InvalidInputError(
            f"--window-ms is {lookahead.window_ms:g}, but --transfer-bandwidth is missing; expected both"
        )
    arena_bytes = parse_bytes(lookahead.arena)
    if lookahead.window_ms > 0 and arena_bytes < 1:
        raise InvalidInputError(
            f"--arena is {lookahead.arena} with --window-ms {lookahead.window_ms:g}, which leaves lookahead no room; "
            "expected --arena above 0"
        )
    workload = load.workloads()
    n_requests = len(workload(load.rate).arrivals)
    load_words = f"{n_requests} requests, {load.arrivals} arrivals, one query each, seed {load.seed}"
    analysis, said = suppose(
        analyse(measured, seed=load.seed),
        WhatIf(
            device_bandwidth=bandwidth,
            device_efficiency=speeds.device_efficiency,
            host_speed=change.host_speed,
            index_scale=change.index_scale,
        ),
    )
    if cluster.nodes is not None:
        budget_bytes = 0 if server.budget is None and chip is None else server.budget_bytes(n_devices, None, chip)
        asked = Asked(
            rate=load.rate,
            slo_ms=load.slo_ms,
            attainment=load.attainment,
            workloads=workload,
            load_words=load_words,
            max_batch=server.max_batch,
            seed=load.seed,
            find_rate=study.find_rate,
        )
        show_scale_out(analysis, (n_devices, budget_bytes), asked, cluster, said, as_json=json)
        return
    budget_bytes = server.budget_bytes(n_devices, llm, chip)
    # Only beside an LLM is a budget a part of the device.
    device_bytes = None if chip is None or llm is None else max(budget_bytes, int(chip.memory_bytes))
    inputs = Inputs(
        analysis=analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=n_devices),
        slo_s=load.slo_ms / 1e3,
        rate=load.rate,
        n_devices=n_devices,
        budget_bytes=budget_bytes,
        device_bytes=device_bytes,
        llm=llm,
        kv_bytes_per_token=server.kv_bytes_per_token,
        replicas=server.replicas,
        rules=EngineRules(max_batch=server.max_batch),
        lookahead=LookaheadRules(
            window_s=lookahead.window_ms / 1e3,
            bytes_per_s=transfer or 0.0,
            overlap=lookahead.overlap,
            arena_bytes=arena_bytes,
        ),
        contention=server.contention,
        percentile=min(load.attainment * 100, 99.9),
        seed=load.seed,
    )
    assumptions = [*said, f"assumed: contention {server.contention:g}; {load_words}"]
    if lookahead.window_ms > 0:
        assumptions.append(
            f"assumed: lookahead has {lookahead.window_ms:g} ms before a search and {readable_bytes(arena_bytes)} of "
            f"arena over all devices; drafts name {lookahead.overlap:g} of the lists of their final query"
        )
    if device_bytes is not None and "dedicated-gpu" in names:
        assumptions.append(
            f"assumed: the device of dedicated-gpu holds no LLM, and an index may take {device_bytes / 1e9:g} GB of it"
        )
    if llm is not None:
        assumptions.append(
            f"assumed: {server.kv_bytes_per_token:g} KV bytes per token, {server.replicas} equal engines; "
            f"{'measured' if len(llm.points) > 1 else 'linear'} LLM throughput against KV cache"
        )
    if study.drift is not None:
        rules = DriftRules(at_s=study.drift, shift=study.drift_shift, bytes_per_s=transfer or _MOVE_BYTES_PER_S)
        assumptions += rules.assumptions()
        _follow(inputs, workload(load.rate), rules, assumptions, load.attainment, as_json=json)
        return
    with CliProgress(quiet=json) as progress:
        found = compare_policies(
            names, inputs, workload, attainment=load.attainment, find_rate=study.find_rate, progress=progress
        )
    if study.plot is not None:
        from hybridindex.report.fig_simulate import draw_simulated

        picture = draw_simulated(found, slo_ms=load.slo_ms)
        assert picture.drawn is not None
        filesystem.write_bytes(study.plot, picture.drawn.png)
    payload = {
        "profile_id": measured.id,
        "rate": load.rate,
        "slo_ms": load.slo_ms,
        "attainment_goal": load.attainment,
        "budget_bytes": budget_bytes,
        "assumptions": assumptions,
        "policies": [one.to_data() for one in found],
    }
    emit(payload, as_json=json, table=_table(found, load.rate, load.slo_ms, with_llm=llm is not None))
    first = found[0]
    if not json:
        for sentence in assumptions:
            out.print(sentence, highlight=False, soft_wrap=True)
    if not first.meets(load.attainment):
        if not json:
            out.print(_nearest(first, load.rate), highlight=False, soft_wrap=True)
        raise typer.Exit(ExitCode.INFEASIBLE)


def _follow(
    inputs: Inputs, workload: Workload, rules: DriftRules, assumptions: list[str], attainment: float, *, as_json: bool
) -> None:
    from hybridindex.studies.simulator.follow_drift import follow_drift

    found = follow_drift(inputs, workload, rules)
    table = Table(
        "refresher", "attained before", "after", "at the end", "hit rate", "search p90 ms",
        title=f"{inputs.rate:g} requests/s, SLO {inputs.slo_s * 1e3:g} ms, hot set moves at {rules.at_s:g} s",
    )  # fmt: skip
    for one in found:
        parts = [f"{part:.1%}" for part in (one.before, one.after, one.at_end)]
        name, outcome = "yes" if one.refreshed else "no", one.outcome
        table.add_row(name, *parts, f"{outcome.hit_rate:.3f}", ms(outcome.search.p90))
    payload = {"assumptions": assumptions, "attainment_goal": attainment, "runs": [one.to_data() for one in found]}
    emit(payload, as_json=as_json, table=table)
    if not as_json:
        told = [f"{at:.4g} s: {what}" for at, what in found[0].history]
        for sentence in [*told, *assumptions]:
            out.print(sentence, highlight=False, soft_wrap=True)
    if found[0].at_end < attainment:
        if not as_json:
            out.print(f"infeasible: ours attains {found[0].at_end:.1%} at the end", highlight=False)
        raise typer.Exit(ExitCode.INFEASIBLE)


def _refuse_beside_nodes(server: ServerOptions, lookahead: LookaheadOptions, study: StudyOptions) -> None:
    for option, given in (
        ("--llm", server.llm is not None),
        ("--window-ms", lookahead.window_ms > 0),
        ("--policy", bool(study.policy)),
        ("--drift", study.drift is not None),
        ("--plot", study.plot is not None),
    ):
        if given:
            raise InvalidInputError(f"--nodes simulates only searches of a cluster; omit {option}")


def _nearest(one: Any, rate: float) -> str:
    if one.outcome is None:
        return f"infeasible: {one.policy}: {one.refused}"
    nearest = "" if one.compliant is None else f"; the nearest feasible rate is {one.compliant.rate:.4g} requests/s"
    return f"infeasible: {one.policy} attains {one.outcome.attainment:.1%} at {rate:g} requests/s{nearest}"


def _table(found: list[Any], rate: float, slo_ms: float, *, with_llm: bool) -> Table:
    latency = ("TTFT p50 / p90 / p99 ms", "search p90 ms", "TPOT ms") if with_llm else ("search p50 / p90 / p99 ms",)
    kept = ("KV use",) if with_llm else ()
    table = Table(
        "policy", "attained", *latency, "req/s", "hit rate", *kept, "index", "req/s within SLO",
        title=f"{rate:g} requests/s, SLO {slo_ms:g} ms",
    )  # fmt: skip
    for one in found:
        if one.outcome is None:
            table.add_row(one.policy, "-", one.refused)
            continue
        o = one.outcome
        beside = (ms(o.search.p90), "-" if o.tpot_s is None else ms(o.tpot_s)) if with_llm else ()
        table.add_row(
            one.policy,
            f"{o.attainment:.1%}",
            " / ".join(ms(s) for s in (o.ttft.p50, o.ttft.p90, o.ttft.p99)),
            *beside,
            f"{o.throughput_rps:.4g}",
            f"{o.hit_rate:.3f}",
            *(("-" if o.kv_mean is None else f"{o.kv_mean:.0%}",) if with_llm else ()),
            readable_bytes(one.index_bytes),
            "-" if one.compliant is None else f"{'>= ' * one.compliant.at_ceiling}{one.compliant.rate:.4g}",
        )
    return table


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""
    app.command()(grouped(simulate))
