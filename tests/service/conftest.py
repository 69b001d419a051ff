"""Services over an index with a profile and a plan, and ways to talk to them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from hybridindex.config import RouterConfig
from hybridindex.refresh.config import RefreshConfig
from hybridindex.service import status
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.app import create_app
from tests.clustered import clustered
from tests.router.slow_copies import until

HERE = RefreshConfig(planning="here")


@pytest.fixture
def make_service(index_path, monkeypatch):
    """``make_service(router={...}, limits={...}, **config)``; warmed up, closed at the test's end.

    It plans in the test's own process, which takes less time; another ``planning``: as a daemon does.
    """
    # A disk that is slow for once is no finding of a test.
    monkeypatch.setattr(status, "_PATIENCE_S", 300.0)
    made: list[Service] = []

    def factory(*, router=None, limits=None, warm=True, planning=HERE, make_refresher=None, **config) -> Service:
        told = RouterConfig(**{"devices": ("cpu",), **(router or {})})
        whole = ServiceConfig(router=told, limits=Limits(**(limits or {})), **config)
        service = Service.open(index_path, whole, make_refresher=make_refresher, planning=planning)
        made.append(service)
        if warm:
            service.warm_up()
        return service

    yield factory
    for service in made:
        service.close()
        service.router.check_invariants()
        service.admission.check_invariants()


@pytest.fixture
def service(make_service):
    return make_service()


@pytest.fixture
def queries():
    return clustered(20, seed=3)


def talk(service, conversation, **options):
    """Runs ``await conversation(http)`` against the application of ``service``."""

    async def run():
        app = create_app(service, **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://daemon") as http:
            return await conversation(http)

    return asyncio.run(run())


def ask(service, method, path, *, app_options=None, **request):
    """One request and its answer."""

    async def conversation(http):
        return await http.request(method, path, **request)

    return talk(service, conversation, **(app_options or {}))


@contextmanager
def held_engine(router, queries):
    """Holds the engine's thread inside a search until the block ends or the event is set; nothing is answered."""
    held, open_ = threading.Event(), threading.Event()

    def hold(_probes) -> None:
        held.set()
        assert open_.wait(300)

    waiting = router.submit(queries[:1], on_probes=hold)
    assert held.wait(300)
    try:
        yield open_
    finally:
        open_.set()
        waiting.result(300)


@contextmanager
def reloading_under(search, service, queries):
    """Another generation serves, while ``search``, on a thread of its own, is held in the old one until the block ends.
    Then the reload ends, too."""
    generation = service.index.ivf.generation
    threads = [threading.Thread(target=run, daemon=True) for run in (search, service.reload)]
    with held_engine(service.router, queries) as gate:
        threads[0].start()
        until(lambda: service.admission.n_in_flight)
        threads[1].start()
        until(lambda: service.index.ivf.generation != generation)
        yield
        gate.set()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "it waits for ever"


def assert_same(result, expected) -> None:
    assert np.array_equal(result.ids, expected.ids)
    assert np.array_equal(result.distances, expected.distances)
