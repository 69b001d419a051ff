"""A profile's fits, scaled to another machine or a larger index by given numbers, with every assumption in words.

Measures nothing and knows no products: the caller looks up their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.coverage import build_coverage_curve
from hybridindex.partitioner.models.latency import DeviceScanModel, LatencyModel
from hybridindex.partitioner.models.scan_models import HostScanModel, ScanWork
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.studies.simulator.query_pool import scale_lists
from hybridindex.types import F64

__all__ = ["WhatIf", "suppose"]

#: Seconds to launch a scan and fetch its result, where no GPU was measured.
_ASSUMED_OVERHEAD_S = 100e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """How the machine differs from the one that was profiled. Raises InvalidInputError, which names the field."""

    #: Memory bandwidth of one device, bytes/s; None: the device that was profiled.
    device_bandwidth: float | None = None
    #: Part of it that scans reach.
    device_efficiency: float = 0.5
    #: Speed of host stages over the profiled one.
    host_speed: float = 1.0
    #: Length of lists over the profiled one.
    index_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.device_bandwidth is not None:
            check_number("device_bandwidth", self.device_bandwidth, above=0.0)
        for name in ("device_efficiency", "host_speed", "index_scale"):
            check_number(name, getattr(self, name), above=0.0)
        check_number("device_efficiency, 1 at most,", 1.0 - self.device_efficiency, least=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FasterHost:
    """A host scan model at another speed."""

    base: HostScanModel
    speed: float

    @property
    def name(self) -> str:
        return self.base.name

    def predict(self, work: ScanWork) -> F64:
        return np.asarray(self.base.predict(work) / self.speed, dtype=np.float64)


def suppose(analysis: Analysis, wanted: WhatIf) -> tuple[Analysis, tuple[str, ...]]:
    """The analysis of that machine and index, and its assumptions in words."""
    said = [
        f"measured: {', '.join(analysis.profile.hardware.devices) or 'no GPU'}; {analysis.profile.hardware.cpu_model}"
    ]
    said += [f"not measured: {note}" for note in analysis.latency.notes]
    latency = analysis.latency
    if wanted.device_bandwidth is not None:
        latency, sentence = _other_device(latency, wanted.device_bandwidth, wanted.device_efficiency)
        said.append(sentence)
    elif latency.device is not None:
        said.append(f"devices scan like {', '.join(latency.device.devices)}, as profiled")
    if wanted.host_speed != 1:
        latency = _other_host(latency, wanted.host_speed)
        said.append(f"assumed: every host stage is {wanted.host_speed:g} times as fast as profiled")
    profile = scale_lists(analysis.profile, wanted.index_scale)
    curve = analysis.curve
    if wanted.index_scale != 1:
        curve = build_coverage_curve(profile, page_bytes=curve.geometry.page_bytes)
        said.append(f"assumed: lists {wanted.index_scale:g} times as long, probed alike; scans grow with their bytes")
    return replace(analysis, profile=profile, latency=latency, curve=curve), tuple(said)


def _other_device(latency: LatencyModel, bandwidth: float, efficiency: float) -> tuple[LatencyModel, str]:
    measured = latency.device
    real = measured is not None and any(name.startswith("cuda") for name in measured.devices)
    overhead = measured.overhead_s if real and measured is not None else _ASSUMED_OVERHEAD_S
    device = DeviceScanModel(
        overhead_s=overhead,
        per_work_byte_s=0.0,
        per_unique_byte_s=1.0 / (bandwidth * efficiency),
        devices=("assumed",),
        max_batch=measured.max_batch if measured is not None else latency.max_batch,
        error=0.0,
    )
    source = "as profiled" if real else "assumed"
    sentence = (
        f"assumed: a device reads each list of a batch once, at {efficiency:g} of {bandwidth / 1e9:,.0f} GB/s; "
        f"{overhead * 1e6:.0f} us for each scan ({source}); devices share nothing with the host"
    )
    routing = replace(latency.hybrid_routing, serial=0.0)
    return replace(latency, device=device, hybrid_routing=routing), sentence


def _other_host(latency: LatencyModel, speed: float) -> LatencyModel:
    coarse, merge = (fit and fit.scaled(1.0 / speed) for fit in (latency.coarse, latency.merge))
    host = replace(latency.host, model=_FasterHost(base=latency.host.model, speed=speed))
    rerank = latency.rerank and latency.rerank.scaled(1.0 / speed)
    return replace(latency, coarse=coarse, merge=merge, rerank=rerank, host=host)
