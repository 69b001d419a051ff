"""Address ranges: memory comes and goes by parts, what stays keeps its bytes, and everything goes in the end."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from hybridindex.errors import DeviceError, OutOfBudgetError
from hybridindex.tiers.contract import address_range
from hybridindex.tiers.contract.address_range import CudaRange, FixedRange, HostRange, reserve

PART = 1 << 12
DEVICE = torch.device("cpu")


class Driver:
    """libcuda's interface for virtual memory; ``room`` bytes can be had."""

    def __init__(self, room: int = 1 << 20, fails: str = "") -> None:
        self.room, self.fails = room, fails
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.reserved: tuple[int, int] | None = None
        self.made = 0

    def __getattribute__(self, name):
        if name.startswith("cuMem") and object.__getattribute__(self, "fails") == name:
            return lambda *_: 801  # CUDA_ERROR_NOT_SUPPORTED
        return object.__getattribute__(self, name)

    def cuMemGetAllocationGranularity(self, unit, wanted, _option):  # noqa: N802
        unit._obj.value = PART
        assert (wanted._obj.type, wanted._obj.location.type) == (1, 1)
        return 0

    def cuMemAddressReserve(self, base, size, *_):  # noqa: N802
        base._obj.value, self.reserved = 1 << 40, (1 << 40, size.value)
        return 0

    def cuMemCreate(self, handle, size, *_):  # noqa: N802
        if size.value > self.room:
            return 2
        self.room -= size.value
        self.made += 1
        self.handles[self.made] = size.value
        handle._obj.value = self.made
        return 0

    def cuMemMap(self, at, _size, _offset, handle, _flags):  # noqa: N802
        assert at.value not in self.mapped
        self.mapped[at.value] = handle.value
        return 0

    def cuMemSetAccess(self, at, _size, access, _count):  # noqa: N802
        assert access._obj.flags == 3
        self.readable.add(at.value)
        return 0

    def cuMemUnmap(self, at, _size):  # noqa: N802
        del self.mapped[at.value]
        self.readable.discard(at.value)
        return 0

    def cuMemRelease(self, handle):  # noqa: N802
        self.room += self.handles.pop(handle.value)
        return 0

    def cuMemAddressFree(self, at, size):  # noqa: N802
        assert self.reserved == (at.value, size.value)
        self.reserved = None
        return 0


class OnDriver(CudaRange):
    """Its bytes are main memory, whatever the driver maps."""

    def _tensor(self, block):
        tensor = torch.ones(block.__cuda_array_interface__["shape"][0], dtype=torch.uint8)
        tensor.block = block
        return tensor


def parts_of(driver):
    return sorted((at - (1 << 40)) // PART for at in driver.mapped)


def test_main_memory_comes_and_goes_and_what_stays_keeps_its_bytes():
    memory = HostRange(10 * PART)
    memory.commit(0, 10)
    memory.data[:] = 7
    memory.release(3, 4)
    assert (memory.data[: 3 * PART] == 7).all()
    assert (memory.data[7 * PART :] == 7).all()
    memory.commit(3, 4)
    assert (memory.data[3 * PART : 7 * PART] == 0).all()


def test_reserving_takes_no_memory():
    memory = HostRange(1 << 42)
    memory.commit(5, 1)
    assert memory.data[5 * memory.part_bytes] == 0
    assert memory.data.numel() == 1 << 42


def test_a_gpu_maps_what_is_asked_for_zeroes_it_and_gives_it_back():
    driver = Driver()
    memory = OnDriver(DEVICE, 8 * PART - 5, driver)
    assert driver.reserved == (1 << 40, 8 * PART)
    assert parts_of(driver) == [0], "CUDA knows the pointer by it"
    memory.commit(0, 3)
    memory.commit(6, 2)
    assert parts_of(driver) == [0, 1, 2, 6, 7]
    assert driver.readable == set(driver.mapped)
    assert not memory.data[: 3 * PART].any()
    assert memory.data[3 * PART : 6 * PART].all()
    memory.release(0, 3)
    assert parts_of(driver) == [0, 6, 7]
    assert sum(driver.handles.values()) == 3 * PART
    data = memory.data
    del memory
    gc.collect()
    assert parts_of(driver) == [0, 6, 7], "a tensor still refers to it"
    del data
    gc.collect()
    assert (driver.mapped, driver.handles, driver.reserved) == ({}, {}, None)


def test_what_torch_caches_unused_is_room(monkeypatch):
    driver, asked = Driver(room=2 * PART), []

    def give_back(device):
        asked.append(device)
        driver.room += 2 * PART if len(asked) == 1 else 0

    monkeypatch.setattr(address_range, "give_back_cached", give_back)
    memory = OnDriver(DEVICE, 8 * PART, driver)
    memory.commit(1, 3)
    assert (parts_of(driver), asked) == ([0, 1, 2, 3], [DEVICE])
    with pytest.raises(OutOfBudgetError):
        memory.commit(4, 1)
    assert asked == [DEVICE, DEVICE]


def test_memory_that_a_lost_device_does_not_clear_is_given_back(monkeypatch):
    driver = Driver()
    memory = OnDriver(DEVICE, 8 * PART, driver)

    def lost(_part):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "zero_", lost)
    with pytest.raises(DeviceError, match="illegal memory access"):
        memory.commit(1, 3)
    assert parts_of(driver) == [0]


@pytest.mark.parametrize("fails", ["", "cuMemMap", "cuMemSetAccess"])
def test_parts_come_together_or_not_at_all(fails):
    driver = Driver(room=4 * PART)
    memory = OnDriver(DEVICE, 8 * PART, driver)
    memory.commit(1, 1)
    driver.fails = fails
    with pytest.raises(DeviceError if fails else OutOfBudgetError):
        memory.commit(1, 5)
    assert parts_of(driver) == [0, 1]
    assert driver.room == 2 * PART


@pytest.mark.parametrize("fails", ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap"])
def test_where_nothing_can_be_mapped_memory_comes_once(monkeypatch, fails):
    driver = Driver(fails=fails)
    with pytest.raises(OSError, match=f"{fails} failed with CUDA error 801"):
        OnDriver(DEVICE, 8 * PART, driver)
    gc.collect()
    assert (driver.mapped, driver.handles) == ({}, {})

    def refused(_nbytes):
        raise OSError("no range")

    monkeypatch.setattr(address_range, "HostRange", refused)
    memory = reserve(DEVICE, 100 * PART, 3 * PART)
    assert isinstance(memory, FixedRange)
    assert memory.data.tolist() == [0] * (3 * PART)


def test_structures_are_as_cuda_h_has_them():
    sizes = [
        ctypes.sizeof(kind) for kind in (address_range._Location, address_range._Allocation, address_range._Access)
    ]
    assert sizes == [8, 32, 12]
