"""What the parts of one router share: the index, its tiers, the residency, counters and running estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridindex.index.ivf import IVFIndex
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.batch.stats import StatsCounter
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import I64

__all__ = ["RouterParts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterParts:
    """Made and closed by the router."""

    index: IVFIndex
    host: HostScanner
    #: By ordinal.
    tiers: Sequence[Tier]
    #: The tiers that single lists come to and leave: all of them, or none where lists come in shards.
    paged: Sequence[DeviceTier]
    residency: ResidencyStore
    stats: StatsCounter
    #: (n_pieces,) int64 device bytes of each piece of the lists, page rounding included.
    device_list_bytes: I64
    #: What nearly all host scans end within; and what device scans take, whichever device's.
    host_pace: PaceEstimator = field(default_factory=PaceEstimator)
    device_pace: PaceEstimator = field(default_factory=PaceEstimator)
    #: What nearly all exact comparisons of the host end within, by candidates in the place of bytes.
    rerank_pace: PaceEstimator = field(default_factory=PaceEstimator)
