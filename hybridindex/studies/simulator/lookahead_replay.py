"""What lookahead and the cache serve: the lists of each query that are on a device although the plan does not place
them there.

Replays residency list by list, in order of arrival but without time, with the router's choice of lists and its cache
policy. The result, a part of each query's host bytes, goes into the stage table. The first pass over the pool warms the
cache, the second one is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.router.lookahead.hotness import HotnessPolicy, lists_to_evict, make_room, next_round, start_hotness
from hybridindex.router.lookahead.prefetch import choose_lists
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.studies.simulator.query_pool import QueryPool
from hybridindex.types import F64, I64

__all__ = ["LookaheadRules", "replay_lookahead"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadRules:
    """How lookahead and the cache are used. Raises InvalidInputError, which names the field."""

    #: Seconds of generation before the search, during which lists are copied; 0: no lookahead.
    window_s: float = 0.0
    #: Bandwidth of copies to one device. A request's lists go to one device; devices copy in parallel.
    bytes_per_s: float = 0.0
    #: Part of the final query's lists that the draft query probes too.
    overlap: float = 0.8
    #: Bytes of all arenas beyond the plan's lists.
    arena_bytes: int = 0
    cache: bool = True

    def __post_init__(self) -> None:
        for name in ("window_s", "bytes_per_s", "arena_bytes"):
            check_number(name, getattr(self, name), least=0.0)
        if not 0 <= self.overlap <= 1:
            raise InvalidInputError(f"overlap is {self.overlap}; give a part of the lists in [0, 1]")

    def budget_bytes(self, rate: float, n_devices: int) -> int:
        """Bytes that one request may copy: the smaller of its share of the links during its window and its share of the
        arenas, both divided by the sessions that are open at once."""
        sessions = max(1.0, rate * self.window_s)
        links = self.bytes_per_s * self.window_s * min(n_devices, sessions)
        return int(min(links, float(self.arena_bytes)) / sessions)


def replay_lookahead(
    pool: QueryPool,
    resident: Mask,
    device_bytes: I64,
    rules: LookaheadRules,
    *,
    budget_bytes: int,
    sessions: int,
    policy: HotnessPolicy,
    seed: int,
) -> F64:
    """(n,) part of each query's missing bytes, under the plan's ``resident`` (nlist,) bool, that is on a device.

    Args:
        device_bytes: (nlist,) bytes of each list's pages.
        budget_bytes: most bytes that one request copies.
        sessions: requests that hold their lists at once; a list is cached when its last holder ends.
    """
    n, nlist = len(pool), len(pool.list_bytes)
    drafts = _drafts(pool.probes, rules.overlap, nlist, seed)
    present, hotness = resident.copy(), np.zeros(nlist)
    free = rules.arena_bytes
    share = policy.cache_share_bytes(rules.arena_bytes) if rules.cache else 0
    holders: list[I64] = []
    served = np.zeros(n)
    for turn in range(2 * n):
        q = turn % n
        held = np.zeros(nlist, dtype=np.bool_)
        for lists in holders:
            held[lists] = True
        wanted, _ = choose_lists(drafts[q][None], device_bytes, present, budget_bytes)
        kept = resident | held
        kept[drafts[q][drafts[q] >= 0]] = True
        room = make_room(int(device_bytes[wanted].sum()), free, hotness, present & ~kept, kept, device_bytes)
        present[room.lists] = False
        free += int(device_bytes[room.lists].sum())
        brought = []
        for one in wanted:
            if device_bytes[one] <= free:
                free -= int(device_bytes[one])
                present[one] = True
                brought.append(one)
        hotness = start_hotness(hotness, np.array(brought, dtype=np.int64), policy)
        probes = pool.probes[q][pool.probes[q] >= 0]
        missed = probes[~resident[probes]]
        missing = float(pool.list_bytes[missed].sum())
        served[q] = float(pool.list_bytes[missed[present[missed]]].sum()) / missing if missing else 0.0
        used = np.zeros(nlist, dtype=np.bool_)
        used[missed[present[missed]]] = True
        hotness = next_round(hotness, used, policy)
        named = drafts[q][drafts[q] >= 0]
        holders.append(named[present[named] & ~resident[named]])
        if len(holders) >= sessions:
            holders.pop(0)
        held[:] = False
        for lists in holders:
            held[lists] = True
        gone = lists_to_evict(hotness, present & ~resident & ~held, resident | held, device_bytes, share)
        present[gone] = False
        free += int(device_bytes[gone].sum())
    return served


def _drafts(probes: I64, overlap: float, nlist: int, seed: int) -> I64:
    """``probes``, each kept with probability ``overlap`` and otherwise replaced by a random list."""
    rng = np.random.default_rng(seed)
    other = rng.integers(0, nlist, probes.shape)
    return np.where((probes < 0) | (rng.random(probes.shape) < overlap), probes, other)
