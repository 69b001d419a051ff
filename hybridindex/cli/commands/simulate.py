"""The command simulate: policies side by side on a server that need not exist, from a stored profile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hybridindex import filesystem
from hybridindex.cli.commands.llm import chosen_llm
from hybridindex.cli.console import CliProgress, ExitCode, emit, out, parse_bytes, readable_bytes
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Json, StoreUrl, WhatIfOptions
from hybridindex.errors import InvalidInputError
from hybridindex.store.control import ControlStore
from hybridindex.types import LLMProfile

if TYPE_CHECKING:
    from hybridindex.partitioner.analysis import Analysis
    from hybridindex.studies.cluster import Network, NodesFound
    from hybridindex.studies.hardware import Chip
    from hybridindex.studies.simulator import Inputs
    from hybridindex.studies.simulator.arrivals import Workload
    from hybridindex.studies.simulator.moving_load import DriftRules

__all__ = ["register"]

_MOST_DEVICES = 64
#: Panel of the options of a cluster.
_CLUSTER = "Several machines"
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
    slo_ms: Annotated[float, typer.Option("--slo-ms", help="Bounds TTFT; the search where there is no LLM.")]
    attainment: Annotated[float, typer.Option(help="Fraction of the requests that must meet the SLO.")] = 0.9
    arrivals: Annotated[str, typer.Option(help="poisson, bursty, or a trace FILE.jsonl.")] = "poisson"
    burstiness: Annotated[float, typer.Option(help="Bursty: rate while on over the mean rate.")] = 4.0
    period_s: Annotated[float, typer.Option(help="Bursty: mean time from burst to burst.")] = 10.0
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

    devices: Annotated[str, typer.Option(help="NAMExN, such as h100x8, or N like the profiled one.")] = "1"
    budget: Annotated[
        str | None, typer.Option(help="Bytes per device for the index; default its share of the KV cache.")
    ] = None
    llm: Annotated[
        str | None, typer.Option(metavar="FILE.json|latest|ID", help="LLM profile of all devices together.")
    ] = None
    kv_bytes_per_token: Annotated[float, typer.Option(help="Of the LLM; default that of an 8B model.")] = 131_072.0
    replicas: Annotated[int, typer.Option(help="Equal LLM engines that share devices and load.")] = 1
    max_batch: Annotated[int | None, typer.Option(help="Queries per batch; default all that wait.")] = None
    contention: Annotated[float, typer.Option(help="Slow-down of scan and decode that share a device.")] = 0.0

    def budget_bytes(self, n_devices: int, llm: LLMProfile | None, chip: Chip | None) -> int:
        """Bytes of each device for an index."""
        if self.budget is not None:
            return parse_bytes(self.budget)
        if llm is not None:
            return llm.kv_cache_bytes // n_devices
        if chip is not None:
            return int(chip.memory_bytes)
        raise InvalidInputError(
            "--budget is missing: without an LLM or a named device nothing says what an index may take"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions:
    """What lookahead may use."""

    window_ms: Annotated[float, typer.Option(help="Generation time before a search that lookahead may use.")] = 0.0
    overlap: Annotated[float, typer.Option(help="Fraction of a final query's lists that its draft names.")] = 0.8
    arena: Annotated[str, typer.Option(help="Bytes for lookahead and cache, over all devices.")] = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """Speeds of the devices and of copies to them."""

    device_bandwidth: Annotated[str | None, typer.Option(help="Of a device's memory, bytes/s: 3350GB.")] = None
    device_efficiency: Annotated[float, typer.Option(help="Fraction of the bandwidth that scans reach.")] = 0.5
    transfer_bandwidth: Annotated[str | None, typer.Option(help="Bandwidth from host to device in bytes/s.")] = None

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

    policy: Annotated[list[str] | None, typer.Option("--policy", help="Repeat for several; default all.")] = None
    find_rate: Annotated[bool, typer.Option(help="Also search each policy's SLO-compliant rate.")] = True
    drift: Annotated[
        float | None,
        typer.Option("--drift", metavar="SECONDS", help="The hot set moves then; ours with and without a refresher."),
    ] = None
    drift_shift: Annotated[float, typer.Option(help="How far down the hot order, as a fraction of all lists.")] = 0.5
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs the extra report.")] = None

    def policies(self) -> tuple[str, ...]:
        """Checked names."""
        from hybridindex.studies.simulator import POLICIES

        names = tuple(self.policy) if self.policy else POLICIES if self.drift is None else ("ours",)
        if self.drift is not None and (names != ("ours",) or self.plot is not None):
            raise InvalidInputError(
                "--drift simulates ours alone, and draws nothing: give no other --policy and no --plot"
            )
        for name in names:
            if name not in POLICIES:
                raise InvalidInputError(f"--policy is {name!r}; expected one of {', '.join(POLICIES)}")
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Nodes like the profiled machine, and the network between them."""

    nodes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Numbers of nodes, 1 to 64 each.", rich_help_panel=_CLUSTER)
    ] = None
    node_memory: Annotated[
        str | None,
        typer.Option(help="Bytes of lists per node; default 80% of the profiled memory.", rich_help_panel=_CLUSTER),
    ] = None
    node_replicas: Annotated[int, typer.Option(help="Nodes that hold each list.", rich_help_panel=_CLUSTER)] = 2
    network_us: Annotated[
        float | None,
        typer.Option(help="One way from node to node; default as measured on loopback.", rich_help_panel=_CLUSTER),
    ] = None
    network_gbps: Annotated[
        float | None, typer.Option(help="Gbit/s of each node's line; default as loopback.", rich_help_panel=_CLUSTER)
    ] = None
    message_us: Annotated[
        float | None,
        typer.Option(help="Engine time per scan asked of a node, on either side.", rich_help_panel=_CLUSTER),
    ] = None

    def counts(self) -> tuple[int, ...]:
        """Numbers of nodes, as they were given."""
        assert self.nodes is not None
        if re.fullmatch(r"\d{1,3}(,\d{1,3})*", self.nodes) is None:
            raise InvalidInputError(f"--nodes is {self.nodes!r}; expected numbers of nodes such as 1,4,16")
        return tuple(int(word) for word in self.nodes.split(","))

    def network(self) -> Network:
        """Measured numbers, but for those that are given."""
        from hybridindex.studies.cluster import Network
        from hybridindex.studies.simulator.arrivals import check_number

        given = Network()
        if self.network_us is not None:
            check_number("--network-us", self.network_us, least=0.0)
            given = replace(given, hop_s=self.network_us / 1e6)
        if self.network_gbps is not None:
            check_number("--network-gbps", self.network_gbps, above=0.0)
            given = replace(given, bytes_per_s=self.network_gbps * 1e9 / 8)
        if self.message_us is not None:
            check_number("--message-us", self.message_us, least=0.0)
            given = replace(given, ask_s=self.message_us / 1e6, serve_s=self.message_us / 1e6)
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """The profile that is simulated from."""

    profile: Annotated[
        str,
        typer.Option("--profile", metavar="INDEX|ID", help="An index with a profile, or a profile's id in --store."),
    ]
    store: StoreUrl = None

    def open(self) -> tuple[ControlStore, int | None]:
        """The control store, and the profile's id where one is named."""
        profile, store = self.profile, self.store
        if profile.isdecimal():
            if store is None:
                raise InvalidInputError(
                    f"--profile is the id {profile}; say with --store where it is, or give an index"
                )
            return ControlStore.open(store), int(profile)
        if store is None and not filesystem.is_file(Path(profile) / "control.sqlite"):
            raise InvalidInputError(f"--profile: {profile} has no control.sqlite; expected an index that was profiled")
        return ControlStore.open(store or Path(profile) / "control.sqlite"), None


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
    if cluster.nodes is not None:
        _refuse_beside_nodes(server, lookahead, study)
    names = study.policies()
    n_devices, chip_name = _devices(server.devices)
    chip = None if chip_name is None else named_chip(chip_name)
    control, profile_id = profile.open()
    with control:
        measured = control.load_profile(profile_id)
        llm = None if server.llm is None else chosen_llm(server.llm, control, None)
    bandwidth, transfer = speeds.bytes_per_s(chip)
    if lookahead.window_ms > 0 and transfer is None:
        raise InvalidInputError(
            f"--window-ms is {lookahead.window_ms:g}; give --transfer-bandwidth for what it may copy"
        )
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
        _scale_out(analysis, (n_devices, budget_bytes), load, server, cluster, said, study.find_rate, as_json=json)
        return
    budget_bytes = server.budget_bytes(n_devices, llm, chip)
    inputs = Inputs(
        analysis=analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=n_devices),
        slo_s=load.slo_ms / 1e3,
        rate=load.rate,
        n_devices=n_devices,
        budget_bytes=budget_bytes,
        llm=llm,
        kv_bytes_per_token=server.kv_bytes_per_token,
        replicas=server.replicas,
        rules=EngineRules(max_batch=server.max_batch),
        lookahead=LookaheadRules(
            window_s=lookahead.window_ms / 1e3,
            bytes_per_s=transfer or 0.0,
            overlap=lookahead.overlap,
            arena_bytes=parse_bytes(lookahead.arena),
        ),
        contention=server.contention,
        percentile=min(load.attainment * 100, 99.9),
        seed=load.seed,
    )
    workload = load.workloads()
    assumptions = [
        *said,
        f"assumed: contention {server.contention:g}; {load.requests} requests, {load.arrivals} arrivals, one query "
        f"each, seed {load.seed}",
    ]
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
        assert picture.png is not None
        filesystem.write_bytes(study.plot, picture.png)
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
        table.add_row(name, *parts, f"{outcome.hit_rate:.3f}", _ms(outcome.search.p90))
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
            raise InvalidInputError(f"--nodes simulates searches of a cluster alone: give no {option}")


