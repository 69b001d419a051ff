"""Which tier and which scanner serve a codec on a device, and why. Decides by codec and device alone, not by budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridindex.index.codec import DeviceCodec, DeviceKind, device_kind
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, shard_page_bytes, usual_page_bytes
from hybridindex.tiers.contract.devices import resolve_device
from hybridindex.tiers.contract.tier import WithoutRoom
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.coarse.device_centroids import centroid_bytes
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.paged.kernel_choice import choose_page_scanner
from hybridindex.tiers.shard.gpu import GpuShard, gpu_unsupported
from hybridindex.tiers.shard.scanner import StandInShard, model_bytes
from hybridindex.tiers.shard.shard_tier import ShardTier

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.tiers.contract.tier import Tier

__all__ = ["CodecService", "TierChoice", "codec_service", "open_device_tier", "page_bytes_of", "tier_of"]

#: Fast scan quantizes its tables over the lists that it scans together: ADR 0005.
_FAST_SCAN = "its distances depend on which lists are scanned together, so one tier, the host, scans them all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """What holds an index's lists on one kind of device, and the memory that takes."""

    #: "host": nothing does.
    tier: Literal["paged", "shard", "host"]
    #: Why nothing does; empty otherwise.
    reason: str = ""
    #: A list takes whole pages of at most so many bytes.
    page_bytes: int = DEFAULT_PAGE_BYTES
    #: What a device takes besides lists and scratch.
    fixed_bytes: int = 0
    #: What the centroids take of the first device, where its budget is not small.
    centroid_bytes: int = 0
    #: Of all codes, where lists are held by their codes: scratch follows them.
    code_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecService:
    """How one codec is served on one device."""

    codec: str
    #: "triton", "native", "torch", "faiss-gpu" or "faiss"; "host" where the device holds no list of this codec.
    scanner: str
    #: Why no faster one, or none; empty where none is faster.
    reason: str


def page_bytes_of(index: IVFIndex) -> int:
    """Most bytes of a page of arenas for ``index`` where no plan says any: as they fit its lists. Shards always have
    their own."""
    if index.device_codec() is None and index.manifest.layout == "rows":
        return shard_page_bytes(index.code_size)
    return usual_page_bytes(index.codec, index.page_row_bytes, index.list_sizes)


def tier_of(index: IVFIndex, device_name: str) -> TierChoice:
    """Which tier holds lists of ``index`` on a device ("cuda:N", "cuda", "cpu"). The device need not be there."""
    if index.device_codec() is not None:
        of_codes = index.rows is not index
        return TierChoice(
            tier="paged",
            page_bytes=page_bytes_of(index),
            # Those of the stand-in lie in host memory.
            centroid_bytes=(
                0 if device_name == "cpu" or not index.coarse.is_ours else centroid_bytes(index.nlist, index.scan_dim)
            ),
            code_bytes=int(index.list_bytes.sum()) if of_codes else 0,
        )
    if index.manifest.layout != "rows":
        return TierChoice(tier="host", reason=f"codec {index.codec!r}: {_FAST_SCAN}")
    if device_name != "cpu" and (reason := gpu_unsupported(index)):
        return TierChoice(tier="host", reason=reason)
    return TierChoice(tier="shard", page_bytes=page_bytes_of(index), fixed_bytes=model_bytes(index))


def open_device_tier(
    index: IVFIndex,
    device_name: str,
    ordinal: int,
    *,
    budget_bytes: int,
    wanted_bytes: int,
    memory: PagedMemory | None = None,
    without_room: WithoutRoom = "raise",
) -> Tier:
    """The tier that serves ``index`` on a device. Where none can, one that holds nothing and says why.

    Args:
        memory: of a paged tier; a shard's follows from its budget and codec.
        without_room: where the device is full or, for a paged tier, busy now.

    Raises:
        OutOfBudgetError: more is needed than the device has free.
        DeviceNotFoundError, DeviceError, MissingDependencyError.
    """
    choice = tier_of(index, device_name)
    if choice.tier == "shard":
        return ShardTier(
            index,
            device_name,
            ordinal,
            budget_bytes=budget_bytes,
            wanted_bytes=wanted_bytes,
            without_room=without_room,
        )
    tier = DeviceTier(
        index,
        device_name,
        ordinal,
        budget_bytes=budget_bytes,
        wanted_bytes=wanted_bytes,
        memory=memory or PagedMemory(page_bytes=choice.page_bytes),
        without_room=without_room,
    )
    tier.disabled_reason = choice.reason or tier.disabled_reason
    return tier


def codec_service(codec: str, device_name: str) -> CodecService:
    """What scans lists of ``codec``, as builds and manifests name it, or codes ("rabitq", "rabitq2"...), on a device.

    Raises:
        DeviceNotFoundError: there is no such device.
        MissingDependencyError: torch or faiss is not installed.
    """
    device, _ = resolve_device(device_name)
    kind: DeviceKind | None = "rabitq" if codec.startswith("rabitq") else device_kind(codec)
    if kind is not None:
        arena = PageArena(device, PageGeometry.for_code_size(1), 0)
        chosen, reason = choose_page_scanner(DeviceCodec(kind=kind, dim=1, code_size=1, by_residual=False), arena)
        return CodecService(codec=codec, scanner=chosen.name, reason=reason)
    if "FastScan" in codec:
        return CodecService(codec=codec, scanner="host", reason=_FAST_SCAN)
    if device.type == "cpu":
        return CodecService(codec=codec, scanner=StandInShard.name, reason="")
    reason = gpu_unsupported() or ("" if codec == "faiss:IVFPQ" else "faiss-gpu is used for pq alone")
    return CodecService(codec=codec, scanner="host" if reason else GpuShard.name, reason=reason)
