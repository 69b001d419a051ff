"""Bytes of devices between several indexes: within the budget, monotone in it, as good as any other way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.partitioner import division
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.division import Choice, Share, choices_of, divide
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.types import LLMProfile
from tests.examples import examples
from tests.partitioner.synthetic import make_profile

MIB = 1 << 20
Asked = list[tuple[Analysis, PlanRequest]]


@pytest.fixture(scope="module")
def several(analysis: Analysis) -> list[Analysis]:
    """Indexes of other sizes and skews."""
    skewed = make_profile(nlist=400, n=600, nprobe=24, seed=3, noise=0.05, skew=1.5)
    flat = make_profile(nlist=128, n=400, nprobe=8, seed=9, noise=0.2, skew=0.3, device_per_byte_s=2e-11)
    return [analysis, analyse(skewed), analyse(flat)]


def request(slo_ms: float = 3.0, rate: float | None = 500.0, **changes: object) -> PlanRequest:
    return PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=1, rate_qps=rate, **changes)  # type: ignore[arg-type]


def worth(shares: tuple[Share, ...]) -> tuple[float, ...]:
    return tuple(sum(parts) for parts in zip(*(share.choice.worth for share in shares), strict=True))


def requests(n: int) -> st.SearchStrategy[list[PlanRequest]]:
    one = st.builds(request, slo_ms=st.floats(0.3, 8), rate=st.one_of(st.none(), st.floats(1, 5000)))
    return st.lists(one, min_size=n, max_size=n)


budgets = st.lists(st.integers(0, 100 * MIB), min_size=1, max_size=3)


@examples(60)
@given(wanted=requests(3), budget=budgets)
def test_shares_stay_within_the_budget_of_each_device(several, wanted, budget) -> None:
    shares = divide(list(zip(several, wanted, strict=True)), budget)
    for device, nbytes in enumerate(budget):
        assert sum(share.budgets[device] for share in shares) <= nbytes
    for share in shares:
        assert share.request.budgets == share.budgets
        assert share.choice.nbytes <= sum(share.budgets) + len(budget) * 2  # each device rounds down


@examples(40)
@given(wanted=requests(2), budget=st.integers(0, 60 * MIB), more=st.integers(0, 60 * MIB))
def test_a_larger_budget_is_never_worth_less(several, wanted, budget, more) -> None:
    asked: Asked = list(zip(several, wanted, strict=False))
    assert worth(divide(asked, (budget + more,))) >= worth(divide(asked, (budget,)))


@examples(40)
@given(wanted=requests(3), budget=st.integers(0, 100 * MIB))
def test_it_is_at_least_as_good_as_equal_shares(several, wanted, budget) -> None:
    asked: Asked = list(zip(several, wanted, strict=True))
    equal = [
        max((c for c in choices_of(analysis, each, (budget,)) if c.nbytes <= budget // 3), key=lambda c: c.nbytes)
        for analysis, each in asked
    ]
    total = tuple(sum(parts) for parts in zip(*(choice.worth for choice in equal), strict=True))
    assert worth(divide(asked, (budget,))) >= total


@pytest.mark.parametrize("budget_mib", [0, 1, 3, 10, 30, 100])
@pytest.mark.parametrize("rates", [(500.0, 500.0, 500.0), (2000.0, 10.0, None), (9000.0, 800.0, 20_000.0)])
def test_it_is_as_good_as_trying_every_combination(several, rates, budget_mib, monkeypatch) -> None:
    monkeypatch.setattr(division, "_PREFIXES", 12)
    asked: Asked = [(a, request(1.0 + i, rate)) for i, (a, rate) in enumerate(zip(several, rates, strict=True))]
    budget = budget_mib * MIB
    curves = [choices_of(analysis, each, (budget,)) for analysis, each in asked]

    def total(combination: tuple[Choice, ...]) -> tuple[float, ...]:
        return tuple(sum(parts) for parts in zip(*(c.worth for c in combination), strict=True))

    fitting = (c for c in itertools.product(*curves) if sum(choice.nbytes for choice in c) <= budget)
    assert worth(divide(asked, (budget,))) == pytest.approx(max(map(total, fitting)), rel=1e-12)


@examples(40)
@given(wanted=requests(2), budget=budgets)
def test_plans_made_of_shares_keep_what_was_promised(several, wanted, budget) -> None:
    asked: Asked = list(zip(several, wanted, strict=False))
    for (analysis, _), share in zip(asked, divide(asked, budget), strict=True):
        plan = make_plan(analysis.profile, share.request, analysis=analysis)
        assert plan.device_bytes <= sum(share.budgets)
        if share.choice.keeps:
            assert plan.feasible
            assert plan.n_unplaced == 0
            assert len(plan.resident_lists) >= share.choice.count
        if share.needs_bytes is not None and share.needs_bytes > sum(budget):
            assert not share.choice.keeps


def test_where_not_all_slos_can_be_kept_as_many_as_possible_are(several) -> None:
    asked: Asked = [(a, request(1.2, 2000.0)) for a in (several[0], several[1], several[0])]
    needs = [share.needs_bytes for share in divide(asked, (100 * MIB,))]
    assert all(need for need in needs)
    two = sum(sorted(needs)[:2])
    kept = [share.choice.keeps for share in divide(asked, (two,))]
    assert sum(kept) == 2
    assert not kept[needs.index(max(needs))] or needs.count(max(needs)) > 1
    assert not any(share.choice.keeps for share in divide(asked, (min(needs) - 1,)))


def test_what_is_left_goes_to_the_higher_rate(several) -> None:
    for quiet, busy in ((0, 1), (1, 0)):
        asked: Asked = [(several[0], request(8.0, 10.0)), (several[0], request(8.0, 10.0))]
        asked[busy] = several[0], request(8.0, 900.0)
        shares = divide(asked, (10 * MIB,))
        assert shares[busy].budgets > shares[quiet].budgets


def test_beside_an_llm_an_index_gets_what_its_slo_needs_and_no_more(several) -> None:
    llm = LLMProfile(kv_cache_bytes=1 << 30, throughput_rps=3000.0)
    beside, alone = request(1.2, 2000.0, llm=llm), request(1.2, 2000.0)
    shares = divide([(several[0], beside), (several[0], alone)], (64 * MIB,))
    assert shares[0].choice.keeps
    assert shares[0].choice.nbytes == shares[0].needs_bytes
    assert shares[1].choice.nbytes > shares[0].choice.nbytes


def test_a_fixed_coverage_gets_its_bytes_and_a_codec_without_a_device_none(several) -> None:
    asked: Asked = [
        (several[0], request(coverage=0.25)),
        (several[1], request(scannable=False, unscannable="no device tier scans it")),
    ]
    fixed, host = divide(asked, (64 * MIB,))
    assert fixed.choice.count == 64
    plan = make_plan(several[0].profile, fixed.request, analysis=several[0])
    assert len(plan.resident_lists) == 64
    assert host.budgets == (0,)


def test_no_budget_is_divided_into_nothing(several) -> None:
    for share in divide([(several[0], request()), (several[1], request())], (0, 0)):
        assert share.budgets == (0, 0)
        assert share.choice.count == 0