def _scale_out(
    analysis: Analysis,
    devices: tuple[int, int],
    load: LoadOptions,
    server: ServerOptions,
    cluster: ClusterOptions,
    said: tuple[str, ...],
    find_rate: bool,
    *,
    as_json: bool,
) -> None:
    """``devices``: of each node, and bytes of each."""
    from hybridindex.studies.cluster import ClusterInputs, explain, scale_out
    from hybridindex.studies.simulator import EngineRules

    counts, network = cluster.counts(), cluster.network()
    memory = analysis.profile.hardware.memory_bytes * 4 // 5
    inputs = ClusterInputs(
        analysis=analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=devices[0]),
        slo_s=load.slo_ms / 1e3,
        rate=load.rate,
        node_bytes=memory if cluster.node_memory is None else parse_bytes(cluster.node_memory),
        replicas=cluster.node_replicas,
        network=network,
        n_devices=devices[0] if devices[1] else 0,
        budget_bytes=devices[1],
        rules=EngineRules(max_batch=server.max_batch),
        seed=load.seed,
    )
    assumptions = [
        *said,
        f"assumed: every node is like the profiled machine, holds {readable_bytes(inputs.node_bytes)} of lists and "
        f"{readable_bytes(inputs.budget_bytes)} of them on each of {inputs.n_devices} devices; each list is on "
        f"{inputs.replicas} nodes; no node fails, and none is slower than others",
        f"assumed: {network.hop_s * 1e6:.3g} us from node to node, {network.bytes_per_s * 8 / 1e9:.3g} Gbit/s; an "
        f"engine loses {network.ask_s * 1e6:.3g} us for each node that a batch asks, and {network.serve_s * 1e6:.3g} "
        "us for each scan that it is asked",
        f"assumed: {load.requests} requests, {load.arrivals} arrivals, one query each, seed {load.seed}; every node "
        "answers equally many",
    ]
    with CliProgress(quiet=as_json) as progress:
        found = scale_out(
            inputs, counts, load.workloads(), attainment=load.attainment, find_rate=find_rate, progress=progress
        )
    knee = explain(found) if find_rate else ""
    if short := [str(one.n_nodes) for one in found if one.short]:
        assumptions.append(
            f"short: at the highest rates of {', '.join(short)} nodes the requests come within a few times the SLO, so "
            "that a part of these rates may be a backlog; give more --requests"
        )
    payload = {
        "profile_id": analysis.profile.id,
        "rate": load.rate,
        "slo_ms": load.slo_ms,
        "attainment_goal": load.attainment,
        "node_bytes": inputs.node_bytes,
        "assumptions": assumptions,
        "nodes": [one.to_data() for one in found],
        "explanation": knee,
    }
    emit(payload, as_json=as_json, table=_nodes_table(found, load.rate, load.slo_ms))
    if not as_json:
        refused = [f"nodes {one.n_nodes}: {one.refused}" for one in found if one.refused]
        for sentence in [*refused, *([knee] if knee else []), *assumptions]:
            out.print(sentence, highlight=False, soft_wrap=True)
    if not any(one.meets(load.attainment) for one in found):
        if not as_json:
            best = max(found, key=lambda one: one.rate)
            nearest = f"; the nearest feasible rate is {best.rate:.4g} on {best.n_nodes} nodes" if best.rate else ""
            out.print(f"infeasible: no number of nodes serves {load.rate:g} requests/s{nearest}", highlight=False)
        raise typer.Exit(ExitCode.INFEASIBLE)


