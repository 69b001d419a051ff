from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import ProfileError
from hybridindex.partitioner.models.fits import PiecewiseLinear
from hybridindex.partitioner.models.scan_models import (
    CalibratedScanModel,
    HostScanModel,
    ListMajorScanModel,
    PaperScanModel,
    QueryParallelScanModel,
    ScanWork,
    choose_host_scan_model,
    fit_list_major,
    fit_paper,
    fit_query_parallel,
    host_scan_work,
)
from hybridindex.types import F64, StageSample

PROBES = 16


def samples_of(truth: str, *, threads: int = 2, noise: float = 0.0, seed: int = 0) -> list[StageSample]:
    """Timings that follow one of the models exactly, but for ``noise``."""
    rng = np.random.default_rng(seed)
    rows = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(4):
            for coverage in (0.0, 0.2, 0.5):
                hit = rng.beta(2, 2, size=batch) if coverage else np.zeros(batch)
                full = rng.integers(1_000_000, 3_000_000, size=batch)
                work = full * (1 - hit)
                probes = np.ceil(PROBES * (1 - hit))
                unique = work.sum() / (1 + np.log(batch))
                if truth == "paper":
                    seconds = (1 - hit.min()) * 1e-3 * (1 + batch / 16)
                elif truth == "query_parallel":
                    seconds = 1e-5 + max(work.max(), work.sum() / min(threads, batch)) * 4e-10
                else:
                    seconds = 1e-5 + max(unique * 8e-10, work.sum() * 1e-10)
                rows.append(
                    StageSample(
                        stage="host_scan",
                        batch=batch,
                        seconds=float(seconds * np.exp(noise * rng.standard_normal())),
                        probes=int(probes.sum()),
                        work_bytes=int(work.sum()),
                        max_work_bytes=int(work.max()),
                        unique_bytes=int(unique),
                        coverage=coverage,
                        min_hit_rate=float(hit.min()),
                    )
                )
    return rows


@pytest.mark.parametrize("truth", ["paper", "query_parallel", "list_major"])
@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_the_true_model_is_recognised(truth: str, noise: float) -> None:
    choice = choose_host_scan_model(samples_of(truth, noise=noise), threads=2, nprobe=PROBES)
    assert choice.model.name.split("+")[0] == truth
    assert choice.errors[choice.model.name] <= 0.02 + noise
    assert set(choice.errors) == {
        "paper",
        "query_parallel",
        "list_major",
        "query_parallel+batch",
        "list_major+batch",
    }


def test_two_threads_at_batch_64_are_not_eq_1() -> None:
    """Mean hit 0.6: the queries share two threads, so the batch falls with the mean miss, not with the worst query."""
    work, seconds = host_scan_work(samples_of("query_parallel"), PROBES)
    model = fit_query_parallel(work, seconds, 2)
    full = 2e6
    hit = np.linspace(0.2, 1.0, 64)

    def batch_of(hits: F64) -> ScanWork:
        miss = full * (1 - hits)
        one = np.ones(1)
        return ScanWork(
            batch=64 * one,
            probes=PROBES * (1 - hits).sum() * one,
            max_probes=PROBES * (1 - hits).max() * one,
            work_bytes=miss.sum() * one,
            max_work_bytes=miss.max() * one,
            unique_bytes=0 * one,
            min_hit_rate=hits.min() * one,
            masked=one,
        )

    ratio = float(model.predict(batch_of(hit))[0] / model.predict(batch_of(np.zeros(64)))[0])
    assert ratio == pytest.approx(0.40, abs=0.02)
    paper = PaperScanModel(full=PiecewiseLinear(knots=np.array([64.0]), values=np.array([1.0])))
    assert float(paper.predict(batch_of(hit))[0]) == pytest.approx(0.8)


def test_effective_threads_are_found() -> None:
    work, seconds = host_scan_work(samples_of("query_parallel", threads=2), PROBES)
    assert fit_query_parallel(work, seconds, 2).effective_threads == pytest.approx(2.0)
    work, seconds = host_scan_work(samples_of("query_parallel", threads=1), PROBES)
    assert fit_query_parallel(work, seconds, 2).effective_threads == pytest.approx(1.0)


def test_list_major_costs_are_found() -> None:
    work, seconds = host_scan_work(samples_of("list_major"), PROBES)
    model = fit_list_major(work, seconds, 2)
    assert np.median(np.abs(model.predict(work) / seconds - 1)) < 0.02


def test_paper_needs_unmasked_samples() -> None:
    masked = [s for s in samples_of("paper") if s.coverage > 0]
    assert fit_paper(*host_scan_work(masked, PROBES), 2) is None
    choice = choose_host_scan_model(masked, threads=2, nprobe=PROBES)
    assert choice.errors["paper"] == float("inf")


def test_one_interrupted_run_does_not_bend_the_fit() -> None:
    rows = samples_of("query_parallel")
    rows[5] = dataclasses.replace(rows[5], seconds=rows[5].seconds * 100)
    work, seconds = host_scan_work(rows, PROBES)
    model = fit_query_parallel(work, seconds, 2)
    assert np.median(np.abs(model.predict(work) / seconds - 1)) < 0.03


MODELS: list[HostScanModel] = [
    QueryParallelScanModel(overhead_s=1e-5, per_probe_s=1e-7, per_byte_s=1e-9, effective_threads=1.7),
    ListMajorScanModel(overhead_s=1e-5, per_probe_s=1e-7, per_unique_byte_s=1e-9, per_work_byte_s=1e-10),
    PaperScanModel(full=PiecewiseLinear(knots=np.array([1.0, 64.0]), values=np.array([1e-3, 1e-2]))),
]
MODELS.append(CalibratedScanModel(base=MODELS[0], log2_batches=np.array([0.0, 6.0]), factors=np.array([1.0, 0.7])))


@given(
    model=st.sampled_from(MODELS),
    batch=st.integers(1, 128),
    misses=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    shrink=st.floats(0, 1),
)
def test_more_misses_never_take_less_time(model: HostScanModel, batch: int, misses: list[float], shrink: float) -> None:
    def row(scale: float) -> ScanWork:
        one = np.ones(1)
        return ScanWork(
            batch=batch * one,
            probes=batch * 16 * misses[0] * scale * one,
            max_probes=16 * misses[0] * scale * one,
            work_bytes=batch * 1e6 * misses[1] * scale * one,
            max_work_bytes=1e6 * misses[1] * scale * one,
            unique_bytes=batch * 5e5 * misses[1] * scale * one,
            min_hit_rate=(1 - scale) * one,
            masked=one,
        )

    assert model.predict(row(shrink))[0] <= model.predict(row(1.0))[0] + 1e-15


def test_without_samples_there_is_no_model() -> None:
    with pytest.raises(ProfileError, match="host_scan"):
        choose_host_scan_model([], threads=2, nprobe=4)


def test_a_single_sample_still_gives_a_model() -> None:
    choice = choose_host_scan_model(samples_of("paper")[:1], threads=2, nprobe=PROBES)
    assert np.isfinite(choice.errors[choice.model.name])
