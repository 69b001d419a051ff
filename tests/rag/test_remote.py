"""Pipelines through a daemon's client: the same passages as in process; sessions end, whatever happens."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from hybridindex.client import Client, RetryPolicy
from hybridindex.config import RouterConfig
from hybridindex.errors import InvalidInputError, TraceError, UnreachableError
from hybridindex.rag.periodic import round_trip_ms
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.app import create_app
from tests.rag.test_periodic import CHUNKS, plan, said, slow_model
from tests.rag.test_pipelines import QUESTION, SAID
from tests.rag.world import embedder, query_embedder, replay


class AppTransport(httpx.BaseTransport):
    """The daemon's application without its sockets; refuses when it is ``down``."""

    def __init__(self, service):
        self._within = httpx.ASGITransport(create_app(service))
        self.down = False

    def handle_request(self, request):
        if self.down:
            raise httpx.ConnectError("nobody listens")

        async def answer():
            response = await self._within.handle_async_request(request)
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        return asyncio.run(answer())


@pytest.fixture
def service(world):
    config = ServiceConfig(router=RouterConfig(devices=("cpu",), device_budget_bytes=16 << 20), plan="none")
    with_daemon = Service.open(world[0].path, config)
    with_daemon.warm_up()
    yield with_daemon
    with_daemon.close()
    with_daemon.router.check_invariants()


@pytest.fixture
def transport(service):
    return AppTransport(service)


@pytest.fixture
def remote(transport, documents):
    with Client("http://daemon", transport=transport, retry=RetryPolicy(attempts=1)) as client:
        yield Retriever(client, query_embedder(documents), documents, k=3)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_daemon_and_a_router_find_the_same(name, remote, retriever, service):
    far = run_pipeline(name, QUESTION, remote, replay(*SAID[name]))
    near = run_pipeline(name, QUESTION, retriever, replay(*SAID[name]))
    assert [p.id for p in far.passages] == [p.id for p in near.passages]
    assert far.text == near.text
    assert len(service.sessions) == 0


def test_a_run_that_fails_ends_its_session(remote, service):
    with pytest.raises(TraceError):
        run_pipeline("hyde", QUESTION, remote, replay())
    assert len(service.sessions) == 0


def test_a_daemon_that_goes_away_while_the_answer_is_written(remote, transport, caplog):
    def gone(_text):
        transport.down = True

    answer = run_pipeline("hyde", QUESTION, remote, replay(*SAID["hyde"]), on_text=gone)
    assert answer.text == "dust and light"
    assert "session could not be closed" in caplog.text
    with pytest.raises(UnreachableError, match="nobody listens"):
        run_pipeline("hyde", QUESTION, remote, replay())


def test_a_daemon_that_goes_away_before_the_search(remote, transport):
    class Cutting:
        def generate(self, prompt, /):
            transport.down = True
            return replay(*SAID["hyde"]).generate(prompt)

        def close(self):
            pass

    with pytest.raises(UnreachableError, match="nobody listens"):
        run_pipeline("hyde", QUESTION, remote, Cutting())


def test_an_embedder_that_does_not_fit(remote, documents, router, transport):
    class Wider:
        def embed(self, texts):
            return embedder().embed(texts).repeat(2, axis=1)

    with pytest.raises(InvalidInputError, match="gives 32 dimensions, but the index has 16"):
        Retriever(remote.source, Wider(), documents)
    for source in (remote.source, router):
        with pytest.raises(InvalidInputError, match="the embedder gives 32 dimensions, but the index has 16"):
            Retriever(source, Wider(), None)
    # Nobody to be asked: the first search says it.
    transport.down = True
    without = Retriever(remote.source, Wider(), None)
    transport.down = False
    with pytest.raises(InvalidInputError, match="16"):
        run_pipeline("hyde", QUESTION, without, replay())


@pytest.mark.parametrize("answer", [None, [1.0], "text"])
def test_an_embedder_that_answers_nonsense(remote, documents, answer):
    class Nonsense:
        def embed(self, _texts):
            return answer

    with pytest.raises(InvalidInputError, match="the embedder gave"):
        Retriever(remote.source, Nonsense(), documents)


@pytest.mark.parametrize(("field", "value"), [("k", 0), ("k", True), ("nprobe", 1.5), ("dim", 5)])
def test_wrong_settings_are_named(remote, documents, field, value):
    with pytest.raises(InvalidInputError):
        Retriever(remote.source, query_embedder(documents), documents, **{field: value})


def test_a_round_trip_is_measured(remote):
    session = remote.open()
    assert round_trip_ms(session) > 0
    session.close()


def test_piperag_gives_deadlines_to_a_daemon(remote, service):
    with Steps(QUESTION, remote, replay(*said(*CHUNKS))) as steps:
        written = plan(min_nprobe=2, margin=1.0).run(steps, slow_model())
    deadlines = [chunk.deadline_ms for chunk in written.chunks]
    assert deadlines[0] is None
    assert all(1.0 <= deadline < 1000 for deadline in deadlines[1:])
    for chunk in written.chunks[1:]:
        # On a machine that is busy a search may miss its window; then the report says so.
        assert chunk.missed or 2 <= chunk.nprobe_used <= 4
    assert len(service.sessions) == 0
