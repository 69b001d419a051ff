"""Fixtures that every room may use: random clustered vectors, small indexes over them, commands as processes."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

import hybridindex as hx
from hybridindex.extension import import_error, native
from hybridindex.index import IVFIndex, build
from hybridindex.types import F32
from tests.clustered import clustered
from tests.durability.launcher import Launcher
from tests.examples import PROFILES

# Without a GPU, triton kernels run in triton's interpreter, on CPU tensors. Triton reads this once, when it is
# imported; nothing here has imported it yet. With a GPU they are compiled, and tests run them there. A GPU's own node
# may only be made when somebody first uses it; the driver is there before.
if not any(Path("/dev").glob("nvidia*")) and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# No deadline: how long an example takes says something of the machine alone.
for _name, _number in PROFILES.items():
    hypothesis.settings.register_profile(_name, max_examples=_number, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure() -> None:
    """An installation always compiles the extension: without it most of these tests would look at something else."""
    if native is None:
        raise pytest.UsageError(f"the extension cannot be imported, so there is nothing to test: {import_error}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as pure what no fixture gives a folder or a server: such a test opens no index, store or daemon."""
    for item in items:
        if not {"tmp_path", "tmp_path_factory", "postgresql_server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("pure")


def clustered_vectors(n: int, dim: int, *, seed: int = 0, clusters: int = 12) -> F32:
    """(n, dim) float32: Gaussian clusters of very different sizes, so that lists differ too."""
    rng = np.random.default_rng(seed)
    centers = 2 * rng.standard_normal((clusters, dim))
    weights = 1 / np.arange(1, clusters + 1)
    picks = rng.choice(clusters, size=n, p=weights / weights.sum())
    return (centers[picks] + rng.standard_normal((n, dim))).astype(np.float32)


@pytest.fixture
def make_index(tmp_path: Path) -> Iterator[Callable[..., IVFIndex]]:
    """``make_index(codec="flat", metric="ip", *, n=600, dim=16, nlist=12, seed=0, **build_options)``.

    Vectors are ``clustered_vectors(n, dim, seed=seed)`` and ids ``3*row + 7`` unless given. Closed at the test's end.
    """
    made: list[IVFIndex] = []
    number = itertools.count()

    def factory(
        codec: str = "flat",
        metric: str = "ip",
        *,
        n: int = 600,
        dim: int = 16,
        nlist: int = 12,
        seed: int = 0,
        **options: Any,
    ) -> IVFIndex:
        vectors = options.pop("vectors", None)
        if vectors is None:
            vectors = clustered_vectors(n, dim, seed=seed)
        options.setdefault("ids", np.arange(len(vectors), dtype=np.int64) * 3 + 7)
        path = options.pop("path", tmp_path / f"index-{next(number)}")
        index = build(vectors, path, nlist=nlist, metric=metric, codec=codec, **options)  # type: ignore[arg-type]
        made.append(index)
        return index

    yield factory
    for index in made:
        index.close()


@pytest.fixture(scope="session")
def planned_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an index with one profile and one plan, which nobody changes."""
    path = tmp_path_factory.mktemp("planned") / "idx"
    with hx.build(clustered(2500, seed=1), path, nlist=24, metric="l2", nprobe=6) as index:
        profile = index.profile(clustered(300, seed=2), 6, devices=0, max_seconds=1)
        assert profile.id is not None
        plan = index.plan(50, 16 << 20, profile, coverage=0.3)
        index.apply_plan(plan)
    return path


@pytest.fixture
def index_path(planned_index: Path, tmp_path: Path) -> Path:
    """A copy of its own, so that plans stored by one test are not another's latest."""
    return shutil.copytree(planned_index, tmp_path / "idx")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Of commands and daemons in processes of their own."""
    with Launcher(tmp_path_factory.mktemp("children")) as launcher:
        yield launcher


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A daemon that starts in a test's process sends its lines to that test's standard error, and keeps doing so."""
    loggers = [logging.getLogger(name) for name in ("hybridindex", "uvicorn", "uvicorn.access", "opentelemetry")]
    before = [(list(each.handlers), each.level, each.propagate, each.disabled) for each in loggers]
    yield
    for each, (handlers, level, propagate, disabled) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate, each.disabled = handlers, propagate, disabled
        each.setLevel(level)
