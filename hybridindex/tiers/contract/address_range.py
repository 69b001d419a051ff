"""Address ranges whose memory comes and goes by parts, while what is there keeps its place.

A range is reserved once, as long as it may ever become; that takes no memory. :class:`hybridindex.tiers.paged.arena`
decides which parts have memory. Main memory comes from an anonymous mapping, that of a GPU from the driver's virtual
memory management, through its C interface: torch reserves no range that it does not fill.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hybridindex.errors import DeviceError, OutOfBudgetError
from hybridindex.tiers.contract.devices import give_back_cached

if TYPE_CHECKING:
    import torch

__all__ = ["AddressRange", "CudaRange", "FixedRange", "HostRange", "reserve"]

#: Linux's ``MAP_NORESERVE``, which Python 3.11 does not name: the range counts when it is used.
_MAP_NORESERVE = 0x4000
#: Bytes that are zeroed or given back at once: other threads get their turn between.
_STEP_BYTES = 4 << 20


class AddressRange(Protocol):
    """Owner of the range, until the last tensor on it goes. One thread at a time changes it."""

    #: Unit in which memory comes and goes; parts are numbered in it.
    part_bytes: int
    #: The whole range, (nbytes,) uint8; only parts with memory may be touched. Always the same tensor.
    data: torch.Tensor

    def commit(self, first: int, n: int) -> None:
        """Gives ``n`` parts memory, all zero; all of them or none.

        Raises:
            OutOfBudgetError: the device has no room for them.
            DeviceError: it refused for another reason.
        """
        ...

    def release(self, first: int, n: int) -> None:
        """Takes the memory of ``n`` parts away. Nothing may be reading or writing them."""
        ...


def reserve(device: torch.device, nbytes: int, least_bytes: int) -> AddressRange:
    """A range of ``nbytes`` on ``device``; where none can be reserved, one of ``least_bytes`` that is filled for good.

    Raises:
        OutOfBudgetError, DeviceError: as :meth:`AddressRange.commit`.
    """
    try:
        return CudaRange(device, nbytes) if device.type == "cuda" else HostRange(nbytes)
    except OSError:
        return FixedRange(device, least_bytes)


class HostRange:
    """Main memory, for the stand-in."""

    part_bytes = mmap.PAGESIZE

    def __init__(self, nbytes: int) -> None:
        """Raises OSError: the system reserves no such range."""
        import torch

        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.data = torch.from_numpy(self._bytes)

    def commit(self, first: int, n: int) -> None:
        start, end = first * self.part_bytes, (first + n) * self.part_bytes
        # Written, so that every page is really there, and counted by the system, from now on.
        for at in range(start, end, _STEP_BYTES):
            self._bytes[at : min(end, at + _STEP_BYTES)] = 0

    def release(self, first: int, n: int) -> None:
        start, end = first * self.part_bytes, (first + n) * self.part_bytes
        for at in range(start, end, _STEP_BYTES):
            self._map.madvise(mmap.MADV_DONTNEED, at, min(_STEP_BYTES, end - at))


class FixedRange:
    """An ordinary tensor: memory that comes once and stays."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Raises OutOfBudgetError, DeviceError: as :meth:`AddressRange.commit`."""
        import torch

        self.part_bytes = max(1, nbytes)
        try:
            self.data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfBudgetError(f"device {device} has no room for {nbytes:,} bytes: {error}") from error
        except RuntimeError as error:
            raise DeviceError(f"device {device} refused {nbytes:,} bytes: {error}") from error

    def commit(self, first: int, n: int) -> None:
        """They have been there from the start."""

    def release(self, first: int, n: int) -> None:
        """They stay."""


# CUDA's driver interface: names and numbers as in cuda.h.

