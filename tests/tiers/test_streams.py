"""The driver's copies, with functions in place of CUDA's: what is queued, in how many calls, and what refusals say."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hybridindex.errors import DeviceError
from hybridindex.tiers.paged import streams
from hybridindex.tiers.paged.streams import Copies, Driver

N = 40


class FakeStream:
    cuda_stream = 77

    def synchronize(self):
        pass


class FakeDriver:
    """Copies at once, and counts calls."""

    def __init__(self, *, batches=True, shift=0, refuse_after=1 << 30, refuse_batches=False):
        self.calls, self.batches, self.streams = 0, 0, set()
        self.asked_for = None
        copy_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        numbers = ctypes.POINTER(ctypes.c_uint64)
        batch_type = ctypes.CFUNCTYPE(
            ctypes.c_int, numbers, numbers, numbers, ctypes.c_size_t, ctypes.c_void_p, numbers, ctypes.c_size_t,
            numbers, ctypes.c_void_p,
        )  # fmt: skip

        def copy(target, source, nbytes, stream):
            self.calls += 1
            self.streams.add(stream)
            if self.calls > refuse_after:
                return 700
            ctypes.memmove(target, source, nbytes)
            return 0

        def batch(targets, sources, sizes, count, attributes, first, n_attributes, _failed, stream):
            if refuse_batches:
                return 801
            assert (first[0], n_attributes) == (0, 1)
            assert ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[:6] == [1, 0, 0, 0, 0, 0]
            self.batches += 1
            self.streams.add(stream)
            for i in range(count):
                ctypes.memmove(targets[i], sources[(i + shift) % count], sizes[i])
            return 0

        self.cuMemcpyHtoDAsync_v2 = copy_type(copy)
        self._batch = batch_type(batch) if batches else None

    def cuGetProcAddress_v2(self, name, found, version, flags, _status):  # noqa: N802
        self.asked_for = name, version, flags.value
        if self._batch is None:
            return 500
        found._obj.value = ctypes.cast(self._batch, ctypes.c_void_p).value
        return 0


def copies_between(source, target, order):
    """One copy of 100 bytes for each of ``order``: from there to the places in turn."""
    at = np.arange(len(order), dtype=np.int64) * 100
    return Copies(target.ctypes.data + at, source.ctypes.data + np.array(order) * 100, np.full(len(order), 100))


@pytest.fixture(params=["extension", "python"])
def either(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(streams, "native", None)
    return request.param


@pytest.mark.parametrize("n", [1, 3, 4, N])
@pytest.mark.parametrize("batches", [False, True])
def test_every_copy_arrives(either, n, batches):
    library = FakeDriver(batches=batches)
    driver = Driver(library)
    driver.try_batches(torch.device("cpu"), FakeStream())
    assert library.asked_for == (b"cuMemcpyBatchAsync", 12080, 0)
    library.calls = library.batches = 0
    source = np.random.default_rng(0).integers(0, 256, (N, 100), dtype=np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(1).permutation(N)[:n]
    driver.start(copies_between(source, target, order), 77)
    np.testing.assert_array_equal(target[:n], source[order])
    assert not target[n:].any()
    together = either == "extension" and batches and n >= 4
    assert (library.calls, library.batches) == ((0, 1) if together else (n, 0))
    assert library.streams == {77}


def test_a_refused_copy_is_an_error_that_says_its_number(either):
    driver = Driver(FakeDriver(refuse_after=2))
    source, target = np.ones((N, 100), np.uint8), np.zeros((N, 100), np.uint8)
    with pytest.raises(DeviceError, match="CUDA error 700"):
        driver.start(copies_between(source, target, [0, 1, 2, 3]), 77)
    # Those before it may be under way.
    assert target[:2].all()
    assert not target[2:].any()


@pytest.mark.parametrize("fault", [{"shift": 1}, {"refuse_batches": True}])
def test_batches_that_do_not_copy_what_they_should_are_not_used(fault, caplog):
    library = FakeDriver(**fault)
    driver = Driver(library)
    driver.try_batches(torch.device("cpu"), FakeStream())
    if streams.native is not None:
        assert "batched copies do not work" in caplog.text
    library.calls = 0
    source, target = np.ones((N, 100), np.uint8), np.zeros((N, 100), np.uint8)
    driver.start(copies_between(source, target, range(N)), 77)
    assert library.calls == N
    assert target.all()


def test_a_system_without_a_driver_says_so():
    with pytest.raises(DeviceError, match="copies no data"):
        Driver(object())
