"""What every test of a crash begins with: files of vectors, and an index with profile and plan."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import hybridindex as hx
from tests.clustered import clustered
from tests.durability.whole import BUILD, NLIST, NPROBE


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """``old.npy``, ``new.npy``: vectors; ``calibration.npy``: queries."""
    folder = tmp_path_factory.mktemp("vectors")
    np.save(folder / "old.npy", clustered(2500, seed=1))
    np.save(folder / "new.npy", clustered(3000, seed=5))
    np.save(folder / "calibration.npy", clustered(300, seed=2))
    return folder


@pytest.fixture(scope="session")
def _planned(files, tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "idx"
    with hx.build(np.load(files / "old.npy"), path, nlist=NLIST, **BUILD) as index:
        profile = index.profile(np.load(files / "calibration.npy"), NPROBE, devices=["cpu"], max_seconds=1)
        assert profile.id is not None
        index.apply_plan(index.plan(50, 16 << 20, profile, coverage=0.3))
    return path


@pytest.fixture(scope="session")
def fingerprints(files, _planned, tmp_path_factory):
    """Of the index over the old vectors, and of that over the new ones."""
    with hx.open(_planned) as old:
        found = old.fingerprint
    with hx.build(np.load(files / "new.npy"), tmp_path_factory.mktemp("new") / "idx", nlist=NLIST, **BUILD) as new:
        return found, new.fingerprint


@pytest.fixture
def index_path(_planned, tmp_path):
    """An index over the old vectors with one profile and one plan, for this test alone."""
    return shutil.copytree(_planned, tmp_path / "idx")
