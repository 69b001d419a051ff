from __future__ import annotations

from dataclasses import replace

import pytest

from hybridindex.errors import ProfileMismatchError
from hybridindex.profiler.check import check_profile
from tests.partitioner.synthetic import make_profile

PROFILE = replace(make_profile(nlist=8, n=20, nprobe=2, batches=(1,), repeats=1), id=7)


def test_the_right_profile_passes():
    check_profile(PROFILE, "index-1", "hw-1")


def test_another_index_is_refused_naming_both():
    with pytest.raises(ProfileMismatchError, match=r"profile 7 .*index-1.*index-2"):
        check_profile(PROFILE, "index-2", "hw-1", allow_other_hardware=True)


def test_another_machine_is_refused_naming_both_unless_allowed():
    with pytest.raises(ProfileMismatchError, match=r"hw-1 \(synthetic, 2 cores\).*hw-2.*profile the index here"):
        check_profile(PROFILE, "index-1", "hw-2")
    check_profile(PROFILE, "index-1", "hw-2", allow_other_hardware=True)
