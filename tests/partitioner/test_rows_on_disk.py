"""Plans of an index whose rows are on disk: pages that are read count, and old profiles say that they cannot tell."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.paging import CODE_PAGE_BYTES
from hybridindex.partitioner import make_plan
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.forms import paths_of
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.replan import PlanChanges, replan
from hybridindex.plans.stored import plan_summary
from hybridindex.report.tables import key_numbers
from tests.examples import examples
from tests.partitioner.synthetic import make_profile, with_candidates, with_row_faults

ROW = 1024
ROWS = {"nlist": 96, "n": 600, "nprobe": 12, "skew": 1.2, "mean_size": 300, "code_size": 36}


@pytest.fixture(scope="module")
def profile():
    codes = replace(make_profile(**ROWS, device_per_byte_s=5e-12), codec="rabitq1", scanner="rabitq")
    return with_row_faults(with_candidates(codes, ROW))


@pytest.fixture(scope="module")
def analysis(profile):
    return analyse(profile, page_bytes=CODE_PAGE_BYTES)


def request(row_cache_bytes=None, slo_ms=1000.0, **asked):
    given = {"device_budget_bytes": 1 << 30, "rate_qps": 20.0, "page_bytes": CODE_PAGE_BYTES, **asked}
    return PlanRequest.resolve(slo_ms=slo_ms, row_cache_bytes=row_cache_bytes, **given)


def plan(analysis, *args, **asked):
    return make_plan(analysis.profile, request(*args, **asked), analysis=analysis)


def row_bytes(profile):
    return (ROW + 8) * int(profile.list_sizes.sum())


def test_pages_that_are_read_count(analysis, profile):
    warm, cold = plan(analysis, coverage=0.1), plan(analysis, 0, coverage=0.1)
    assert (warm.predicted_row_faults, plan(analysis, 2 * row_bytes(profile)).predicted_row_faults) == (None, 0)
    assert cold.predicted_row_faults > 50
    added = cold.predicted_latency_ms(4) - warm.predicted_latency_ms(4)
    assert added == pytest.approx(0.2 + 0.03 * 4 * cold.predicted_row_faults, rel=0.1)
    assert cold.max_sustainable_qps < warm.max_sustainable_qps / 4


def test_a_target_that_rows_in_memory_meet_can_be_missed_with_rows_on_disk(analysis):
    nearest = plan(analysis, 1 << 20, slo_ms=1e-3, device_budget_bytes=0).nearest_slo_ms
    assert not plan(analysis, 1 << 20, slo_ms=nearest / 2, device_budget_bytes=0).feasible
    assert plan(analysis, slo_ms=nearest / 2, device_budget_bytes=0).feasible


def test_rows_that_would_be_read_from_disk_come_before_codes(analysis):
    def in_first_half(nbytes):
        configured = analysis.configured(page_bytes=CODE_PAGE_BYTES, n_devices=1, row_cache_bytes=nbytes)
        return [int(path.rows[path.useful // 2]) for path in paths_of(configured.curve, configured.latency)[1:]]

    warm, cold = in_first_half(None), in_first_half(1 << 20)
    assert all(more > few for few, more in zip(warm, cold, strict=True))


def test_rows_come_to_devices_where_they_would_be_read_from_disk(analysis):
    asked = {"slo_ms": 4.0, "device_budget_bytes": 1 << 30}
    warm, cold = plan(analysis, **asked), plan(analysis, 1 << 20, **asked)
    assert not warm.resident_rows.size
    assert cold.resident_rows.size
    assert cold.feasible


@given(shares=st.lists(st.floats(0, 1.1), min_size=2, max_size=4), slo_ms=st.floats(1.0, 30.0))
@examples(20)
def test_more_memory_never_hurts(analysis, profile, shares, slo_ms):
    total = row_bytes(profile)
    found = [plan(analysis, int(share * total), slo_ms=slo_ms, coverage=0.1) for share in sorted(shares)]
    rates = [each.max_sustainable_qps for each in found]
    assert all(more >= less * (1 - 1e-6) for less, more in itertools.pairwise(rates))
    assert [each.feasible for each in found] == sorted(each.feasible for each in found)


def test_a_plan_says_what_is_read(analysis, profile):
    found = plan(analysis, 4 << 20, coverage=0.1)
    line = next(line for line in found.explain().splitlines() if line.startswith("Latency"))
    assert "ms of them to read rows from disk, " in line
    assert f"{found.predicted_row_faults:.3g} pages a query at 30 us" in line
    assert "with 4.00 MiB of memory for " in line
    assert "beyond what was measured" not in line
    summary = plan_summary(found)
    assert summary["row_cache_bytes"] == 4 << 20
    assert summary["predicted_row_faults"] == found.predicted_row_faults > 0
    assert any("Rows on disk" in row[0] for row in key_numbers(found).rows)
    without = plan(analysis, coverage=0.1)
    assert "from disk" not in without.explain()
    assert not any("Rows on disk" in row[0] for row in key_numbers(without).rows)


def test_more_pages_than_were_measured_are_said(profile):
    few = [replace(s, probes=s.probes // 20) if s.stage == "row_faults" else s for s in profile.stages]
    found = plan(analyse(replace(profile, stages=tuple(few))), 0, coverage=0.0)
    assert "beyond what was measured" in found.explain()


def test_a_profile_that_cannot_tell_is_refused(analysis, profile):
    old = replace(profile, stages=tuple(s for s in profile.stages if s.stage != "row_faults"))
    uncounted = replace(profile, access=replace(profile.access, list_candidates=None, held_candidates=None))
    for without in (old, uncounted):
        with pytest.raises(ProfileError, match="did not measure what reading rows from disk takes; profile again"):
            plan(analyse(without), 1 << 20)
    assert plan(analyse(old), coverage=0.1).feasible
    in_memory = replace(old, notes={**old.notes, "row_faults": {"skipped": "rows on tmpfs stay in memory"}})
    with pytest.raises(ProfileError, match=r"takes \(rows on tmpfs stay in memory\); profile again"):
        plan(analyse(in_memory), 1 << 20)
    with pytest.raises(ProfileError, match="row_cache_bytes is 5, and the profile is of rows"):
        plan(analyse(make_profile(**ROWS)), 5)
    for wrong in (-1, 1.5, True, "1GiB", math.inf):
        with pytest.raises(InvalidInputError, match=r"row_cache_bytes is .*; give whole bytes >= 0, or None"):
            request(wrong)


def test_plans_are_stored_and_read(analysis, profile):
    for nbytes in (None, 0, 3 << 20):
        found = plan(analysis, nbytes, slo_ms=8.0)
        record = found.to_record()
        assert ("row_cache_bytes" in record["data"]["request"]) == (nbytes is not None)
        again = Plan.from_record(record, profile)
        assert again.request == found.request
        assert again.predicted_row_faults == found.predicted_row_faults
        assert again.predicted_latency_ms(4) == found.predicted_latency_ms(4)
        np.testing.assert_array_equal(again.resident_rows, found.resident_rows)


def test_the_next_plan_keeps_the_memory_for_rows():
    assert replan(request(7 << 20), PlanChanges(slo_ms=3.0), None).row_cache_bytes == 7 << 20
    assert replan(request(7 << 20), PlanChanges(row_cache_bytes=0), None).row_cache_bytes == 0
    assert replan(request(7 << 20), PlanChanges(row_cache_bytes="all"), None).row_cache_bytes is None
    assert replan(request(), PlanChanges(slo_ms=3.0), None).row_cache_bytes is None
