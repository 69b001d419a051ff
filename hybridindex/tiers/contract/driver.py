"""What the driver tells without a CUDA context, through NVIDIA's management library (NVML): free memory, its version.

CUDA's own answer needs a context, which takes memory itself. The library comes with the driver; no package is needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import FileError

__all__ = ["driver_version", "free_bytes_outside", "mps_directory"]

_NVML = "libnvidia-ml.so.1"
#: ``NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE``.
_VERSION_BYTES = 80
#: Where a control daemon of CUDA's Multi-Process Service says that it runs, unless the environment names another place.
_MPS_DIRECTORY, _MPS_PID = "/tmp/nvidia-mps", "nvidia-cuda-mps-control.pid"  # noqa: S108 - where CUDA itself looks


class _Memory(ctypes.Structure):
    """``nvmlMemory_t`` of the NVML API reference."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@contextmanager
def _opened(library: str) -> Iterator[ctypes.CDLL | None]:
    """The library, ready for questions; None where there is no driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def free_bytes_outside(uuid: str, library: str = _NVML) -> int | None:
    """Free bytes of the GPU with that UUID (with or without its "GPU-"); None where the driver does not tell."""
    with _opened(library) as nvml:
        handle, memory = ctypes.c_void_p(), _Memory()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if nvml is None or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
            return None
        return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None


def driver_version(library: str = _NVML) -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    with _opened(library) as nvml:
        text = ctypes.create_string_buffer(_VERSION_BYTES)
        if nvml is None or nvml.nvmlSystemGetDriverVersion(text, _VERSION_BYTES) != 0:
            return None
        return text.value.decode()


def mps_directory() -> Path | None:
    """Pipe directory of the control daemon of CUDA's Multi-Process Service (MPS) that this process would go through;
    None where none runs: then processes take turns at a GPU, one context after the other."""
    directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_DIRECTORY)
    try:
        text = filesystem.read_text(directory / _MPS_PID)
        return directory if filesystem.exists(Path("/proc") / str(int(text))) else None
    except (FileError, ValueError):
        return None
