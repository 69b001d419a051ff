"""The same requests on clusters of several sizes: latency, highest rate, and where the next node stops paying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.nodes.cover import MOST_NODES
from hybridindex.studies.cluster.node_loop import PARTS, ClusterRun, serve
from hybridindex.studies.cluster.system import ClusterInputs, ClusterSystem, build_cluster
from hybridindex.studies.cluster.visits import Visits
from hybridindex.studies.simulator.arrivals import Workload
from hybridindex.studies.simulator.outcome import Outcome, quantiles
from hybridindex.studies.simulator.rates import RateFound, compliant_rate
from hybridindex.types import F64

__all__ = ["Costs", "NodesFound", "explain", "scale_out"]

#: Highest rate that is tried, over the rate of a flooded cluster whose batches are bounded.
_CEILING, _FLOOD_BATCH = 1.5, 128
#: The next node pays where it brings this part of what a node of the smallest cluster brings.
_PAYS = 0.5
_FEW_SLOS = 20
#: Less than this factor is no reason.
_MATTERS = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a query, in seconds of all nodes together."""

    coarse_s: float
    host_s: float
    #: Of the slowest device of each batch.
    device_s: float
    #: Exact distances of candidates, by codes.
    compare_s: float
    fixed_s: float
    messages_s: float
    #: Of the engines, or of the busiest device of each node where that is busier.
    node_s: float
    #: The same of the busiest node over the mean of all, and the part of the time in which it is busy.
    imbalance: float
    busiest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFound:
    """One number of nodes, or why it cannot serve."""

    n_nodes: int
    refused: str = ""
    outcome: Outcome | None = None
    compliant: RateFound | None = None
    #: Nodes beside the answering one that a query asks; part of its bytes that the answering one scans, by codes of its
    #: candidates that it compares.
    fan_out: float = 0.0
    local_share: float = 0.0
    #: Bytes of lists on the fullest node, by codes of their rows; lists that more than ``replicas`` nodes hold.
    node_bytes: int = 0
    n_spread: int = 0
    #: At the highest rate within the SLO, where there is one, else at the rate that was asked for.
    costs: Costs | None = None

    @property
    def rate(self) -> float:
        """The highest rate within the SLO; 0: there is none, or it was not searched."""
        return 0.0 if self.compliant is None else self.compliant.rate

    @property
    def short(self) -> bool:
        """At the highest rate the requests come within so few SLOs that a part of it may be a backlog."""
        return (
            self.outcome is not None and self.rate * _FEW_SLOS * (self.outcome.slo_s or 0.0) > self.outcome.n_requests
        )

    def meets(self, attainment: float) -> bool:
        return self.outcome is not None and (self.outcome.attainment or 0.0) >= attainment

    def to_data(self) -> dict[str, Any]:
        return {
            "nodes": self.n_nodes,
            "refused": self.refused,
            "fan_out": self.fan_out,
            "local_share": self.local_share,
            "node_bytes": self.node_bytes,
            "spread_lists": self.n_spread,
            "outcome": None if self.outcome is None else self.outcome.to_data(),
            "compliant_rate": None if self.compliant is None else self.compliant.to_data(),
            "costs": None if self.costs is None else asdict(self.costs),
        }


