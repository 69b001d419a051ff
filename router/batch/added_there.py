"""What devices scan of the rows that were added, for one batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.index.live.added import AddedLists
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.added.added_pages import AddedLease
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import F32, I64

__all__ = ["AddedThere"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddedThere:
    """:meth:`release` it at the end of the batch."""

    added: AddedLists
    #: (nlist,) lists of which the device that holds them has all added rows.
    lists: npt.NDArray[np.bool_]
    lease: AddedLease

    def there(self, probes: I64) -> I64:
        """Probes as far as devices scan their added rows, -1 elsewhere; as many."""
        return np.where((probes >= 0) & self.lists[probes], probes, -1)

    def elsewhere(self, probes: I64) -> I64:
        """The others."""
        return np.where((probes >= 0) & ~self.lists[probes], probes, -1)

    def scan(self, tier: Tier, queries: F32, probes: I64, k: int) -> tuple[F32, I64] | None:
        """What a device finds for a part of the batch; None: it probes no such list."""
        probes = self.there(probes)
        if not (probes >= 0).any():
            return None
        assert isinstance(tier, DeviceTier), "shards hold no added rows"
        scanner = tier.added_scanner(self.lease, self.added, self.lists)
        return scanner.scan(queries, probes, np.zeros(probes.shape, dtype=np.float32), k)

    def release(self) -> None:
        self.lease.release()
