"""Profiles shared by the partitioner's tests."""

from __future__ import annotations

import pytest

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.types import Profile
from tests.partitioner.synthetic import make_profile


@pytest.fixture(scope="session")
def profile() -> Profile:
    """256 lists, 200 held-back queries, 5 % timing noise."""
    return make_profile(noise=0.05)


@pytest.fixture(scope="session")
def analysis(profile: Profile) -> Analysis:
    return analyse(profile)


@pytest.fixture(scope="session")
def large_analysis() -> Analysis:
    """1,500 held-back queries: enough for minima of batches of 64."""
    return analyse(make_profile(nlist=400, n=3000, nprobe=24, seed=3, noise=0.05))