_DEVICE_MEMORY = 1
_PINNED_ALLOCATION = 1
_READ_WRITE = 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaRange:
    """Memory of one GPU. Its first part has memory from the start: CUDA knows a pointer by what lies there."""

    def __init__(self, device: torch.device, nbytes: int, driver: Any = None) -> None:
        """
        Args:
            driver: libcuda; None: the system's.

        Raises:
            OSError: this driver or GPU maps no memory by parts.
            OutOfBudgetError, DeviceError: as :meth:`AddressRange.commit`.
        """
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        location = _Location(_DEVICE_MEMORY, device.index or 0)
        self._wanted = _Allocation(_PINNED_ALLOCATION, 0, location, None)
        self._access = _Access(location, _READ_WRITE)
        unit, base = ctypes.c_size_t(), ctypes.c_uint64()
        self._try("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._wanted), 0)
        self.part_bytes = unit.value
        self._nbytes = -(-max(1, nbytes) // unit.value) * unit.value
        size = ctypes.c_size_t(self._nbytes)
        self._try("cuMemAddressReserve", ctypes.byref(base), size, ctypes.c_size_t(0), ctypes.c_uint64(0), _ull(0))
        #: Handle of each part that has memory.
        self._handles: dict[int, int] = {}
        self._base = base.value
        block = _Block(self._base, self._nbytes)
        # The tensor keeps the block alive, and the memory goes with it.
        weakref.finalize(block, _free, self._driver, self._base, self._nbytes, unit.value, self._handles).atexit = False
        try:
            self._map(0)
            self.data = self._tensor(block)
        except OutOfBudgetError:
            raise
        except (DeviceError, RuntimeError) as error:
            raise OSError(str(error)) from error
        self._zero(0, 1)

    def _tensor(self, block: _Block) -> torch.Tensor:
        import torch

        return torch.as_tensor(block, device=self._device)

    def commit(self, first: int, n: int) -> None:
        done = []
        try:
            for part in range(first, first + n):
                if part not in self._handles:
                    self._map(part)
                    done.append(part)
            self._zero(first, n)
        except BaseException:
            for part in done:
                self._unmap(part)
            raise

    def release(self, first: int, n: int) -> None:
        for part in range(max(1, first), first + n):
            self._unmap(part)

    def _zero(self, first: int, n: int) -> None:
        import torch

        try:
            self.data[first * self.part_bytes : (first + n) * self.part_bytes].zero_()
            if self._device.type == "cuda":
                # The zeroing must be over before another stream writes.
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise DeviceError(f"device {self._device} does not clear new memory: {error}") from error

    def _map(self, part: int) -> None:
        handle, size, at = ctypes.c_uint64(), ctypes.c_size_t(self.part_bytes), self._at(part)
        create = "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._wanted), _ull(0)
        try:
            self._do(*create)
        except OutOfBudgetError:
            # What torch caches unused, which it releases only for allocations of its own.
            give_back_cached(self._device)
            self._do(*create)
        try:
            self._do("cuMemMap", at, size, ctypes.c_size_t(0), handle, _ull(0))
            try:
                self._do("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
            except BaseException:
                self._driver.cuMemUnmap(at, size)
                raise
        except BaseException:
            self._driver.cuMemRelease(handle)
            raise
        self._handles[part] = handle.value

    def _unmap(self, part: int) -> None:
        handle = self._handles.pop(part)
        self._do("cuMemUnmap", self._at(part), ctypes.c_size_t(self.part_bytes))
        self._do("cuMemRelease", ctypes.c_uint64(handle))

    def _at(self, part: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._base + part * self.part_bytes)

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise OutOfBudgetError(f"device {self._device} has no room for {self.part_bytes:,} more bytes")
        if status:
            raise DeviceError(f"device {self._device}: {name} failed with CUDA error {status}")

    def _try(self, name: str, *arguments: Any) -> None:
        try:
            status = getattr(self._driver, name)(*arguments)
        except AttributeError as error:
            raise OSError(f"this driver has no {name}") from error
        if status:
            raise OSError(f"{name} failed with CUDA error {status}")


class _Block:
    """The range as torch takes it from other libraries."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (base, False),
            "strides": None,
            "version": 3,
        }


def _ull(value: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)


def _free(driver: Any, base: int, nbytes: int, part_bytes: int, handles: dict[int, int]) -> None:
    """Gives the range back; what the driver says to it is of no use to anybody."""
    for part, handle in handles.items():
        driver.cuMemUnmap(ctypes.c_uint64(base + part * part_bytes), ctypes.c_size_t(part_bytes))
        driver.cuMemRelease(ctypes.c_uint64(handle))
    driver.cuMemAddressFree(ctypes.c_uint64(base), ctypes.c_size_t(nbytes))
