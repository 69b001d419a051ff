from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.partitioner.models.transfer import fit_transfers
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.types import Profile, TransferSample


def copies(latency_s: float, bytes_per_s: float, *, pinned: bool = False, noise: float = 0.0) -> list[TransferSample]:
    rng = np.random.default_rng(0)
    return [
        TransferSample(
            device="cuda:0",
            pinned=pinned,
            nbytes=nbytes,
            seconds=(latency_s + nbytes / bytes_per_s) * (1 + noise * rng.random()),
        )
        for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24)
        for _ in range(5)
    ]


def test_latency_and_bandwidth_are_recovered() -> None:
    model = fit_transfers([*copies(1e-5, 5e10, pinned=True), *copies(2e-5, 1e10)], pinned=True)
    assert model.latency_s == pytest.approx(1e-5, rel=1e-3)
    assert model.bytes_per_s == pytest.approx(5e10, rel=1e-3)
    assert model.predict(1 << 30) == pytest.approx(1e-5 + (1 << 30) / 5e10, rel=1e-3)
    assert (model.devices, model.pinned) == (("cuda:0",), True)
    noisy = fit_transfers(copies(1e-5, 5e10, noise=0.1), pinned=False)
    assert noisy.bytes_per_s == pytest.approx(5e10, rel=0.15)
    assert 0 < noisy.error < 0.1


def test_copies_of_one_size_still_give_a_bandwidth() -> None:
    sample = TransferSample(device="cuda:0", pinned=False, nbytes=1000, seconds=0.001)
    model = fit_transfers([sample, sample], pinned=False)
    assert 0 < model.predict(1000) <= 0.0021
    assert model.bytes_per_s >= 1e6


def test_a_profile_without_copies_is_refused() -> None:
    with pytest.raises(ProfileError, match="page-locked"):
        fit_transfers(copies(1e-5, 1e10), pinned=True)
    with pytest.raises(ProfileError, match="ordinary"):
        fit_transfers([], pinned=False)


def test_a_plan_says_what_a_session_should_move(profile: Profile) -> None:
    timed = dataclasses.replace(profile, transfers=tuple(copies(1e-5, 1e7)))
    plan = make_plan(timed, PlanRequest.resolve(slo_ms=50, device_budget_bytes=1 << 30, coverage=0.1))
    share = 1 << 30
    sizes = [plan.lookahead_budget(window, share_bytes=share).nbytes for window in (0.001, 10.0, 1000.0, 1e6)]
    assert sizes == sorted(sizes)
    left = plan.analysis.curve.geometry.page_bytes * int(plan.analysis.curve.prefix_pages[-1])
    resident = plan.device_bytes - sum(plan.request.scratch)
    assert sizes[-1] == left - resident
    # 1 s at 10 MB/s hides behind generation.
    assert sizes[2] >= min(1e7 * 0.99, left - resident)
    assert plan.lookahead_budget(1e6, share_bytes=1000).nbytes == 1000
    with pytest.raises(InvalidInputError, match="window_ms"):
        plan.lookahead_budget(-1, share_bytes=share)
    with pytest.raises(ProfileError, match="copies"):
        make_plan(profile, PlanRequest.resolve(slo_ms=50, device_budget_bytes=1 << 30)).lookahead_budget(
            5, share_bytes=share
        )
