"""Copy streams: copies between host and device, and marks that tell when they are done.

The stand-in has no stream: its copies are done when they return.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hybridindex.errors import DeviceError
from hybridindex.extension import native
from hybridindex.types import I64

if TYPE_CHECKING:
    import torch

__all__ = ["Copies", "CopyMark", "CopyStream", "CudaStream", "Driver"]

_log = logging.getLogger(__name__)

#: Copies of a trial.
_TRIED = 64


class CopyMark(Protocol):
    """A place on a copy stream: behind the copies that were started together."""

    def done(self) -> bool:
        """Whether everything up to here is done. Raises what the device has to say when it is lost."""
        ...

    def wait(self) -> None:
        """Returns when everything up to here is done. Raises as :meth:`done`."""
        ...

    def seconds(self) -> float:
        """How long these copies took; once they are done."""
        ...


class Copies(NamedTuple):
    """Copies from host memory into memory of a device, by address: (n,) int64 each. Who sends them keeps both."""

    targets: I64
    sources: I64
    nbytes: I64


class CopyStream(Protocol):
    """Copies in the order in which they were started. One thread starts them."""

    def send(self, copies: Copies) -> CopyMark:
        """Starts copies to the device and returns at once.

        When it raises, some of them may have been started.
        """
        ...

    def fetch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyMark:
        """Starts copies (target, source) of equal shapes from the device, as :meth:`send`."""
        ...

    def drain(self) -> None:
        """Waits for everything started so far."""
        ...


class CudaStream:
    """A stream of its own, so that copies and scans do not wait for each other. Made at the first copy: the device may
    be busy before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._driver: Driver | None = None

    def send(self, copies: Copies) -> CudaMark:
        def start(stream: Any) -> None:
            if self._driver is None:
                self._driver = Driver()
                self._driver.try_batches(self._device, stream)
            self._driver.start(copies, stream.cuda_stream)

        return self._marked(start)

    def fetch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CudaMark:
        def start(_: Any) -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        return self._marked(start)

    def _marked(self, start: Callable[[Any], None]) -> CudaMark:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # Blocking: the waiting thread sleeps and leaves its core to the host scan.
            ended = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            # The thread has the device's context from here on, which the driver asks for.
            started.record(self._stream)
            start(self._stream)
            ended.record(self._stream)
        return CudaMark(started, ended)

    def drain(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Driver:
    """CUDA's driver interface, as far as copies need it: names and numbers as in cuda.h."""

    def __init__(self, library: Any = None) -> None:
        """
        Args:
            library: libcuda; None: the system's.

        Raises:
            DeviceError: there is none.
        """
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
            self._copy: Any = self._library.cuMemcpyHtoDAsync_v2
        except (OSError, AttributeError) as error:
            raise DeviceError(f"this system's CUDA driver copies no data: {error}") from error
        self._copy_at = ctypes.cast(self._copy, ctypes.c_void_p).value
        #: The call that takes many copies; 0: none.
        self._batch_at = 0

    def start(self, copies: Copies, stream: int) -> None:
        """Queues ``copies`` on a stream, by its handle.

        Raises:
            DeviceError: the driver refused; some may have been queued.
        """
        if native is not None:
            status = native.start_copies(*copies, self._copy_at, self._batch_at, stream)
        else:
            status, on = 0, ctypes.c_void_p(stream)
            for target, source, nbytes in zip(*(each.tolist() for each in copies), strict=True):
                to, source_at = ctypes.c_uint64(target), ctypes.c_void_p(source)
                status = status or self._copy(to, source_at, ctypes.c_size_t(nbytes), on)
        if status:
            raise DeviceError(f"a copy failed with CUDA error {status}")

    def try_batches(self, device: torch.device, stream: Any) -> None:
        """Takes many copies in one call from now on, if the driver has one that copies what it should."""
        import torch

        found, answer = ctypes.c_void_p(), ctypes.c_int()
        try:
            # The call's arguments are those of CUDA 12.8, whatever the driver's version is.
            status = self._library.cuGetProcAddress_v2(
                b"cuMemcpyBatchAsync", ctypes.byref(found), 12080, ctypes.c_uint64(0), ctypes.byref(answer)
            )
        except AttributeError:
            return
        if status or not found.value:
            return
        self._batch_at = found.value
        try:
            sent = torch.arange(_TRIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
            there = torch.zeros(_TRIED, dtype=torch.uint8, device=device)
            if device.type == "cuda":
                stream.wait_stream(torch.cuda.current_stream(device))
            # One byte each, to the other end.
            at = np.arange(_TRIED, dtype=np.int64)
            copies = Copies(there.data_ptr() + at[::-1], sent.data_ptr() + at, np.ones_like(at))
            self.start(copies, stream.cuda_stream)
            stream.synchronize()
            works = bool((there.cpu().flip(0) == sent).all())
        except (DeviceError, RuntimeError):
            works = False
        if not works:
            self._batch_at = 0
            _log.warning("device %s: the driver's batched copies do not work; lists are copied one by one", device)


class CudaMark:
    """Two events around copies that were started together."""

    __slots__ = ("_ended", "_started")

    def __init__(self, started: Any, ended: Any) -> None:
        self._started, self._ended = started, ended

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        return float(self._started.elapsed_time(self._ended)) / 1e3
