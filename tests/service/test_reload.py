"""Another generation takes the place of the one that serves: no search fails, and none is answered from two."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.errors import (
    InvalidInputError,
    OutOfBudgetError,
    OverloadedError,
    ReloadError,
    UnknownSessionError,
)
from hybridindex.index.live.store import LOOK_AGAIN_S
from hybridindex.plans.current import make_current
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.service import reload
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http import upkeep
from hybridindex.service.http.app import create_app
from hybridindex.service.http.searching import SearchRoute
from hybridindex.service.observe.events import DeviceWatch
from hybridindex.service.observe.metrics import Metrics
from hybridindex.service.observe.series import Series
from hybridindex.service.searches import SearchRequest
from hybridindex.service.serving import ServedIndex, close_serving
from hybridindex.service.status import status_of
from hybridindex.tiers.paged.arena import PageArena
from tests.clustered import clustered
from tests.service.conftest import ask, assert_same, reloading_under, talk
from tests.service.live import live

#: No id of the first generation is one of the second.
SECOND = 100_000


def replace(path, *, n=2000, nlist=16, seed=7, **options):
    """Puts another index in the place of the one at ``path``."""
    ids = np.arange(SECOND, SECOND + n)
    vectors = clustered(n, seed=seed)
    options = {"metric": "l2", "nprobe": 6, **options}
    with hx.build(vectors, path, nlist=nlist, ids=ids, replace=True, **options) as index:
        return index.fingerprint


def replace_by_the_same(path):
    with hx.build(clustered(2500, seed=1), path, nlist=24, metric="l2", nprobe=6, replace=True) as index:
        return index.fingerprint


def search(service, queries, **options):
    return asyncio.run(service.search(SearchRequest(queries=queries, **options), "me"))


def damage(path, number):
    file = path / f"gen-{number:06d}" / "lists.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def generations(path):
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith("gen-"))


@pytest.mark.parametrize("devices", [("cpu",), ()])
def test_searches_go_on_and_each_answer_is_of_one_generation(make_service, index_path, queries, devices):
    service = make_service(router={"devices": devices})
    with hx.open(index_path) as index, index.router() as router:
        old = router.search(queries, 5, 6)
    answers = []

    async def main():
        ended = asyncio.Event()

        async def client():
            while not ended.is_set():
                answers.append(await service.search(SearchRequest(queries=queries, k=5, nprobe=6), "me"))

        clients = [asyncio.create_task(client()) for _ in range(3)]
        for number in range(3):
            await asyncio.to_thread(replace, index_path, seed=7 if number % 2 == 0 else 8)
            await asyncio.to_thread(service.reload)
        await service.search(SearchRequest(queries=queries), "me")
        ended.set()
        await asyncio.gather(*clients)

    asyncio.run(main())
    expected = [old]
    for seed in (7, 8):
        replace(index_path, seed=seed)
        with hx.open(index_path) as index, index.router() as router:
            expected.append(router.search(queries, 5, 6))
    seen = {next(i for i, e in enumerate(expected) if np.array_equal(e.ids, answer.ids)) for answer in answers}
    assert seen == {0, 1, 2}
    assert service.index.ivf.generation == 4
    assert status_of(service)["reload"]["done"] == 3


def test_a_reload_at_a_signal_waits_for_the_change_that_is_under_way(make_service, index_path):
    """Longer than the line of changes lets it: nobody would ask again."""
    service = make_service(warm=False)
    replace(index_path)
    app = create_app(service)

    async def main():
        with service.changes.one_change():
            reloading = asyncio.create_task(app.reload("SIGHUP"))
            while not (app._waiting or reloading.done()):
                await asyncio.sleep(0.05)
            assert service.index.ivf.generation == 1
        await reloading

    asyncio.run(main())
    assert service.index.ivf.generation == 2
    assert service.generations.counts.failed == 0


def test_a_search_of_what_was_left_behind_is_told_to_come_again(make_service, index_path, queries):
    """Two compactions of others, of which the daemon has seen neither."""
    service = make_service(warm=False, router={"devices": ()})
    script = (
        f"import hybridindex as hx\nwith hx.open({str(index_path)!r}, write=True) as index:\n"
        "    for row in range(2):\n        index.delete([row])\n        index.compact()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    time.sleep(LOOK_AGAIN_S)
    answer = ask(service, "POST", "/v1/search", json={"queries": queries[0].tolist()})
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "1"
    assert str(index_path) not in answer.text
    service.reload()
    assert ask(service, "POST", "/v1/search", json={"queries": queries[0].tolist()}).status_code == 200


def test_a_search_under_way_ends_in_its_generation(service, index_path, queries):
    expected = service.router.search(queries, 5)
    replace(index_path)
    found = []
    with reloading_under(lambda: found.append(search(service, queries, k=5)), service, queries):
        # New ones have the new generation, while the old one is not closed before its last is answered.
        assert (search(service, queries).ids >= SECOND).all()
        assert not found
    assert_same(found[0], expected)


def test_the_plan_of_the_same_content_is_carried_over(service, index_path, queries):
    applied = service.repartition(apply=True, coverage=0.5)["plan_id"]
    expected, resident = service.router.search(queries, 5), service.router.residency.list_device >= 0
    replace_by_the_same(index_path)
    answer = service.reload()
    assert (answer["reloaded"], answer["generation_before"], answer["generation"]) == (True, 1, 2)
    assert (answer["plan_id"], answer["plan_origin"], answer["note"]) == (applied, "carried over", None)
    assert np.array_equal(service.router.residency.list_device >= 0, resident)
    assert_same(search(service, queries, k=5), expected)
    assert service.reload()["reloaded"] is False


def test_housekeeping_closes_no_generation_that_sessions_are_going_to_use(service, index_path, queries, monkeypatch):
    name = service.open_session("me", lookahead_bytes=1 << 20)
    expected = asyncio.run(service.search(SearchRequest(queries=queries, k=5, nprobe=6), "me", name))
    replace(index_path)
    move = service.sessions.move

    def looked_at_just_before(again):
        service.generations.close_unused()
        return move(again)

    monkeypatch.setattr(service.sessions, "move", looked_at_just_before)
    service.reload()
    service.generations.close_unused()
    assert status_of(service)["reload"]["retired"] == [{"generation": 1, "sessions": 1}]
    found = asyncio.run(service.search(SearchRequest(queries=queries, k=5, nprobe=6), "me", name))
    assert_same(found, expected)


def test_a_stored_plan_of_the_new_content_serves(service, index_path):
    replace(index_path)
    with hx.open(index_path) as index, index.store() as store:
        profile = index.profile(clustered(300, seed=2), 6, max_seconds=0.1)
        plan = index.plan(50, 8 << 20, profile, coverage=0.4)
        stored = store.save_plan(plan.to_record(), profile.id)
        make_current(store, plan, stored, verified=False, why="applied")
    answer = service.reload()
    assert (answer["plan_id"], answer["plan_origin"]) == (stored, "stored")
    assert service.router.plan.coverage == pytest.approx(0.4, abs=0.1)
    assert service.router.residency.n_resident > 0


def test_a_profile_of_the_new_content_is_planned_from_as_before(service, index_path):
    before = service.router.plan.request
    replace(index_path)
    with hx.open(index_path) as index:
        index.profile(clustered(300, seed=2), 6, max_seconds=0.1)
    answer = service.reload()
    assert answer["plan_origin"] == "made anew"
    assert answer["plan_id"] == service.plan()["plan_id"] == 2
    after = service.router.plan.request
    assert (after.slo_ms, after.budgets, after.coverage) == (before.slo_ms, before.budgets, before.coverage)
    assert service.history()["applied"][-1]["plan_id"] == 2


def test_a_plan_that_was_applied_while_another_generation_opened_is_what_that_one_is_planned_for(service, index_path):
    """As nodes of a cluster go on: what serves may get another plan until the next generation takes its place."""
    replace(index_path)
    with hx.open(index_path) as index:
        index.profile(clustered(300, seed=2), 6, max_seconds=0.1)
    generations = service.generations
    beside = generations.open_beside(ServedIndex(hx.open(index_path).ivf))
    assert beside.choice.origin == "made anew"
    service.repartition(apply=True, coverage=0.6)
    old = generations.serve_beside(beside)
    try:
        generations.retire_for_others(old, lambda _heir: None)
        assert service.router.plan.request.coverage == pytest.approx(0.6)
        assert service.generations.current.generation == 2
        assert service.history()["applied"][-1]["plan_id"] == service.plan()["plan_id"]
    finally:
        close_serving(old)


def test_without_a_plan_the_host_serves_until_there_is_one(service, index_path, queries):
    fingerprint = replace(index_path)
    answer = service.reload()
    assert (answer["plan_id"], answer["plan_origin"]) == (None, "none")
    assert fingerprint in answer["note"]
    assert "hybridindex apply INDEX" in answer["note"]
    assert status_of(service)["note"] == answer["note"]
    assert service.router.devices == ()
    with pytest.raises(InvalidInputError, match="no plan is stored"):
        service.repartition(apply=False)
    # A client that names a window for lookahead is not refused for it.
    service.close_session(service.open_session("me", window_ms=100.0), "me")
    host = search(service, queries, k=5)
    with hx.open(index_path) as index, index.store() as store:
        profile = index.profile(clustered(300, seed=2), 6, max_seconds=0.1)
        plan = index.plan(50, 8 << 20, profile, coverage=0.4)
        make_current(store, plan, store.save_plan(plan.to_record(), profile.id), verified=False, why="applied")
    again = service.reload()
    assert (again["reloaded"], again["generation"], again["plan_origin"], again["note"]) == (True, 2, "stored", None)
    assert service.router.residency.n_resident > 0
    assert_same(search(service, queries, k=5), host)


def test_a_plan_that_opens_devices_replaces_no_index(service, index_path, queries):
    """The directory has another generation, which nobody asked to serve."""
    replace(index_path)
    service.reload()
    with hx.open(index_path) as index, index.store() as store:
        profile = index.profile(clustered(300, seed=2), 6, max_seconds=0.1)
        plan_id = store.save_plan(index.plan(50, 8 << 20, profile, coverage=0.4).to_record(), profile.id)
    host = search(service, queries, k=5)
    replace(index_path, seed=8)
    answer = service.apply_plan(str(plan_id), force=True)
    assert (answer["applied"], answer["plan_id"], service.plan_id) == (True, plan_id, plan_id)
    assert service.index.ivf.generation == 2
    assert service.router.residency.n_resident > 0
    assert_same(search(service, queries, k=5), host)
    assert service.reload()["generation"] == 3


def test_a_session_keeps_its_generation_until_it_ends(service, index_path, queries):
    name = service.open_session("me", lookahead_bytes=1 << 20)
    service.lookahead(name, "me", queries[:2])

    def in_session():
        request = SearchRequest(queries=queries, k=5, nprobe=6)
        return asyncio.run(service.search(request, "me", name))

    expected = in_session()
    replace(index_path)
    service.reload()
    assert (search(service, queries, k=5).ids >= SECOND).all()
    assert_same(in_session(), expected)
    service.lookahead(name, "me", queries[:2])
    assert_same(in_session(), expected)
    assert status_of(service)["reload"]["retired"] == [{"generation": 1, "sessions": 1}]
    # A second replacement does not end it either.
    replace(index_path, seed=8)
    service.reload()
    assert_same(in_session(), expected)
    service.close_session(name, "me")
    service.generations.close_unused()
    assert status_of(service)["reload"]["retired"] == []
    with pytest.raises(UnknownSessionError):
        in_session()


def test_a_session_that_began_while_the_arena_was_filled_gets_the_devices(service, index_path, queries, monkeypatch):
    replace_by_the_same(index_path)
    names = []
    opened = service.generations._open_devices

    def late(choice):
        names.append(service.open_session("me", lookahead_bytes=1 << 20))
        opened(choice)

    monkeypatch.setattr(service.generations, "_open_devices", late)
    service.reload()
    with service.sessions.use(names[0], "me") as session:
        session.lookahead(queries[:4]).result(300)
    assert service.session_stats(names[0], "me")["lists_moved"] > 0


def test_no_two_arenas_are_held_at_once(service, index_path, monkeypatch):
    replace_by_the_same(index_path)
    held, most = {id(tier.arena) for tier in service.router.devices}, []
    take, release = PageArena.take, PageArena.release

    def taking(arena):
        take(arena)
        held.add(id(arena))
        most.append(len(held))

    def releasing(arena):
        release(arena)
        held.discard(id(arena))

    monkeypatch.setattr(PageArena, "take", taking)
    monkeypatch.setattr(PageArena, "release", releasing)
    service.reload()
    assert most == [1]


def test_what_routes_take_is_made_anew_only_where_it_is_another(service, index_path):
    """Its making holds the event loop."""
    routes = [SearchRoute(service, Metrics(service)) for _ in range(2)]
    taken = routes[0].requests
    assert routes[1].requests is taken
    replace_by_the_same(index_path)
    service.reload()
    assert routes[0].requests is taken
    replace(index_path, nlist=16)
    service.reload()
    assert routes[0].requests is routes[1].requests is not taken
    assert routes[0].requests.search.options["nprobe"]["maximum"] == 16


def test_a_damaged_generation_is_refused_and_the_old_one_serves(service, index_path, queries):
    expected = search(service, queries, k=5)
    metrics = Metrics(service)
    replace(index_path)
    damage(index_path, 2)
    with pytest.raises(ReloadError, match=r"generation 2 cannot serve: .*lists\.bin.*generation 1 goes on serving"):
        service.reload()
    assert_same(search(service, queries, k=5), expected)
    assert service.router.residency.n_resident > 0
    said = status_of(service)["reload"]
    assert (said["done"], said["failed"], said["under_way"]) == (0, 1, False)
    assert "lists.bin" in said["last_error"]
    assert str(index_path) not in said["last_error"]
    assert 'hybridindex_reloads_total{outcome="failed"} 1.0' in metrics.render().decode()
    assert service.store.list_events(kind="reload_failed")[0].payload["generation"] == 1
    assert generations(index_path) == ["gen-000001", "gen-000002"]
    # Not tried again by itself, but on request; and back again without a daemon's help.
    assert not service.generations.changed()
    hx.rollback(index_path)
    assert service.reload()["reloaded"] is False
    assert generations(index_path) == ["gen-000001"]


@pytest.mark.parametrize(("options", "name"), [({"metric": "ip"}, "metric"), ({"n": 300}, "dim")])
def test_clients_do_not_get_an_index_that_they_cannot_ask(service, index_path, queries, options, name):
    if name == "dim":
        vectors = clustered(300, seed=1)[:, :8]
        hx.build(np.ascontiguousarray(vectors), index_path, nlist=4, metric="l2", replace=True).close()
    else:
        replace(index_path, **options)
    with pytest.raises(ReloadError, match=f"{name} is"):
        service.reload()
    assert (search(service, queries).ids < SECOND).all()


@pytest.mark.parametrize("what", ["opened", "warmed up"])
def test_a_device_that_fails_leaves_the_new_generation_on_the_host(service, index_path, queries, monkeypatch, what):
    """The same index serves there, whose router with devices is given up."""
    replace_by_the_same(index_path)
    warm_up = reload.warm_up

    def refuse(*_):
        raise OutOfBudgetError("somebody took the memory")

    def fail(router, *args, **options):
        return refuse() if router.devices else warm_up(router, *args, **options)

    def full(_number):
        raise OSError("no room for the address file")

    service.generations.on_generation.append(full)
    if what == "opened":
        monkeypatch.setattr(service.generations, "_open_devices", refuse)
    else:
        monkeypatch.setattr(reload, "warm_up", fail)
    answer = service.reload()
    assert (answer["reloaded"], answer["generation"]) == (True, 2)
    assert "somebody took the memory" in answer["note"]
    assert len(search(service, queries).ids) == len(queries)
    monkeypatch.undo()
    assert service.reload()["note"] is None
    assert service.router.residency.n_resident > 0
    assert len(search(service, queries).ids) == len(queries)


def test_one_change_at_a_time(service, index_path, monkeypatch):
    replace(index_path)
    with service.changes.changing, pytest.raises(OverloadedError, match="another change"):
        service.reload()


def test_a_daemon_that_stops_keeps_what_it_serves(service, index_path):
    replace(index_path)
    service.admission.drain()
    with pytest.raises(OverloadedError, match="about to stop"):
        service.reload()
    assert service.index.ivf.generation == 1


def test_what_was_replaced_leaves_the_disk_when_the_new_one_serves(service, index_path):
    replace(index_path)
    assert generations(index_path) == ["gen-000001", "gen-000002"]
    assert service.reload()["removed_generations"] == [1]
    assert generations(index_path) == ["gen-000002"]


def test_what_was_replaced_stays_where_it_shall(make_service, index_path, queries):
    service = make_service(keep_replaced=True)
    expected = search(service, queries, k=5)
    replace(index_path)
    assert service.reload()["removed_generations"] == []
    assert (search(service, queries).ids >= SECOND).all()
    assert hx.rollback(index_path) == 1
    answer = service.reload()
    assert (answer["generation"], answer["plan_origin"]) == (1, "stored")
    assert_same(search(service, queries, k=5), expected)


def test_a_refresh_follows_the_new_generation(index_path, queries):
    config = ServiceConfig(router=RouterConfig(devices=("cpu",)))

    def follow(index, router, store):
        return Refresher(index, router, store, RefreshConfig())

    service = Service.open(index_path, config, make_refresher=follow)
    try:
        service.start()
        before = service.refresher
        replace_by_the_same(index_path)
        assert service.reload()["plan_origin"] == "carried over"
        assert service.refresher is not before
        assert service.refresher.status().running
        assert not before.status().running
        search(service, queries)
        assert service.refresher.status().requests == 1
        replace(index_path)
        assert service.reload()["plan_id"] is None
        assert service.refresher is None
    finally:
        service.close()


def test_who_watches_the_service_sees_the_new_generation(service, index_path, queries):
    metrics, series, watch = Metrics(service), Series(service, lambda: 1.0), DeviceWatch(service)
    series.sample()
    watch.look()
    replace(index_path)
    service.reload()  # on the host
    series.sample()
    watch.look()
    replace_by_the_same(index_path)
    assert service.reload()["plan_origin"] == "stored"
    series.sample()
    watch.look()
    told = threading.Event()  # a batch is told after its answers
    service.router.on_batch.append(lambda _report: told.set())
    search(service, queries)
    assert told.wait(300)
    text = metrics.render().decode()
    assert "hybridindex_generation 3.0" in text
    assert 'hybridindex_stage_seconds_count{stage="coarse"}' in text
    (device,) = series.read()["devices"]
    assert device["usable"] == [True, False, True]
    assert service.store.list_events(kind="index_reloaded")[0].payload["generation"] == 3


def test_the_route_answers_and_names_no_path(service, index_path):
    replace(index_path, nlist=16)
    before = ask(service, "GET", "/v1/openapi.json").json()
    answer = ask(service, "POST", "/v1/reload")
    assert answer.status_code == 200
    assert answer.json()["generation"] == 2
    replace(index_path, seed=8)
    damage(index_path, 3)
    problem = ask(service, "POST", "/v1/reload")
    assert problem.status_code == 409
    assert problem.json()["type"].endswith(":reload-failed")
    assert str(index_path) not in problem.text
    assert ask(service, "POST", "/v1/reload", json={"force": True}).status_code == 400
    after = ask(service, "GET", "/v1/openapi.json").json()

    def most(document):
        parameters = document["paths"]["/v1/search"]["post"]["parameters"]
        return next(p["schema"]["maximum"] for p in parameters if p["name"] == "nprobe")

    assert (most(before), most(after)) == (24, 16)


def test_the_document_of_an_application_follows(service, index_path):
    async def conversation(http):
        before = (await http.get("/v1/openapi.json")).json()
        await http.post("/v1/reload")
        return before, (await http.get("/v1/openapi.json")).json()

    replace(index_path, nlist=16)
    before, after = talk(service, conversation)
    assert '"maximum": 16' in str(after).replace("'", '"')
    assert before != after


def test_it_reloads_by_itself_where_it_is_told_to(make_service, index_path, monkeypatch):
    monkeypatch.setattr(upkeep, "_FOLLOW_S", 0.01)
    service = make_service(reload="auto", warm=False)
    with live(service):
        replace(index_path)
        while service.index.ivf.generation == 1:
            assert not service.generations.counts.failed
        while service.generations.counts.done == 0:
            pass
    assert service.index.count == 2000


@pytest.mark.parametrize("choice", ["latest", "1"])
def test_a_plan_of_another_index_starts_on_the_host(index_path, queries, choice):
    """A unit of systemd would else start it again for ever."""
    replace(index_path)
    config = ServiceConfig(plan=choice, router=RouterConfig(devices=("cpu",)))
    with contextlib.closing(Service.open(index_path, config, make_refresher=Refresher)) as service:
        service.warm_up()
        note = status_of(service)["note"]
        with hx.open(index_path) as index:
            assert index.fingerprint in note
        assert "hybridindex apply INDEX" in note
        assert (search(service, queries).ids >= SECOND).all()
        # Who starts with it serves it: what it replaced is gone.
        assert generations(index_path) == ["gen-000002"]


def test_devices_with_a_budget_of_their_own_open_without_a_plan(make_service, index_path):
    replace(index_path)
    service = make_service(router={"device_budget_bytes": 4 << 20})
    assert len(service.router.devices) == 1
    assert "no plan is stored" in status_of(service)["note"]
