from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.models.latency import RoutingModel, fit_latency_model
from hybridindex.types import StageSample
from tests.examples import examples
from tests.partitioner.synthetic import make_profile, scan_seconds


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("coverage", [0.0, 0.05, 0.2, 0.4])
def test_median_is_within_a_fifth_of_the_truth_at_coverages_never_timed(
    analysis: Analysis, batch: int, coverage: float
) -> None:
    profile, curve = analysis.profile, analysis.curve
    rng = np.random.default_rng(5)
    count = int(coverage * curve.nlist)
    resident = np.zeros(curve.nlist, dtype=bool)
    resident[curve.order[:count]] = True
    truth = []
    for _ in range(300):
        rows = profile.access.held_probes[rng.permutation(curve.n_held)[:batch]]
        missed = ~resident[rows]
        work = (profile.list_bytes[rows] * missed).sum(axis=1).astype(float)
        truth.append(1e-4 * (1 + batch / 10) + scan_seconds(work, missed.sum(axis=1), min(2, batch)))
    predicted = analysis.latency.predict(curve, curve.at(count), batch)
    assert predicted.seconds == pytest.approx(np.median(truth), rel=0.2)
    assert not predicted.extrapolated
    high = analysis.latency.predict(curve, curve.at(count), batch, 90).seconds
    assert high == pytest.approx(np.quantile(truth, 0.9), rel=0.25)


@given(
    batch=st.integers(1, 300),
    counts=st.tuples(st.integers(0, 256), st.integers(0, 256)),
    percentile=st.floats(1, 99),
)
def test_more_coverage_never_slows_the_host(
    analysis: Analysis, batch: int, counts: tuple[int, int], percentile: float
) -> None:
    few, many = sorted(counts)
    latency, curve = analysis.latency, analysis.curve
    slow = latency.quantile(curve, curve.at(few), batch, percentile)
    fast = latency.quantile(curve, curve.at(many), batch, percentile)
    assert fast <= slow * (1 + 1e-12)


def test_percentiles_rise_and_large_batches_are_flagged(analysis: Analysis) -> None:
    curve = analysis.curve
    work = curve.at(30)
    levels = [analysis.latency.predict(curve, work, 8, p).seconds for p in (10, 50, 90, 99)]
    assert levels == sorted(levels)
    assert levels[0] < levels[-1]
    far = analysis.latency.predict(curve, work, 4096)
    assert far.extrapolated
    assert far.seconds > analysis.latency.predict(curve, work, 64).seconds * 20


def test_a_slow_device_is_not_hidden(analysis: Analysis) -> None:
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=2e-9))
    curve = slow.curve
    assert slow.latency.device is not None
    half = slow.latency.predict(curve, curve.at(128), 16).seconds
    everything = slow.latency.predict(curve, curve.at(256), 16).seconds
    assert everything > half
    shared = dataclasses.replace(slow.latency, n_devices=4)
    assert shared.predict(curve, curve.at(256), 16).seconds < everything
    nothing = slow.latency.parts(curve, curve.at(0), 16)
    assert (nothing.device_s == 0).all()


def test_what_was_not_measured_is_said(analysis: Analysis) -> None:
    assert any("merging" in note for note in analysis.latency.notes)
    assert any("device" in note for note in analysis.latency.notes)
    bare = dataclasses.replace(
        analysis.profile, stages=tuple(s for s in analysis.profile.stages if s.stage == "host_scan")
    )
    model = fit_latency_model(bare, analysis.curve)
    assert any("coarse" in note for note in model.notes)


@pytest.mark.parametrize("coverage", [0.0, 51 / 256])
def test_routed_batches_say_what_routing_costs(analysis: Analysis, coverage: float) -> None:
    """Routing that doubles the stages and adds 0.5 ms and 20 us a query is found again."""
    curve, latency = analysis.curve, analysis.latency
    work = curve.at(round(coverage * 256))
    routed = tuple(
        StageSample(
            stage="batch",
            batch=b,
            seconds=2 * float(np.median(latency.parts(curve, work, b).total())) + 5e-4 + 2e-5 * b,
            coverage=coverage,
        )
        for b in (1, 4, 16, 64)
    )
    model = fit_latency_model(dataclasses.replace(analysis.profile, stages=analysis.profile.stages + routed), curve)
    assert not any("merging" in note for note in model.notes), "routed batches have it in them"
    for batch in (1, 8, 32):
        expected = 2 * float(np.median(latency.parts(curve, work, batch).total())) + 5e-4 + 2e-5 * batch
        assert float(np.median(model.parts(curve, work, batch).total())) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("n_devices", [2, 4])
