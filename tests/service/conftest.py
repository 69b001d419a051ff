"""One profiled and planned index for all tests of the service, and services over it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

import hybridindex as hx
from hybridindex.service.app import create_app
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from tests.clustered import clustered


@pytest.fixture(scope="session")
def planned_index(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "idx"
    with hx.build(clustered(2500, seed=1), path, nlist=24, metric="l2", nprobe=6) as index:
        profile = index.profile(clustered(300, seed=2), 6, max_seconds=1)
        plan = index.plan(50, 16 << 20, profile, coverage=0.3)
        with index.store() as store:
            store.save_plan(plan.to_record(), profile.id)
    return path


@pytest.fixture
def index_path(planned_index, tmp_path):
    """A copy of its own, so that plans stored by one test are not another's latest."""
    return shutil.copytree(planned_index, tmp_path / "idx")


@pytest.fixture
def make_service(index_path):
    """``make_service(limits={...}, **config)``; warmed up, closed at the test's end."""
    made: list[Service] = []

    def factory(*, limits=None, warm=True, **config) -> Service:
        config.setdefault("devices", ("cpu",))
        service = Service.open(index_path, ServiceConfig(limits=Limits(**(limits or {})), **config))
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
        assert open_.wait(60)

    waiting = router.submit(queries[:1], on_probes=hold)
    assert held.wait(60)
    try:
        yield open_
    finally:
        open_.set()
        waiting.result(60)


def assert_same(result, expected) -> None:
    assert np.array_equal(result.ids, expected.ids)
    assert np.array_equal(result.distances, expected.distances)
