"""A cluster that can be simulated: nodes like the profiled machine, lists placed by the plan that a cluster serves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.paging import scratch_for_budget
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.latency import LatencyModel
from hybridindex.partitioner.nodes.cover import MOST_NODES
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest, lists_of_node
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.partitioner.placement import place_lpt
from hybridindex.studies.cluster.visits import Visits, compared_by, entries_of, scanned_by, visits_of
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.studies.simulator.engine_loop import EngineRules
from hybridindex.studies.simulator.query_pool import QueryPool, query_pool
from hybridindex.types import F64, I64, Profile

__all__ = ["ClusterInputs", "ClusterSystem", "Network", "build_cluster"]

I16 = npt.NDArray[np.int16]

#: Most devices of a node.
_MOST_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Costs of asking a node. The defaults were measured on loopback, two daemons on one machine (docs/simulator.md).
    Raises InvalidInputError, which names the field."""

    #: From one node to another, one way: the line, and processes that have to wake. Below 0 where a part of ``ask_s``
    #: and ``serve_s`` passes while the message travels, or after the answer has left.
    hop_s: float = 230e-6
    #: Of the line of each node, to others; what leaves a node leaves one after the other.
    bytes_per_s: float = 4.8e9
    #: Engine time lost for each node that a batch asks, on the asking node (encoding, sending, merging; half of it
    #: before the question leaves, half after the answer came), and for each scan that others ask, on the asked one.
    ask_s: float = 190e-6
    serve_s: float = 190e-6
    #: Engine time lost for each request of a client: half before it is searched, half with its answer.
    request_s: float = 310e-6
    #: Of each latency, for what the client itself does.
    client_s: float = 160e-6

    def __post_init__(self) -> None:
        for name in ("ask_s", "serve_s", "request_s", "client_s"):
            check_number(name, getattr(self, name), least=0.0)
        check_number("hop_s", self.hop_s, least=-self.ask_s / 2)
        check_number("bytes_per_s", self.bytes_per_s, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterInputs:
    """What is simulated on any number of nodes. Raises InvalidInputError, which names the field."""

    #: Of one machine; every node is like it.
    analysis: Analysis
    slo_s: float
    rate: float
    #: Bytes of lists that a node may hold; by codes, of their rows.
    node_bytes: int
    #: Nodes that hold each list; fewer where there are fewer nodes.
    replicas: int = 2
    network: Network = field(default_factory=Network)
    #: Devices of each node, and bytes of each that an index may take (scratch included).
    n_devices: int = 0
    budget_bytes: int = 0
    rules: EngineRules = field(default_factory=EngineRules)
    #: Clients choose nodes by their queries, as the router of a cluster does; False: any node is asked.
    by_locality: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("slo_s", self.slo_s, above=0.0)
        check_number("rate", self.rate, above=0.0)
        check_number("node_bytes", self.node_bytes, above=0.0)
        check_number("budget_bytes", self.budget_bytes, least=0.0)
        if not 0 <= self.n_devices <= _MOST_DEVICES:
            raise InvalidInputError(f"n_devices is {self.n_devices}; give 0 to {_MOST_DEVICES} of each node")
        if self.replicas < 1:
            raise InvalidInputError(f"replicas is {self.replicas}; give an integer >= 1")
        if self.rules.max_batch is not None and self.rules.max_batch < 1:
            raise InvalidInputError(f"max_batch is {self.rules.max_batch}; give an integer >= 1, or None")
        if self.by_codes and (self.analysis.curve.rows is None or self.analysis.latency.rerank is None):
            raise InvalidInputError(
                "the profile is of searches by codes, and does not say in which lists their candidates are and what "
                "comparing them takes; profile the index again"
            )

    @property
    def by_codes(self) -> bool:
        """Nodes scan codes, of which each has all, and hold rows of some lists; else they scan these rows."""
        return self.analysis.profile.bits is not None

    @property
    def code_bytes(self) -> int:
        """Of all lists, on each node beside its rows; 0 where rows are scanned."""
        return self.analysis.profile.nbytes if self.by_codes else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterSystem:
    """Nodes with their lists."""

    inputs: ClusterInputs
    plan: NodePlan
    pool: QueryPool
    #: (n_nodes, nlist) int16 device of each list on each node, -1 = host.
    list_device: I16

    @property
    def n_nodes(self) -> int:
        return self.plan.request.n_nodes

    @property
    def model(self) -> LatencyModel:
        return self.inputs.analysis.latency

    def visits(self, n: int) -> Visits:
        """Visits of ``n`` requests: request i asks query i modulo the pool. Where clients do not choose, of each
        ``n_nodes`` requests in a row every node answers one, in a random order."""
        query = np.arange(n) % len(self.pool)
        probes, given = self.pool.probes[query], self.inputs
        if given.by_locality:
            own = entries_of(probes, self.plan)
        else:
            rng = np.random.default_rng((given.seed, self.n_nodes))
            rounds = -(-n // self.n_nodes)
            own = rng.permuted(np.tile(np.arange(self.n_nodes), (rounds, 1)), axis=1).ravel()[:n]
        if given.by_codes:
            where = np.broadcast_to(own[:, None], probes.shape)
            compared = compared_by(self._candidates(), query, self.plan, own)
        else:
            where, compared = scanned_by(probes, self.plan, own), None
        return visits_of(probes, where, own, self.pool.list_bytes, self.list_device, given.n_devices, compared)

    def _candidates(self) -> I64:
        """(q, r) int64 list of each candidate of the pool's queries, -1 = none."""
        rows = self.inputs.analysis.curve.rows
        assert rows is not None
        order = np.argsort(rows.probe_query, kind="stable")
        query, lists = rows.probe_query[order], rows.probe_list[order]
        # Where candidates were not counted, they are expected numbers, which are rounded so that the sums stay.
        counts = np.diff(np.floor(np.cumsum(rows.probe_candidates[order]) + 0.5), prepend=0.0).astype(np.int64)
        query, lists = np.repeat(query, counts), np.repeat(lists, counts)
        first = np.searchsorted(query, np.arange(len(self.pool)))
        found = np.full((len(self.pool), max(1, int(np.bincount(query, minlength=1).max()))), -1, dtype=np.int64)
        found[query, np.arange(len(query)) - first[query]] = lists
        return found


def build_cluster(inputs: ClusterInputs, n_nodes: int) -> ClusterSystem:
    """The cluster of ``n_nodes`` nodes. Lists are placed by half of the profile's queries; requests ask the others.

    Raises:
        InvalidInputError: no such number of nodes, or too little memory: the message says how much is missing.
    """
    if not 1 <= n_nodes <= MOST_NODES:
        raise InvalidInputError(f"nodes is {n_nodes}; give 1 to {MOST_NODES}")
    profile, curve = inputs.analysis.profile, inputs.analysis.curve
    request = NodeRequest(node_bytes=(inputs.node_bytes,) * n_nodes, replicas=min(inputs.replicas, n_nodes))
    held_bytes = profile.list_bytes if curve.rows is None else curve.rows.list_bytes
    probes = profile.access.fit_probes.astype(np.int64)
    plan = place_lists(held_bytes, _work(profile, held_bytes), request, probes=probes)
    list_device = np.full((n_nodes, profile.nlist), -1, dtype=np.int16)
    room = max(0, inputs.budget_bytes - scratch_for_budget(inputs.budget_bytes)) // curve.geometry.page_bytes
    if inputs.n_devices and room and inputs.analysis.latency.device is not None:
        pages = np.empty(profile.nlist, dtype=np.int64)
        pages[curve.order] = curve.pages_by_rank
        work = _work(profile, profile.list_bytes)
        # A list that several nodes hold is scanned by one of them at a time; codes by each for its own requests.
        each = work / (n_nodes if inputs.by_codes else np.maximum(plan.copies, 1))
        for node in range(n_nodes):
            held = np.arange(profile.nlist) if inputs.by_codes else lists_of_node(plan.holders, node)
            held = held[work[held] > 0]
            held = held[np.argsort(curve.rank[held])]
            fits = held[np.cumsum(pages[held]) <= room * inputs.n_devices]
            list_device[node, fits] = place_lpt(each[fits], pages[fits], [room] * inputs.n_devices).device
    return ClusterSystem(inputs=inputs, plan=plan, pool=query_pool(curve, profile.dim), list_device=list_device)


def _work(profile: Profile, list_bytes: I64) -> F64:
    """(nlist,) float64 of the ``list_bytes`` (nlist,) int64 of each list, what a query probes in the mean."""
    accesses = profile.access.list_accesses
    work: F64 = accesses * list_bytes * (profile.nprobe / max(float(accesses.sum()), 1e-300))
    return work
