"""Free device memory as the driver sees it, without a CUDA context: through NVIDIA's management library (NVML).

CUDA's own answer needs a context, which takes memory itself. The library comes with the driver; no package is needed.
"""

from __future__ import annotations

import ctypes

__all__ = ["free_bytes_outside"]


class _Memory(ctypes.Structure):
    """``nvmlMemory_t`` of the NVML API reference."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes_outside(uuid: str, library: str = "libnvidia-ml.so.1") -> int | None:
    """Free bytes of the GPU with that UUID (with or without its "GPU-"); None where the driver does not tell."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
            return None
        memory = _Memory()
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return int(memory.free)
    finally:
        nvml.nvmlShutdown()
