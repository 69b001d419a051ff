"""``cycle.py INDEX FILES KEYS``: builds, profiles, plans, serves, moves, swaps and changes keys, until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.refresh.config import RefreshConfig
from hybridindex.service.auth import KeyFile
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from tests.durability.whole import BUILD, NLIST, NPROBE


def say(stage: str) -> None:
    print(stage, flush=True)


def turn(path: Path, files: Path, keys: KeyFile, number: int) -> None:
    """Once around."""
    say("build")
    vectors = np.load(files / ("old.npy", "new.npy")[number % 2])
    with hx.build(vectors, path, nlist=NLIST, replace=True, **BUILD) as index:
        say("profile")
        calibration = np.load(files / "calibration.npy")
        profile = index.profile(
            calibration, NPROBE, devices=["cpu"], max_seconds=0.05, checkpoint=path / "profile.checkpoint"
        )
        say("plan")
        assert profile.id is not None
        index.apply_plan(index.plan(50, 16 << 20, profile, coverage=0.3))
    say("start")
    config = ServiceConfig(router=RouterConfig(devices=("cpu",)))
    service = Service.open(path, config, planning=RefreshConfig(planning="here"))
    for coverage in (0.6, 0.1, 0.8, 0.2):
        say("move")
        service.repartition(apply=True, coverage=coverage)
    service.close()
    say("keys")
    for name in ("one", "two", "three"):
        keys.add(name, "search")
    for name in ("one", "two", "three"):
        keys.revoke(name)


if __name__ == "__main__":
    folder, vectors, key_file = map(Path, sys.argv[1:])
    key_ring = KeyFile(key_file)
    for held in key_ring.read():
        if held.name != "kept":
            key_ring.revoke(held.name)
    number = 0
    while True:
        turn(folder, vectors, key_ring, number)
        number += 1
