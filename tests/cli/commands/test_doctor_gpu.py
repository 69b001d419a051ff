"""``doctor --gpu``: what is said of devices, codecs and measurements, and what when there are none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import hybridindex as hx
from hybridindex.cli import doctor_gpu
from hybridindex.cli.commands.doctor import Finding, findings_table
from hybridindex.cli.console import ExitCode
from hybridindex.cli.doctor_gpu import (
    GpuReport,
    SeenDevice,
    examine_devices,
    measured_devices,
    report_of_devices,
)
from hybridindex.index import codec
from hybridindex.index.codec import CODEC_NAMES
from hybridindex.tiers.serving import CodecService
from hybridindex.types import TransferSample
from tests.clustered import clustered

COPIES = tuple(
    TransferSample(device="cuda:0 (some GPU)", pinned=True, nbytes=n, seconds=1e-5 + n / 20e9)
    for n in (1 << 16, 1 << 20, 1 << 24)
)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """An index with a stored profile that timed the stand-in, and the profile."""
    path = tmp_path_factory.mktemp("profiled") / "idx"
    with hx.build(clustered(2500, seed=1), path, nlist=24, metric="l2", nprobe=6) as index:
        profile = index.profile(clustered(300, seed=2), 6, max_seconds=1, devices=["cpu"])
    return path, profile


def test_codecs_have_the_scanner_that_would_serve_them(cli):
    answer = cli("doctor", "--gpu", "--json")
    assert answer.code == 0, answer.err
    gpu = answer.json["gpu"]
    assert gpu["versions"]["torch"] == torch.__version__
    for device in gpu["devices"]:
        assert device["stand_in"] == (not torch.cuda.is_available())
        services = {service["codec"]: service for service in device["codecs"]}
        assert set(CODEC_NAMES) <= set(services)
        expected = ("triton", "torch") if torch.cuda.is_available() else ("native", "torch")
        assert {services[codec]["scanner"] for codec in ("flat", "pq", "pqfs")} <= set(expected)
        assert (device["free_bytes"] is None) == device["stand_in"]


def test_a_stand_in_is_called_one_and_the_way_to_measure_is_named(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = cli("doctor", "--gpu")
    assert "cpu (stand-in)" in answer.out
    assert "hybridindex profile INDEX -q QUERIES.npy --device cpu" in " ".join(answer.out.split())


def test_a_reason_keeps_the_extra_that_it_names(printed):
    reason = "triton is not installed; pip install 'hybridindex[gpu]'"
    seen = SeenDevice(
        name="cuda:0",
        label="cuda:0 (some GPU)",
        stand_in=False,
        free_bytes=1 << 30,
        total_bytes=1 << 30,
        context_bytes=None,
        codecs=(CodecService(codec="flat", scanner="torch", reason=reason),),
    )
    assert f"torch: {reason}" in printed(report_of_devices(GpuReport(versions={"torch": None}, devices=(seen,))))


def test_a_remedy_keeps_the_extra_that_it_names(printed):
    remedy = "pip install 'hybridindex[gpu]'"
    table = findings_table([Finding(what="triton", state="missing", detail="not here [yet]", remedy=remedy)])
    assert remedy in (text := printed(table))
    assert "not here [yet]" in text


def test_what_the_newest_profile_measured_is_shown(cli, profiled):
    path, profile = profiled
    answer = cli("doctor", "--gpu", "--index", path, "--json")
    assert answer.code == 0, answer.err
    gpu = answer.json["gpu"]
    assert gpu["profile_id"] == profile.id
    assert gpu["profile_of_this_machine"] is True
    assert gpu["missing"] == ""
    (device,) = gpu["measured"]
    assert device["label"] == "cpu (stand-in)"
    assert device["scan"]["devices"] == ["cpu (stand-in)"]
    assert device["scan"]["error"] >= 0
    assert [copy["pinned"] for copy in device["transfers"]] == [False]
    assert "scanned byte" in cli("doctor", "--gpu", "--index", path).out


def test_each_device_has_its_own_fits(profiled):
    _, profile = profiled
    both = replace(profile, transfers=profile.transfers + COPIES)
    measured = {device.label: device for device in measured_devices(both)}
    assert set(measured) == {"cpu (stand-in)", "cuda:0 (some GPU)"}
    gpu = measured["cuda:0 (some GPU)"]
    assert gpu.scan is None
    assert measured["cpu (stand-in)"].scan is not None
    (copy,) = gpu.transfers
    assert copy.pinned
    np.testing.assert_allclose(copy.bytes_per_s, 20e9, rtol=1e-6)
    np.testing.assert_allclose(copy.latency_s, 1e-5, rtol=1e-6)


def test_an_index_without_profile_says_what_would_measure(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 11)
    hx.build(clustered(600, seed=1), tmp_path / "idx", nlist=8, codec="pqfs").close()
    answer = cli("doctor", "--gpu", "--index", tmp_path / "idx", "--json")
    assert answer.code == 0, answer.err
    assert f"hybridindex profile {tmp_path / 'idx'} -q QUERIES.npy --device" in answer.json["gpu"]["missing"]
    assert answer.json["gpu"]["measured"] == []
    own = {service["codec"]: service for service in answer.json["gpu"]["devices"][0]["codecs"]}["pqfs12"]
    assert own["scanner"] == "host"
    assert "'pqfs12'" in own["reason"]


def test_a_profile_that_timed_no_device_says_so(profiled):
    path, profile = profiled
    bare = replace(profile, stages=tuple(s for s in profile.stages if not s.device), transfers=())
    with hx.open(path) as index, index.store() as store:
        bare = store.save_profile(bare)
        report = examine_devices(index)
    assert report.profile_id == bare.id
    assert f"profile {bare.id} timed no device" in report.missing


def test_a_profile_of_another_machine_is_called_one(profiled, monkeypatch):
    path, profile = profiled
    elsewhere = replace(profile.hardware, fingerprint="other")
    monkeypatch.setattr(doctor_gpu, "hardware_info", lambda: elsewhere)
    with hx.open(path) as index, index.store() as store:
        store.save_profile(profile)
        assert examine_devices(index).profile_of_this_machine is False


def test_an_index_needs_the_flag(cli, profiled):
    answer = cli("doctor", "--index", profiled[0])
    assert answer.code == ExitCode.USAGE
    assert "--gpu" in answer.err
