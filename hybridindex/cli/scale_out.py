"""Clusters of several sizes from one profile, for ``simulate --nodes`` and ``plan --hardware --nodes``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hybridindex.cli.console import CliProgress, ExitCode, emit, ms, out, parse_bytes, readable_bytes
from hybridindex.errors import InvalidInputError

if TYPE_CHECKING:
    from hybridindex.partitioner.analysis import Analysis
    from hybridindex.studies.cluster import ClusterInputs, Network, NodesFound
    from hybridindex.studies.simulator.arrivals import Workload
    from hybridindex.types import Profile

__all__ = ["Asked", "ClusterOptions", "show_scale_out"]

#: Who answers a request.
_CHOICES = {
    True: "clients ask the node that holds most of a query's lists",
    False: "every node answers equally many requests",
}
#: Panel of the options.
_CLUSTER = "Several machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Nodes like the profiled machine, and the network between them."""

    nodes: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Numbers of nodes to compare, 1 to 64.", rich_help_panel=_CLUSTER),
    ] = None
    node_memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes of lists per node (rows, beside codes); default: 80% of the profiled memory, less the codes.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    node_replicas: Annotated[int, typer.Option(help="Nodes that hold each list.", rich_help_panel=_CLUSTER)] = 2
    by_locality: Annotated[
        bool,
        typer.Option(
            "--by-locality/--any-node",
            help="Clients choose nodes by their queries, or a load balancer picks any node.",
            rich_help_panel=_CLUSTER,
        ),
    ] = True
    network_us: Annotated[
        float | None,
        typer.Option(help="One-way latency between nodes; default: as on loopback.", rich_help_panel=_CLUSTER),
    ] = None
    network_gbps: Annotated[
        float | None,
        typer.Option(help="Gbit/s of each node's link; default: as on loopback.", rich_help_panel=_CLUSTER),
    ] = None
    message_us: Annotated[
        float | None,
        typer.Option(help="Engine time, on each side, per scan requested of a node.", rich_help_panel=_CLUSTER),
    ] = None
    request_us: Annotated[
        float | None,
        typer.Option(help="Engine time per HTTP request of a client.", rich_help_panel=_CLUSTER),
    ] = None
    client_us: Annotated[
        float | None, typer.Option(help="Time that the client adds to each latency.", rich_help_panel=_CLUSTER)
    ] = None

    def counts(self) -> tuple[int, ...]:
        """Numbers of nodes in the order in which they were given, each once."""
        assert self.nodes is not None
        if re.fullmatch(r"\d{1,3}(,\d{1,3})*", self.nodes) is None:
            raise InvalidInputError(f"--nodes is {self.nodes!r}; expected numbers of nodes such as 1,4,16")
        return tuple(dict.fromkeys(int(word) for word in self.nodes.split(",")))

    def memory_bytes(self, profile: Profile) -> int:
        """Of each node, for lists; by codes for their rows, beside all codes."""
        if self.node_memory is not None:
            return parse_bytes(self.node_memory)
        memory = profile.hardware.memory_bytes
        codes = 0 if profile.bits is None else profile.nbytes
        if (left := memory * 4 // 5 - codes) < 1:
            raise InvalidInputError(
                f"the codes of all lists take {readable_bytes(codes)}, and 80% of the profiled memory is "
                f"{readable_bytes(memory * 4 // 5)}; set --node-memory to the bytes per node for rows beside the codes"
            )
        return left

    def network(self) -> Network:
        """Measured numbers, but for those that are given."""
        from hybridindex.studies.cluster import Network
        from hybridindex.studies.simulator.arrivals import check_number

        given = Network()
        times = (
            ("--network-us", self.network_us, ("hop_s",)),
            ("--message-us", self.message_us, ("ask_s", "serve_s")),
            ("--request-us", self.request_us, ("request_s",)),
            ("--client-us", self.client_us, ("client_s",)),
        )
        for option, microseconds, names in times:
            if microseconds is not None:
                check_number(option, microseconds, least=0.0)
                given = replace(given, **dict.fromkeys(names, microseconds / 1e6))
        if self.network_gbps is not None:
            check_number("--network-gbps", self.network_gbps, above=0.0)
            given = replace(given, bytes_per_s=self.network_gbps * 1e9 / 8)
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a cluster."""

    rate: float
    slo_ms: float
    #: Fraction of the requests that must meet the SLO.
    attainment: float
    #: The arrivals at any rate, and words for them.
    workloads: Callable[[float], Workload]
    load_words: str
    max_batch: int | None = None
    seed: int = 0
    #: Whether the highest rates are searched.
    find_rate: bool = True


def show_scale_out(
    analysis: Analysis,
    devices: tuple[int, int],
    asked: Asked,
    cluster: ClusterOptions,
    said: Sequence[str],
    *,
    as_json: bool,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Prints the clusters. Exit status 10 when none of them serves the rate.

    Args:
        devices: of each node, and bytes of each.
        said: what was measured and what is assumed of a node.
        more: of the JSON.
    """
    from hybridindex.studies.cluster import ClusterInputs, explain, scale_out
    from hybridindex.studies.simulator import EngineRules

    counts, network = cluster.counts(), cluster.network()
    inputs = ClusterInputs(
        analysis=analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=devices[0]),
        slo_s=asked.slo_ms / 1e3,
        rate=asked.rate,
        node_bytes=cluster.memory_bytes(analysis.profile),
        replicas=cluster.node_replicas,
        network=network,
        by_locality=cluster.by_locality,
        n_devices=devices[0] if devices[1] else 0,
        budget_bytes=devices[1],
        rules=EngineRules(max_batch=asked.max_batch),
        seed=asked.seed,
    )
    assumptions = [
        *said,
        f"assumed: every node is like the profiled machine, holds up to {readable_bytes(inputs.node_bytes)} of "
        f"{_held(inputs)} and {_on_devices(inputs)}; {_copies(inputs.replicas, counts)}; no node fails, and none is "
        "slower than others",
        f"assumed: {network.hop_s * 1e6:.3g} us from node to node, {network.bytes_per_s * 8 / 1e9:.3g} Gbit/s; an "
        f"engine spends {network.request_s * 1e6:.3g} us per request of a client, {network.ask_s * 1e6:.3g} us per "
        f"node that a batch asks, and {network.serve_s * 1e6:.3g} us per scan that other nodes request; a client "
        f"adds {network.client_s * 1e6:.3g} us to each latency",
        f"assumed: {asked.load_words}; {_CHOICES[cluster.by_locality]}",
    ]
    with CliProgress(quiet=as_json) as progress:
        found = scale_out(
            inputs, counts, asked.workloads, attainment=asked.attainment, find_rate=asked.find_rate, progress=progress
        )
    knee = explain(found) if asked.find_rate else ""
    if short := [str(one.n_nodes) for one in found if one.short]:
        assumptions.append(
            f"short: at the highest rates of {', '.join(short)} nodes, all requests arrive within a few times the SLO, "
            "so part of these rates may be backlog; run simulate --nodes with more --requests"
        )
    payload = {
        **more,
        "profile_id": analysis.profile.id,
        "rate": asked.rate,
        "slo_ms": asked.slo_ms,
        "attainment_goal": asked.attainment,
        "node_bytes": inputs.node_bytes,
        "code_bytes": inputs.code_bytes,
        "assumptions": assumptions,
        "nodes": [one.to_data() for one in found],
        "explanation": knee,
    }
    emit(payload, as_json=as_json, table=_nodes_table(found, asked.rate, asked.slo_ms))
    if not as_json:
        refused = [f"nodes {one.n_nodes}: {one.refused}" for one in found if one.refused]
        for sentence in [*refused, *([knee] if knee else []), *assumptions]:
            out.print(sentence, highlight=False, soft_wrap=True)
    if not any(one.meets(asked.attainment) for one in found):
        if not as_json:
            best = max(found, key=lambda one: one.rate)
            nearest = f"; the nearest feasible rate is {best.rate:.4g} on {best.n_nodes} nodes" if best.rate else ""
            out.print(f"infeasible: no number of nodes serves {asked.rate:g} requests/s{nearest}", highlight=False)
        raise typer.Exit(ExitCode.INFEASIBLE)


