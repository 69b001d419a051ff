"""The benchmark of updates: its parts on rows that take no time, and how its numbers are judged."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.clusters import make_clusters
from benchmarks.host import update_recall, updates
from benchmarks.host.update_adds import Scale, verdict
from benchmarks.host.update_recall import drifting, nearest, stands_beside
from benchmarks.rivals.updating import PEERS, Data, Side, SideError

#: So few that each part takes a second.
FEW = {
    **updates.QUICK, "dim": 16, "count": 2_000,
    "few": 1_000, "batch": 100, "rounds": 1, "turn_s": 0.1, "turn_rows": 300,
    "threads": 3, "single_s": 0.1, "repeats": 2, "window_s": 0.2, "windows": 1, "capacity_s": 0.2, "steps": 4,
    "queries": 50,
}  # fmt: skip


def test_every_part_leaves_its_numbers_beside_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("HYBRIDINDEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(updates, "QUICK", FEW)
    file = tmp_path / "updates.json"
    options = [
        "--quick",
        "--dataset",
        "none",
        "--codecs",
        "flat",
        "--peers",
        "hybridindex",
        "disk",
        "--json",
        str(file),
    ]
    for parts in ("add,checkpoint", "latency,amplification,recall"):
        monkeypatch.setattr("sys.argv", ["updates", *options, "--scratch", str(tmp_path), "--parts", parts])
        updates.main()
    found = json.loads(file.read_text())["parts"]
    assert set(found) == set(updates.PARTS)
    assert found["add"]["batches"]["rows"]["hybridindex"]["rows_per_s"] > 0
    assert found["add"]["batches"]["verdict"] is None, "there was no other system"
    assert found["add"]["absent"]["faiss IVF,Flat"] == "not asked for"
    assert set(found["add"]["absent"]) == {
        peer.name for peer in PEERS if peer.system not in ("hybridindex", "disk") and peer.durable
    }
    assert found["checkpoint"]["absent"] == {"LanceDB IVF_FLAT": "not asked for"}
    assert found["checkpoint"]["rows"]["hybridindex"]["given_bytes"] > 16 * 4
    assert [row["batch"] for row in found["latency"]["rows"]] == [1, 8]
    assert {row["n_live"] for row in found["amplification"]["rows"]} == {2_000}
    assert all(row["amplification"] > 1 for row in found["amplification"]["rows"])
    assert found["recall"]["rows"][0]["deleted"] == found["recall"]["rows"][0]["added"]


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr("sys.argv", ["updates", "--parts", "add,everything"])
    with pytest.raises(SystemExit, match="unknown parts: everything"):
        updates.main()


def test_a_system_that_is_not_installed_is_named(tmp_path: Path) -> None:
    clusters = make_clusters(8, 100 * 32, nlist=4)
    data = Data.written(clusters, tmp_path, 50, 50, tmp_path / "cache")
    absent = replace(next(peer for peer in PEERS if peer.system == "milvus"), name="absent")
    # An interpreter without any packages.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c \'print("{{\\"missing\\": \\"no pymilvus\\"}}")\'\n')
    python.chmod(0o755)
    with pytest.raises(SideError, match="absent is not installed: no pymilvus"):
        Side(absent, data, tmp_path, python)


@pytest.mark.parametrize(
    ("value", "said"), [(1.0, "met"), (1.4, "inconclusive"), (1.55, "inconclusive"), (1.7, "missed")]
)
def test_what_lies_within_the_floor_of_its_target_decides_nothing(value: float, said: str) -> None:
    assert verdict(value, 1.5, 0.1) == said
    assert verdict(1 / value, 1 / 1.5, 0.1, least=True) == said


def test_curves_are_compared_at_equal_bytes_and_at_equal_recall() -> None:
    fresh = [(1, 100.0, 0.5), (2, 200.0, 0.7), (4, 400.0, 0.9), (8, 800.0, 0.97)]
    twice = [(nprobe, 2 * nbytes, found) for nprobe, nbytes, found in fresh]
    assert stands_beside(fresh, fresh, 0.9) == pytest.approx((0.0, 1.0))
    assert stands_beside(twice, fresh, 0.9) == pytest.approx((20.0, 2.0))
    assert stands_beside(twice, fresh, 0.99) is None
    assert stands_beside(twice, fresh, 0.5) is None


def test_rows_come_in_the_order_of_their_topics() -> None:
    made = make_clusters(16, 4_000 * 64, nlist=64)
    ordered = drifting(made.vectors, made.lists, made.centres)
    assert sorted(map(bytes, ordered)) == sorted(map(bytes, made.vectors))
    first, second = ordered[:2_000].mean(axis=0), ordered[2_000:].mean(axis=0)
    mixed = np.random.default_rng(0).permutation(made.vectors)
    # The halves are of different topics.
    assert np.linalg.norm(first - second) > 4 * np.linalg.norm(mixed[:2_000].mean(axis=0) - mixed[2_000:].mean(axis=0))


def test_truth_is_found_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = rng.standard_normal((70_000, 4), dtype=np.float32), rng.standard_normal((3, 4), dtype=np.float32)
    whole = np.argsort(-(queries @ vectors.T), axis=1)[:, : update_recall.K]
    assert np.array_equal(nearest(vectors, np.arange(len(vectors)) + 5, queries), whole + 5)


def test_the_full_run_is_larger_than_the_quick_one() -> None:
    full = Scale()
    assert all(getattr(full, name) >= value for name, value in updates.QUICK.items() if isinstance(value, int | float))
