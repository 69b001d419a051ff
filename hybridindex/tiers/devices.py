"""Device names and what stands behind them: "cuda:0", or "cpu" as the stand-in device in main memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridindex.errors import DeviceNotFoundError, MissingDependencyError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceInfo", "require_torch", "resolve_device"]


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


def require_torch() -> None:
    """Raises MissingDependencyError, naming the extra, when torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "the device tier needs torch, which is not installed; pip install 'hybridindex[device]'"
        ) from error


def resolve_device(name: str) -> tuple[torch.device, DeviceInfo]:
    """Checks that a device exists.

    Raises:
        DeviceNotFoundError: the name is not "cpu" or "cuda:N", or there is no such GPU.
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
    free, total = torch.cuda.mem_get_info(device)
    label = f"cuda:{number} ({torch.cuda.get_device_name(device)})"
    return device, DeviceInfo(name=f"cuda:{number}", label=label, stand_in=False, free_bytes=free, total_bytes=total)
