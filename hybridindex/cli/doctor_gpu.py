"""``hybridindex doctor --gpu``: the devices, which scanner serves each codec there, and what a profile says of them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import hybridindex as hx
from hybridindex.cli.console import readable_bytes
from hybridindex.errors import ProfileError
from hybridindex.index.codec import CODEC_NAMES
from hybridindex.partitioner.models.latency import DeviceScanModel, fit_device_scan
from hybridindex.partitioner.models.transfer import TransferModel, fit_transfers
from hybridindex.plans.precision import view_to_plan
from hybridindex.profiler.hardware import hardware_info
from hybridindex.tiers.contract.devices import require_torch, resolve_device
from hybridindex.tiers.contract.driver import driver_version, mps_directory
from hybridindex.tiers.serving import CodecService, codec_service, tier_of
from hybridindex.types import Profile

__all__ = ["GpuReport", "MeasuredDevice", "SeenDevice", "examine_devices", "measured_devices", "report_of_devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    """One device as it is now."""

    name: str
    label: str
    stand_in: bool
    #: None for the stand-in.
    free_bytes: int | None
    total_bytes: int | None
    #: See :attr:`hybridindex.tiers.contract.devices.DeviceInfo.context_bytes`.
    context_bytes: int | None
    codecs: tuple[CodecService, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """What a profile's samples of one device were fitted to; None where there are none."""

    label: str
    scan: DeviceScanModel | None
    transfers: tuple[TransferModel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """Everything that was looked at."""

    #: Driver, torch, CUDA and triton; None where one is not here.
    versions: dict[str, str | None]
    devices: tuple[SeenDevice, ...]
    #: How processes share a GPU; empty where there is none.
    sharing: str = ""
    #: The stored profile that was read; None without one.
    profile_id: int | None = None
    #: False where that profile is of another machine.
    profile_of_this_machine: bool | None = None
    measured: tuple[MeasuredDevice, ...] = ()
    #: Why nothing measured is shown, and what would measure it; empty where something is.
    missing: str = ""


def examine_devices(index: hx.Index | None = None, store_url: str | None = None) -> GpuReport:
    """Looks at every CUDA device, or at the stand-in where there is none, and at the index's newest profile.

    Raises:
        MissingDependencyError: torch is not installed.
        StoreError: the control store cannot be read.
    """
    require_torch()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    codecs = [*CODEC_NAMES, "rabitq"]
    if index is not None and index.codec not in codecs:
        codecs.append(index.codec)
    versions = {
        "driver": driver_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "triton": _version("triton"),
    }
    seen = tuple(_look_at(name, codecs, index) for name in names)
    sharing = _sharing() if count else ""
    command = f"hybridindex profile {index.path if index is not None else 'INDEX'} -q QUERIES.npy " + " ".join(
        f"--device {name}" for name in names
    )
    if index is None:
        missing = f"no index given: --index shows what its profile measured; measure with: {command}"
        return GpuReport(versions=versions, devices=seen, sharing=sharing, missing=missing)
    try:
        with index.store(store_url) as store:
            profile = store.load_profile(
                index_fingerprint=view_to_plan(index.ivf, store, any_hardware=True).fingerprint
            )
    except ProfileError as error:
        missing = f"{error}; measure with: {command}"
        return GpuReport(versions=versions, devices=seen, sharing=sharing, missing=missing)
    measured = measured_devices(profile)
    missing = "" if measured else f"profile {profile.id} timed no device; measure with: {command}"
    return GpuReport(
        versions=versions,
        devices=seen,
        sharing=sharing,
        profile_id=profile.id,
        profile_of_this_machine=profile.hardware.fingerprint == hardware_info().fingerprint,
        measured=measured,
        missing=missing,
    )


def _sharing() -> str:
    directory = mps_directory()
    if directory is None:
        return "processes take turns: no MPS daemon runs (when to start one: docs/devices.md)"
    return f"processes share it through MPS ({directory})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at(name: str, codecs: list[str], index: hx.Index | None) -> SeenDevice:
    _, info = resolve_device(name)
    return SeenDevice(
        name=info.name,
        label=info.label,
        stand_in=info.stand_in,
        free_bytes=info.free_bytes,
        total_bytes=info.total_bytes,
        context_bytes=info.context_bytes,
        codecs=tuple(_service_of(codec, name, index) for codec in codecs),
    )


def _service_of(codec: str, name: str, index: hx.Index | None) -> CodecService:
    """By the codec's name; of the index's own codec, what that index has besides its name counts too."""
    if index is not None and codec == index.codec and (reason := tier_of(index.ivf, name).reason):
        return CodecService(codec=codec, scanner="host", reason=reason)
    return codec_service(codec, name)


def measured_devices(profile: Profile) -> tuple[MeasuredDevice, ...]:
    """The fits of each device that ``profile`` timed, by label."""
    scans = {s.device for s in profile.stages if s.stage == "device_scan"}
    found = []
    for label in sorted(scans | {t.device for t in profile.transfers}):
        copies = [t for t in profile.transfers if t.device == label]
        found.append(
            MeasuredDevice(
                label=label,
                scan=fit_device_scan([s for s in profile.stages if s.device == label]),
                transfers=tuple(
                    fit_transfers(copies, pinned=pinned) for pinned in sorted({t.pinned for t in copies}, reverse=True)
                ),
            )
        )
    return tuple(found)


def report_of_devices(report: GpuReport) -> RenderableType:
    """The report, for people."""
    versions = ", ".join(f"{name} {version or 'not found'}" for name, version in report.versions.items())
    sharing = [Text(f"GPU sharing: {report.sharing}")] if report.sharing else []
    parts: list[RenderableType] = [Text(versions), *sharing, *(_device_table(device) for device in report.devices)]
    if report.measured:
        where = "" if report.profile_of_this_machine else ", measured on another machine"
        parts.append(_measured_table(report.measured, f"profile {report.profile_id}{where}"))
    if report.missing:
        parts.append(Text(f"nothing measured: {report.missing}"))
    return Group(*parts)


def _device_table(device: SeenDevice) -> Table:
    table = Table(title=device.label, show_header=False)
    if device.stand_in:
        table.add_row(
            "memory", "the host's; no CUDA device is visible, and a stand-in's timings say nothing about GPUs"
        )
    else:
        assert device.free_bytes is not None
        assert device.total_bytes is not None
        table.add_row("memory", f"{readable_bytes(device.free_bytes)} of {readable_bytes(device.total_bytes)} free")
        context = "unknown" if device.context_bytes is None else readable_bytes(device.context_bytes)
        table.add_row("context, outside every budget", context)
    for service in device.codecs:
        table.add_row(f"codec {service.codec}", f"{service.scanner}: {service.reason}".removesuffix(": "))
    return table


def _measured_table(measured: tuple[MeasuredDevice, ...], title: str) -> Table:
    table = Table("device", "what", "model", "median error", title=title)
    for device in measured:
        if (scan := device.scan) is not None:
            bytes_of = f"{scan.per_work_byte_s * 1e12:.3g} ps/scanned byte + {scan.per_unique_byte_s * 1e12:.3g} ps/"
            model = f"{scan.overhead_s * 1e6:.1f} us + {bytes_of}distinct byte, batches up to {scan.max_batch}"
            table.add_row(device.label, "scan", model, f"{scan.error:.1%}")
        for copy in device.transfers:
            kind = "copy from page-locked memory" if copy.pinned else "copy from ordinary memory"
            model = f"{copy.latency_s * 1e6:.1f} us + bytes / {copy.bytes_per_s / 1e9:.2f} GB/s"
            table.add_row(device.label, kind, model, f"{copy.error:.1%}")
    return table
