"""Copy streams: copies between host and device, and marks that tell when they are done.

The stand-in has no stream: its copies are done when they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["CopyMark", "CopyStream", "CudaStream"]


class CopyMark(Protocol):
    """A place on a copy stream: behind the copies of one launch."""

    def done(self) -> bool:
        """Whether everything up to here is done. Raises what the device has to say when it is lost."""
        ...

    def wait(self) -> None:
        """Returns when everything up to here is done. Raises as :meth:`done`."""
        ...

    def seconds(self) -> float:
        """How long the launch's own copies took; once they are done."""
        ...


class CopyStream(Protocol):
    """Copies in the order in which they were launched. One thread launches."""

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyMark:
        """Starts copies (target, source) of equal shapes, and returns at once.

        When it raises, some of them may have been started.
        """
        ...

    def drain(self) -> None:
        """Waits for everything launched so far."""
        ...


class CudaStream:
    """A stream of its own, so that copies and scans do not wait for each other. Made at the first launch: the device
    may be busy before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CudaMark:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # Blocking: the waiting thread sleeps and leaves its core to the host scan.
            ended = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            started.record(self._stream)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            ended.record(self._stream)
        return CudaMark(started, ended)

    def drain(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class CudaMark:
    """Two events around one launch."""

    __slots__ = ("_ended", "_started")

    def __init__(self, started: Any, ended: Any) -> None:
        self._started, self._ended = started, ended

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        return float(self._started.elapsed_time(self._ended)) / 1e3
