"""The plan of a daemon: proposed, applied, resumed, compared; one change at a time."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.errors import (
    InfeasiblePlanError,
    InvalidInputError,
    OverloadedError,
    PlanConflictError,
    PlanningError,
    ProfileError,
    RouterClosedError,
)
from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.partitioner import plan as partitioner_plan
from hybridindex.plans import planner
from hybridindex.plans.current import make_current
from hybridindex.plans.llm_profiles import save_llm_measurement
from hybridindex.profiler.hardware import hardware_info
from hybridindex.refresh import planner_process
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.searches import SearchRequest
from hybridindex.service.status import status_of
from hybridindex.types import LLMMeasurement, LLMProfile
from tests.clustered import plan_in_pages
from tests.service.conftest import ask, assert_same


def search(service, queries, **options):
    return asyncio.run(service.search(SearchRequest(queries=queries, **options), "me"))


def test_a_dry_run_moves_nothing_and_says_what_would(service):
    before = service.router.residency.version
    answer = service.repartition(apply=False, coverage=0.6)
    assert not answer["applied"]
    assert answer["lists_to_move"] > 0
    assert answer["bytes_to_move"] > 0
    assert answer["gain"]["hit_rate"] > 0
    assert answer["gain"]["device_bytes"] < 0
    assert service.router.residency.version == before
    assert len(service.store.list_plans()) == 1


def test_applying_moves_the_difference_records_it_and_keeps_answers(service, queries):
    expected = service.router.search(queries, 5)
    dry = service.repartition(apply=False, coverage=0.5)
    answer = service.repartition(apply=True, coverage=0.5)
    assert answer["bytes_to_move"] == dry["bytes_to_move"]
    resident = service.router.residency.list_device >= 0
    assert np.array_equal(resident, service.router.plan.list_device >= 0)
    assert_same(search(service, queries, k=5), expected)
    assert service.plan()["plan_id"] == answer["plan_id"] == 2
    history = service.history()
    assert history["current"] == 2
    assert [e["plan_id"] for e in history["applied"]] == [1, 2]
    assert service.repartition(apply=False)["lists_to_move"] == 0


def test_a_restart_resumes_the_plan_that_was_applied_last(make_service, index_path):
    service = make_service()
    applied = service.repartition(apply=True, coverage=0.5)["plan_id"]
    service.close()
    again = make_service()
    assert again.plan_id == applied
    assert again.router.plan.coverage == pytest.approx(0.5)
    # Taking it back applies the one before, which is then the latest although it was stored first.
    make_current(again.store, again.router.plan, 1, verified=False, why="taken back")
    again.close()
    third = make_service()
    assert third.plan_id == 1
    # What is only stored, be it an experiment, serves nobody.
    plan = third.index.plan(0.001, 16 << 20)
    third.store.save_plan(plan.to_record(), plan.profile_id)
    third.close()
    assert make_service().plan_id == 1


def test_a_plan_that_is_named_at_the_start_is_applied_and_an_infeasible_one_only_by_force(make_service, caplog):
    service = make_service()
    good = save(service, service.index.plan(50, 16 << 20, coverage=0.2))
    bad = save(service, service.index.plan(0.001, 16 << 20))
    service.close()
    with pytest.raises(InfeasiblePlanError, match=r"infeasible.*--force"):
        make_service(plan=str(bad))
    resumed = make_service(plan="latest")
    assert resumed.plan_id == 1, "what was tried does not keep a daemon from starting"
    assert "the plan applied last is resumed" in caplog.text
    resumed.close()
    for told, serves in (({"plan": str(good)}, good), ({}, good), ({"plan": str(bad), "force": True}, bad), ({}, bad)):
        service = make_service(**told)
        assert service.plan_id == serves
        service.close()


def save(service, plan):
    return service.store.save_plan(plan.to_record(), plan.profile_id)


def test_an_infeasible_plan_is_applied_only_by_force_and_nothing_is_lost(service):
    before = service.router.residency.version
    with pytest.raises(InfeasiblePlanError, match="infeasible"):
        service.repartition(apply=True, slo_ms=0.001, coverage="solve")
    bad = save(service, service.index.plan(0.001, 16 << 20))
    with pytest.raises(InfeasiblePlanError, match="infeasible"):
        service.apply_plan(str(bad))
    with pytest.raises(InfeasiblePlanError, match="infeasible"):
        service.router.apply_plan(service.index.plan(0.001, 16 << 20))
    assert service.router.residency.version == before
    assert service.plan_id == 1
    assert len(service.store.list_plans()) == 2
    assert service.repartition(apply=False, slo_ms=0.001, coverage="solve")["placed"]["verdict"] == "infeasible"
    assert service.repartition(apply=True, slo_ms=0.001, coverage="solve", force=True)["plan_id"] == 3
    assert service.apply_plan(str(bad), force=True)["plan_id"] == bad == service.plan_id


@pytest.mark.parametrize("choice", ["9" * 5000, "12345678901234567890", "-1", "1.0"])
def test_what_is_no_plan_id_is_refused_in_short(service, choice):
    with pytest.raises(InvalidInputError, match=r"^plan is .{1,60}; expected a plan id"):
        service.apply_plan(choice, apply=False, bandwidth_share=None, force=False)


def test_a_stored_plan_is_applied_by_its_id(service, queries):
    expected = service.router.search(queries, 5)
    chosen = save(service, service.index.plan(50, 16 << 20, coverage=0.6))
    dry = service.apply_plan("latest", apply=False)
    assert (dry["applied"], dry["plan_id"], service.plan_id) == (False, chosen, 1)
    done = service.apply_plan(str(chosen))
    assert {k: v for k, v in done.items() if k not in ("applied", "unplaced_lists")} == {
        k: v for k, v in dry.items() if k not in ("applied", "unplaced_lists")
    }
    assert service.plan_id == chosen
    assert len(service.store.list_plans()) == 2, "it was stored already"
    assert_same(search(service, queries, k=5), expected)
    with pytest.raises(ProfileError, match="no plan 99"):
        service.apply_plan("99")
    two = service.index.plan(50, 16 << 20, coverage=0.2, n_devices=2)
    with pytest.raises(InvalidInputError, match=r"is for 2 device\(s\); the daemon has 1"):
        service.apply_plan(str(save(service, two)))


def test_what_has_no_room_is_said_before_and_after(make_service):
    """A daemon told to take few bytes is asked for more lists than they hold."""
    service = make_service(router={"device_budget_bytes": 256 << 10})
    dry = service.repartition(apply=False, coverage=1.0)
    assert dry["placed"]["lists"] < dry["planned"]["lists"] == 24
    assert dry["placed"]["bytes"] <= service.router.devices[0].capacity_bytes < dry["planned"]["bytes"]
    assert dry["placed"]["hit_rate"] == dry["hit_rate_after"] < dry["planned"]["hit_rate"]
    assert f"{dry['placed']['lists']} of the 24 planned lists" in dry["placed"]["reason"]
    done = service.repartition(apply=True, coverage=1.0, force=True)
    for part in ("resident", "planned", "placed", "hit_rate_after", "latency_ms_after", "gain"):
        assert done[part] == dry[part]
    held = service.router.residency.list_device >= 0
    assert done["placed"]["lists"] == held.sum()
    assert done["unplaced_lists"] == 24 - held.sum()
    again = service.repartition(apply=False, coverage=1.0)
    assert again["resident"] == {k: done["placed"][k] for k in ("lists", "rows", "bytes")}
    assert again["hit_rate_before"] == pytest.approx(done["hit_rate_after"])
    assert again["bytes_to_move"] == 0


def test_a_plan_is_made_in_another_process_whoever_asks(make_service, monkeypatch):
    expected = make_service().repartition(apply=False, coverage=0.5)
    service = make_service(planning=RefreshConfig(planning_nice=0))

    def refuse(*_args) -> None:
        raise AssertionError("a plan is made in the process that serves")

    for module in (planner, partitioner_plan):
        monkeypatch.setattr(module, "make_plan", refuse)
    answer = service.repartition(apply=False, coverage=0.5)
    assert answer == expected
    applied = service.repartition(apply=True, coverage=0.5)
    assert applied["placed"] == expected["placed"]
    assert service._planning.planner is None, "it ended with the plan"
    assert service.plan()["plan_id"] == 2


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit(7)", "ended by itself with exit status 7"),
        ("import time; time.sleep(600)", "it took more than 0.5 s"),
    ],
)
def test_a_process_that_makes_no_plan_costs_the_plan_alone(make_service, queries, monkeypatch, tmp_path, source, why):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{source}\n")
    program.chmod(0o755)
    service = make_service(planning=RefreshConfig(planning_timeout_s=0.5 if "took" in why else 60))
    monkeypatch.setattr(planner_process.sys, "executable", str(program))
    failed = ask(service, "POST", "/v1/repartition", json={"coverage": 0.5, "apply": True})
    assert (failed.status_code, failed.json()["type"]) == (503, "urn:hybridindex:problem:no-plan")
    assert why in failed.json()["detail"]
    assert search(service, queries).ids.shape == (20, 10)
    assert service.plan()["plan_id"] == 1
    assert service._planning.planner is None


def test_the_end_of_the_daemon_gives_up_a_plan_that_is_being_made(make_service, monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport time; time.sleep(600)\n")
    program.chmod(0o755)
    service = make_service(planning=RefreshConfig(planning_nice=0))
    monkeypatch.setattr(planner_process.sys, "executable", str(program))
    started = threading.Event()
    real = service._planning.start
    monkeypatch.setattr(service._planning, "start", lambda index: (real(index), started.set())[0])
    failed: list[Exception] = []

    def change() -> None:
        try:
            service.repartition(apply=True, coverage=0.5)
        except PlanningError as error:
            failed.append(error)

    changing = threading.Thread(target=change)
    changing.start()
    assert started.wait(300)
    service.stop_changes()
    changing.join(300)
    assert "told to stop" in str(failed[0])
    with pytest.raises(RouterClosedError):
        service.repartition(apply=False, coverage=0.5)


def test_values_out_of_range_are_named(service):
    with pytest.raises(InvalidInputError, match="slo_ms"):
        service.repartition(apply=False, slo_ms=-1)
    with pytest.raises(InvalidInputError, match="share"):
        service.repartition(apply=True, coverage=0.1, bandwidth_share=2)
    assert len(service.store.list_plans()) == 1


def test_a_fixed_coverage_and_a_new_target_contradict_each_other_and_solve_gives_it_up(service):
    both = {"slo_ms": 40, "coverage": 0.6}
    for asked in ({"slo_ms": 40}, {"device_budget_bytes": 8 << 20}, both):
        with pytest.raises(PlanConflictError, match="coverage is 0.[36].* " + next(iter(asked))):
            service.repartition(apply=False, **asked)
    solved = service.repartition(apply=True, slo_ms=40, coverage="solve")
    assert solved["plan"]["slo_ms"] == 40
    assert service.router.plan.request.coverage is None
    assert service.repartition(apply=False, slo_ms=30)["plan"]["slo_ms"] == 30


def test_what_was_planned_is_there_and_the_answer_says_so(make_service, queries):
    service = make_service(router={"device_budget_bytes": 16 << 20})
    [tier] = service.router.devices
    for coverage in (0.1, 0.6, 0.2):
        dry = service.repartition(apply=False, coverage=coverage)
        done = service.repartition(apply=True, coverage=coverage)
        assert dry["plan"] == done["plan"]
        assert dry["planned"] == done["planned"]
        assert {**done["placed"], "reason": ""} == {**dry["placed"], "reason": ""}
        assert done["placed"]["bytes"] == done["planned"]["bytes"] == tier.used_bytes
        assert done["placed"]["lists"] == done["planned"]["lists"] == service.router.residency.n_resident
        assert done["unplaced_lists"] == 0
        assert tier.capacity_bytes + tier.reserved_bytes <= 16 << 20
        assert search(service, queries).ids.shape == (20, 10)


def test_measured_steps_are_the_windows_of_sessions(make_service, index_path):
    steps = {"answer": 1.5, "narrow": 0.2}
    measured = LLMMeasurement(
        created_at="2026-01-01T00:00:00+00:00",
        hardware_fingerprint=hardware_info().fingerprint,
        model="m",
        method="server",
        profile=LLMProfile(kv_cache_bytes=1, throughput_rps=1.0, points=((1, 1.0),), generation_s=steps),
        levels=(),
    )
    with hx.open(index_path) as index, index.store() as store:
        save_llm_measurement(store, measured)
    service = make_service()
    assert service.router.window_ms == 1500
    with pytest.raises(InvalidInputError, match="expected one of answer, narrow"):
        service.router.session(step="rewrite")


def test_without_devices_nothing_can_move(make_service, queries):
    service = make_service(router={"devices": ()})
    with pytest.raises(InvalidInputError, match="devices is empty"):
        service.repartition(apply=False)
    assert search(service, queries).ids.shape == (20, 10)


def test_without_a_plan_the_target_has_to_be_given(make_service):
    service = make_service(plan="none", router={"device_budget_bytes": 16 << 20})
    with pytest.raises(InvalidInputError, match="slo_ms is missing"):
        service.repartition(apply=False)
    assert service.repartition(apply=True, slo_ms=50, coverage=0.2)["plan_id"] == 2
    assert service.slo_ms == 50


def test_changes_take_turns(service):
    assert service.changes.changing.acquire(blocking=False)
    try:
        with pytest.raises(OverloadedError, match="under way"):
            service.repartition(apply=False)
    finally:
        service.changes.changing.release()
    service.repartition(apply=False)


def test_without_an_applied_plan_the_host_serves_and_the_command_is_named(make_service, index_path, caplog):
    forget_what_was_applied(index_path)
    service = make_service()
    assert service.plan()["plan"] is None
    assert not service.router.devices
    assert (
        f"serving on the host: plan 1 is stored (feasible); apply it with: hybridindex apply {index_path} --plan 1"
        in (caplog.text)
    )
    service.close()
    with hx.open(index_path) as index:
        assert index.current_plan() is None
        index.apply_plan(1)
        assert index.current_plan().request.coverage == 0.3
    assert make_service().plan_id == 1


def forget_what_was_applied(path):
    with contextlib.closing(sqlite3.connect(path / "control.sqlite")) as store, store:
        store.execute("DELETE FROM events")


@pytest.mark.parametrize("refresh", [False, True])
def test_the_first_plan_that_is_applied_is_compared_with_the_host(make_service, index_path, queries, refresh):
    forget_what_was_applied(index_path)
    service = make_service(make_refresher=Following if refresh else None)
    expected = service.router.search(queries, 5)
    dry = service.apply_plan("latest", apply=False)
    assert not service.router.devices
    done = service.apply_plan("latest")
    [tier] = service.router.devices
    for answer in (dry, done):
        assert (answer["resident"], answer["current"]) == ({"lists": 0, "rows": 0, "bytes": 0}, None)
        assert answer["hit_rate_before"] == 0 < answer["hit_rate_after"]
        assert answer["lists_to_move"] == answer["placed"]["lists"] == service.router.residency.n_resident > 0
        assert answer["bytes_to_move"] == answer["placed"]["bytes"] == tier.used_bytes
    assert (done["applied"], done["plan_id"], done["unplaced_lists"], service.plan_id) == (True, 1, 0, 1)
    assert len(service.history()["applied"]) == 1
    assert service.router.stats().queries == 0, "nobody asked for the warm-up"
    assert (service.refresher is not None) == refresh
    assert_same(search(service, queries, k=5), expected)
    again = service.apply_plan("1", apply=False)
    assert (again["resident"]["lists"], again["lists_to_move"]) == (done["placed"]["lists"], 0)


def test_devices_without_any_plan_say_what_is_missing(tmp_path, caplog):
    from tests.clustered import clustered

    bare = tmp_path / "bare"
    hx.build(clustered(500), bare, nlist=8, metric="l2").close()
    for devices, opened in ((("cpu",), 0), ((), 0)):
        service = Service.open(bare, ServiceConfig(router=RouterConfig(devices=devices)), make_refresher=Following)
        assert service.plan()["plan"] is None
        assert service.refresher is None
        assert len(service.router.devices) == opened
        service.close()
        service.close()
    assert "run profile and plan" in caplog.text
    told = RouterConfig(devices=("cpu",), device_budget_bytes=1 << 20)
    service = Service.open(bare, ServiceConfig(router=told))
    assert len(service.router.devices) == 1, "its budget is known"
    service.close()
    with pytest.raises(ProfileError, match="no plan 99"):
        Service.open(bare, ServiceConfig(plan="99", router=RouterConfig(devices=("cpu",))))
    service.close()


def test_searches_go_on_while_a_plan_is_applied(service, queries):
    expected = service.router.search(queries, 5)
    done = threading.Event()

    def change() -> None:
        for coverage in (0.6, 0.1, 0.5):
            service.repartition(apply=True, coverage=coverage)
        done.set()

    changer = threading.Thread(target=change)
    changer.start()
    n = 0
    while not done.is_set() or n == 0:
        assert_same(search(service, queries, k=5), expected)
        n += 1
    changer.join()


class Following(Refresher):
    """Says what it was told."""

    def __init__(self, index, router, store) -> None:
        super().__init__(index, router, store, RefreshConfig(planning="here", min_queries=16, tick_s=3600))
        self.seen: list[tuple[int, float, float]] = []
        self.calls: list[str] = []

    def observe(self, queries, latency_s, hit_rate) -> None:
        self.seen.append((len(queries), latency_s, float(hit_rate.mean())))
        super().observe(queries, latency_s, hit_rate)

    def start(self) -> None:
        self.calls.append("start")
        super().start()

    def stop(self) -> None:
        self.calls.append("stop")
        super().stop()

    def close(self) -> None:
        self.calls.append("close")
        super().close()


def test_a_refresher_watches_proposes_and_applies(index_path, queries):
    service = Service.open(index_path, ServiceConfig(router=RouterConfig(devices=("cpu",))), make_refresher=Following)
    try:
        service.start()
        search(service, queries)
        assert [seen[0] for seen in service.refresher.seen] == [20]
        assert status_of(service)["refresher"]["requests"] == 1
        answer = service.repartition(apply=False, coverage=0.5)
        assert answer["reason"] == "requested"
        assert answer["n_queries"] == 20
        assert answer["plan"]["coverage"] == pytest.approx(0.5)
        assert service.router.plan.coverage != pytest.approx(0.5)
        assert service.repartition(apply=True, coverage=0.5)["update"]["stage"] == "verifying"
        assert service.router.plan.coverage == pytest.approx(0.5)
    finally:
        service.close()
    assert service.refresher.calls[:3] == ["start", "stop", "close"]


def test_answers_have_one_shape_with_and_without_a_refresher(index_path, queries):
    def shape(value):
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else type(value)

    found = []
    for make in (None, Following):
        service = Service.open(index_path, ServiceConfig(router=RouterConfig(devices=("cpu",))), make_refresher=make)
        try:
            search(service, queries)
            answer = service.repartition(apply=False, coverage=0.5)
            unknown = {name for name, value in answer.items() if value is None}
            known = {"number", "created_at", "n_queries", "worthwhile", "objection"}
            assert unknown - {"move_s"} == {"plan_id", "unplaced_lists", "update"} | (known if make is None else set())
            parts = (
                "plan",
                "current",
                "resident",
                "planned",
                "placed",
                "gain",
                "lists_to_move",
                "bytes_to_move",
                "lists_to_drop",
                "hit_rate_after",
            )
            found.append((set(answer), [shape(answer[part]) for part in parts]))
        finally:
            service.close()
    assert found[0] == found[1]


@pytest.fixture
def early_service(make_service, index_path):
    """Opened with a plan of 64-KiB pages, as those were that earlier versions made; no byte to spare, and none for
    sessions. With the number of a stored plan whose pages fit the lists."""
    with hx.open(index_path) as index, index.store() as store:
        profile = store.load_profile(index_fingerprint=index.fingerprint)
        budget = 2 * int(index.list_bytes.sum())
        index.apply_plan(plan_in_pages(index, profile, DEFAULT_PAGE_BYTES, budget, 0.2))
        fitting = index.plan(50, budget, profile, coverage=1.0)
        assert fitting.request.page_bytes < DEFAULT_PAGE_BYTES
        number = store.save_plan(fitting.to_record(), profile.id)
    return make_service(router={"device_budget_bytes": budget, "lookahead_bytes": 0}), number


def test_plans_are_made_for_the_pages_of_the_open_devices(early_service, queries):
    service, _ = early_service
    [tier] = service.router.devices
    assert service.router.page_bytes == DEFAULT_PAGE_BYTES
    expected = service.router.search(queries, 5)
    for coverage in (1.0, 0.1, 0.6):
        answer = service.repartition(apply=True, coverage=coverage, force=True)
        assert answer["unplaced_lists"] == 0
        assert answer["placed"]["lists"] == answer["planned"]["lists"] == service.router.residency.n_resident > 0
        assert answer["placed"]["bytes"] <= tier.arena.nbytes
        assert service.router.plan.request.page_bytes == DEFAULT_PAGE_BYTES
        assert_same(search(service, queries, k=5), expected)
    assert next(c for c in ask(service, "GET", "/healthz").json()["checks"] if c["name"] == "fallbacks")["ok"]


def test_a_plan_of_other_pages_is_told_as_it_lies_in_the_open_ones(early_service, make_service, queries):
    service, number = early_service
    expected = service.router.search(queries, 5)
    dry = service.apply_plan(str(number), force=True, apply=False)
    assert 0 < dry["placed"]["lists"] < dry["planned"]["lists"] == len(np.flatnonzero(service.index.list_sizes))
    assert "made for pages of" in dry["placed"]["reason"]
    done = service.apply_plan(str(number), force=True, apply=True)
    assert done["placed"] == dry["placed"]
    assert done["placed"]["lists"] == service.router.residency.n_resident
    assert done["placed"]["bytes"] == service.router.devices[0].used_bytes
    assert done["unplaced_lists"] == dry["planned"]["lists"] - dry["placed"]["lists"]
    assert_same(search(service, queries, k=5), expected)
    service.close()
    # Opened with it, the devices have its pages, and room for all of it.
    budget = service.config.router.device_budget_bytes
    again = make_service(router={"device_budget_bytes": budget, "lookahead_bytes": 0})
    assert again.plan_id == number
    assert again.router.stats().unplaced_lists == 0
    assert again.router.residency.n_resident == dry["planned"]["lists"]
    assert_same(search(again, queries, k=5), expected)
