"""Which nodes a query asks for the lists that are not here: as few as a greedy cover finds.

The native kernel does the work; :func:`choose_nodes_reference` says in Python what it must answer, and stands in where
the extension was not built.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from heapq import heapify, heappop, heapreplace
from operator import or_
from typing import Final

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.types import F64, I64

I16 = npt.NDArray[np.int16]
U64 = npt.NDArray[np.uint64]

__all__ = ["HERE", "MOST_NODES", "NOBODY", "choose_nodes", "choose_nodes_reference"]

#: A node is a bit of a uint64.
MOST_NODES: Final = 64
#: In the place of a node: the probe is scanned here, or is skipped; no usable node holds its list.
HERE: Final = -1
NOBODY: Final = -2

#: Parts of a key: the node, its place, the number of lists.
_BITS_OF_A_NODE: Final = 6
_COUNT: Final = 2 * _BITS_OF_A_NODE
_NODE: Final = MOST_NODES - 1
_EIGHT: Final = (1 << np.arange(8, dtype=np.uint8))[:, None]


def choose_nodes(
    probes: I64,
    *,
    here: npt.NDArray[np.bool_],
    holders: U64,
    usable: int,
    own: int | None = None,
    load: F64 | None = None,
    turn: int = 0,
) -> I16:
    """Who scans each probe: (n, p) int16, -1 = this node (or no probe), j = node j, -2 = no usable node has the list.

    Each query asks the node that holds most of its lists that are left, until none is left that a usable node holds: at
    most 1 + 1/2 + ... + 1/p times as many nodes as the fewest that would do. Of nodes that hold equally many, it asks
    the one with the least to do, where each query before it is taken to have gone to the node with the least to do
    then; of those, another one at each turn. So nodes that are equal share the work.

    Args:
        probes: (n, p) int64 list ids, -1 = skip.
        here: (nlist,) bool lists that this node scans itself.
        holders: (nlist,) uint64, bit j: node j holds the list.
        usable: bit j: node j may be asked.
        own: this node, which is never asked.
        load: (n_nodes,) float64 what each node has to do, in queries; None: the same everywhere.
        turn: number of the first query. Who gives a query at a time counts them, so that equal nodes share the work.

    Raises:
        InvalidInputError: a probe is not a list id.
    """
    usable = int(usable)
    if own is not None:
        usable &= ~(1 << own)
    if native is None:
        return choose_nodes_reference(probes, here=here, holders=holders, usable=usable, load=load, turn=turn)
    found = np.empty(probes.shape, dtype=np.int16)
    places = _turns(max(1, usable.bit_length()))
    to_do = None if load is None or not usable else np.ascontiguousarray(load, dtype=np.float64)
    try:
        native.cover_probes(np.ascontiguousarray(probes), here, holders, usable, to_do, places, turn, found)
    except IndexError as error:
        raise InvalidInputError(str(error)) from error
    return found


def choose_nodes_reference(
    probes: I64, *, here: npt.NDArray[np.bool_], holders: U64, usable: int, load: F64 | None, turn: int
) -> I16:
    """The same in Python; ``usable`` without the own node."""
    if probes.size and (probes.min() < -1 or probes.max() >= len(here)):
        raise InvalidInputError(f"probes hold a list id outside -1..{len(here) - 1}")
    found = np.full(probes.shape, HERE, dtype=np.int16)
    away = ~here[probes]
    away &= probes >= 0
    if not away.any():
        return found
    masks = holders[probes]
    masks &= np.uint64(usable)
    masks *= away
    found[away] = NOBODY
    only = masks > 0
    if not (masks & (masks - only)).any():
        # One holder each: nothing to choose. Bit j has j bits below it.
        found[only] = np.bitwise_count(masks[only] - np.uint64(1))
        return found
    _cover(masks, _places(len(probes), usable.bit_length(), load, turn), found)
    return found


@lru_cache
def _turns(n_nodes: int) -> I64:
    """(64 n_nodes, n_nodes) int64 places of the nodes at each turn, fair to any nodes that are equal: an order of the
    nodes is rotated through, and then another one."""
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(n_nodes), (64, 1)), axis=1)
    return ((orders[:, None, :] + np.arange(n_nodes)[:, None]) % n_nodes).reshape(-1, n_nodes)


def _places(n: int, n_nodes: int, load: F64 | None, turn: int) -> I64:
    """(n, n_nodes) int64 place of each node among those that hold equally many lists of a query: the first is asked."""
    turns = _turns(n_nodes)
    places = turns[np.arange(turn, turn + n) % len(turns)]
    if load is not None:
        to_do = load[:n_nodes].astype(np.float64)
        for query in range(n):
            order = np.lexsort((places[query], to_do))
            places[query, order] = np.arange(n_nodes)
            to_do[order[0]] += 1
    return places


def _cover(masks: U64, places: I64, found: I16) -> None:
    """Writes the nodes that are asked to ``found``; ``masks``: (n, p) usable holders of each list, 0 = not asked for.

    The lists of a node are one integer, a bit a probe. A key is less, the more lists a node adds, and ends with its
    place and itself. What nodes add falls as lists are covered, so that only the first of a heap is counted again.
    """
    n, n_nodes = places.shape
    data, width = _lists_by_node(masks, n_nodes)
    stride = len(data) // n
    tails = ((places << _BITS_OF_A_NODE) + np.arange(n_nodes)).tolist()
    queries: list[int] = []
    nodes: list[int] = []
    taken: list[bytes] = []
    for query, tail in enumerate(tails):
        start = query * stride
        held = [int.from_bytes(data[at : at + width]) for at in range(start, start + n_nodes * width, width)]
        heap = [end - (lists.bit_count() << _COUNT) for end, lists in zip(tail, held, strict=True) if lists]
        heapify(heap)
        left = reduce(or_, held)
        while left:
            key = heap[0]
            node = key & _NODE
            new = held[node] & left
            now = tail[node] - (new.bit_count() << _COUNT)
            if now == key:
                left ^= new
                queries.append(query)
                nodes.append(node)
                taken.append(new.to_bytes(width))
                heappop(heap)
            else:
                heapreplace(heap, now)
    bits = np.frombuffer(b"".join(taken), dtype=np.uint8).reshape(-1, width)
    row, probe = np.unpackbits(bits, axis=1).nonzero()
    found[np.array(queries)[row], probe] = np.array(nodes, dtype=np.int16)[row]


def _lists_by_node(masks: U64, n_nodes: int) -> tuple[bytes, int]:
    """Per query and node the lists that it holds, a bit a probe, the first the highest; and their bytes.
    Nodes are filled up to a multiple of 8."""
    n, p = masks.shape
    lists = masks.view(np.uint8).reshape(n, p, 8)[:, :, : -(-n_nodes // 8)].transpose(0, 2, 1)
    rows = np.packbits(np.ascontiguousarray(lists)[:, :, None, :] & _EIGHT, axis=3)
    return rows.tobytes(), rows.shape[3]
