"""Searches through every tier before a daemon is ready.

The first scan of a device compiles kernels and allocates; the first scan of the host reads pages from disk. Clients
should not wait for either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import BuildError, DamagedListsError, IncompleteAnswerError, NotHeldError, OverloadedError
from hybridindex.router.router import Router
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.service.serving import Serving

__all__ = ["warm_up", "warm_up_current"]

_QUERIES = 8


def warm_up_current(current: Callable[[], Serving], reload: Callable[[], object], stop: Callable[[], bool]) -> set[int]:
    """:func:`warm_up` of what serves; of what serves then, where other processes left it behind before anybody searched
    it, so that it refuses searches."""
    while True:
        served = current()
        try:
            return warm_up(served.router, served.index.dim, served.index.nlist, stop=stop)
        except BuildError:
            if served is current():
                if served.index.ivf.rows.live.lost is None or stop():
                    raise
                try:
                    reload()
                except OverloadedError:  # another reload is under way
                    time.sleep(0.1)


def warm_up(
    router: Router, dim: int, nlist: int, *, rounds: int = 3, stop: Callable[[], bool] = lambda: False
) -> set[int]:
    """Searches random queries until every tier that holds lists has scanned some. The router's statistics begin then.

    Args:
        dim: dimension of queries.
        rounds: searches of each batch size.
        stop: called before each search; True ends the warm-up.

    Returns:
        Ordinals of the tiers that scanned, -1 for the host.
    """
    list_device = router.residency.list_device
    wanted = {int(d) for d in np.unique(list_device)}
    seen: set[int] = set()

    def note(probes: I64) -> None:
        seen.update(int(d) for d in np.unique(list_device[probes[probes >= 0]]))

    def search(n: int, nprobe: int | None) -> None:
        queries = rng.standard_normal((n, dim)).astype(np.float32)
        # A share answers what it can, and so does a node; and all answer what is whole.
        with suppress(NotHeldError, IncompleteAnswerError, DamagedListsError):
            router.submit(queries, k, nprobe, on_probes=note).result()

    # A router with fewer candidates answers no more.
    k = min(10, router.config.candidates or 10)
    rng = np.random.default_rng(0)
    nprobe = router.nprobe
    for number in range(rounds):
        for n in (1, _QUERIES):
            if not stop():
                search(n, nprobe if number == 0 else None)
    # Random queries may not probe the plan's lists: probe more lists until they do.
    while not wanted <= seen and nprobe < nlist and not stop():
        nprobe = min(nlist, nprobe * 4)
        search(1, nprobe)
    router.forget_load()
    return seen