def _nodes_table(found: list[NodesFound], rate: float, slo_ms: float) -> Table:
    table = Table(
        "nodes", "attained", "p50 / p90 / p99 ms", "asked", "local", "per node", "ms a query", "req/s",
        title=f"{rate:g} requests/s, SLO {slo_ms:g} ms",
    )  # fmt: skip
    for one in found:
        if one.outcome is None or one.costs is None:
            table.add_row(str(one.n_nodes), "-", "too little memory")
            continue
        o = one.outcome
        table.add_row(
            str(one.n_nodes),
            f"{o.attainment:.1%}",
            " / ".join(_ms(s) for s in (o.search.p50, o.search.p90, o.search.p99)),
            f"{one.fan_out:.2f}",
            f"{one.local_share:.1%}",
            readable_bytes(one.node_bytes),
            f"{one.costs.node_s * 1e3:.3g}",
            "-" if one.compliant is None else f"{'>= ' * one.compliant.at_ceiling}{float(f'{one.rate:.4g}'):g}",
        )
    return table


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
        beside = (_ms(o.search.p90), "-" if o.tpot_s is None else _ms(o.tpot_s)) if with_llm else ()
        table.add_row(
            one.policy,
            f"{o.attainment:.1%}",
            " / ".join(_ms(s) for s in (o.ttft.p50, o.ttft.p90, o.ttft.p99)),
            *beside,
            f"{o.throughput_rps:.4g}",
            f"{o.hit_rate:.3f}",
            *(("-" if o.kv_mean is None else f"{o.kv_mean:.0%}",) if with_llm else ()),
            readable_bytes(one.index_bytes),
            "-" if one.compliant is None else f"{'>= ' * one.compliant.at_ceiling}{one.compliant.rate:.4g}",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if math.isfinite(seconds) else "never"


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""
    app.command()(grouped(simulate))