def _held(inputs: ClusterInputs) -> str:
    if not inputs.by_codes:
        return "lists"
    return f"rows beside {readable_bytes(inputs.code_bytes)}, the codes of all lists, which it scans,"


def _on_devices(inputs: ClusterInputs) -> str:
    if not (inputs.n_devices and inputs.budget_bytes):
        return "none of them on devices"
    if inputs.analysis.latency.device is None:
        return "none of them on devices: the profile has no scans of a device"
    each = "its device" if inputs.n_devices == 1 else f"each of {inputs.n_devices} devices"
    return f"up to {readable_bytes(inputs.budget_bytes)} of them on {each}"


def _copies(replicas: int, counts: tuple[int, ...]) -> str:
    """On how many nodes a list is, where there are so many."""
    if max(counts) <= replicas:
        return "every node holds all lists"
    fewer = ", or on all where there are fewer" if min(counts) < replicas else ""
    return f"each list is on {replicas} node{'s' if replicas > 1 else ''}{fewer}"


def _nodes_table(found: list[NodesFound], rate: float, slo_ms: float) -> Table:
    table = Table(
        "nodes", "attained", "p50 / p90 / p99 ms", "asked", "local", "per node", "ms per query", "req/s",
        title=f"{rate:g} requests/s, SLO {slo_ms:g} ms",
    )  # fmt: skip
    for one in found:
        if one.outcome is None or one.costs is None:
            table.add_row(str(one.n_nodes), "-", "not enough memory")
            continue
        o = one.outcome
        table.add_row(
            str(one.n_nodes),
            f"{o.attainment:.1%}",
            " / ".join(ms(s) for s in (o.search.p50, o.search.p90, o.search.p99)),
            f"{one.fan_out:.2f}",
            f"{one.local_share:.1%}",
            readable_bytes(one.node_bytes),
            f"{one.costs.node_s * 1e3:.3g}",
            "-" if one.compliant is None else f"{'>= ' * one.compliant.at_ceiling}{float(f'{one.rate:.4g}'):g}",
        )
    return table
