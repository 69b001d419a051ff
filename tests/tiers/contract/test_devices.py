"""Names of devices."""

from __future__ import annotations

import pytest

from hybridindex.errors import DeviceNotFoundError
from hybridindex.tiers.contract.devices import resolve_device


@pytest.mark.parametrize("name", ["", "gpu", "cuda:one", "cuda:-1", "cpu:0", "rocm:0", "cuda:4096"])
def test_a_name_without_a_device_is_refused_by_name(name):
    with pytest.raises(DeviceNotFoundError, match=f"device (is )?{name!r}"):
        resolve_device(name)


def test_the_stand_in_has_no_memory_of_its_own():
    device, info = resolve_device("cpu")
    assert (device.type, info.stand_in, info.free_bytes, info.total_bytes) == ("cpu", True, None, None)