def scale_out(
    inputs: ClusterInputs,
    nodes: Sequence[int],
    workload: Callable[[float], Workload],
    *,
    attainment: float = 0.9,
    find_rate: bool = True,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> list[NodesFound]:
    """Simulates each number of ``nodes`` with the same requests; ``workload`` gives them at a rate, as many at each.

    Raises:
        InvalidInputError: no such number of nodes. Too little memory is no error: the result says it.
    """
    wrong = [n_nodes for n_nodes in nodes if not 1 <= n_nodes <= MOST_NODES]
    if wrong or not nodes:
        raise InvalidInputError(f"nodes is {wrong[0] if wrong else 'empty'}; give numbers from 1 to {MOST_NODES}")
    found = []
    for number, n_nodes in enumerate(nodes):
        if progress is not None:
            progress("simulate", number, len(nodes))
        found.append(_of(inputs, n_nodes, workload, attainment, find_rate))
    if progress is not None:
        progress("simulate", len(nodes), len(nodes))
    return found


def _of(
    inputs: ClusterInputs, n_nodes: int, workload: Callable[[float], Workload], attainment: float, find_rate: bool
) -> NodesFound:
    try:
        system = build_cluster(inputs, n_nodes)
    except InvalidInputError as error:
        return NodesFound(n_nodes=n_nodes, refused=str(error))
    first = workload(inputs.rate)
    visits = system.visits(len(first.arrivals))

    def run(rate: float) -> tuple[Outcome, Costs]:
        work = workload(rate)
        done = serve(work.arrivals, system, visits, seed=inputs.seed)
        return _outcome(system, visits, work, done), _costs(done)

    outcome, costs = run(inputs.rate)
    compliant = None
    if find_rate:
        ceiling = _CEILING * _flooded(system, visits)
        compliant = compliant_rate(lambda rate: run(rate)[0], attainment=attainment, ceiling=ceiling)
        if compliant.rate:
            costs = run(compliant.rate)[1]
    return NodesFound(
        n_nodes=n_nodes,
        outcome=outcome,
        compliant=compliant,
        fan_out=visits.fan_out,
        local_share=float(visits.local.mean()),
        node_bytes=int(system.plan.node_bytes.max()),
        n_spread=int(system.plan.spread.size),
        costs=costs,
    )


def _flooded(system: ClusterSystem, visits: Visits) -> float:
    """Queries per second of the busiest node when all wait at once and batches are bounded."""
    cap = min(system.inputs.rules.max_batch or _FLOOD_BATCH, _FLOOD_BATCH)
    inputs = replace(system.inputs, rules=replace(system.inputs.rules, max_batch=cap))
    n = len(visits.own)
    done = serve(np.zeros(n), replace(system, inputs=inputs), visits, seed=inputs.seed)
    return n / max(float(_node_s(done).max()), 1e-12)


def _node_s(done: ClusterRun) -> F64:
    """(n_nodes,) float64 busy seconds of the engine or of the busiest device of each node, whichever is busier."""
    busy: F64 = np.maximum(done.engine_s, done.device_s.max(axis=1, initial=0.0))
    return busy


def _costs(done: ClusterRun) -> Costs:
    n, busy = len(done.done_s), _node_s(done)
    coarse, host, device, compare, fixed, messages = (done.spent_s / n).tolist()
    return Costs(
        coarse_s=coarse,
        host_s=host,
        device_s=device,
        compare_s=compare,
        fixed_s=fixed,
        messages_s=messages,
        node_s=float(busy.sum()) / n,
        imbalance=float(busy.max() / max(float(busy.mean()), 1e-300)),
        busiest=float(busy.max()) / max(float(done.done_s.max()), 1e-12),
    )


def _outcome(system: ClusterSystem, visits: Visits, work: Workload, done: ClusterRun) -> Outcome:
    search_s, slo_s = done.done_s - work.arrivals, system.inputs.slo_s
    told = quantiles(search_s)
    span = float(done.done_s.max() - work.arrivals[0])
    return Outcome(
        rate=work.rate,
        n_requests=len(search_s),
        search=told,
        ttft=told,
        attainment=float((search_s <= slo_s).mean()),
        slo_s=slo_s,
        tpot_s=None,
        throughput_rps=len(search_s) / span if span > 0 else 0.0,
        hit_rate=float(visits.hit_rate.mean()),
        mean_batch=float(done.batches.mean()),
        device_use=tuple((done.device_s.mean(axis=0) / max(float(done.done_s.max()), 1e-12)).tolist()),
        kv_mean=None,
        kv_peak=None,
        search_s=search_s,
        ttft_s=search_s,
    )


def explain(found: Sequence[NodesFound]) -> str:
    """One sentence: from where on the next node stops paying, and why.

    The rate of a node is the busy part of the busiest node, over the seconds that a query costs, over how uneven the
    work is. What changed most of the three is the reason.
    """
    # Each number of nodes once: rates are compared by the nodes between them.
    able = sorted({one.n_nodes: one for one in found if one.rate}.values(), key=lambda one: one.n_nodes)
    if len(able) < 2:
        return "Where the next node stops paying is not known: give two numbers of nodes that serve within the SLO."
    first = able[0]
    each = first.rate / first.n_nodes
    gained = 1.0
    for before, after in pairwise(able):
        gained = (after.rate - before.rate) / ((after.n_nodes - before.n_nodes) * each)
        if gained < _PAYS:
            return (
                f"The next node stops paying between {before.n_nodes} and {after.n_nodes} nodes, where each brings "
                f"{max(gained, 0.0):.0%} of the rate of {_one_of(first)}: {_why(first, after)}."
            )
    last = able[-1]
    return (
        f"The next node still pays at {last.n_nodes} nodes, where each brings {gained:.0%} of the rate of "
        f"{_one_of(first)}: {_why(first, last)}."
    )


def _one_of(first: NodesFound) -> str:
    return "one node alone" if first.n_nodes == 1 else f"one of {first.n_nodes} nodes"


def _why(first: NodesFound, last: NodesFound) -> str:
    """What changed most in the rate of a node."""
    a, b = first.costs, last.costs
    assert a is not None
    assert b is not None
    reasons = {
        b.node_s / a.node_s: _why_dearer(a, b, last),
        b.imbalance / a.imbalance: (
            f"work is uneven, the busiest of {last.n_nodes} nodes has {b.imbalance:.2f} times the mean"
        ),
        a.busiest / b.busiest: (
            f"the SLO leaves no time to wait, the busiest of {last.n_nodes} nodes is busy for only {b.busiest:.0%} of "
            f"the time at the highest rate, after {a.busiest:.0%}"
        ),
    }
    factor = max(reasons)
    if factor < _MATTERS:
        return (
            f"a query costs {_ms(b.node_s)} of node time, scans {_ms(b.host_s + b.device_s)} of it, and cost "
            f"{_ms(a.node_s)} before"
        )
    return reasons[factor]


def _why_dearer(a: Costs, b: Costs, last: NodesFound) -> str:
    pairs = zip(PARTS, _parts(a), _parts(b), strict=True)
    name, before, after = max(pairs, key=lambda part: part[2] - part[1])
    return (
        f"a query asks {last.fan_out:.1f} other nodes, and its node time grows from {_ms(a.node_s)} to "
        f"{_ms(b.node_s)}, mostly by {name} ({_ms(before)} to {_ms(after)}); scans go from "
        f"{_ms(a.host_s + a.device_s)} to {_ms(b.host_s + b.device_s)}"
    )


def _parts(costs: Costs) -> tuple[float, ...]:
    return costs.coarse_s, costs.host_s, costs.device_s, costs.compare_s, costs.fixed_s, costs.messages_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
