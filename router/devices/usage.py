"""What the bytes of each device's arena are used for: the plan, sessions, the cache. For status pages and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.tier import Tier
from hybridindex.types import I64

__all__ = ["ArenaUse", "arena_use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUse:
    """Bytes of one device. The five parts of the arena add up to its capacity."""

    name: str
    usable: bool
    capacity_bytes: int
    #: Beside the arena, within the budget.
    scratch_bytes: int
    #: Lists that the plan keeps here.
    pinned_bytes: int
    #: Lists that sessions hold.
    lookahead_bytes: int
    #: Lists that stay because they were used.
    cached_bytes: int
    #: Pages in use for nothing of these: on their way in, or out with their last reader.
    other_bytes: int
    free_bytes: int
    #: Among ``other_bytes``: out of use since a copy failed that may still write them; free after a recovery.
    kept_bytes: int
    #: Outside the budget: what the runtime's context took of the device, None where that is not known; and host memory
    #: for copies on their way.
    context_bytes: int | None
    host_bytes: int


def arena_use(
    tiers: Sequence[Tier],
    residency: Residency,
    list_bytes: I64,
    *,
    held: npt.NDArray[np.bool_],
    cached: npt.NDArray[np.bool_],
) -> tuple[ArenaUse, ...]:
    """Reads each tier. Moves go on meanwhile, so a list that comes or goes may count as "other" or not at all.

    Args:
        list_bytes: (nlist,) int64 device bytes of each list.
        held, cached: (nlist,) bool.
    """
    uses = []
    for tier in tiers:
        here = residency.list_device == tier.ordinal
        capacity = tier.capacity_bytes
        left = used = min(tier.used_bytes, capacity)
        parts = {}
        for name, mask in (("pinned", here & ~held & ~cached), ("lookahead", here & held), ("cached", here & cached)):
            parts[f"{name}_bytes"] = min(int(list_bytes[mask].sum()), left)
            left -= parts[f"{name}_bytes"]
        uses.append(
            ArenaUse(
                name=tier.label,
                usable=tier.usable,
                capacity_bytes=capacity,
                scratch_bytes=tier.reserved_bytes,
                **parts,
                other_bytes=left,
                free_bytes=capacity - used,
                kept_bytes=min(tier.kept_bytes, left),
                context_bytes=tier.context_bytes,
                host_bytes=tier.host_bytes,
            )
        )
    return tuple(uses)
