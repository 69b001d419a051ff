from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import ProfileError
from hybridindex.paging import usual_page_bytes
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.coverage import build_coverage_curve, code_size_of, count_grid
from hybridindex.types import Profile
from tests.examples import examples
from tests.partitioner.synthetic import make_profile


@examples(20)
@given(st.integers(0, 1000), st.integers(1, 90), st.integers(0, 300))
def test_hits_at_any_prefix_equal_a_plain_count(seed: int, nlist: int, count: int) -> None:
    profile = make_profile(nlist=nlist, n=40, nprobe=5, seed=seed, batches=(1, 4), repeats=1, empty_share=0.2)
    curve = build_coverage_curve(profile, points=20)
    count = min(count, nlist)
    hot = np.argsort(-profile.access.list_accesses, kind="stable")[:count]
    held = profile.access.held_probes
    work = profile.list_bytes[held]
    held, work = held[work.sum(axis=1) > 0], work[work.sum(axis=1) > 0]
    hit = (work * np.isin(held, hot)).sum(axis=1)
    if hit.size:
        assert sorted(curve.at(count).hit_work.tolist()) == sorted(hit.tolist())
        assert curve.at(count).hit_rate.mean() == pytest.approx((hit / work.sum(axis=1)).mean())


def test_curve_rises_from_nothing_to_everything(analysis: Analysis) -> None:
    curve = analysis.curve
    assert curve.grid[0] == 0
    assert curve.grid[-1] == curve.nlist
    assert curve.mean[0] == 0
    assert curve.mean[-1] == pytest.approx(1.0)
    for series in (curve.mean, curve.prefix_bytes, curve.prefix_pages):
        assert (np.diff(series) >= 0).all()


def test_hot_order_is_by_accesses_with_ties_by_id(analysis: Analysis) -> None:
    accesses, order = analysis.profile.access.list_accesses, analysis.curve.order
    keys = list(zip(-accesses[order], order, strict=True))
    assert keys == sorted(keys)


def test_memory_is_that_of_the_hot_lists_in_pages(analysis: Analysis) -> None:
    curve, profile = analysis.curve, analysis.profile
    rows = usual_page_bytes(profile.codec, 512, profile.list_sizes) // 512
    assert rows < 65_536 // 512, "lists are short"
    pages = -(-profile.list_sizes[curve.order[:10]] // rows)
    assert curve.device_bytes(10) == pages.sum() * rows * 512


def test_any_set_of_lists_equals_the_prefix_when_it_is_one(analysis: Analysis) -> None:
    curve = analysis.curve
    prefix, same = curve.at(37), curve.of_lists(curve.order[:37][::-1].copy())
    assert same.prefix == 37
    assert (same.hit_work == prefix.hit_work).all()
    odd = curve.of_lists(curve.order[[0, 5, 9]])
    assert odd.prefix is None
    assert (odd.hit_work <= curve.at(10).hit_work).all()
    assert odd.hit_work.sum() > 0


def test_union_is_the_mean_over_batches(analysis: Analysis) -> None:
    curve, rng = analysis.curve, np.random.default_rng(1)
    held = analysis.profile.access.held_probes
    hot = np.zeros(curve.nlist, dtype=bool)
    hot[curve.order[:25]] = True
    resident, missed = curve.union_bytes(curve.at(25), 8)
    seen = []
    for _ in range(400):
        lists = np.unique(held[rng.permutation(held.shape[0])[:8]])
        seen.append(
            [
                analysis.profile.list_bytes[lists[hot[lists]]].sum(),
                analysis.profile.list_bytes[lists[~hot[lists]]].sum(),
            ]
        )
    assert [resident, missed] == pytest.approx(np.mean(seen, axis=0), rel=0.03)


def test_variance_peaks_near_half_and_is_profiled_there(analysis: Analysis) -> None:
    curve = analysis.curve
    near = int(np.argmin(np.abs(curve.mean - 0.5)))
    assert curve.sigma2_max == pytest.approx(curve.variance[near], rel=0.2)


def test_effective_probes_count_what_weighs() -> None:
    """As many as there are where lists are equal; hardly more than one where one list outweighs the others."""
    curve = build_coverage_curve(make_profile(nlist=32, nprobe=5, list_sizes=np.full(32, 100)))
    assert curve.effective_probes == pytest.approx(5.0)
    uneven = make_profile(nlist=32, nprobe=32, list_sizes=np.array([100_000] + [100] * 31))
    assert build_coverage_curve(uneven).effective_probes == pytest.approx(103_100**2 / (100_000**2 + 31 * 100**2))


def test_too_few_held_queries_are_refused() -> None:
    with pytest.raises(ProfileError, match="at least 8"):
        build_coverage_curve(make_profile(n=14))


def test_arrays_of_another_size_are_refused(analysis: Analysis) -> None:
    short = dataclasses.replace(analysis.profile, list_bytes=analysis.profile.list_bytes[:-1])
    with pytest.raises(ProfileError, match="list_bytes"):
        build_coverage_curve(short)
    access = dataclasses.replace(
        analysis.profile.access, held_probes=np.full((20, 2), analysis.profile.nlist, dtype=np.int32)
    )
    with pytest.raises(ProfileError, match="names list"):
        build_coverage_curve(dataclasses.replace(analysis.profile, access=access))


def test_skipped_probes_count_for_nothing(analysis: Analysis) -> None:
    access = analysis.profile.access
    padded = np.concatenate((access.held_probes, np.full_like(access.held_probes, -1)), axis=1)
    curve = build_coverage_curve(
        dataclasses.replace(analysis.profile, access=dataclasses.replace(access, held_probes=padded))
    )
    assert (curve.mean == analysis.curve.mean).all()
    assert curve.at(curve.nlist).probes.max() == access.held_probes.shape[1]


def test_code_size_survives_empty_lists() -> None:
    assert code_size_of(make_profile(empty_share=0.5)) == 512
    assert code_size_of(make_profile(list_sizes=np.zeros(256, dtype=np.int64))) == 1


@given(st.integers(1, 100_000))
def test_grid_covers_both_ends(nlist: int) -> None:
    grid = count_grid(nlist)
    assert grid[0] == 0
    assert grid[-1] == nlist
    assert (np.diff(grid) > 0).all()
    assert grid.size <= 204


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_accesses_that_are_no_counts_are_refused(profile: Profile, wrong: float) -> None:
    accesses = profile.access.list_accesses.copy()
    accesses[3] = wrong
    damaged = dataclasses.replace(profile, access=dataclasses.replace(profile.access, list_accesses=accesses))
    with pytest.raises(ProfileError, match=f"list_accesses of list 3 is {wrong}; .* finite and >= 0"):
        build_coverage_curve(damaged)
