"""Which node scans which lists of each request, as the cluster decides it: a *visit* is a request's part on a node.

Of a search by codes, each request has one visit, on the node that answers it; other nodes compare candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.nodes.cover import NOBODY, choose_nodes
from hybridindex.partitioner.nodes.nearest import remote_costs
from hybridindex.partitioner.nodes.node_plan import NodePlan, mask_of, matrix_of
from hybridindex.types import F64, I64

__all__ = ["Compared", "Visits", "compared_by", "entries_of", "scanned_by", "visits_of"]

I16 = npt.NDArray[np.int16]

#: Requests under way on a node, in the mean, where a client chooses between nodes.
_UNDER_WAY = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Which node compares how many candidates of n requests of searches by codes."""

    #: (n,) int64 those of each request that its own node compares; (n + 1,) int64 where those of others begin.
    here: I64
    first: I64
    #: (m,) int64 other nodes, and the candidates that each of them compares.
    node: I64
    candidates: I64

    @property
    def local(self) -> F64:
        """(n,) float64 part of each request's candidates that its own node compares."""
        away = np.add.reduceat(np.append(self.candidates, 0), self.first[:-1]) * (np.diff(self.first) > 0)
        local: F64 = self.here / np.maximum(self.here + away, 1)
        return local


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visits:
    """Visits of n requests in order; of each request by node. A request has one on its own node only where it scans
    there."""

    #: (n,) int64 the node that answers each request; (n + 1,) int64 where its visits begin.
    own: I64
    first: I64
    #: (v,) int64 node of each; (v + 1,) int64 where its lists begin in ``lists``, and where those on devices begin.
    node: I64
    start: I64
    on_devices: I64
    #: (m,) int64 lists and their devices: of each visit those of the host first.
    lists: I64
    device: I16
    #: (v,) float64 bytes on the host; (v, n_devices) float64 bytes on each device.
    host_work: F64
    device_work: F64
    #: (v,) float64 part of its request's bytes that is not of this visit's host scan.
    elsewhere: F64
    #: (n,) float64 part of each request's bytes on its own node, by codes of its candidates; and of its bytes on
    #: devices of any.
    local: F64
    hit_rate: F64
    #: Of searches by codes; None: rows are scanned.
    compared: Compared | None = None

    @property
    def fan_out(self) -> float:
        """Nodes beside the answering one that a request asks, in the mean."""
        if self.compared is not None:
            return len(self.compared.node) / len(self.own)
        others = self.node != np.repeat(self.own, np.diff(self.first))
        return float(others.sum() / len(self.own))


def entries_of(probes: I64, plan: NodePlan) -> I64:
    """(n,) int64 nodes that one client asks for (n, p) ``probes``, one request after the other: by what they hold and
    what they have to do (:mod:`hybridindex.partitioner.nodes.nearest`).

    Arrivals have no times here: a request is taken to be under way until :data:`_UNDER_WAY` for each node have come.
    """
    on = matrix_of(plan.holders, plan.request.n_nodes)
    nbytes = np.where(probes >= 0, plan.list_bytes[probes], 0)
    local = np.einsum("np,npm->nm", nbytes, on[probes]) / np.maximum(nbytes.sum(axis=1, keepdims=True), 1)
    costs = remote_costs(local).astype(np.float64)
    costs[:, np.setdiff1d(np.arange(plan.request.n_nodes), plan.request.taking)] = np.inf
    n_open, left = np.zeros(plan.request.n_nodes), 1 - 1 / (_UNDER_WAY * plan.request.n_nodes)
    entries = np.empty(len(probes), dtype=np.int64)
    for number, cost in enumerate(costs):
        entries[number] = chosen = (cost + n_open).argmin()
        n_open *= left
        n_open[chosen] += 1
    return entries


def scanned_by(probes: I64, plan: NodePlan, own: I64) -> I64:
    """(n, p) int64 node that scans each of the ``probes`` (n, p) int64, -1 = none, of requests that nodes ``own`` (n,)
    int64 answer. Any where there is no probe."""
    on, usable = matrix_of(plan.holders, plan.request.n_nodes), mask_of(plan.request.taking)
    where = np.empty(probes.shape, dtype=np.int64)
    for node in np.unique(own).tolist():
        mine = own == node
        found = choose_nodes(probes[mine], here=on[:, node], holders=plan.holders, usable=usable, own=node)
        assert (found != NOBODY).all(), "a plan that was not repaired places every list"
        where[mine] = np.where(found >= 0, found, node)
    return where


def compared_by(lists: I64, query: I64, plan: NodePlan, own: I64) -> Compared:
    """Who compares the candidates of requests that nodes ``own`` (n,) int64 answer.

    Args:
        lists: (q, r) int64 list of each candidate of the queries, -1 = none.
        query: (n,) int64 number of each request's query.
    """
    n, n_nodes = len(query), plan.request.n_nodes
    counts = np.zeros((n, n_nodes), dtype=np.int64)
    for node in np.unique(own).tolist():
        mine = np.flatnonzero(own == node)
        candidates = lists[query[mine]]
        row, column = np.nonzero(candidates >= 0)
        where = scanned_by(candidates, plan, np.full(len(mine), node))
        np.add.at(counts, (mine[row], where[row, column]), 1)
    here = counts[np.arange(n), own]
    counts[np.arange(n), own] = 0
    request, node_of = np.nonzero(counts)
    return Compared(
        here=here,
        first=np.searchsorted(request, np.arange(n + 1)),
        node=node_of,
        candidates=counts[request, node_of],
    )


def visits_of(
    probes: I64, where: I64, own: I64, list_bytes: I64, list_device: I16, n_devices: int, compared: Compared | None
) -> Visits:
    """Visits of the requests with ``probes`` (n, p) int64, -1 = none, that nodes ``own`` (n,) int64 answer.

    Args:
        where: (n, p) int64 node that scans each probe.
        list_bytes: (nlist,) int64 bytes that a scan reads of each list.
        list_device: (n_nodes, nlist) int16 device of each list on each node, -1 = host.
        compared: of searches by codes.
    """
    n, n_nodes = len(probes), len(list_device)
    request, column = np.nonzero(probes >= 0)
    node, lists = where[request, column], probes[request, column]
    device = list_device[node, lists]
    order = np.lexsort((device, node, request))
    request, node, lists, device = request[order], node[order], lists[order], device[order]
    key = request * n_nodes + node
    start = np.flatnonzero(np.diff(key, prepend=-1))
    visit_of = np.cumsum(np.diff(key, prepend=-1) > 0) - 1
    nbytes = list_bytes[lists].astype(np.float64)
    work = np.zeros((len(start), n_devices + 1))
    np.add.at(work, (visit_of, device + 1), nbytes)
    whole = np.maximum(np.bincount(request, weights=nbytes, minlength=n), 1e-300)
    ends = np.append(start, len(lists))
    on_own = np.bincount(request, weights=nbytes * (node == own[request]), minlength=n) / whole
    on_host = np.bincount(visit_of, weights=device < 0, minlength=len(start)).astype(np.int64)
    return Visits(
        own=own,
        first=np.searchsorted(request[start], np.arange(n + 1)),
        node=node[start],
        start=ends,
        on_devices=ends[:-1] + on_host,
        lists=lists,
        device=device,
        host_work=work[:, 0],
        device_work=work[:, 1:],
        elsewhere=1.0 - work[:, 0] / whole[request[start]],
        local=on_own if compared is None else compared.local,
        hit_rate=np.bincount(request, weights=nbytes * (device >= 0), minlength=n) / whole,
        compared=compared,
    )
