"""The account of one device's shards: which exist, how many bytes they take, and which of their lists are still named.

A residency names lists by pages. A list of a shard has one page, whose number encodes the shard and the list. When the
last page of a shard comes back, no snapshot and no lease can reach it, and its memory is freed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from hybridindex.tiers.shard.scanner import FaissShard
from hybridindex.types import I32, I64

__all__ = ["ShardLedger"]


@dataclass(slots=True, eq=False)
class _Entry:
    nbytes: int
    #: None while it is being built.
    shard: FaissShard | None = None
    #: Lists whose page has not come back.
    n_named: int = 0


class ShardLedger:
    """Owner of the shards of one device, numbered by slot. Thread-safe."""

    def __init__(self, nlist: int) -> None:
        self._nlist = nlist
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all shards, those included that are being built or that only older leases read."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values())

    @property
    def n_shards(self) -> int:
        with self._lock:
            return len(self._entries)

    def reserve(self, nbytes: int) -> int:
        """Accounts for a shard to be built; its slot. :meth:`fill` or :meth:`cancel` follows."""
        with self._lock:
            slot = next(number for number in range(len(self._entries) + 1) if number not in self._entries)
            self._entries[slot] = _Entry(nbytes)
            return slot

    def cancel(self, slot: int) -> None:
        """The shard was not built."""
        with self._lock:
            del self._entries[slot]

    def fill(self, slot: int, shard: FaissShard, lists: I64) -> dict[int, I32]:
        """The shard is built, and the ledger's from now on; the page of each list, for a residency to name."""
        pages = {int(list_id): np.array([slot * self._nlist + int(list_id)], np.int32) for list_id in lists}
        with self._lock:
            entry = self._entries[slot]
            entry.shard, entry.n_named = shard, len(pages)
        return pages

    def find(self, pages: I32) -> FaissShard:
        """The shard of a list that a leased snapshot names."""
        with self._lock:
            shard = self._entries[int(pages[0]) // self._nlist].shard
        assert shard is not None
        return shard

    def free(self, pages: I32) -> None:
        """See :meth:`hybridindex.tiers.contract.tier.PageOwner.free`."""
        emptied: list[tuple[int, _Entry]] = []
        slots, counts = np.unique(pages // self._nlist, return_counts=True)
        with self._lock:
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                entry = self._entries[slot]
                entry.n_named -= count
                if not entry.n_named:
                    emptied.append((slot, entry))
        for slot, entry in emptied:
            # Accounted for until its memory is really free; nothing else can reach it.
            assert entry.shard is not None
            entry.shard.close()
            with self._lock:
                del self._entries[slot]

    def clear(self) -> None:
        """Lets all shards go; pages may not come back any more."""
        with self._lock:
            entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.shard is not None:
                entry.shard.close()

    def check_invariants(self) -> None:
        """Asserts that shards that are built have lists that are named, at most as many as there are."""
        with self._lock:
            for entry in self._entries.values():
                assert entry.nbytes > 0
                assert 0 <= entry.n_named <= self._nlist
                assert entry.shard is not None or entry.n_named == 0
