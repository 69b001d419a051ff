"""Both clients: the same answers as in-process, errors of the library's tree, retries that lose and repeat nothing."""

from __future__ import annotations

import asyncio
import gc
import json

import httpx
import numpy as np
import pytest

from hybridindex import errors
from hybridindex.answer_codec import encode_answer
from hybridindex.client import AsyncClient, Client, RetryPolicy
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.http.app import create_app
from tests.service.conftest import assert_same


def with_client(service, conversation, **options):
    async def run():
        transport = httpx.ASGITransport(create_app(service, keyring=options.pop("keyring", None)))
        async with AsyncClient("http://daemon", transport=transport, **options) as client:
            return await conversation(client)

    return asyncio.run(run())


class Answers(httpx.BaseTransport):
    """Answers, or errors, in the order given; remembers what was asked."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []

    def handle_request(self, request):
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def problem(status, detail="because", name="x", **headers):
    kind = f"urn:hybridindex:problem:{name}"
    return httpx.Response(status, headers=headers, content=json.dumps({"detail": detail, "type": kind}))


def client_of(*answers, **options):
    transport, pauses = Answers(*answers), []
    return Client("http://daemon", transport=transport, sleep=pauses.append, **options), transport, pauses


def test_searches_equal_those_in_process(service, queries):
    expected = service.router.search(queries, 4, 5)

    async def conversation(client):
        assert_same(await client.search(queries, 4, 5), expected)
        assert_same(await client.search(queries[0], 4, 5), service.router.search(queries[0], 4, 5))
        async with await client.session(lookahead_bytes=1 << 20) as session:
            await session.lookahead(queries, nprobe=4)
            assert_same(await session.search(queries, 4, 5), expected)
            assert (await session.stats())["searches"] == 1
        assert len(service.sessions) == 0
        assert (await client.status())["index"]["dim"] == 24
        assert (await client.plan())["plan_id"] == 1
        assert len((await client.plans())["plans"]) == 1
        assert not (await client.repartition(coverage=0.5))["applied"]
        assert (await client.repartition(apply=True, coverage=0.5))["plan_id"] == 2
        assert (await client.apply_plan(1, dry_run=True))["lists_to_drop"] > 0
        assert (await client.apply_plan(1))["plan_id"] == 1
        with pytest.raises(errors.InfeasiblePlanError, match="--force"):
            await client.repartition(apply=True, slo_ms=0.001, coverage="solve")
        await client.drain()
        with pytest.raises(errors.OverloadedError):
            await client.search(queries, deadline_ms=500)

    with_client(service, conversation)


def test_refusals_are_errors_of_the_tree(service, queries, tmp_path):
    file = KeyFile(tmp_path / "keys")
    key = file.add("web", "search")

    async def conversation(client):
        with pytest.raises(errors.InvalidInputError, match=r"^k is 0"):
            await client.search(queries, 0)
        with pytest.raises(errors.InvalidInputError, match="dimension 24"):
            await client.search(np.zeros((1, 3), np.float32))
        with pytest.raises(errors.AccessDeniedError, match="role admin"):
            await client.repartition()
        session = await client.session()
        await session.close()
        await session.close()
        with pytest.raises(errors.UnknownSessionError):
            await session.search(queries)

    with_client(service, conversation, key=key, keyring=Keyring(file.path))

    async def stranger(client):
        with pytest.raises(errors.AccessDeniedError, match="valid API key"):
            await client.status()

    with_client(service, stranger, keyring=Keyring(file.path))


@pytest.mark.parametrize("bad", [[1.0, 2.0], np.zeros(3), np.zeros((1, 1, 1), np.float32)])
def test_queries_are_checked_before_anything_is_sent(bad):
    client, transport, _ = client_of()
    with pytest.raises(errors.InvalidInputError, match=r"^queries is"):
        client.search(bad)
    assert not transport.asked


def answer(service, queries):
    return httpx.Response(200, content=encode_answer(service.router.search(queries)))


def test_lost_connections_and_refusals_are_tried_again(service, queries):
    client, transport, pauses = client_of(
        httpx.ConnectError("refused"),
        problem(503, **{"retry-after": "2"}),
        problem(429, **{"retry-after": "nonsense"}),
        answer(service, queries),
    )
    assert_same(client.search(queries), service.router.search(queries))
    assert len(transport.asked) == 4
    assert pauses[0] <= 0.05
    assert 2 <= pauses[1] <= 2.2
    assert 1 <= pauses[2] <= 1.2


def test_milliseconds_go_before_seconds(service, queries):
    client, _, pauses = client_of(
        problem(503, **{"retry-after": "1", "retry-after-ms": "300"}), answer(service, queries)
    )
    client.search(queries)
    assert 0.3 <= pauses[0] <= 0.33


def test_retries_stop_at_the_deadline(queries):
    client, transport, pauses = client_of(problem(503, **{"retry-after": "20"}))
    with pytest.raises(errors.OverloadedError) as refused:
        client.search(queries, deadline_ms=5000)
    assert refused.value.retry_after_s == 20
    assert not pauses
    assert float(transport.asked[0].url.params["deadline_ms"]) <= 5000


def test_a_change_may_take_longer_than_a_search(service, queries):
    """A planner of low priority takes minutes beside busy cores; the client used to give it up after 30 s."""
    done = httpx.Response(200, json={"applied": True})
    client, transport, _ = client_of(answer(service, queries), done, done, done, timeout_s=7, change_timeout_s=1000)
    client.search(queries)
    client.repartition(apply=True)
    client.apply_plan()
    client.reload()
    limits = [request.extensions["timeout"]["read"] for request in transport.asked]
    assert limits[0] <= 7
    assert all(900 < limit <= 1000 for limit in limits[1:])
    with pytest.raises(errors.InvalidInputError, match="change_timeout_s is 0; expected seconds above 0"):
        Client("http://127.0.0.1:1", change_timeout_s=0)


def test_a_change_is_not_sent_twice_once_it_may_have_arrived():
    client, transport, _ = client_of(httpx.ReadTimeout("silence"))
    with pytest.raises(errors.UnreachableError, match="silence"):
        client.repartition(apply=True)
    assert len(transport.asked) == 1
    client, transport, _ = client_of(httpx.ConnectError("refused"), httpx.Response(200, json={"applied": True}))
    assert client.repartition(apply=True) == {"applied": True}
    assert len(transport.asked) == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidInputError),
        (401, errors.AccessDeniedError),
        (403, errors.AccessDeniedError),
        (404, errors.ServiceError),
        (408, errors.DeadlineExceededError),
        (409, errors.ProfileError),
        (413, errors.InvalidInputError),
        (415, errors.InvalidInputError),
        (500, errors.ServiceError),
        (504, errors.DeadlineExceededError),
    ],
)
def test_statuses_are_errors_and_final(status, kind):
    client, transport, _ = client_of(problem(status))
    with pytest.raises(kind, match="because"):
        client.status()
    assert len(transport.asked) == 1


@pytest.mark.parametrize(
    ("status", "name", "kind"),
    [
        (404, "unknown-session", errors.UnknownSessionError),
        (409, "device-failed", errors.DeviceError),
        (409, "infeasible-plan", errors.InfeasiblePlanError),
        (409, "plan-conflict", errors.PlanConflictError),
        (409, "reload-failed", errors.ReloadError),
        (503, "damaged-lists", errors.DamagedListsError),
        (503, "not-held", errors.NotHeldError),
        (503, "no-plan", errors.PlanningError),
    ],
)
def test_problems_with_a_name_are_errors_of_their_own_and_final(status, name, kind):
    """``no-plan`` used to be asked again until the call's time, an hour of the command line, was over."""
    client, transport, pauses = client_of(problem(status, name=name, **{"retry-after": "1"}))
    with pytest.raises(kind, match="because") as caught:
        client.repartition(apply=True)
    assert type(caught.value) is kind
    assert len(transport.asked) == 1
    assert not pauses


