from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.demo import run
from hybridindex.errors import MissingDependencyError
from hybridindex.types import Profile


def test_the_log_is_split_in_two_halves_in_its_order(monkeypatch) -> None:
    monkeypatch.setattr(run, "N_CALIBRATION", 20)
    log = np.arange(101, dtype=np.float32)[:, None]
    data = SimpleNamespace(log_queries=log, centered=lambda vectors: vectors + 0.5)
    calibration, test = (part[:, 0] - 0.5 for part in run._queries(data))
    assert len(calibration) == 20
    assert len(test) == 51
    assert not set(calibration) & set(test)
    for part in (calibration, test):
        assert np.all(np.diff(part) > 0)
    assert test[-1] > 90
    assert test[0] < 10


def test_all_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    gone = ("faiss", "torch")
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None if name in gone else there(name))
    output = tmp_path / "demo"
    with pytest.raises(MissingDependencyError, match=r"needs faiss, torch: .*torch.*uvx --from") as caught:
        run.run_demo(output, device="auto", hardware="h100", progress=lambda *_: None, say=lambda _: None)
    assert "faiss-cpu" in str(caught.value)
    assert not output.exists()


@pytest.mark.parametrize("name", ["matplotlib", "safetensors", "tokenizers", "torch"])
def test_nothing_is_named_that_is_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Beside faiss-gpu, faiss-cpu would take its place."""
    there = importlib.util.find_spec
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda asked: None if asked == name else there(asked))
    with pytest.raises(MissingDependencyError, match=rf"the demo needs {name}: pip install .*'{name}") as caught:
        run._check_packages()
    told = str(caught.value)
    assert "faiss" not in told
    assert told.endswith("in a clone of the repository: uvx --from '.[demo,device]' hybridindex demo")


@pytest.mark.parametrize(
    ("device", "label", "threads", "taken"),
    [
        ("cpu", "cpu (stand-in)", 2, True),
        ("cpu", "cpu (stand-in)", 3, False),
        ("cuda:0", "cuda:0 (a GPU)", 2, False),
    ],
    ids=["the same", "other threads", "another device"],
)
def test_a_profile_is_taken_only_of_the_same_device_and_threads(
    monkeypatch: pytest.MonkeyPatch, device: str, label: str, threads: int, taken: bool
) -> None:
    """Of all that are stored, not only of the newest."""
    from tests.partitioner.synthetic import HARDWARE, make_profile

    monkeypatch.setattr("hybridindex.profiler.hardware.hardware_info", lambda: HARDWARE)
    monkeypatch.setattr(run, "_host_threads", lambda _: threads)
    stored = [
        dataclasses.replace(make_profile(nlist=8, n=40, threads=2, device_per_byte_s=1e-11), id=1),
        dataclasses.replace(make_profile(nlist=8, n=40, threads=2), id=2),  # without a device
        dataclasses.replace(make_profile(nlist=8, n=40, threads=5, device_per_byte_s=1e-11), id=3),
    ]
    measured = object()
    asked = []

    class Store:
        def list_profiles(self, *, index_fingerprint: str) -> list[object]:
            return [
                SimpleNamespace(id=each.id, hardware_fingerprint=each.hardware.fingerprint, threads=each.threads)
                for each in stored
                if each.index_fingerprint == index_fingerprint
            ]

        def load_profile(self, profile_id: int | None = None, **_: str) -> Profile:
            return stored[-1] if profile_id is None else stored[profile_id - 1]

    def profile(*_: object, **options: object) -> object:
        asked.append((options["devices"], options["threads"]))
        return measured

    index = SimpleNamespace(fingerprint="index-1", store=lambda: contextlib.nullcontext(Store()), profile=profile)
    found = run._profile(index, np.zeros((1, 2)), device, label, lambda *_: None)
    assert found is (stored[0] if taken else measured)
    assert asked == ([] if taken else [([device], threads)])


def test_the_host_has_all_threads_but_one_beside_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("hybridindex.tiers.host.openmp.openmp_threads", lambda: 7)
    assert (run._host_threads("cpu"), run._host_threads("cuda:0")) == (3, 7)
