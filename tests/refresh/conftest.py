"""One profiled and planned index for all tests of the refresh, and routers over it."""

from __future__ import annotations

import pytest

import hybridindex as hx
from hybridindex.store import ControlStore
from tests.clustered import clustered
from tests.moving_load import moving_queries
from tests.refresh.world import BUDGET, CONFIG, NLIST, NPROBE, World


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("refresh") / "idx"
    with hx.build(clustered(6000, seed=1), path=path, nlist=NLIST, metric="l2", codec="flat") as index:
        yield index


@pytest.fixture(scope="module")
def profile(index):
    queries = moving_queries(800, seed=2, moved=False)
    return index.profile(queries, nprobe=NPROBE, devices=["cpu"], max_seconds=1, save=False)


@pytest.fixture(scope="module")
def plan(index, profile):
    return index.plan(50, BUDGET, profile, coverage=0.2)


@pytest.fixture
def make_world(index, plan, tmp_path):
    worlds = []

    def make(config=CONFIG, *, store=True, **options):
        opened = ControlStore.open(tmp_path / "control.sqlite") if store else None
        worlds.append(World(index, options.pop("plan", plan), opened, config, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.refresher.close()
        world.router.check_invariants()
        world.router.close()
        if world.store is not None:
            world.store.close()
