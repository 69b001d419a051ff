from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

import hybridindex.profiler.device as device_module
from hybridindex.errors import DeviceNotFoundError
from hybridindex.profiler.device import room_to_measure, time_device, time_transfers
from hybridindex.profiler.request import ProfileRequest
from hybridindex.profiler.searching import open_searching


@pytest.fixture
def order(index):
    return np.argsort(-index.list_sizes, kind="stable")


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch):
    monkeypatch.setattr(device_module, "TRANSFER_BYTES", (1 << 10, 1 << 16))


def timed(index, name, queries, order, *, max_seconds=60.0, clock=time.perf_counter, **options):
    settings = {
        "nprobe": 6,
        "k": 3,
        "batches": (1, 4),
        "repeats": 2,
        "device_budget_bytes": 16 << 20,
        **options,
    }
    request, x = ProfileRequest(**settings), index.transform(queries)
    with closing(open_searching(index, threads=1)) as searching:
        return time_device(searching, name, x, order, request, max_seconds=max_seconds, clock=clock)


def test_stand_in_scans_and_copies_are_timed_and_say_what_they_are(index, queries, order):
    timing = timed(index, "cpu", queries, order)
    assert timing.label == "cpu (stand-in)"
    assert timing.notes["stand_in"] is True
    assert timing.notes["lists_loaded"] == (index.list_sizes > 0).sum()
    assert {s.stage for s in timing.samples} == {"device_scan"}
    assert {s.device for s in timing.samples} == {t.device for t in timing.transfers} == {"cpu (stand-in)"}
    assert {s.batch for s in timing.samples} == {1, 4}
    assert all(0 < s.unique_bytes <= s.work_bytes and s.seconds > 0 for s in timing.samples)
    assert {t.nbytes for t in timing.transfers} == {1 << 10, 1 << 16}
    assert not any(t.pinned for t in timing.transfers)
    assert len({s.coverage for s in timing.samples}) == 3


def test_only_what_fits_the_budget_is_scanned(index, queries, order, monkeypatch):
    monkeypatch.setattr(device_module, "TRANSFER_BYTES", (1 << 30,))
    # Two pages of 64 KiB beside the scratch.
    timing = timed(index, "cpu", queries, order, device_budget_bytes=2 * 65536 + 32768)
    assert 0 < timing.notes["lists_loaded"] < index.nlist
    assert all(s.coverage <= timing.notes["coverage_loaded"] for s in timing.samples)
    assert max(t.nbytes for t in timing.transfers) <= 2 * 65536 + 32768


def test_without_a_budget_every_list_is_measured_as_far_as_there_is_room(index, queries, order, monkeypatch):
    timing = timed(index, "cpu", queries, order, device_budget_bytes=None)
    assert timing.notes["lists_loaded"] == (index.list_sizes > 0).sum()
    assert timing.notes["budget_bytes"] == room_to_measure(index, ["cpu"])
    monkeypatch.setattr(device_module, "available_bytes", lambda _device: 1 << 18)
    monkeypatch.setattr(device_module.os, "sysconf", lambda name: 1 << 9)
    assert room_to_measure(index, ["cpu"], 3) == (1 << 18) // 4


def test_a_budget_below_one_page_gives_transfers_only(index, queries, order):
    timing = timed(index, "cpu", queries, order, device_budget_bytes=100)
    assert timing.samples == ()
    assert timing.transfers
    assert timing.notes["lists_loaded"] == 0


def test_time_over_leaves_out_large_batches_but_finishes_a_round(index, queries, order):
    ticking = itertools.count()
    timing = timed(
        index, "cpu", queries, order, repeats=9, max_seconds=1.0, clock=lambda: float(next(ticking)), batches=(16, 64)
    )
    assert timing.notes["batches"] == [16]
    assert timing.notes["batches_left_out"] == [64]
    assert timing.notes["rounds"] == 1
    assert {s.batch for s in timing.samples} == {16}


def test_nothing_stays_behind(index, queries, order):
    before = set(threading.enumerate())
    timed(index, "cpu", queries, order)
    assert set(threading.enumerate()) <= before


def test_a_scan_that_fails_closes_the_device(index, queries, order, monkeypatch):
    def fail(*_):
        raise RuntimeError("it burns")

    monkeypatch.setattr(device_module._DeviceBench, "run", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="it burns"):
        timed(index, "cpu", queries, order)
    assert set(threading.enumerate()) <= before


def test_a_missing_device_is_named(index, queries, order):
    with pytest.raises(DeviceNotFoundError, match="cuda:99"):
        timed(index, "cuda:99", queries, order)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the copies of a real GPU are timed; torch sees none here")
def test_gpu_copies_are_timed_pinned_and_not(index, queries, order):
    timing = timed(index, "cuda:0", queries, order)
    assert {t.pinned for t in timing.transfers} == {True, False}
    assert all(s.device.startswith("cuda:0 (") for s in timing.samples)
    assert timing.samples


def test_transfers_are_repeated_at_every_size():
    samples = time_transfers(torch.device("cpu"), "ram", [10, 20], repeats=3)
    assert [(s.nbytes, s.device, s.pinned) for s in samples] == [(10, "ram", False), (20, "ram", False)] * 3
