from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
import pytest

import hybridindex.profiler.run as run_module
from hybridindex.errors import DeviceError, DeviceNotFoundError, InvalidInputError, ProfileError, ProfileMismatchError
from hybridindex.index import codec, from_faiss
from hybridindex.partitioner import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler import ProfileRequest, profile_index, searching
from hybridindex.profiler.access import access_counts, split_halves
from hybridindex.store import ControlStore
from tests.clustered import clustered, small_index

QUICK = {"batches": (1, 4), "repeats": 2, "coverages": (0.2,), "threads": 1, "k": 5}


def profiled(index, queries, *, progress=None, checkpoint=None, **asked):
    return profile_index(index, queries, ProfileRequest(**asked), progress=progress, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def profile(index, queries):
    return profiled(index, queries, nprobe=6, devices=["cpu"], device_budget_bytes=16 << 20, **QUICK)


def test_a_profile_holds_what_was_measured_and_where(profile, index, queries):
    assert profile.index_fingerprint == index.fingerprint
    assert (profile.nprobe, profile.k, profile.threads, profile.scanner) == (6, 5, 1, "native")
    assert (profile.metric, profile.codec, profile.dim, profile.count) == ("l2", "flat", 24, 3000)
    assert {s.stage for s in profile.stages} == {"coarse", "host_scan", "device_scan"}
    assert profile.transfers
    assert [p.nprobe for p in profile.recall] == [1, 2, 4, 6, 8, 16, 32]
    assert profile.access.fit_probes.shape == profile.access.held_probes.shape == (100, 6)
    np.testing.assert_array_equal(profile.list_bytes, index.list_bytes)
    assert profile.notes["queries"] == {"given": 200, "fit": 100, "held": 100}


def test_the_hot_order_comes_from_one_half_and_estimates_from_the_other(profile, index, queries):
    fit, held = split_halves(len(queries), 0)
    x = index.transform(queries)
    np.testing.assert_array_equal(profile.access.fit_probes, index.quantize(x[fit], 6)[0])
    np.testing.assert_array_equal(profile.access.held_probes, index.quantize(x[held], 6)[0])
    np.testing.assert_array_equal(profile.access.list_accesses, access_counts(profile.access.fit_probes, index.nlist))


def test_the_store_keeps_it_and_the_partitioner_plans_from_it(profile, tmp_path):
    with ControlStore.open(tmp_path / "control.sqlite") as store:
        kept = store.load_profile(store.save_profile(profile).id)
    assert replace(kept, id=None).stages == profile.stages
    assert kept.notes == profile.notes
    plan = make_plan(kept, PlanRequest.resolve(slo_ms=1000, device_budget_bytes=1 << 20))
    assert plan.verdict == "feasible"


def test_recall_target_chooses_the_smallest_nprobe(index, queries):
    made = profiled(index, queries, recall_target=0.9, **QUICK)
    by_nprobe = {p.nprobe: p.recall for p in made.recall}
    assert by_nprobe[made.nprobe] >= 0.9
    assert all(recall < 0.9 for nprobe, recall in by_nprobe.items() if nprobe < made.nprobe)
    assert made.nprobe - 1 in by_nprobe
    assert made.access.held_probes.shape[1] == made.nprobe


def test_nprobe_defaults_to_the_index_s(index, queries):
    assert profiled(index, queries[:64], **QUICK).nprobe == index.nprobe


def test_a_codec_of_the_host_skips_devices_and_says_so(tmp_path, queries, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 11)
    with small_index(tmp_path / "idx", codec="pqfs", metric="ip") as index:
        made = profiled(index, queries, devices=["cpu"], **QUICK)
    assert "host only" in made.notes["device cpu"]["skipped"]
    assert made.transfers == ()
    assert {s.stage for s in made.stages} == {"coarse", "host_scan"}


def test_a_device_that_fails_is_left_out_and_the_rest_stays(index, queries, monkeypatch, caplog):
    def fail(*_args, **_options):
        raise DeviceError("it burns")

    monkeypatch.setattr(run_module, "time_device", fail)
    with caplog.at_level(logging.WARNING):
        made = profiled(index, queries, devices=["cpu"], **QUICK)
    assert made.notes["device cpu"] == {"skipped": "it burns"}
    assert "it burns" in caplog.text
    assert made.stages


def test_one_host_scanner_measures_host_and_devices(index, queries, monkeypatch):
    made, open_one = [], searching.open_host_scanner
    monkeypatch.setattr(searching, "open_host_scanner", lambda *a, **k: made.append(open_one(*a, **k)) or made[-1])
    profile = profiled(index, queries, devices=["cpu"], **QUICK)
    assert "device_scan" in {s.stage for s in profile.stages}
    assert len(made) == 1


def test_queries_are_transformed_before_they_are_measured(tmp_path):
    import faiss

    vectors = clustered(1000, seed=1)
    made = faiss.index_factory(vectors.shape[1], "PCA10,IVF16,Flat")
    made.train(vectors)
    made.add(vectors)
    faiss.write_index(made, str(tmp_path / "made.faiss"))
    queries = clustered(80, seed=2)
    with from_faiss(tmp_path / "made.faiss", tmp_path / "idx") as index:
        profile = profiled(index, queries, nprobe=3, **QUICK)
        held = index.transform(queries[split_halves(80, 0)[1]])
        np.testing.assert_array_equal(profile.access.held_probes, index.quantize(held, 3)[0])
    assert (profile.dim, index.scan_dim) == (24, 10)


def test_history_is_added_with_less_weight(profile, index, queries):
    made = profiled(index, queries, nprobe=6, history=profile, history_decay=0.5, **QUICK)
    np.testing.assert_allclose(made.access.list_accesses, 1.5 * profile.access.list_accesses)
    assert made.notes["access"]["history"]["created_at"] == profile.created_at


def test_history_of_another_index_is_refused(profile, index, queries):
    with pytest.raises(ProfileMismatchError, match="other"):
        profiled(index, queries, history=replace(profile, index_fingerprint="other"), **QUICK)


def test_notes_are_kept(index, queries):
    made = profiled(index, queries, notes={"source": "a log"}, **QUICK)
    assert made.notes["source"] == "a log"


def test_batches_larger_than_half_the_queries_are_noted(index, queries):
    made = profiled(index, queries, **{**QUICK, "batches": (1, 128)})
    assert made.notes["batches_too_large"] == [128]
    assert {s.batch for s in made.stages} == {1}


def test_progress_tells_every_stage(index, queries):
    told = []
    profiled(index, queries, progress=lambda stage, done, total: told.append((stage, done, total)), **QUICK)
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["recall", "access", "host"]
    assert all(0 <= done <= total for _, done, total in told)


@pytest.mark.parametrize("stage", ["access", "host", "device cpu"])
def test_an_interrupted_profile_resumes_after_the_stages_it_finished(index, queries, tmp_path, monkeypatch, stage):
    path = tmp_path / "checkpoint"
    options = {"checkpoint": path, "devices": ["cpu"], "device_budget_bytes": 16 << 20, **QUICK}

    def interrupt(name, done, total):
        if name == stage and (done, total) == (1, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiled(index, queries, progress=interrupt, **options)
    assert path.exists()

    def not_again(*_args, **_options):
        raise AssertionError("a finished stage was measured again")

    finished = ["search_exhaustively", "sample_access", "time_host", "time_device"]
    for name in finished[: ["access", "host", "device cpu"].index(stage) + 2]:
        monkeypatch.setattr(run_module, name, not_again)
    made = profiled(index, queries, **options)
    assert {s.stage for s in made.stages} == {"coarse", "host_scan", "device_scan"}
    assert made.access.held_probes.dtype == np.int32
    # Whoever asked may have more to measure.
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_of_other_queries_is_not_used(index, queries, tmp_path):
    path = tmp_path / "checkpoint"

    def interrupt(name, done, total):
        if name == "host":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiled(index, queries, checkpoint=path, progress=interrupt, **QUICK)
    other = clustered(200, seed=77)
    made = profiled(index, other, checkpoint=path, **QUICK)
    held = index.transform(other[split_halves(200, 0)[1]])
    np.testing.assert_array_equal(made.access.held_probes, index.quantize(held, index.nprobe)[0])


def _interrupted(index, queries, path, **more):
    def interrupt(name, done, total):
        if name == "host" and (done, total) == (1, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiled(index, queries, checkpoint=path, progress=interrupt, **{**QUICK, **more})


def test_a_resumed_profile_says_when_and_at_what_load_its_stages_were_measured(
    index, queries, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("hybridindex.profiler.checkpoint.load_average", lambda: 999.0)
    path = tmp_path / "checkpoint"
    _interrupted(index, queries, path)
    monkeypatch.setattr("hybridindex.profiler.checkpoint.load_average", lambda: 0.0)
    made = profiled(index, queries, checkpoint=path, **QUICK)
    assert set(made.notes["resumed"]) == {"recall", "access", "host"}
    assert made.notes["resumed"]["host"]["load_average"] == 999.0
    assert any("host was measured at" in said and "999" in said for said in made.notes["warnings"])
    assert "host was measured at" in caplog.text
    fresh = profiled(index, queries, **QUICK)
    assert fresh.notes["resumed"] == {}


def test_stages_of_last_week_are_measured_again(index, queries, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    _interrupted(index, queries, path)
    now = time.time()
    monkeypatch.setattr("hybridindex.profiler.checkpoint.time.time", lambda: now + 7 * 86_400)
    assert profiled(index, queries, checkpoint=path, **QUICK).notes["resumed"] == {}


@pytest.mark.parametrize("changed", ["policy", "version"])
def test_a_checkpoint_of_another_wait_policy_or_version_is_not_used(index, queries, tmp_path, monkeypatch, changed):
    path = tmp_path / "checkpoint"
    _interrupted(index, queries, path)
    if changed == "policy":
        monkeypatch.setattr(run_module, "omp_wait_policy", lambda: "ACTIVE")
    else:
        here = run_module.hardware_info()
        other = replace(here, versions={**here.versions, "hybridindex": "0.0.0"})
        monkeypatch.setattr(run_module, "hardware_info", lambda: other)
    assert profiled(index, queries, checkpoint=path, **QUICK).notes["resumed"] == {}


def test_nothing_of_an_older_recall_is_used_after_a_new_one(index, queries, tmp_path, monkeypatch):
    """Probes and times are those of the nprobe that recall chose."""
    path = tmp_path / "checkpoint"
    _interrupted(index, queries, path)
    get = run_module.Checkpoint.get
    monkeypatch.setattr(
        run_module.Checkpoint, "get", lambda self, stage: None if stage == "recall" else get(self, stage)
    )
    assert profiled(index, queries, checkpoint=path, **QUICK).notes["resumed"] == {}


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda q: q[:63], ProfileError, "63 calibration queries"),
        (lambda q: q[:, :5], InvalidInputError, "shape"),
        (lambda q: q.astype(np.float64), InvalidInputError, "float64"),
        (lambda q: np.where(np.arange(24) == 3, np.nan, q).astype(np.float32), InvalidInputError, "NaN"),
    ],
)
def test_unusable_queries_are_refused(index, queries, spoil, error, said):
    with pytest.raises(error, match=said):
        profiled(index, spoil(queries), **QUICK)


def test_a_missing_device_is_named_before_anything_is_measured(index, queries):
    told = []
    with pytest.raises(DeviceNotFoundError, match="cuda:99"):
        profiled(index, queries, devices=["cuda:99"], progress=lambda *facts: told.append(facts), **QUICK)
    assert told == []


def test_one_query_alone_is_refused_by_its_shape(index, queries):
    with pytest.raises(InvalidInputError, match=r"queries has shape \(24,\), one query; expected \(n, 24\)"):
        profiled(index, queries[0], **QUICK)


def test_a_checkpoint_of_other_threads_is_not_used(index, queries, tmp_path, monkeypatch):
    """Times of one thread would stand in a profile of two."""
    path = tmp_path / "checkpoint"

    def interrupt(name, done, total):
        if name == "host" and (done, total) == (1, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiled(index, queries, checkpoint=path, progress=interrupt, **QUICK)
    timed = []
    time_host = run_module.time_host
    monkeypatch.setattr(run_module, "time_host", lambda *a, **o: timed.append(1) or time_host(*a, **o))
    profiled(index, queries, checkpoint=path, **{**QUICK, "threads": 2})
    assert timed
