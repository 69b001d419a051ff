"""What reading rows from disk takes: candidates are compared when their rows are not in memory."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.index.storage.mapped_lists import MappedLists
from hybridindex.partitioner import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler import ProfileRequest, host, profile_index
from hybridindex.profiler.hardware import file_system_of
from hybridindex.profiler.routed import time_routed
from hybridindex.tiers.host.rows_on_disk import RowsOnDisk
from tests.clustered import clustered, small_index
from tests.coded import with_codes
from tests.cold import PAGE, forget_lists, in_memory

QUICK = {"batches": (1, 4), "repeats": 6, "coverages": (0.2,), "threads": 1, "k": 5, "nprobe": 6, "rows": "mapped"}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "i"
    with with_codes(small_index(path, n=20_000, dim=64)) as found:
        yield found


@pytest.fixture(scope="module")
def queries():
    return clustered(160, 64, seed=9)


def profiled(index, queries, **asked):
    return profile_index(index.by_codes(), queries, ProfileRequest(**{**QUICK, **asked}))


def faults_of(profile):
    return [s for s in profile.stages if s.stage == "row_faults"]


def plan(profile):
    return make_plan(profile, PlanRequest.resolve(slo_ms=50, device_budget_bytes=0, row_cache_bytes=1 << 20))


def test_pages_are_counted_and_timed(index, queries):
    forget_lists(index)
    profile = profiled(index, queries)
    found = faults_of(profile)
    assert {s.batch for s in found if s.coverage == 0} == {1, 4}
    for sample in found:
        assert 0 < sample.probes <= len(index.mapped_lists()) // PAGE
        assert sample.work_bytes == sample.probes * PAGE
        assert sample.seconds > 0
    assert len({s.probes for s in found}) > 2
    notes = profile.notes["row_faults"]
    assert notes["page_bytes"] == PAGE
    assert notes["file_system"] == file_system_of(index.integrity.file)
    assert notes["batches"] == [1, 4]
    found = plan(profile)
    assert found.predicted_row_faults > 0
    assert "to read rows from disk" in found.explain()


def test_profiles_of_rows_in_memory_read_none(index, queries):
    profile = profiled(index, queries, rows="resident")
    assert not faults_of(profile)
    assert "row_faults" not in profile.notes
    with pytest.raises(ProfileError, match="profile again with rows 'mapped'"):
        plan(profile)


def test_what_stays_in_memory_is_said_and_not_timed(index, queries, monkeypatch, caplog):
    monkeypatch.setattr(MappedLists, "read_again", lambda *_: None)
    index.mapped_lists()[::PAGE].max()
    for kind, why in (("tmpfs", "rows on tmpfs stay in memory: it is memory"), ("ext4", "rows on ext4 stay in memory")):
        monkeypatch.setattr(host, "file_system_of", lambda _, kind=kind: kind)
        profile = profiled(index, queries)
        assert not faults_of(profile)
        assert profile.notes["row_faults"]["skipped"].startswith(why)
        assert why in caplog.text
        with pytest.raises(ProfileError, match=f"{why}.*; profile again"):
            plan(profile)


def test_a_file_that_the_system_says_nothing_of_is_not_timed(index, queries, monkeypatch):
    monkeypatch.setattr(MappedLists, "tells_memory", False)
    assert "does not say" in profiled(index, queries).notes["row_faults"]["skipped"]


def test_mended_lists_stay_as_they_are(index, queries, monkeypatch):
    monkeypatch.setattr(index.integrity, "mended", frozenset({3}))
    monkeypatch.setattr(RowsOnDisk, "forget_all", lambda _: pytest.fail("the good bytes are gone"))
    assert "damaged" in profiled(index, queries).notes["row_faults"]["skipped"]


def test_rows_that_are_scanned_are_in_memory(index, queries):
    with pytest.raises(InvalidInputError, match="rows is 'mapped' with a profile of rows"):
        profile_index(index, queries, ProfileRequest(**QUICK))
    with pytest.raises(InvalidInputError, match="rows is 'disk'; expected 'resident' or 'mapped'"):
        ProfileRequest(rows="disk")


def test_an_interrupted_profile_goes_on_behind_them(index, queries, tmp_path, monkeypatch):
    kept = tmp_path / "checkpoint"
    with monkeypatch.context() as patch:
        patch.setattr("hybridindex.profiler.checkpoint.Checkpoint.remove", lambda _: None)
        first = profile_index(index.by_codes(), queries, ProfileRequest(**QUICK), checkpoint=kept)
        patch.setattr("hybridindex.profiler.run.time_row_faults", lambda *_args, **_options: pytest.fail("again"))
        again = profile_index(index.by_codes(), queries, ProfileRequest(**QUICK), checkpoint=kept)
    assert again.stages == first.stages
    # How many queries the candidates were counted of is known of the first attempt alone.
    assert again.notes["candidates"] == first.notes["candidates"]


def test_routed_batches_are_timed_with_rows_on_disk_that_were_read_before(index, queries):
    profile = profiled(index, queries)
    forget_lists(index)
    held = np.ascontiguousarray(queries[80:])
    found = time_routed(
        index.by_codes(), profile, held, devices=(), device_budget_bytes=None, max_seconds=1, rows="mapped"
    )
    assert {s.stage for s in found} == {"batch"}


def test_the_pages_of_rows_are_forgotten_and_no_others(index):
    forget_lists(index)
    rows = RowsOnDisk(index)
    data = index.mapped_lists()
    data[::PAGE].max()
    lists = np.array([[2, 7, 9]])
    positions = lists << 32 | np.array([[0, 5, 1]])
    n = rows.forget(np.concatenate([positions, np.full((1, 3), -1)]))
    gone = ~in_memory(data)
    rows.close()
    assert 0 < gone.sum() == n <= 9
    assert rows.forget(np.full((1, 2), -1)) == 0
