"""How long a new residency snapshot keeps searches waiting. Target: 100 us.

One thread takes leases and gives them back, one after another, as batches do; another publishes: sixteen lists go,
sixteen others come, each with an array of pages of its own. The *pause* of a publish is the longest that the first
thread took from one lease to the next across it: it may wait for the store's lock or for the interpreter's, a batch
could not tell. Turns in which the publisher wakes and does nothing show what that alone costs. From time to time a
publish compacts the log of pages: those are counted apart, and held to the same target.

No device takes part: the figures are of the host, and stand for a server's only where it is one.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common.measure import arguments, show, write
from benchmarks.device.targets import SWAP_TARGET_US
from hybridindex.tiers.contract.driver import driver_version
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.types import F64

_SWAPPED_LISTS, _PAGES = 16, 16
#: Between turns, so that pauses do not touch.
_REST_S = 0.001
#: Most swaps spent on coming near the next compaction.
_MOST_UNMEASURED = 8192


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nlist", type=int, nargs="+", default=[4096, 65_536])
    parser.add_argument("--swaps", type=int, default=400)


@dataclass(slots=True)
class Swaps:
    """Publishes that replace lists of ``store``, half of whose lists are resident; in and out go round in circles."""

    store: ResidencyStore
    turn: int = 0
    _log: Any = field(init=False)

    def __post_init__(self) -> None:
        half = len(self.store.current.list_device) // 2
        self._log = self.store.publish(_loads(range(half))).page_log

    def prepare(self) -> tuple[dict[int, tuple[int, Any]], range]:
        """What comes and what goes next; arrays are made here, as they are before a real publish."""
        nlist = len(self.store.current.list_device)
        at = self.turn * _SWAPPED_LISTS
        self.turn += 1
        coming = [(nlist // 2 + at + i) % nlist for i in range(_SWAPPED_LISTS)]
        leaving = range(at % nlist, at % nlist + _SWAPPED_LISTS)
        return _loads(coming), leaving

    def compacted(self, now: Residency) -> bool:
        """Whether the publish that made ``now`` took a new log."""
        before, self._log = self._log, now.page_log
        return self._log is not before

    def until_compaction(self, limit: int) -> int:
        """Swaps until one compacts, that one included, or ``limit``; how many it took."""
        for number in range(1, limit + 1):
            loads, drops = self.prepare()
            if self.compacted(self.store.publish(loads, drops)):
                return number
        return limit


def _loads(lists: Any) -> dict[int, tuple[int, Any]]:
    return {i: (0, np.arange(i * _PAGES, (i + 1) * _PAGES, dtype=np.int32)) for i in lists}


class Leases:
    """A thread that takes leases until it is stopped, and keeps from when to when it had to wait for the next one."""

    _SHORT_S = 5e-6

    def __init__(self, store: ResidencyStore) -> None:
        self._store, self._stop = store, threading.Event()
        self._seen: list[tuple[float, float]] = []
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        clock, lease = time.perf_counter, self._store.lease
        start = clock()
        while not self._stop.is_set():
            lease().release()
            self.count += 1
            end = clock()
            if end - start > self._SHORT_S:
                self._seen.append((start, end))
            start = end

    def longest_over(self, times: list[tuple[float, float]]) -> F64:
        """(n,) seconds of the longest wait across each (start, end); 0 where all were short. After the end."""
        waits = np.array(self._seen).reshape(-1, 2)
        longest = np.zeros(len(times))
        for i, (start, end) in enumerate(times):
            # Waits are in order and do not overlap.
            first, last = np.searchsorted(waits[:, 1], start, "right"), np.searchsorted(waits[:, 0], end, "left")
            over = waits[first:last]
            if len(over):
                longest[i] = (over[:, 1] - over[:, 0]).max()
        return longest


def measure(nlist: int, swaps: int) -> dict[str, Any]:
    """Pauses of ``swaps`` publishes among ``nlist`` lists, in us; and of as many turns without one."""
    store = ResidencyStore(nlist, lambda _device, _pages: None)
    work = Swaps(store)
    work.until_compaction(_MOST_UNMEASURED)
    every = work.until_compaction(_MOST_UNMEASURED)
    if every > swaps:
        # So that one lies about the middle of what is measured.
        work.until_compaction(every - swaps // 2)
    times: dict[str, list[tuple[float, float]]] = {"swap": [], "nothing": []}
    compacting: list[bool] = []
    with Leases(store) as leases:
        for _ in range(swaps):
            loads, drops = work.prepare()
            for what, own in times.items():
                time.sleep(_REST_S)
                start = time.perf_counter()
                if what == "swap":
                    snapshot = store.publish(loads, drops)
                own.append((start, time.perf_counter()))
            compacting.append(work.compacted(snapshot))
    store.check_invariants()
    pauses = {what: 1e6 * leases.longest_over(own) for what, own in times.items()}
    at = np.array(compacting)
    taken = 1e6 * np.ptp(np.array(times["swap"]), axis=1)
    return {
        "nlist": nlist,
        "swaps": swaps,
        "leases": leases.count,
        "publish_us": _summary(taken),
        "pause_us": _summary(pauses["swap"]),
        "nothing_us": _summary(pauses["nothing"]),
        "swaps_between_compactions": every,
        "compactions": int(at.sum()),
        "compaction_pause_us": _summary(pauses["swap"][at]) if at.any() else None,
    }


def _summary(values: F64) -> dict[str, float]:
    middle, high = np.percentile(values, [50, 99])
    return {"median": float(middle), "p99": float(high), "max": float(values.max())}


def main() -> None:
    args = arguments(__doc__, _options)
    stand_in = driver_version() is None
    rows: list[dict[str, Any]] = []

    def save(*, complete: bool = False) -> None:
        write(args.json, "device_swap", {"stand_in": stand_in, "complete": complete, "rows": rows})

    for nlist in args.nlist:
        rows.append(measure(nlist, args.swaps))
        save()
    save(complete=True)
    claim = "no GPU here: claims nothing" if stand_in else f"target {SWAP_TARGET_US:g}"
    show(
        f"wait of a lease while {_SWAPPED_LISTS} lists are replaced, us ({claim})",
        ("nlist", "median", "p99", "max", "p99 of nothing", "publish", "compactions", "one each", "their median"),
        [
            (
                r["nlist"],
                *(r["pause_us"][key] for key in ("median", "p99", "max")),
                r["nothing_us"]["p99"],
                r["publish_us"]["median"],
                r["compactions"],
                r["swaps_between_compactions"],
                "-" if r["compaction_pause_us"] is None else r["compaction_pause_us"]["median"],
            )
            for r in rows
        ],
    )


if __name__ == "__main__":
    main()
