"""Describes this machine, and warns of what distorts timings on it. Changes nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import FileError
from hybridindex.types import HardwareInfo

__all__ = ["file_system_of", "hardware_info", "load_average", "measurement_warnings", "omp_wait_policy", "usable_cores"]

_log = logging.getLogger(__name__)

#: Instruction sets that change how fast codes are scanned.
_FLAG_PREFIXES = ("avx2", "avx512", "avx_vnni", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
_PACKAGES = ("hybridindex", "faiss-cpu", "faiss-gpu", "numpy", "torch")
#: One of these exists wherever a driver could show a device to torch.
_DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


def hardware_info() -> HardwareInfo:
    """This machine. The fingerprint covers CPU model, flags, usable cores, memory in GiB and devices; not the load."""
    model, flags = _cpu()
    cores, memory, devices = usable_cores(), _memory_bytes(), _devices()
    return HardwareInfo(
        fingerprint=_fingerprint(model, flags, cores, memory, devices),
        cpu_model=model,
        cpu_flags=flags,
        cores=cores,
        memory_bytes=memory,
        devices=devices,
        versions=_versions(),
    )


def _fingerprint(model: str, flags: tuple[str, ...], cores: int, memory_bytes: int, devices: tuple[str, ...]) -> str:
    # Kernels reserve some memory at start, a little more or less each time.
    facts = [model, list(flags), cores, round(memory_bytes / 2**30), list(devices)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def load_average() -> float:
    """Runnable processes over the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def file_system_of(path: Path) -> str:
    """Kind of the file system that holds a file, such as "ext4"; empty where that is not known."""
    try:
        mounts = [line.split()[1:3] for line in filesystem.read_text("/proc/self/mounts").splitlines()]
    except OSError:
        return ""
    real = path.resolve()
    holding = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    # Of two mounts at one point the later one counts.
    return max(reversed(holding), key=lambda mount: mount[0], default=(0, ""))[1]


def omp_wait_policy(environ: Mapping[str, str] = os.environ) -> str:
    """``OMP_WAIT_POLICY`` in capitals, or "unset"."""
    return environ.get("OMP_WAIT_POLICY", "").strip().upper() or "unset"


def measurement_warnings(policy: str, load: float, cores: int) -> list[str]:
    """Sentences on what distorts timings taken now; also logged."""
    found = []
    if policy != "PASSIVE":
        found.append(
            f"OMP_WAIT_POLICY is {policy}: spinning OpenMP threads distort timings on a busy machine; "
            "set OMP_WAIT_POLICY=PASSIVE before faiss is imported"
        )
    if load > cores:
        found.append(f"load average {load:.1f} on {cores} cores: other processes share the machine, timings are high")
    for warning in found:
        _log.warning("%s", warning)
    return found


def _cpu() -> tuple[str, tuple[str, ...]]:
    """CPU model and its relevant flags, sorted."""
    try:
        text = filesystem.read_text("/proc/cpuinfo")
    except FileError:
        text = ""
    return _parse_cpuinfo(text)


def _parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip().lower(), value.strip())
    # Arm names no model: implementer and part number say as much.
    part = " ".join(fields[key] for key in ("cpu implementer", "cpu part") if key in fields)
    model = fields.get("model name") or part or platform.processor() or platform.machine() or "unknown"
    words = (fields.get("flags") or fields.get("features") or "").split()
    return model, tuple(sorted({word for word in words if word.startswith(_FLAG_PREFIXES)}))


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _devices() -> tuple[str, ...]:
    # Importing torch takes seconds: only where a device can be there at all.
    if "torch" not in sys.modules and not any(filesystem.exists(node) for node in _DRIVER_NODES):
        return ()
    try:
        import torch
    except (ImportError, OSError, RuntimeError, ValueError):  # one that does not load: who needs it says so
        return ()
    if not torch.cuda.is_available():
        return ()
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found.append(f"cuda:{number} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return tuple(found)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
