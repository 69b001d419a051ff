"""Two indexes of other content and dimensions, each with a profile and an applied plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.service.config import ServiceConfig
from hybridindex.service.several.config import IndexConfig
from hybridindex.service.several.indexes import Indexes
from tests.clustered import clustered

#: Bytes of the one device: the whole of the first index fits beside the plan of the other, and little else.
BUDGET = 9 << 16
OTHER_DIM = 16


@pytest.fixture(scope="session")
def other_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``planned_index``, which nobody changes, too."""
    path = tmp_path_factory.mktemp("other") / "idx"
    with hx.build(clustered(2000, OTHER_DIM, seed=5), path, nlist=16, metric="l2", nprobe=4) as index:
        profile = index.profile(clustered(300, OTHER_DIM, seed=6), 4, devices=0, max_seconds=1)
        # An SLO that a busy machine keeps, too.
        index.apply_plan(index.plan(5000, 16 << 20, profile, coverage=0.25))
    return path


@pytest.fixture
def folders(planned_index: Path, other_index: Path, tmp_path: Path) -> dict[str, Path]:
    """Copies of a test's own."""
    return {
        "docs": shutil.copytree(planned_index, tmp_path / "docs"),
        "code": shutil.copytree(other_index, tmp_path / "code"),
    }


@pytest.fixture
def open_indexes(folders):
    """``open_indexes(names, router={...}, told={name: {...}}, **config)``; warmed up, closed at the test's end."""
    made: list[Indexes] = []

    def factory(*names, router=None, told=None, make_refresher=None, **config) -> Indexes:
        router = {"devices": ("cpu",), "device_budget_bytes": BUDGET, **(router or {})}
        wanted = {name: IndexConfig(path=folders[name], **(told or {}).get(name, {})) for name in names or folders}
        indexes = Indexes.open(
            wanted, ServiceConfig(router=RouterConfig(**router), **config), make_refresher=make_refresher
        )
        made.append(indexes)
        for service in indexes.services.values():
            service.warm_up()
        return indexes

    yield factory
    for indexes in made:
        indexes.close()
        for service in indexes.services.values():
            service.router.check_invariants()
