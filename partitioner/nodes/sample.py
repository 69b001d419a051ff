"""Which queries of a sample probe which lists, and what follows from it: which lists every node should hold, and in
which order lists come near those that are probed with them.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
import numpy.typing as npt

from hybridindex.types import F64, I64

__all__ = ["Sample"]

#: What a list counts by its accesses alone, beside those of queries that all of whose lists are chosen.
_BY_ACCESSES = 0.02
#: Queries of a list that are asked for its neighbours, and neighbours that follow it.
_QUERIES, _NEIGHBOURS = 20, 8


class Sample:
    """(q, p) probes of queries, and the queries of each list."""

    def __init__(self, probes: I64, nlist: int) -> None:
        """``probes``: (q, p) int64 list ids, -1 = skip."""
        self.probes = probes
        query, at = np.nonzero(probes >= 0)
        lists = probes[query, at]
        self._queries = query[np.argsort(lists, kind="stable")]
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(lists, minlength=nlist)))).tolist()

    def queries_of(self, which: int) -> I64:
        """(m,) int64 queries that probe list ``which``, ascending."""
        return self._queries[self._starts[which] : self._starts[which + 1]]

    def whole_queries_first(self, list_bytes: I64, accesses: F64) -> I64:
        """(nlist,) int64 lists; each prefix holds, for its bytes, many queries whole: they need no other list.

        Again and again the list goes that the fewest queries need per byte, and with it the queries that need it (the
        peeling of densest subgraphs: Charikar 2000).

        Args:
            list_bytes: (nlist,) int64.
            accesses: (nlist,) float64 probes per query of each list; they decide where no query is left.
        """
        nbytes = np.maximum(list_bytes, 1).tolist()
        needed = np.diff(self._starts).tolist()
        base = (accesses * (_BY_ACCESSES * len(self.probes))).tolist()
        heap = [((n + b) / s, which) for which, (n, b, s) in enumerate(zip(needed, base, nbytes, strict=True))]
        heapq.heapify(heap)
        whole = [True] * len(self.probes)
        probes = self.probes.tolist()
        gone = [False] * len(needed)
        order = []
        while heap:
            score, which = heapq.heappop(heap)
            if gone[which] or score > (needed[which] + base[which]) / nbytes[which]:
                continue  # went, or stands further ahead with fewer queries
            gone[which] = True
            order.append(which)
            for query in self.queries_of(which).tolist():
                if whole[query]:
                    whole[query] = False
                    for other in probes[query]:
                        if other >= 0 and not gone[other]:
                            needed[other] -= 1
                            heapq.heappush(heap, ((needed[other] + base[other]) / nbytes[other], other))
        return np.array(order[::-1], dtype=np.int64)

    def neighbours_together(self, order: I64, wanted: npt.NDArray[np.bool_]) -> list[int]:
        """The lists of ``order`` that are ``wanted``, each soon after one that is probed with it: breadth first."""
        new = wanted.copy()
        found = []
        for first in order.tolist():
            if not new[first]:
                continue
            new[first] = False
            waiting = deque([first])
            while waiting:
                which = waiting.popleft()
                found.append(which)
                probed = self.probes[self.queries_of(which)[:_QUERIES]]
                lists, counts = np.unique(probed[probed >= 0], return_counts=True)
                near = lists[np.argsort(-counts, kind="stable")]
                near = near[new[near]][:_NEIGHBOURS]
                new[near] = False
                waiting.extend(near.tolist())
        return found