def test_batches_that_several_devices_scanned_say_what_routing_costs(n_devices: int) -> None:
    """Each scans a part of the hits: a fit that gave all of them to one would find routing faster than it is."""
    one = analyse(make_profile(noise=0.02, device_per_byte_s=2e-9))
    curve, many = one.curve, dataclasses.replace(one.latency, n_devices=n_devices)
    work = curve.at(128)

    def seconds(batch: int) -> float:
        return 1.5 * float(np.median(many.parts(curve, work, batch).total())) + 3e-4

    label = "+".join(f"cuda:{n}" for n in range(n_devices))
    routed = tuple(
        StageSample(stage="batch", batch=b, seconds=seconds(b), coverage=0.5, device=label) for b in (1, 4, 16, 64)
    )
    profile = dataclasses.replace(one.profile, stages=one.profile.stages + routed)
    planned = analyse(profile).configured(page_bytes=65_536, n_devices=n_devices).latency
    assert planned.hybrid_routing.scale == pytest.approx(1.5, rel=0.1)
    for batch in (1, 8, 32):
        predicted = float(np.median(planned.parts(curve, work, batch).total()))
        assert predicted == pytest.approx(seconds(batch), rel=0.1)


def test_the_most_loaded_device_counts(analysis: Analysis) -> None:
    curve = analysis.curve

    def part(count: int, *room: int) -> float:
        model = dataclasses.replace(analysis.latency, n_devices=len(room), room=room)
        return model.largest_part(curve, curve.at(count))

    pages = int(curve.prefix_pages[128])
    assert part(128, pages, pages) == 0.5
    assert part(128, pages) == 1.0
    # The small one is full, and the other holds the rest.
    loads = curve.accesses_by_rank * curve.bytes_by_rank
    hottest = int(np.searchsorted(curve.prefix_pages, 2 * (pages // 4)))
    shared = loads[:hottest].sum() / loads[:128].sum()
    assert part(128, pages // 4, pages) == pytest.approx(1 - shared / 2, abs=0.01)
    assert part(128, pages // 4, pages, pages) < part(128, pages // 4, pages)
    # Lists that do not fit count as on devices that are larger in proportion.
    assert part(128, pages // 40, pages // 10) == pytest.approx(part(128, pages // 5, pages - pages // 5), abs=0.02)
    # A list is on one device.
    assert part(1, pages, pages, pages) == 1.0
    assert part(0, pages, pages, pages) == pytest.approx(1 / 3)


@examples(60)
@given(
    room=st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    more=st.integers(0, 2000),
    which=st.integers(0, 4),
    count=st.integers(0, 256),
)
def test_room_on_a_device_never_loads_another_more(
    analysis: Analysis, room: list[int], more: int, which: int, count: int
) -> None:
    curve = analysis.curve
    larger = [own + more * (number == which) for number, own in enumerate(room)]
    before, after = (
        dataclasses.replace(analysis.latency, n_devices=len(room), room=tuple(own)).largest_part(curve, curve.at(count))
        for own in (room, larger)
    )
    assert 1 / len(room) <= before <= 1 + 1e-12
    if curve.prefix_pages[count] <= sum(room):
        assert after <= before + 1e-12


def test_scans_that_share_cores_do_not_overlap() -> None:
    together = RoutingModel(serial=1.0)
    apart = RoutingModel()
    host, device = np.array([3.0, 1.0]), np.array([2.0, 4.0])
    assert together.seconds(0.5, host, device, 1).tolist() == [5.5, 5.5]
    assert apart.seconds(0.5, host, device, 1).tolist() == [3.5, 4.5]


def test_merging_counts_where_devices_answer(analysis: Analysis) -> None:
    curve = analysis.curve
    merge = tuple(StageSample(stage="merge", batch=b, seconds=1e-4) for b in (1, 16))
    merged = fit_latency_model(dataclasses.replace(analysis.profile, stages=analysis.profile.stages + merge), curve)
    assert merged.parts(curve, curve.at(20), 4).merge_s == pytest.approx(1e-4)
    assert merged.parts(curve, curve.at(0), 4).merge_s == 0
    assert not any("merging" in note for note in merged.notes)


def test_bad_arguments_are_refused(analysis: Analysis) -> None:
    work = analysis.curve.at(0)
    with pytest.raises(InvalidInputError, match="batch"):
        analysis.latency.predict(analysis.curve, work, 0)
    with pytest.raises(InvalidInputError, match="percentile"):
        analysis.latency.predict(analysis.curve, work, 1, 100)
