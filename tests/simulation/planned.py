"""An index with a profile and plans, made in a simulation: what was measured is the same on every machine."""

from __future__ import annotations

import random
from pathlib import Path

import hybridindex as hx
from tests.clustered import clustered
from tests.simulation.machine import Machine
from tests.simulation.virtual.patching import patched
from tests.simulation.virtual.scheduler import Scheduler

__all__ = ["make_planned"]

BUDGET = 192 << 10


def make_planned(path: Path) -> None:
    """A folder that worlds copy: two plans, of which the second one is current."""
    sim = Scheduler(0, switch=0.0)

    def make() -> None:
        with hx.build(clustered(2000, seed=1), path, nlist=24, metric="l2", nprobe=6) as index:
            profile = index.profile(clustered(300, seed=2), 6, devices=0, max_seconds=1)
            assert profile.id is not None
            for coverage in (0.6, 0.3):
                index.apply_plan(index.plan(50, BUDGET, profile, coverage=coverage), force=True)

    with patched(), Machine(sim, random.Random(0)).applied():
        sim.run(make)
