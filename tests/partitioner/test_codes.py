"""Plans of codes: what they take beside plans of rows, and what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.index.rabitq.spec import BLOCK_ROWS
from hybridindex.paging import CODE_PAGE_BYTES, DEFAULT_PAGE_BYTES, usual_page_bytes
from hybridindex.partitioner import make_plan
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.models import coverage
from hybridindex.partitioner.models.latency import fit_rerank
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import problem_of, rate_in_words, solve
from hybridindex.types import StageSample
from tests.examples import examples
from tests.partitioner.synthetic import make_profile, with_candidates

#: 768 dimensions, flat, and a bit each with the factors of ip.
ROW, CODE = 3072, 100
BUDGET = 16 << 30


def profiles(*, nlist=512, mean_size=4000, seed=3):
    """Of one access log: of rows, and of codes, which are scanned at the speed of bytes and have more fixed work."""
    shape = {"nlist": nlist, "n": 600, "nprobe": 16, "skew": 1.2, "seed": seed, "mean_size": mean_size}
    rows = make_profile(**shape, code_size=ROW, device_per_byte_s=5e-12)
    codes = make_profile(**shape, code_size=CODE, device_per_byte_s=5e-12, coarse_s=1.2e-4)
    blocks = -(-codes.list_sizes // BLOCK_ROWS)
    codes = replace(
        codes,
        codec="rabitq1",
        scanner="rabitq",
        index_fingerprint="codes",
        list_bytes=blocks * (BLOCK_ROWS * CODE),
        notes={"codes": {"bits": 1, "candidates": 230, "recall_loss": 0.005, "row_bytes": rows.nbytes}},
    )
    np.testing.assert_array_equal(codes.access.held_probes, rows.access.held_probes)
    return rows, codes


def plan(profile, slo_ms, **asked):
    page = DEFAULT_PAGE_BYTES if profile.bits is None else CODE_PAGE_BYTES
    request = PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=BUDGET, rate_qps=20.0, page_bytes=page, **asked)
    return make_plan(profile, request)


def test_the_block_of_codes_is_one():
    assert coverage._BLOCK_ROWS == BLOCK_ROWS


@pytest.mark.parametrize("fixed", [0.1, 0.3, 0.6])
def test_a_plan_of_codes_takes_an_eighth_of_the_bytes(fixed):
    rows, codes = profiles()
    # The tightest SLO that this coverage of rows meets: less would not do.
    nearest = plan(rows, 1e-3, coverage=fixed).nearest_slo_ms
    of_rows, of_codes = plan(rows, nearest), plan(codes, nearest)
    assert of_rows.feasible
    assert of_codes.feasible
    assert 0.9 * fixed <= of_rows.coverage <= 0.62
    assert of_codes.device_bytes <= of_rows.device_bytes / 8
    # The same lists, scratch aside, which follows from the budget.
    same = plan(codes, nearest, coverage=of_rows.coverage)
    assert set(same.resident_lists) == set(of_rows.resident_lists)
    lists_of_rows, lists_of_codes = (each.device_bytes - each.request.scratch[0] for each in (of_rows, same))
    assert 0 < lists_of_codes <= lists_of_rows / 20


def test_scratch_follows_the_codes():
    mib = 1 << 20

    def asked(code_bytes, budget=BUDGET):
        return PlanRequest.resolve(
            slo_ms=5, device_budget_bytes=budget, n_devices=2, fixed_bytes=100, code_bytes=code_bytes
        )

    for code_bytes, scratch in ((0, 64), (100 * mib, 25), (mib, 4), (1 << 40, 64)):
        request = asked(code_bytes)
        assert request.scratch == (scratch * mib + 100,) * 2
        assert request.fixed_bytes == 100
        assert request.within((BUDGET // 2, 8 * mib)).scratch == (scratch * mib + 100, mib + 100)
        assert PlanRequest.from_data(request.to_data()) == request
        assert ("code_bytes" in request.to_data()) == (code_bytes > 0)
    assert asked(100 * mib, 8 * mib).scratch == (mib + 100,) * 2


def test_a_plan_of_codes_says_so():
    rows, codes = profiles(nlist=64)
    found = plan(codes, 1000.0, coverage=0.5)
    assert found.bits == 1
    line = next(line for line in found.explain().splitlines() if line.startswith("Placed: "))
    assert "codes, 1 bit: " in line
    held, total = int(codes.list_bytes[found.resident_lists].sum()), codes.nbytes
    assert f"{held / 2**20:.2f} MiB of {total / 2**20:.2f} MiB, in place of " in line
    assert "of rows, which stay on the host" in line
    of_rows = plan(rows, 1000.0, coverage=0.5)
    assert of_rows.bits is None
    assert "codes" not in of_rows.explain()


def test_pages_of_codes_hold_whole_blocks():
    _, codes = profiles(nlist=64)
    found = plan(codes, 1000.0, coverage=1.0)
    geometry = found.analysis.curve.geometry
    assert (geometry.code_size, geometry.group_rows, geometry.rows_per_page % BLOCK_ROWS) == (CODE, BLOCK_ROWS, 0)
    assert geometry.page_bytes <= CODE_PAGE_BYTES
    pages = -(-codes.list_sizes // geometry.rows_per_page)
    assert found.device_bytes == int(pages.sum()) * geometry.page_bytes + found.request.scratch[0]


def test_an_analysis_takes_the_pages_of_what_was_profiled():
    """What-ifs and simulations name none; of codes they used to take those of rows, four times the bytes."""
    rows, codes = profiles(nlist=64)
    for profile, usual in ((rows, usual_page_bytes(rows.codec, ROW, rows.list_sizes)), (codes, CODE_PAGE_BYTES)):
        assert analyse(profile).curve.geometry == analyse(profile, page_bytes=usual).curve.geometry


@pytest.fixture(scope="module")
def mixed():
    """Codes with counted candidates, whose exact distances take as long as the scan."""
    _, codes = profiles(nlist=128, mean_size=400)
    return analyse(with_candidates(codes, ROW), page_bytes=CODE_PAGE_BYTES)


def ask(analysis, slo_ms, **asked):
    given = {"device_budget_bytes": BUDGET, "rate_qps": 100.0, "page_bytes": CODE_PAGE_BYTES, **asked}
    return make_plan(analysis.profile, PlanRequest.resolve(slo_ms=slo_ms, **given), analysis=analysis)


def without_rows(analysis):
    """Of the same timings, with no candidate counted."""
    access = replace(analysis.profile.access, list_candidates=None, held_candidates=None)
    return analyse(replace(analysis.profile, access=access), page_bytes=CODE_PAGE_BYTES)


def test_a_path_takes_each_piece_once_and_never_gives_one_back(mixed):
    found = problem_of(mixed, PlanRequest.resolve(slo_ms=1, device_budget_bytes=BUDGET))
    assert len(found.paths) > 1
    for path in found.paths:
        steps = np.diff(path.lists) + np.diff(path.rows)
        np.testing.assert_array_equal(steps, 1)
        lists, rows = path.pieces(np.arange(steps.size))
        np.testing.assert_array_equal(lists, np.arange(path.lists[-1]))
        np.testing.assert_array_equal(rows, np.arange(path.rows[-1]))
        pages = mixed.curve.prefix_pages[path.lists] + mixed.curve.rows.prefix_pages[path.rows]
        np.testing.assert_array_equal(path.pages, pages)
    assert found.paths[0].rows[-1] == 0
    assert found.paths[1].rows[-1] == mixed.curve.rows.n_lists


def test_rows_meet_what_codes_alone_cannot(mixed):
    """Once all codes are on devices only the exact distances are left on the host."""
    fixed = ask(mixed, 1e-3, coverage=1.0)
    slo_ms = fixed.nearest_slo_ms * 0.97
    alone = ask(without_rows(mixed), slo_ms)
    both = ask(mixed, slo_ms)
    assert (alone.feasible, both.feasible) == (False, True)
    assert both.resident_rows.size > 0
    assert both.predicted_row_hit_rate > 0
    np.testing.assert_array_equal(np.flatnonzero(both.row_device >= 0), np.sort(both.resident_rows))
    held = both.bytes_by_precision
    assert sum(held.values()) + both.request.scratch[0] == both.device_bytes
    assert held["rows"] == sum(
        -(-int(mixed.profile.list_sizes[one]) * ROW // both.page_bytes) * both.page_bytes for one in both.resident_rows
    )
    line = next(line for line in both.explain().splitlines() if line.startswith("Placed: "))
    assert f"; rows of {both.resident_rows.size} lists: " in line
    assert f", which compare {both.predicted_row_hit_rate:.1%} of the candidates; " in line
    assert "stay on the host" not in line
    assert "no device computed exact distances" not in both.explain()
    unable = replace(
        mixed.profile, stages=tuple(s for s in mixed.profile.stages if s.stage != "rerank" or not s.device)
    )
    on_host = ask(analyse(unable), slo_ms)
    assert (on_host.feasible, on_host.resident_rows.size) == (False, 0)
    assert "no device computed exact distances: rows stay on the host" in on_host.explain()


def test_a_rate_that_no_slo_meets_is_told_of_the_path_that_sustains_most(mixed):
    asked = ask(mixed, 1e3, rate_qps=1e9)
    assert (asked.feasible, asked.nearest_slo_ms) == (False, None)
    assert asked.resident_rows.size > 0
    most = asked.max_sustainable_qps
    for path in problem_of(mixed, asked.request).paths:
        problem = problem_of(mixed, asked.request).along(path)
        assert problem.max_qps(problem.work_at(path.useful), problem.prefix_bytes(path.useful), math.inf) <= most * 1.01
    assert not ask(mixed, 1e6, rate_qps=most * 1.2).feasible
    # The reason has the rate of what the solver chose, rows included.
    problem = problem_of(mixed, asked.request)
    found = solve(problem, 1.0)
    along = problem.along(found.path)
    assert found.rows
    sustained = along.max_qps(along.work_at(found.place), found.device_bytes, math.inf)
    assert f"search sustains {rate_in_words(sustained)} where" in found.reason


def test_the_nearest_slo_is_met_on_several_devices(mixed):
    """All devices together may have room for a list that fits on none of them."""
    tried = 0
    for budget in np.geomspace(1e4, 3e6, 40).astype(int).tolist():
        asked = {"rate_qps": 50.0, "n_devices": 2, "scratch_bytes": 0, "device_budget_bytes": budget}
        missed = ask(mixed, 0.3, **asked)
        if missed.nearest_slo_ms is not None:
            assert ask(mixed, missed.nearest_slo_ms, **asked).feasible, budget
            tried += 1
    assert tried > 30


@examples(60)
@given(slo_ms=st.floats(0.3, 8), rate=st.floats(1, 8000), looser=st.floats(1, 3), n_devices=st.integers(1, 2))
def test_a_looser_question_never_takes_more_bytes(mixed, slo_ms, rate, looser, n_devices):
    tight = ask(mixed, slo_ms, rate_qps=rate, n_devices=n_devices)
    for loose in (
        ask(mixed, slo_ms * looser, rate_qps=rate, n_devices=n_devices),
        ask(mixed, slo_ms, rate_qps=rate / looser, n_devices=n_devices),
    ):
        if tight.feasible:
            assert loose.feasible
            assert loose.device_bytes <= tight.device_bytes


@examples(60)
@given(slo_ms=st.floats(0.3, 8), rate=st.floats(1, 8000), budget=st.integers(0, 1 << 27), more=st.floats(1, 4))
def test_more_budget_never_hurts_the_verdict(mixed, slo_ms, rate, budget, more):
    small, large = (
        ask(mixed, slo_ms, rate_qps=rate, device_budget_bytes=nbytes, scratch_bytes=0)
        for nbytes in (budget, int(budget * more))
    )
    for found in (small, large):
        assert found.device_bytes <= found.request.budgets[0]
    if small.feasible:
        assert large.feasible
        # A budget that binds is filled. What fills it may happen to answer in time with fewer bytes than the search
        # finds, whose own bytes do not grow.
        if solve(problem_of(mixed, small.request), small.request.search_slo_s).feasible:
            assert large.device_bytes <= small.device_bytes


@examples(60)
@given(slo_ms=st.floats(0.3, 8), rate=st.floats(1, 8000))
def test_rows_beside_codes_never_cost_bytes(mixed, slo_ms, rate):
    request = PlanRequest.resolve(slo_ms=slo_ms, rate_qps=rate, device_budget_bytes=BUDGET, page_bytes=CODE_PAGE_BYTES)
    problem = problem_of(mixed, request)
    alone = problem_of(mixed, request)
    alone.__dict__["paths"] = problem.paths[:1]
    both, codes = solve(problem, slo_ms / 1e3), solve(alone, slo_ms / 1e3)
    assert both.feasible >= codes.feasible
    if codes.feasible:
        assert both.device_bytes <= codes.device_bytes


def test_a_record_restores_a_plan_with_rows(mixed):
    plan = ask(mixed, 0.9 * ask(mixed, 1e-3, coverage=1.0).nearest_slo_ms, n_devices=2)
    assert plan.resident_rows.size
    again = Plan.from_record(plan.to_record(), mixed.profile)
    assert again.predicted_latency_ms(8, 90) == plan.predicted_latency_ms(8, 90)
    assert again.explain() == plan.explain()
    assert again.trace[-1].rows == plan.resident_rows.size
    assert set(plan.row_device[plan.resident_rows]) == {0, 1}


def test_rows_compare_what_the_held_back_queries_have_there(mixed):
    curve, access = mixed.curve, mixed.profile.access
    lists = np.array([3, 50, 7])
    hits, prefix = curve.rows.of_lists(lists)
    there = np.where(np.isin(access.held_probes, lists), access.held_candidates, 0).sum()
    assert hits.sum() == pytest.approx(there)
    assert prefix is None
    for count in (0, 1, 17, 60, curve.rows.n_lists):
        of_lists, prefix = curve.rows.of_lists(curve.rows.order[:count])
        np.testing.assert_allclose(curve.rows.at(count), of_lists)
        assert prefix == count
        chosen = np.where(np.isin(access.held_probes, curve.rows.order[:count]), access.held_candidates, 0).sum()
        assert of_lists.sum() == pytest.approx(chosen)
    assert curve.rows.every.sum() == pytest.approx(access.held_candidates.sum())


def test_devices_share_the_comparisons(mixed):
    work = mixed.curve.at(0, mixed.curve.rows.n_lists)
    free = replace(mixed.latency, rerank=mixed.latency.rerank.scaled(0.0))
    one, two = (replace(free, n_devices=n).parts(mixed.curve, work, 8).rerank_s for n in (1, 2))
    fixed_s = free.device_rerank.overhead_s + 8 * free.device_rerank.per_query_s
    np.testing.assert_allclose(two - fixed_s, (one - fixed_s) / 2)
    assert (one > fixed_s).all()


def test_exact_distances_count_in_every_latency(mixed):
    work, batch = mixed.curve.at(0), 8
    without = replace(mixed.latency, rerank=None)
    added_s = mixed.latency.parts(mixed.curve, work, batch).rerank_s.mean()
    parts = [model.parts(mixed.curve, work, batch).total().mean() for model in (mixed.latency, without)]
    means = [model.both(mixed.curve, work, batch, 90)[1] for model in (mixed.latency, without)]
    for with_s, without_s in (parts, means):
        assert with_s - without_s == pytest.approx(added_s, rel=0.05)
    # Their own timings scatter, and those of the scans do not.
    ratios = np.linspace(0.5, 1.5, mixed.latency.rerank.ratios.size)
    wide = replace(mixed.latency, rerank=replace(mixed.latency.rerank, ratios=ratios))
    assert wide.both(mixed.curve, work, batch, 90)[0] > 1.05 * mixed.latency.both(mixed.curve, work, batch, 90)[0]


def test_the_slowest_device_is_planned_for():
    slow, fast = (
        [
            StageSample(stage="rerank", batch=b, seconds=1e-5 + each_s * n * b, probes=n * b, device=name)
            for b in (1, 4, 16)
            for n in (20, 50)
        ]
        for name, each_s in (("slow", 1e-6), ("fast", 1e-8))
    )
    for samples in (slow + fast, fast + slow):
        assert fit_rerank(samples, on_device=True, levels=4).per_candidate_s == pytest.approx(1e-6, rel=0.01)
    # What takes time besides the candidates counts, too.
    launches, copies = (
        [
            StageSample(stage="rerank", batch=b, seconds=fixed_s + each_s * n * b, probes=n * b, device=name)
            for b in (1, 4, 16)
            for n in (20, 50)
        ]
        for name, fixed_s, each_s in (("launches", 1e-2, 0.0), ("copies", 1e-6, 1e-8))
    )
    for samples in (launches + copies, copies + launches):
        assert fit_rerank(samples, on_device=True, levels=4).overhead_s == pytest.approx(1e-2, rel=0.01)


def test_rows_come_in_the_order_of_candidates_per_row(mixed):
    counts, sizes = mixed.profile.access.list_candidates, mixed.profile.list_sizes
    each = (counts / np.maximum(sizes, 1))[mixed.curve.rows.order]
    assert (np.diff(each) <= 0).all()
    assert (np.diff(counts[mixed.curve.rows.order]) > 0).any()


def test_devices_get_even_shares_of_the_bytes_read(mixed):
    found = ask(mixed, 0.9 * ask(mixed, 1e-3, coverage=1.0).nearest_slo_ms, n_devices=2)
    access, profile = mixed.profile.access, mixed.profile
    codes = access.list_accesses * profile.list_bytes
    rows = access.list_candidates * ROW
    loads = [codes[found.list_device == one].sum() + rows[found.row_device == one].sum() for one in (0, 1)]
    assert found.resident_rows.size
    assert found.imbalance == pytest.approx(max(loads) / np.mean(loads))


def test_the_path_of_fewest_bytes_counts(mixed):
    """Codes alone are not least where rows are needed early, as on the path on which comparisons weigh most."""
    least = set()
    for slo_ms in np.geomspace(0.28, 1.2, 24).tolist():
        request = PlanRequest.resolve(
            slo_ms=slo_ms, rate_qps=100, device_budget_bytes=BUDGET, page_bytes=CODE_PAGE_BYTES, scratch_bytes=0
        )
        problem, nbytes = problem_of(mixed, request), []
        for path in problem.paths:
            alone = problem_of(mixed, request)
            alone.__dict__["paths"] = (path,)
            found = solve(alone, slo_ms / 1e3)
            nbytes.append(found.device_bytes if found.feasible else math.inf)
        if min(nbytes) < math.inf:
            assert solve(problem, slo_ms / 1e3).device_bytes == min(nbytes)
            least.add(nbytes.index(min(nbytes)))
    assert {0, 3} <= least


def test_a_share_is_filled_with_what_answers_soonest(mixed):
    slo_ms = 1.1 * ask(mixed, 1e-3, coverage=1.0).nearest_slo_ms
    needed = ask(mixed, slo_ms, scratch_bytes=0)
    assert needed.device_bytes > 0
    best = set()
    for fill_bytes in np.geomspace(2 * needed.device_bytes, 50 * needed.device_bytes, 6).astype(int).tolist():
        found = ask(mixed, slo_ms, fill_bytes=fill_bytes, scratch_bytes=0)
        problem = problem_of(mixed, found.request)
        steps = [
            problem.along(path).prefix_step(
                min(int(np.searchsorted(path.pages, fill_bytes // found.page_bytes, side="right")) - 1, path.useful),
                found.request.search_slo_s,
            )
            for path in problem.paths
        ]
        responses = [step.response_s for step in steps]
        assert found.trace[-1].response_s == min(responses)
        best.add(max(responses) > min(responses))
    assert True in best
