"""Names of devices."""

from __future__ import annotations

import os

import pytest
import torch

from hybridindex.errors import DeviceNotFoundError
from hybridindex.tiers.contract.devices import is_out_of_memory, resolve_device
from hybridindex.tiers.contract.driver import mps_directory


@pytest.mark.parametrize("name", ["", "gpu", "cuda:one", "cuda:-1", "cpu:0", "rocm:0", "cuda:4096"])
def test_a_name_without_a_device_is_refused_by_name(name):
    with pytest.raises(DeviceNotFoundError, match=f"device (is )?{name!r}"):
        resolve_device(name)


def test_the_stand_in_has_no_memory_of_its_own():
    device, info = resolve_device("cpu")
    assert (device.type, info.stand_in, info.free_bytes, info.total_bytes) == ("cpu", True, None, None)


def test_what_says_that_memory_is_short():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("an illegal memory access was encountered"))


def test_mps_is_on_where_its_daemon_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert mps_directory() is None
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    for text in ("", "4194305", "x"):
        pid.write_text(text)
        assert mps_directory() is None, "that process is not there"
    pid.write_text(f"{os.getpid()}\n")
    assert mps_directory() == tmp_path
