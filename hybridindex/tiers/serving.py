"""Which scanner serves a codec on a device, and why: for those who plan, and for those who ask.

Decides by codec and device alone; whether a budget has room for anything is the tier's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridindex.index.codec import DEVICE_KINDS, DeviceCodec
from hybridindex.paging import PageGeometry
from hybridindex.tiers.arena import PageArena
from hybridindex.tiers.device import choose_page_scanner
from hybridindex.tiers.devices import resolve_device

__all__ = ["CodecService", "codec_service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecService:
    """How one codec is served on one device."""

    codec: str
    #: "triton", "native" or "torch"; "host" where the device holds no list of this codec.
    scanner: str
    #: Why no faster one; empty where none is faster.
    reason: str


def codec_service(codec: str, device_name: str) -> CodecService:
    """What scans lists of ``codec`` on a device.

    Raises:
        DeviceNotFoundError: there is no such device.
        MissingDependencyError: torch is not installed.
    """
    kind = DEVICE_KINDS.get(codec)
    if kind is None:
        return CodecService(codec=codec, scanner="host", reason=f"codec {codec!r} is scanned on the host only")
    device, _ = resolve_device(device_name)
    arena = PageArena(device, PageGeometry.for_code_size(1), 0)
    chosen, reason = choose_page_scanner(DeviceCodec(kind=kind, dim=1, code_size=1, by_residual=False), arena)
    return CodecService(codec=codec, scanner=chosen.name, reason=reason)
