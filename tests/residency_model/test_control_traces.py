"""Traces of refreshes and of reloads are runs of the model, and those with a fault are not."""

from __future__ import annotations

import asyncio

import pytest

from hybridindex.errors import StoreError
from hybridindex.plans import current
from hybridindex.refresh import updater
from hybridindex.service.searches import SearchRequest
from tests.refresh.conftest import index, make_world, plan, profile  # noqa: F401 - fixtures
from tests.refresh.world import FAST_S, LATE_S
from tests.residency_model import mutants
from tests.residency_model.observe import observed
from tests.residency_model.replay import Rejected, replay
from tests.router.slow_copies import until
from tests.service.conftest import make_service, queries, reloading_under  # noqa: F401 - fixtures
from tests.service.test_reload import replace, replace_by_the_same


def refreshes(world):
    """One that is committed, and one that a person chose by mistake and that is taken back."""
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    world.serve(2, seed=5, moved=True)
    proposal = world.refresher.propose("a mistake")
    world.serve(3, seed=16)
    world.now += 1000.0
    world.refresher.apply(proposal)
    world.serve(3, seed=10, moved=False, latency_s=LATE_S)
    world.serve(1, seed=11, latency_s=FAST_S)


def test_refreshes_that_are_committed_and_taken_back(make_world):  # noqa: F811
    with observed() as trace:
        world = make_world()
        refreshes(world)
        replayed = replay(trace)
    assert world.refresher.status().updates == {"committed": 1, "rolled_back": 1}
    assert replayed.happened >= {"make current", "moved", "go back"}


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_store_that_fails_while_it_commits(make_world, monkeypatch, taken, times):  # noqa: F811
    real, calls = updater.make_current, []

    def failing(*args, **options):
        calls.append(args)
        # The first one is what served before.
        if 2 <= len(calls) < 2 + times:
            if taken:
                real(*args, **options)
            raise StoreError("injected")
        real(*args, **options)

    for module in (updater, current):
        monkeypatch.setattr(module, "make_current", failing)
    with observed() as trace:
        world = make_world()
        world.serve(2, seed=4, moved=True, latency_s=LATE_S)
        world.serve(2, seed=5, moved=True)
        world.refresher.step()
        replay(trace)
    assert world.refresher.status().updates == {"rolled_back": 1}


@pytest.mark.parametrize("name", mutants.REFRESHES)
def test_the_replay_rejects_a_refresh_with_a_fault(make_world, monkeypatch, name):  # noqa: F811
    fault, expected = mutants.REFRESHES[name]
    fault(monkeypatch)
    with observed() as trace:
        refreshes(make_world())
        with pytest.raises(Rejected) as rejected:
            replay(trace)
    assert rejected.value.what in expected


def reloads(service, index_path, queries, before_the_answer=lambda: None):  # noqa: F811
    """Another content while a session is open and a search is under way, and the same content again."""
    name = service.open_session("me", lookahead_bytes=1 << 20)

    def search(session=None):
        return asyncio.run(service.search(SearchRequest(queries=queries, k=5, nprobe=6), "me", session))

    search(name)
    replace(index_path)
    with reloading_under(search, service, queries):
        search()
        before_the_answer()
    search(name)
    service.generations.close_unused()
    search(name)
    service.close_session(name, "me")
    service.generations.close_unused()
    other = service.open_session("me", lookahead_bytes=1 << 20)
    replace_by_the_same(index_path)
    service.reload()
    search(other)
    service.close_session(other, "me")


def test_reloads_with_sessions_and_searches(make_service, index_path, queries):  # noqa: F811
    with observed() as trace:
        service = make_service()
        reloads(service, index_path, queries)
        service.close()
        replayed = replay(trace)
    assert replayed.happened >= {"enter", "open session", "use", "serves", "close serving", "close serving the end"}


@pytest.mark.parametrize("name", mutants.SWAPS)
def test_the_replay_rejects_a_reload_with_a_fault(make_service, index_path, queries, monkeypatch, name):  # noqa: F811
    fault, expected = mutants.SWAPS[name]
    fault(monkeypatch)
    with observed() as trace:

        def closed():
            if name == "does_not_wait_for_searches":
                until(lambda: any(event.what == "close serving" for event in trace.events))

        service = make_service()
        try:
            reloads(service, index_path, queries, closed)
        except Exception as error:  # noqa: BLE001 - what the fault does to the scene is not what is tested
            print(repr(error))
        with pytest.raises(Rejected) as rejected:
            replay(trace)
    assert rejected.value.what in expected
