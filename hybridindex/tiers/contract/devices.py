"""Device names and what stands behind them: "cuda:0", or "cpu" as the stand-in device in main memory."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridindex.errors import DeviceBusyError, DeviceError, DeviceNotFoundError, MissingDependencyError, how_to_install
from hybridindex.tiers.contract.driver import free_bytes_outside

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceInfo",
    "available_bytes",
    "busy_device",
    "give_back_cached",
    "is_out_of_memory",
    "kind_here",
    "require_torch",
    "resolve_device",
]


_log = logging.getLogger(__name__)

#: In the words of what is no error of its own kind: torch's host allocator, the CUDA runtime, triton, cuBLAS.
_NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device that can hold an arena."""

    name: str
    #: What tables and logs print; says so when it is a stand-in.
    label: str
    stand_in: bool
    #: Free and total bytes when asked; None for the stand-in.
    free_bytes: int | None
    total_bytes: int | None
    #: What the runtime took of the device for its context, outside every budget: the drop of free memory over its
    #: making. None for the stand-in, and where it was made before we looked or the driver does not tell.
    context_bytes: int | None = None


def require_torch() -> None:
    """Raises MissingDependencyError, naming the extra, when torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"the device tier needs torch, which is not installed: {how_to_install('device')}"
        ) from error


def kind_here() -> str:
    """The kind of device that this machine offers: "cuda" where torch sees one, else "cpu", the stand-in."""
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"


def resolve_device(name: str) -> tuple[torch.device, DeviceInfo]:
    """Checks that a device exists.

    Raises:
        DeviceNotFoundError: the name is not "cpu" or "cuda:N", or there is no such GPU.
        DeviceBusyError: the GPU exists but no context can be opened on it.
        MissingDependencyError: torch is not installed.
    """
    require_torch()
    import torch

    if name == "cpu":
        info = DeviceInfo(name="cpu", label="cpu (stand-in)", stand_in=True, free_bytes=None, total_bytes=None)
        return torch.device("cpu"), info
    kind, _, ordinal = name.partition(":")
    if kind != "cuda" or not (ordinal == "" or ordinal.isdecimal()):
        raise DeviceNotFoundError(f"device is {name!r}; expected 'cuda:N', or 'cpu' for the stand-in device in RAM")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(ordinal or 0)
    if number >= count:
        have = f"this machine has {count} CUDA device(s)" if count else "no CUDA device is visible to torch here"
        raise DeviceNotFoundError(f"device {name!r} does not exist: {have}; 'cpu' is the stand-in device in RAM")
    device = torch.device("cuda", number)
    try:
        context_bytes = _open_context(device)
        free, total = torch.cuda.mem_get_info(device)
        label = f"cuda:{number} ({torch.cuda.get_device_name(device)})"
    except RuntimeError as error:
        raise DeviceBusyError(f"device {name!r} cannot be opened: {error}") from error
    info = DeviceInfo(
        name=f"cuda:{number}",
        label=label,
        stand_in=False,
        free_bytes=free,
        total_bytes=total,
        context_bytes=context_bytes,
    )
    return device, info


def busy_device(name: str) -> tuple[torch.device, DeviceInfo]:
    """A GPU that :func:`resolve_device` found busy: its name, and nothing that only its driver knows."""
    import torch

    device = torch.device("cuda", int(name.partition(":")[2] or 0))
    return device, DeviceInfo(name=str(device), label=str(device), stand_in=False, free_bytes=None, total_bytes=None)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated on ``device`` right now; None for the stand-in, whose memory is the host's.

    Memory that torch caches unused for this process counts as free: it is released before an allocation fails.

    Raises:
        DeviceError: the device does not answer.
    """
    if device.type != "cuda":
        return None
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device} cannot report how much memory is free: {error}") from error
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def give_back_cached(device: torch.device) -> None:
    """Releases what torch caches unused for this process: memory of ``device``, and page-locked memory of the host.

    What a lost device says to it is logged.
    """
    if device.type == "cuda":
        import torch

        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            _log.warning("device %s: unused memory was not given back: %s", device, error)
        give_back_locked()


def give_back_locked() -> None:
    """Releases page-locked memory of the host that torch caches unused for this process."""
    import torch

    # Not in every torch that is supported.
    if empty := getattr(torch.accelerator, "empty_host_cache", None):
        with suppress(RuntimeError):  # there is no such device any more
            empty()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of a device or of the host: what asked for less would have been done."""
    if isinstance(error, RuntimeError):
        torch = sys.modules.get("torch")
        named = torch is not None and isinstance(error, torch.OutOfMemoryError)
        return named or any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError)


_context_lock = threading.Lock()
#: What the context of each device took when this process made it; one context per device and process.
_context_bytes: dict[int, int | None] = {}


def _open_context(device: torch.device) -> int | None:
    """Makes the runtime's context where there is none yet; its bytes, as :attr:`DeviceInfo.context_bytes`."""
    import torch

    with _context_lock:
        if device.index not in _context_bytes:
            uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
            before = free_bytes_outside(uuid)
            torch.cuda.mem_get_info(device)
            after = free_bytes_outside(uuid)
            # No drop: the context was there already, and what it took is not known.
            known = before is not None and after is not None and after < before
            _context_bytes[device.index] = before - after if known else None  # type: ignore[operator]
        return _context_bytes[device.index]
