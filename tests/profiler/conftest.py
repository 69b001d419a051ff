"""Small indexes and calibration queries for the profiler's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import F32
from tests.clustered import clustered, small_index


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IVFIndex]:
    """3000 x 24, flat, l2, nlist 32, nprobe 8."""
    made = small_index(Path(tmp_path_factory.mktemp("profiled")) / "idx")
    yield made
    made.close()


@pytest.fixture(scope="session")
def queries() -> F32:
    return clustered(200, seed=2)
