"""One budget: divided at the start and at each change, never exceeded on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import DeviceError, InfeasiblePlanError, InvalidInputError, OverloadedError, StoreError
from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.plans.current import current_plan_id
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.service import status
from hybridindex.service.core import Service
from hybridindex.service.searches import SearchRequest
from hybridindex.tiers.paged.device_tier import DeviceTier
from tests.clustered import DIM, clustered, plan_in_pages
from tests.service.several.conftest import BUDGET, OTHER_DIM

NOBODY_LOOKS = RefreshConfig(planning="here", tick_s=3600)


def queries(name):
    return clustered(20, DIM if name == "docs" else OTHER_DIM, seed=3)


def search(service, asked):
    return asyncio.run(service.search(SearchRequest(queries=asked, k=5), "me"))


def held(indexes) -> int:
    """Bytes that the arenas have, scratch included."""
    tiers = [tier for service in indexes.services.values() for tier in service.router.devices]
    return sum(tier.arena.nbytes + tier.scratch_bytes for tier in tiers if tier.arena.nbytes)


@pytest.fixture
def watched(monkeypatch):
    """Sums of all arenas after each change of one of them, scratch included."""
    tiers: list[DeviceTier] = []
    sums: list[int] = []
    made, resize, release = DeviceTier.__init__, DeviceTier.resize, DeviceTier._release

    def note() -> None:
        sums.append(sum(t.arena.nbytes + t.scratch_bytes for t in tiers if t.arena.nbytes))

    def init(tier, *args, **options):
        made(tier, *args, **options)
        tiers.append(tier)
        note()

    def change(tier, *args):
        resize(tier, *args)
        note()

    def end(tier):
        release(tier)
        if tier in tiers:
            tiers.remove(tier)

    monkeypatch.setattr(DeviceTier, "__init__", init)
    monkeypatch.setattr(DeviceTier, "resize", change)
    monkeypatch.setattr(DeviceTier, "_release", end)
    return sums


def planned(service) -> int:
    return len(service.router.plan.resident_lists)


def test_each_index_gets_what_it_is_asked_for_and_the_rest_is_shared(open_indexes, watched):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    assert (planned(docs), planned(code)) == (8, 4)  # 0.3 of 24, 0.25 of 16
    shares = [indexes.shared.share_of(name)[0] for name in indexes.names]
    assert sum(shares) <= BUDGET
    for service, share in zip((docs, code), shares, strict=True):
        assert service.router.plan.request.budgets == (share,)
        assert service.router.residency.n_resident == planned(service)
        assert current_plan_id(service.store, service.index.fingerprint) == service.plan_id
    assert 0 < max(watched) <= BUDGET


def test_a_restart_divides_alike_and_stores_nothing_new(open_indexes):
    first = open_indexes()
    before = [service.plan_id for service in first.services.values()]
    first.close()
    again = open_indexes()
    assert [service.plan_id for service in again.services.values()] == before
    assert [len(service.store.list_plans()) for service in again.services.values()] == [2, 2]


def test_a_change_of_one_shrinks_the_others_first_and_loses_no_search(open_indexes, watched):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    expected = {name: search(service, queries(name)) for name, service in indexes.services.items()}
    wrong: list[object] = []
    over = threading.Event()

    def load(name):
        service = indexes.services[name]
        while not over.is_set():
            found = search(service, queries(name))
            if not np.array_equal(found.ids, expected[name].ids):
                wrong.append(found)

    clients = [threading.Thread(target=load, args=(name,)) for name in indexes.names]
    for client in clients:
        client.start()
    try:
        for coverage in (0.8, 0.1, 1.0, 0.3):
            share = indexes.shared.share_of("code")
            answer = docs.repartition(coverage=coverage, apply=True, force=True)
            assert answer["shares"].keys() == {"docs", "code"}
            assert answer["placed"]["lists"] == planned(docs) == round(coverage * 24 + 0.4)
            assert answer["unplaced_lists"] == code.router.stats().unplaced_lists == 0
            assert planned(code) == 4
            assert (indexes.shared.share_of("code") < share) == (coverage in (0.8, 1.0))
            assert sum(each["share_bytes"][0] for each in answer["shares"].values()) <= BUDGET
            assert held(indexes) <= BUDGET
    finally:
        over.set()
        for client in clients:
            client.join(300)
    assert not wrong
    assert max(watched) <= BUDGET
    docs.router.check_invariants()
    code.router.check_invariants()


def test_a_dry_run_moves_nothing_and_tells_of_the_others(open_indexes):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    before = [indexes.shared.share_of(name) for name in indexes.names]
    answer = docs.repartition(coverage=1.0, apply=False)
    assert answer["shares"]["docs"]["share_bytes"] > list(before[0])
    assert answer["placed"]["lists"] == answer["planned"]["lists"] == 24
    assert [indexes.shared.share_of(name) for name in indexes.names] == before
    assert (planned(docs), planned(code)) == (8, 4)


def test_what_would_cost_another_its_slo_needs_force(open_indexes):
    indexes = open_indexes(router={"device_budget_bytes": 1 << 18})
    docs, code = indexes.services.values()
    plan = code.router.plan
    needs = docs.repartition(coverage=1.0, apply=False)["shares"]["docs"]["needs_bytes"]
    assert needs > 1 << 18
    before = code.router.residency.n_resident
    assert plan.feasible
    # More lists of one index do not take those of another, as long as the others keep what they are asked for.
    docs.repartition(coverage=1.0, apply=True, force=True)
    assert code.router.residency.n_resident == before
    assert docs.router.stats().unplaced_lists == 0
    assert planned(docs) < 24
    assert held(indexes) <= 1 << 18


def test_another_budget_is_that_of_all(open_indexes, watched):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    for budget in (375_000, 550_000, 1 << 18):
        answer = docs.repartition(device_budget_bytes=budget, apply=True, force=True)
        assert indexes.listing()["device_budget_bytes"] == [budget]
        assert budget * 0.99 < sum(each["share_bytes"][0] for each in answer["shares"].values()) <= budget
        assert held(indexes) <= budget
        assert (planned(docs), planned(code)) == (8, 4)
        assert docs.router.residency.n_resident == 8
    assert max(watched) <= BUDGET
    with pytest.raises(InvalidInputError, match="device_budget_bytes has 2 entries; there are 1 devices"):
        docs.repartition(device_budget_bytes=(1, 2), apply=False)


@pytest.mark.parametrize("fails", ["docs", "code"])
def test_a_change_that_fails_leaves_the_budget_and_the_shares_as_they_were(open_indexes, monkeypatch, watched, fails):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    before = [indexes.shared.share_of(name) for name in indexes.names]
    failing = indexes.services[fails].changes
    serve, calls = type(failing).serve_plan, []

    def serve_once(changes, *args, **options):
        if changes is failing and not calls:
            raise StoreError(f"the disk of {calls.append(1)} is full")
        return serve(changes, *args, **options)

    monkeypatch.setattr(type(failing), "serve_plan", serve_once)
    with pytest.raises(StoreError, match="is full"):
        docs.repartition(coverage=1.0, device_budget_bytes=BUDGET + (1 << 16), apply=True, force=True)
    assert calls
    assert indexes.listing()["device_budget_bytes"] == [BUDGET]
    assert [indexes.shared.share_of(name) for name in indexes.names] == before
    assert (planned(docs), planned(code)) == (8, 4)
    assert (docs.router.residency.n_resident, code.router.residency.n_resident) == (8, 4)
    assert held(indexes) <= BUDGET
    monkeypatch.undo()
    docs.repartition(coverage=1.0, apply=True, force=True)
    assert docs.router.residency.n_resident == 24
    assert held(indexes) <= BUDGET


def test_one_change_at_a_time_in_the_whole_daemon(open_indexes):
    indexes = open_indexes()
    with indexes.shared.changing, pytest.raises(OverloadedError, match="another change"):
        indexes.services["code"].repartition(coverage=0.5, apply=False)


def test_a_stored_plan_is_applied_within_a_share(open_indexes):
    indexes = open_indexes()
    docs = indexes.services["docs"]
    plan = docs.index.plan(50, 64 << 20, docs.router.plan.analysis.profile, coverage=0.5)
    plan_id = docs.store.save_plan(plan.to_record(), plan.profile_id)
    answer = docs.apply_plan(str(plan_id), force=True)
    assert planned(docs) == 12
    assert answer["plan_id"] == docs.plan_id != plan_id
    assert docs.router.plan.request.budgets == indexes.shared.share_of("docs")
    assert docs.apply_plan(str(docs.plan_id), force=True)["plan_id"] == docs.plan_id


def test_shares_are_divided_for_the_pages_that_each_index_has_open(open_indexes, folders, watched):
    """One was planned by an earlier version, in pages of 64 KiB."""
    with hx.open(folders["docs"]) as index:
        with index.store() as store:
            profile = store.load_profile(index_fingerprint=index.fingerprint)
        index.apply_plan(plan_in_pages(index, profile, DEFAULT_PAGE_BYTES, 64 << 20, 0.3))
        fitting = index.plan(50, 64 << 20, profile, coverage=0.5)
    indexes = open_indexes(router={"device_budget_bytes": 9 << 18})
    docs, code = indexes.services.values()
    pages = docs.router.page_bytes, code.router.page_bytes
    assert pages[1] < pages[0] == DEFAULT_PAGE_BYTES
    plan_id = docs.store.save_plan(fitting.to_record(), fitting.profile_id)
    for change in (
        lambda: docs.repartition(coverage=1.0, apply=True, force=True),
        lambda: code.repartition(coverage=1.0, apply=True, force=True),
        lambda: docs.apply_plan(str(plan_id), force=True),
    ):
        change()
        for service, page_bytes in zip((docs, code), pages, strict=True):
            assert service.router.plan.request.page_bytes == service.router.page_bytes == page_bytes
            assert service.router.stats().unplaced_lists == 0
            assert service.router.residency.n_resident == planned(service) > 0
        assert held(indexes) <= 9 << 18
    assert max(watched) <= 9 << 18


def test_an_index_without_a_plan_gets_no_bytes_until_it_has_one(open_indexes, folders, watched):
    with hx.open(folders["code"]) as index:
        plan_id = index.current_plan().profile_id
        (folders["code"] / "control.sqlite").unlink()
        profile = index.profile(clustered(300, OTHER_DIM, seed=6), 4, devices=0, max_seconds=0.5)
    assert plan_id is not None
    indexes = open_indexes()
    docs, code = indexes.services.values()
    assert indexes.shared.share_of("code") is None
    assert not code.router.devices
    assert "plan" in code.generations.current.note
    alone = indexes.shared.share_of("docs")[0]
    assert alone > BUDGET * 0.99
    plan = code.index.plan(50, BUDGET, profile, coverage=0.5)
    plan_id = code.store.save_plan(plan.to_record(), profile.id)
    code.apply_plan(str(plan_id), force=True)
    assert code.router.residency.n_resident == 8
    assert indexes.shared.share_of("docs")[0] < alone
    assert planned(docs) == 8
    assert max(watched) <= BUDGET


def test_a_reload_keeps_to_the_budget_and_divides_again(open_indexes, folders, watched):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    share = indexes.shared.share_of("docs")[0]
    with hx.build(clustered(6000, seed=8), folders["docs"], nlist=40, metric="l2", nprobe=6, replace=True) as index:
        profile = index.profile(clustered(300, seed=2), 6, devices=0, max_seconds=0.5)
        # Stored for far more than the daemon has.
        index.apply_plan(index.plan(50, 1 << 30, profile, coverage=0.5), force=True)
    answer = docs.reload()
    assert answer["reloaded"]
    assert docs.router.plan.request.budgets == indexes.shared.share_of("docs")
    assert docs.router.residency.n_resident == planned(docs) == 20
    assert indexes.shared.share_of("docs")[0] > share
    assert planned(code) == code.router.residency.n_resident == 4
    assert max(watched) <= BUDGET
    assert held(indexes) <= BUDGET
    # Without a plan the others get its bytes.
    with hx.build(clustered(3000, seed=9), folders["docs"], nlist=8, metric="l2", nprobe=2, replace=True):
        pass
    docs.reload()
    assert not docs.router.devices
    assert indexes.shared.share_of("code")[0] > BUDGET * 0.99
    assert max(watched) <= BUDGET


def test_an_index_that_does_not_begin_leaves_its_share_to_the_others(open_indexes, monkeypatch):
    real = Service.begin

    def begin(prepared, *arguments, **options):
        if prepared.index.dim == OTHER_DIM:
            prepared.close()
            raise DeviceError("device cpu is out of memory")
        return real(prepared, *arguments, **options)

    share = open_indexes().shared.share_of("docs")[0]
    monkeypatch.setattr(Service, "begin", begin)
    indexes = open_indexes()
    assert list(indexes.services) == ["docs"]
    assert "out of memory" in indexes.problems["code"]
    assert indexes.shared.share_of("code") is None
    assert indexes.shared.share_of("docs")[0] > max(share, BUDGET * 0.99)
    assert held(indexes) <= BUDGET


def test_an_slo_of_the_settings_is_what_the_plan_keeps(open_indexes):
    indexes = open_indexes(told={"code": {"rate_qps": 10.0}})
    code = indexes.services["code"]
    assert code.router.plan.request.rate_qps == 10
    assert code.router.plan.request.slo_ms == 5000
    assert planned(code) == 4
    assert current_plan_id(code.store, code.index.fingerprint) == code.plan_id


def test_lookahead_keeps_its_bytes_of_each_share(open_indexes):
    kept = 100_000
    indexes = open_indexes(router={"lookahead_bytes": kept})
    for service in indexes.services.values():
        (tier,) = service.router.devices
        plan = service.router.plan
        lists = plan.device_bytes - plan.request.scratch[0]
        assert tier.arena.nbytes >= lists + kept * 0.8
    assert held(indexes) <= BUDGET


def test_a_refresh_stays_within_its_share_and_is_not_interrupted(open_indexes, monkeypatch):
    indexes = open_indexes(make_refresher=lambda *parts: Refresher(*parts, NOBODY_LOOKS))
    docs, code = indexes.services.values()
    for _ in range(20):
        search(docs, queries("docs"))
    docs.refresher.offer(clustered(400, seed=11))
    share = indexes.shared.share_of("docs")
    proposal = docs.refresher.propose("by hand")
    assert proposal.plan.device_bytes <= share[0]
    docs.refresher.apply(proposal, force=True)
    assert docs.router.devices[0].budget_bytes <= share[0]
    stage = docs.refresher.status().stage
    assert stage != "idle"
    with pytest.raises(OverloadedError, match=f"a refresh of index docs is {stage}"):
        code.repartition(coverage=1.0, apply=True, force=True)
    assert planned(code) == 4


@pytest.mark.parametrize("replaced", ["compacted", "built anew"])
def test_devices_of_a_reload_that_met_a_refresh_open_when_it_is_over(open_indexes, folders, replaced):
    indexes = open_indexes(make_refresher=lambda *parts: Refresher(*parts, NOBODY_LOOKS))
    docs, code = indexes.services.values()
    before = docs.router.plan
    docs.refresher.offer(clustered(400, seed=11))
    docs.refresher.apply(docs.refresher.propose("by hand"), force=True)
    rows = clustered(3000, OTHER_DIM, seed=9)
    if replaced == "compacted":  # a plan is made at the reload, and none is the current one
        with hx.open(folders["code"], write=True) as index:
            index.add(rows)
            index.compact()
    else:
        with hx.build(rows, folders["code"], nlist=16, metric="l2", nprobe=4, replace=True) as index:
            profile = index.profile(clustered(300, OTHER_DIM, seed=2), 4, devices=0, max_seconds=0.5)
            index.apply_plan(index.plan(5000, 1 << 30, profile, coverage=1.0), force=True)
    assert code.reload()["reloaded"]
    assert "a refresh of index docs is verifying" in code.note
    for tried in (code.take_up_store, code.take_up_store, code.reload):
        assert code.store_changed(), "nobody would try again"
        with pytest.raises(OverloadedError):
            tried()
    assert code.generations.counts.failed == 0
    assert all(check.ok for check in status._look_at_storage(code))
    docs.router.apply_plan(dataclasses.replace(before))  # somebody ends the update
    docs.refresher.step()
    code.take_up_store()
    assert code.router.residency.n_resident == planned(code) > 0
    assert not code.note
    assert not code.store_changed()


def test_no_slo_is_lost_without_force(open_indexes, monkeypatch):
    indexes = open_indexes()
    docs, code = indexes.services.values()
    division = indexes.shared.divide("docs", docs.router.plan, None)
    part = division.divided["code"]
    monkeypatch.setattr(type(part.plan), "feasible", property(lambda plan: plan is not part.plan))
    assert part.plan is not code.router.plan
    with pytest.raises(InfeasiblePlanError, match="index code would miss its SLO"):
        division.refuse(force=False)
    division.refuse(force=True)


def test_a_store_that_cannot_be_written_keeps_no_index_from_serving(open_indexes, monkeypatch):
    def refuse(*_args, **_options):
        raise StoreError("the disk is full")

    monkeypatch.setattr("hybridindex.service.several.shares.save_plan", refuse)
    indexes = open_indexes()
    for service, lists in zip(indexes.services.values(), (8, 4), strict=True):
        assert service.router.residency.n_resident == planned(service) == lists
        assert service.plan_id is None
