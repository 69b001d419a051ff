"""Which nodes hold which lists: each list on several, the hottest on all, those that are probed together together."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.paging import format_bytes
from hybridindex.partitioner.nodes.cover import NOBODY, U64, choose_nodes
from hybridindex.partitioner.nodes.nearest import nearest_nodes
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest, mask_of, matrix_of
from hybridindex.partitioner.nodes.placing import Placing, hottest_first
from hybridindex.partitioner.nodes.sample import Sample
from hybridindex.types import F64, I64

__all__ = ["choose_hot", "foreseen", "missing_bytes", "place_lists", "split_sample"]

#: Memory that hot lists leave free for others to be placed together, over ``replicas`` copies of the index.
_LEFT_FREE = 0.03
#: Place in the order of hot lists, over its own, of a list that many nodes hold already: it costs no copies.
_STAYS = 0.75
#: Held-back queries whose fan-out is counted.
_COUNTED = 256


def place_lists(
    list_bytes: I64,
    work: F64,
    request: NodeRequest,
    *,
    current: U64 | None = None,
    probes: I64 | None = None,
) -> NodePlan:
    """Place every list on ``request.replicas`` nodes, and the hottest on all as far as memory allows.

    Without a sample lists are spread so that bytes and work are even. With one, lists that are probed together come to
    the same nodes, and lists are hot that make queries local as a whole. With ``current``, lists stay where they are,
    but for what lacks memory or copies, or makes work uneven.

    Args:
        list_bytes: (nlist,) int64 bytes of each list.
        work: (nlist,) float64 bytes that a query scans of each list, in the mean.
        current: (nlist,) uint64 who holds each list now. Nodes beyond ``request.n_nodes`` are gone.
        probes: (q, p) int64 lists of a sample of queries, -1 = skip. Every second query is held back to predict.

    Raises:
        InvalidInputError: arrays of unequal lengths, more replicas than nodes, or too little memory: the message says
            how much is missing, and what each node needs.
    """
    _check(list_bytes, work, current, probes)
    taking = request.taking
    if request.replicas > taking.size:
        raise InvalidInputError(
            f"replicas is {request.replicas} and {taking.size} nodes take lists; give at most {taking.size} replicas, "
            "or more nodes with memory"
        )
    missing = missing_bytes(list_bytes, request)
    if missing:
        raise _too_little(missing, list_bytes, request)
    fit, held = split_sample(probes)
    sample = None if fit is None else Sample(fit, len(list_bytes))
    hot = choose_hot(list_bytes, request, _by_heat(list_bytes, work, request, sample, current))
    placing = None if current is None else _from_current(list_bytes, work, request, hot, sample, current)
    placing = placing or _from_nothing(list_bytes, work, request, hot, sample)
    return foreseen(NodePlan(request=request, list_bytes=list_bytes, work=work, holders=placing.holders), held)


def missing_bytes(list_bytes: I64, request: NodeRequest) -> int:
    """Bytes of memory that ``replicas`` copies of every list lack. A node is used for one copy of the index at most."""
    index = int(list_bytes.sum())
    return max(request.replicas * index - sum(min(nbytes, index) for nbytes in request.node_bytes), 0)


def choose_hot(list_bytes: I64, request: NodeRequest, order: I64) -> npt.NDArray[np.bool_]:
    """(nlist,) bool lists that every node is to hold: the first of ``order``, (m,) int64 lists, that have room."""
    hot = np.zeros(len(list_bytes), dtype=np.bool_)
    taking, index = request.taking, int(list_bytes.sum())
    more = taking.size - request.replicas
    if request.replicate == "none" or more <= 0:
        return hot
    room = [request.node_bytes[node] for node in taking]
    if min(room) >= index and request.spread_bytes is None:
        hot[order] = True
        return hot
    # Copies of lists are placed whole: any node may end with less room than the largest list.
    left = int(list_bytes.max(initial=0)) * taking.size + math.ceil(_LEFT_FREE * request.replicas * index)
    free = sum(min(nbytes, index) for nbytes in room) - request.replicas * index - left
    if request.spread_bytes is not None:
        free = min(free, request.spread_bytes)
    hot[order[: np.searchsorted(np.cumsum(list_bytes[order]), min(free // more, *room), side="right")]] = True
    return hot


def _by_heat(list_bytes: I64, work: F64, request: NodeRequest, sample: Sample | None, current: U64 | None) -> I64:
    """(m,) int64 lists that are probed at all, in the order in which every node should hold them."""
    if sample is None:
        order = hottest_first(list_bytes, work)
    else:
        order = sample.whole_queries_first(list_bytes, work / np.maximum(list_bytes, 1))
    if current is not None:
        spread = np.bitwise_count(current[order]) > request.replicas
        order = order[np.argsort(np.arange(len(order)) * np.where(spread, _STAYS, 1.0), kind="stable")]
    return order[work[order] > 0]


def split_sample(probes: I64 | None) -> tuple[I64 | None, I64 | None]:
    """Queries to decide by, and held-back ones to predict with. None: there are none."""
    if probes is None or not len(probes):
        return None, None
    return probes[::2], probes[1::2]


def foreseen(plan: NodePlan, held: I64 | None) -> NodePlan:
    """``plan`` with its fan-out and local share on ``held`` (q, p) probes, where any node that takes lists answers."""
    if held is None or not len(held):
        return dataclasses.replace(plan, fan_out=None, local_share=None, nearest_fan_out=None, nearest_local_share=None)
    probes = held[:: -(-len(held) // _COUNTED)]
    nodes, scanned = plan.request.taking, np.where(probes >= 0, plan.list_bytes[probes], 0)
    on = matrix_of(plan.holders, plan.request.n_nodes)
    whole = np.maximum(scanned.sum(axis=1), 1)
    asked, local = np.empty((len(probes), nodes.size), dtype=np.int64), np.empty((len(probes), nodes.size))
    for turn, own in enumerate(nodes.tolist()):
        here = on[:, own]
        found = choose_nodes(
            probes, here=here, holders=plan.holders, usable=mask_of(nodes), own=own, turn=turn * len(probes)
        )
        found = np.sort(found, axis=1)
        new = np.diff(found, axis=1, prepend=NOBODY) > 0
        asked[:, turn] = (new & (found >= 0)).sum(axis=1)
        local[:, turn] = (scanned * here[probes]).sum(axis=1) / whole
    nearest = np.arange(len(probes)), nearest_nodes(local)
    return dataclasses.replace(
        plan,
        fan_out=float(asked.mean()),
        local_share=float(local.mean()),
        nearest_fan_out=float(asked[nearest].mean()),
        nearest_local_share=float(local[nearest].mean()),
    )


def _from_current(
    list_bytes: I64,
    work: F64,
    request: NodeRequest,
    hot: npt.NDArray[np.bool_],
    sample: Sample | None,
    current: U64,
) -> Placing | None:
    """None: lists would have to be exchanged between full nodes."""
    placing = Placing(list_bytes, work, request, hot, sample)
    placing.start(current)
    placing.drop_spare()
    placing.make_room()
    if placing.fill(placing.order()).size:
        return None
    placing.even()
    return placing


def _from_nothing(
    list_bytes: I64, work: F64, request: NodeRequest, hot: npt.NDArray[np.bool_], sample: Sample | None
) -> Placing:
    hottest = np.flatnonzero(hot)[np.argsort(-work[hot] / np.maximum(list_bytes[hot], 1), kind="stable")]
    for part, together in ((1.0, sample), (0.5, sample), (1.0, None), (0.5, None)):
        fewer = np.zeros_like(hot)
        fewer[hottest[: math.ceil(part * hottest.size)]] = True
        placing = Placing(list_bytes, work, request, fewer, together)
        placing.start()
        order = placing.order()
        if not placing.fill(order).size:
            placing.improve(order)
            return placing
    placing = Placing(list_bytes, work, request, np.zeros_like(hot), None)
    lost = placing.pack()
    if lost.size:
        raise _too_little(int(list_bytes[lost].sum()), list_bytes, request)
    return placing


def _too_little(missing: int, list_bytes: I64, request: NodeRequest) -> InvalidInputError:
    index, n = int(list_bytes.sum()), request.taking.size
    each = min(-(-request.replicas * index // n) + int(list_bytes.max()), index)
    return InvalidInputError(
        f"{missing} bytes of memory are missing ({format_bytes(missing)}): {request.replicas} copies of "
        f"{format_bytes(index)} do not fit on {n} nodes with {format_bytes(sum(request.node_bytes))} in all, each list "
        f"at most once on a node; {each} bytes ({format_bytes(each)}) on each node would do"
    )


def _check(list_bytes: I64, work: F64, current: U64 | None, probes: I64 | None) -> None:
    nlist = len(list_bytes)
    for name, array in (("work", work), ("current", current)):
        if array is not None and len(array) != nlist:
            raise InvalidInputError(f"{name} has {len(array)} entries; list_bytes has {nlist}: give one per list")
    if nlist == 0 or int(list_bytes.min()) < 0:
        raise InvalidInputError("list_bytes is empty or holds a negative number; give the bytes of each list, >= 0")
    if not (np.isfinite(work) & (work >= 0)).all():
        raise InvalidInputError("work holds a negative number, or no number; give bytes of each list per query, >= 0")
    if probes is not None and probes.size and not -1 <= int(probes.min()) <= int(probes.max()) < nlist:
        raise InvalidInputError(f"probes hold {probes.min()} to {probes.max()}; give list ids below {nlist}, or -1")
