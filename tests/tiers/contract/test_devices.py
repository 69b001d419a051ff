"""Names of devices."""

from __future__ import annotations

import os

import pytest
import torch

from hybridindex.errors import DeviceError, DeviceNotFoundError
from hybridindex.tiers.contract.devices import (
    available_bytes,
    give_back_cached,
    is_out_of_memory,
    resolve_device,
)
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
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("an illegal memory access was encountered"))


def test_a_lost_device_is_an_error_of_ours_and_does_not_keep_anybody_from_closing(monkeypatch, caplog):
    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    with pytest.raises(DeviceError, match="illegal memory access"):
        available_bytes(torch.device("cuda", 0))
    give_back_cached(torch.device("cuda", 0))
    assert caplog.text.count("illegal memory access") == 1


def test_mps_is_on_where_its_daemon_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert mps_directory() is None
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    for text in ("", "4194305", "x"):
        pid.write_text(text)
        assert mps_directory() is None, "that process is not there"
    pid.write_text(f"{os.getpid()}\n")
    assert mps_directory() == tmp_path
