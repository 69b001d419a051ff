"""The service with the real refresher: it proposes and applies, is seen in status and metrics, and is resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.errors import InfeasiblePlanError, InvalidInputError
from hybridindex.plans.current import current_plan_id, same_decision
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.problems import PROBLEM_TYPE
from hybridindex.service.status import status_of
from tests.service.conftest import ask
from tests.service.test_core import search
from tests.service.test_reload import replace_by_the_same

CONFIG = ServiceConfig(router=RouterConfig(devices=("cpu",)))


def follow(index, router, store):
    return Refresher(index, router, store, RefreshConfig())


@pytest.fixture
def service(index_path):
    service = Service.open(index_path, CONFIG, make_refresher=follow)
    service.start()
    yield service
    service.close()


def test_it_plans_from_what_it_saw_and_before_that_from_the_profile(service, queries):
    early = service.repartition(apply=False, coverage=0.5)
    assert early["plan"]["coverage"] == pytest.approx(0.5)
    for _ in range(40):
        search(service, queries)
    proposed = service.repartition(apply=False, coverage=0.5)
    assert proposed["plan"]["coverage"] == pytest.approx(0.5)
    assert early["n_queries"] is None
    assert proposed["n_queries"] > 0
    applied = service.repartition(apply=True, coverage=0.5)
    assert service.router.plan.coverage == pytest.approx(0.5)
    json.dumps([early, proposed, applied, status_of(service), service.plan(), service.history()], allow_nan=False)
    assert status_of(service)["refresher"]["requests"] == 40


def test_the_plan_that_is_stored_already_is_committed_and_not_stored_again(service):
    assert [plan.id for plan in service.store.list_plans()] == [1]
    assert service.plan()["plan_id"] == 1
    assert [event.payload["plan_id"] for event in service.store.list_events(kind="plan_current")] == [1]


@pytest.mark.parametrize("refresh", [True, False])
def test_a_restart_resumes_the_committed_plan(index_path, queries, refresh):
    service = Service.open(index_path, CONFIG, make_refresher=follow)
    service.start()
    committed = service.plan()["plan_id"]
    lists = service.router.plan.list_device
    # Stored later, tried and never committed.
    service.store.save_plan(service.index.plan(50, 4 << 20, coverage=0.9).to_record(), 1, trial=True)
    service.close()
    again = Service.open(index_path, CONFIG, make_refresher=follow if refresh else None)
    try:
        again.start()
        assert again.plan()["plan_id"] == committed
        np.testing.assert_array_equal(again.router.plan.list_device, lists)
        assert search(again, queries).ids.shape[0] == len(queries)
    finally:
        again.close()


@pytest.mark.parametrize("refresh", [True, False])
def test_what_is_stored_by_hand_afterwards_is_resumed_once_it_is_applied(index_path, refresh):
    service = Service.open(index_path, CONFIG, make_refresher=follow)
    service.start()
    stored = service.store.save_plan(service.index.plan(50, 4 << 20, coverage=0.9).to_record(), 1)
    service.close()
    for apply in (False, True):
        if apply:
            with hx.open(index_path) as index:
                assert index.apply_plan(stored) == stored
        again = Service.open(index_path, CONFIG, make_refresher=follow if refresh else None)
        assert again.plan_id == (stored if apply else 1)
        again.close()


def test_the_refresh_applies_a_stored_plan_verifies_it_and_stores_nothing_anew(service):
    bad = service.store.save_plan(service.index.plan(0.001, 16 << 20).to_record(), 1)
    stored = service.store.save_plan(service.index.plan(50, 16 << 20, coverage=0.5).to_record(), 1)
    assert service.apply_plan("latest", apply=False)["update"] is None
    with pytest.raises(InfeasiblePlanError, match="--force"):
        service.apply_plan(str(bad))
    answer = service.apply_plan(str(stored))
    assert (answer["plan_id"], answer["update"]["plan_id"], answer["update"]["stage"]) == (stored, stored, "verifying")
    assert service.router.plan.coverage == pytest.approx(0.5)
    assert len(service.store.list_plans()) == 3
    assert service.plan()["plan_id"] == 1, "until it is verified"


def test_a_plan_that_is_being_verified_does_not_become_current_by_a_reload(service, index_path):
    before = service.router.plan
    stored = service.store.save_plan(service.index.plan(50, 16 << 20, coverage=0.5).to_record(), 1)
    assert service.apply_plan(str(stored))["update"]["stage"] == "verifying"
    replace_by_the_same(index_path)
    answer = service.reload()
    assert (answer["plan_id"], answer["plan_origin"]) == (1, "carried over")
    assert same_decision(service.router.plan, before)
    assert current_plan_id(service.store, service.index.fingerprint) == 1, "it was never verified"


def test_what_a_daemon_without_a_refresh_applied_is_resumed_with_one(index_path):
    for make, coverage in ((follow, None), (None, 0.5), (follow, None)):
        service = Service.open(index_path, CONFIG, make_refresher=make)
        service.start()
        if coverage is not None:
            applied = service.repartition(apply=True, coverage=coverage)["plan_id"]
        resumed = service.plan()["plan_id"]
        service.close()
    assert resumed == applied == 2


def test_a_change_during_another_is_refused_with_retry_after(service, queries):
    for _ in range(40):
        search(service, queries)
    change = {"apply": True, "coverage": 0.5}
    assert ask(service, "POST", "/v1/repartition", json=change).status_code == 200
    plan = service.router.plan
    # The first one is still being verified: no window has closed since.
    refused = ask(service, "POST", "/v1/repartition", json={**change, "coverage": 0.2})
    assert refused.status_code == 503
    assert refused.headers["content-type"] == PROBLEM_TYPE
    assert int(refused.headers["retry-after"]) >= 1
    assert service.router.plan is plan


def test_the_move_keeps_to_the_share_that_was_asked_for(service, queries, monkeypatch):
    for _ in range(40):
        search(service, queries)
    shares = []
    load = type(service.router.devices[0]).load

    def note(tier, *args, bandwidth_share=None, **options):
        shares.append(bandwidth_share)
        return load(tier, *args, bandwidth_share=bandwidth_share, **options)

    monkeypatch.setattr(type(service.router.devices[0]), "load", note)
    full = service.repartition(apply=False, coverage=0.6, bandwidth_share=1.0)
    slow = service.repartition(apply=False, coverage=0.6, bandwidth_share=0.5)
    assert slow["bytes_to_move"] == full["bytes_to_move"] > 0
    assert not shares
    service.repartition(apply=True, coverage=0.6, bandwidth_share=0.5)
    assert set(shares) == {0.5}
    with pytest.raises(InvalidInputError, match="bandwidth_share"):
        service.repartition(apply=True, coverage=0.6, bandwidth_share=1.5)


def test_a_failed_device_takes_no_new_plan_and_says_why(service, queries):
    for _ in range(40):
        search(service, queries)
    service.router._served.recovery.close()  # it would try again, and find nothing wrong
    service.router.devices[0].fail(RuntimeError("it broke"))
    refused = ask(service, "POST", "/v1/repartition", json={"apply": True, "coverage": 0.5})
    assert refused.status_code == 409
    assert refused.json()["type"] == "urn:hybridindex:problem:device-failed"