@pytest.mark.parametrize("body", [b"", b"{", b"HIXA", b"[]"])
def test_answers_that_make_no_sense_are_errors(body, queries):
    client, _, _ = client_of(httpx.Response(200, content=body))
    with pytest.raises(errors.ServiceError, match="cannot be read"):
        client.search(queries)
    client, _, _ = client_of(httpx.Response(502, content=body))
    with pytest.raises(errors.ServiceError, match="answered 502"):
        client.status()


# httpcore leaves a unix socket that could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_nobody_there_is_said_with_the_address(tmp_path):
    with (
        Client(f"unix:{tmp_path / 'none'}", retry=RetryPolicy(attempts=1)) as client,
        pytest.raises(errors.UnreachableError, match=f"unix:{tmp_path / 'none'}"),
    ):
        client.status()
    gc.collect()


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "unix:"])
def test_addresses_are_checked(url):
    with pytest.raises(errors.InvalidInputError, match=r"^url is"):
        Client(url)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1", True])
def test_timeouts_are_checked(timeout):
    with pytest.raises(errors.InvalidInputError, match=r"^timeout_s is"):
        Client("http://x", timeout_s=timeout)


def test_keys_are_sent_and_never_shown():
    client, transport, _ = client_of(httpx.ConnectError("refused"), retry=RetryPolicy(attempts=1), key="hix_secret")
    with pytest.raises(errors.UnreachableError) as failed:
        client.status()
    assert transport.asked[0].headers["authorization"] == "Bearer hix_secret"
    assert "secret" not in str(failed.value) + repr(client)


@pytest.mark.parametrize("deadline_ms", [np.float32(40), np.float64(40), np.int64(40)])
def test_a_deadline_may_be_a_number_of_numpy(service, queries, deadline_ms):
    """As those of a router in the same process."""
    client, transport, _ = client_of(answer(service, queries))
    client.search(queries, deadline_ms=deadline_ms)
    assert 0 < float(transport.asked[0].url.params["deadline_ms"]) <= 40


@pytest.mark.parametrize("deadline_ms", [10**400, -1, 0, float("nan"), True, "5"])
def test_a_deadline_that_is_none_is_refused_by_name(queries, deadline_ms):
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(
            errors.InvalidInputError, match=r"deadline_ms is .*; expected milliseconds above 0, a day at most"
        ),
    ):
        client.search(queries, deadline_ms=deadline_ms)
