"""The budget of bytes: taken before they are there, refused beyond a share, given back however a request ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import numpy as np
import pytest

from hybridindex.errors import OverloadedError
from hybridindex.service.http.app import create_app
from hybridindex.service.http.wire import BodyError, parse_json_object, parsed_bytes
from hybridindex.service.intake.machine_memory import LEAST_REQUEST_MEMORY, default_request_memory
from hybridindex.service.intake.request_memory import RequestMemory
from tests.service.conftest import ask, held_engine, talk
from tests.service.live import live

#: 128 MiB for requests, half of them for one client.
LIMITS = {"request_memory_bytes": LEAST_REQUEST_MEMORY}
MIB = 1 << 20


@contextlib.contextmanager
def holding(memory, client, nbytes):
    """A request of ``client`` that has ``nbytes``."""
    with memory.open(client) as charge:
        charge.hold(nbytes)
        yield


def test_a_charge_grows_shrinks_and_is_given_back():
    memory = RequestMemory(LEAST_REQUEST_MEMORY, client_share=0.5)
    with memory.open("a") as charge:
        charge.hold(40 * MIB)
        assert 40 * MIB < memory.taken_bytes < 41 * MIB
        with pytest.raises(OverloadedError, match="your share of request_memory_bytes") as refused:
            charge.hold(70 * MIB)
        assert refused.value.own_share
        assert charge.nbytes == 40 * MIB
        charge.hold(MIB)
        assert memory.taken_bytes < 2 * MIB
        memory.check_invariants()
    assert memory.taken_bytes == 0
    with pytest.raises(ZeroDivisionError), holding(memory, "a", MIB):
        raise ZeroDivisionError
    assert memory.taken_bytes == 0
    memory.check_invariants()


def test_a_newcomer_gets_whatever_is_free_beside_one_that_took_all_it_may():
    memory = RequestMemory(LEAST_REQUEST_MEMORY, client_share=0.5)
    with contextlib.ExitStack() as held:
        for _ in range(15):
            held.enter_context(holding(memory, "flood", 4 * MIB))
        with pytest.raises(OverloadedError), holding(memory, "flood", 4 * MIB):
            pass
        assert 60 * MIB < memory.taken_bytes <= 64 * MIB
        # More than is left beside it; of a body without a length, bit by bit.
        with memory.open("modest") as charge:
            for mib in range(50):
                charge.hold(mib * MIB)
            for client in ("flood", "modest"):
                with pytest.raises(OverloadedError), memory.open(client):
                    pass
        assert memory.refused == {"full": 0, "share": 3}
    assert memory.taken_bytes == 0
    memory.check_invariants()


def test_the_default_is_a_part_of_the_machine():
    assert LEAST_REQUEST_MEMORY <= default_request_memory() <= 8 << 30


#: Just beyond a growth of a dictionary that holds them.
PAIRS = b"{" + b",".join(b'"%x":-9' % i for i in range(43_691))


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"9.5," * 20_000 + b"1]",
        b"[" + b"[]," * 20_000 + b"1]",
        b"[" + b'{"":1},' * 20_000 + b"1]",
        PAIRS + b"}",
        PAIRS + b',"0":1}',
        b"[" + b'"ab",' * 20_000 + b"1]",
        b'["' + b"a" * 100_000 + b'\\ud83d\\ude00"]',
        ('["' + 2 * ("a" * 100_000 + "\U0001f600\\n") + '"]').encode(),
        b"300",
    ],
    ids=["numbers", "lists", "objects", "pairs", "a key twice", "strings", "escapes", "wide characters", "small"],
)
def test_what_a_json_body_parses_to_is_not_underestimated(body):
    import tracemalloc

    with pytest.raises(BodyError):
        parse_json_object(b'{"a": 1, "a": 1}', set())  # what is set up once
    tracemalloc.start()
    try:
        with pytest.raises(BodyError):
            parse_json_object(body, set())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parsed_bytes(body) >= peak - 4096


class Stalled:
    """Requests whose bodies never come, straight into the application."""

    def __init__(self, service) -> None:
        self.app = create_app(service)
        self.tasks: list[asyncio.Task[None]] = []
        self.read = 0

    def send(self, *headers, path="/v1/search", client="1.1.1.1", parts=()) -> list:
        sent: list[dict] = []
        left = [*parts]

        async def receive():
            self.read += 1
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": True}
            return await asyncio.get_running_loop().create_future()

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1", "client": (client, 1), "server": ("localhost", 1),
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/octet-stream"), *headers],
        }  # fmt: skip
        self.tasks.append(asyncio.create_task(self.app(scope, receive, send)))
        return sent

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/v1/search", "/v1/sessions", "/v1/repartition"])
def test_stalled_bodies_hold_no_more_than_their_share_and_others_get_in(make_service, queries, path):
    service = make_service(warm=False, limits=LIMITS)
    length = (b"content-length", str(15 * MIB).encode())

    async def run():
        stalled = Stalled(service)
        answers = [stalled.send(length, path=path) for _ in range(120)]
        await settle()
        assert service.memory.taken_bytes <= 64 * MIB
        refused = [sent for sent in answers if sent]
        assert len(refused) == 118
        assert stalled.read == 2, "nothing of a refused body is asked for"
        assert {sent[0]["status"] for sent in refused} == {429}
        assert b"retry-after-ms" in dict(refused[0][0]["headers"])
        other = stalled.send(length, path=path, client="2.2.2.2")
        await settle()
        assert not other, "a newcomer's body is read"
        await stalled.end()

    asyncio.run(run())
    assert service.memory.taken_bytes == 0
    assert ask(service, "POST", "/v1/search", json={"queries": queries.tolist()}).status_code == 200
    assert service.memory.taken_bytes == 0
    assert service.memory.refused["share"] == 118


def test_a_drain_does_not_wait_for_bodies_that_do_not_come(make_service):
    """They are refused, as they would be if they came: SIGTERM used to wait for them until its time was over."""
    service = make_service(warm=False, limits=LIMITS)

    async def run():
        stalled = Stalled(service)
        sent = [stalled.send((b"content-length", b"1000")), stalled.send(path="/v1/sessions")]
        await settle()
        assert sent == [[], []]
        service.drain()
        await asyncio.gather(*stalled.tasks)
        assert [answer[0]["status"] for answer in sent] == [503, 503]
        # Those that begin later would hold the drain for as long as it may last.
        sent = [stalled.send((b"expect", b"100-continue")), stalled.send(path="/v1/sessions")]
        await settle()
        assert [answer and answer[0]["status"] for answer in sent] == [503, 503]
        await stalled.end()

    asyncio.run(run())
    assert service.memory.taken_bytes == 0
    assert not service.memory.reading


def test_bodies_without_a_length_count_as_they_come(make_service):
    service = make_service(warm=False, limits=LIMITS)

    async def run():
        stalled = Stalled(service)
        answers = [stalled.send(parts=[bytes(MIB)] * 14) for _ in range(8)]
        await settle()
        assert 50 * MIB < service.memory.taken_bytes <= 64 * MIB
        assert any(sent and sent[0]["status"] == 429 for sent in answers)
        await stalled.end()

    asyncio.run(run())
    assert service.memory.taken_bytes == 0


def test_what_can_never_fit_is_too_large(make_service, queries):
    service = make_service(limits=LIMITS)
    answer = ask(service, "POST", "/v1/search", json={"queries": queries[:1].repeat(600, 0).tolist(), "k": 1700})
    assert answer.status_code == 413, answer.text
    assert "send fewer queries" in answer.json()["detail"]
    hostile = b'{"queries": [' + b"{}," * 400_000 + b"1]}"
    for path in ("/v1/search", "/v1/sessions", "/v1/repartition"):
        answer = ask(service, "POST", path, content=hostile, headers={"content-type": "application/json"})
        assert answer.status_code == 413, "it is parsed"
    assert service.memory.taken_bytes == 0


def test_a_large_answer_is_refused_where_there_is_no_room_for_it(make_service):
    service = make_service(warm=False, limits=LIMITS)
    assert len(ask(service, "GET", "/v1/openapi.json").content) > 1 << 16
    most = service.memory.most - (16 << 10)
    with holding(service.memory, "one", most), holding(service.memory, "two", most - (64 << 10)):
        answer = ask(service, "GET", "/v1/openapi.json")
        assert answer.status_code == 503, "nobody counts it"
        assert answer.json()["retry_after_s"] > 0
        assert ask(service, "GET", "/v1/plan").status_code == 200
    assert service.memory.taken_bytes == 0
    assert ask(service, "GET", "/v1/openapi.json").status_code == 200


def test_ids_of_filters_count_while_a_search_is_under_way(make_service, queries):
    service = make_service(limits=LIMITS)
    ids = {name: list(range(100_000)) for name in ("allow_ids", "deny_ids")}

    async def conversation(http):
        searching = asyncio.create_task(http.post("/v1/search", json={"queries": queries[0].tolist(), **ids}))
        while not service.admission.n_in_flight:
            await asyncio.sleep(0.001)
        taken = service.memory.taken_bytes
        opened.set()
        return taken, await searching

    with held_engine(service.router, queries) as opened:
        taken, answer = talk(service, conversation)
    assert answer.status_code == 200, answer.text
    assert taken > 2 * 2 * 100_000 * 8
    assert service.memory.taken_bytes == 0


def test_an_answer_counts_until_it_is_taken_and_a_client_that_never_reads_is_cut_off(make_service, queries):
    service = make_service(warm=False, limits={"client_timeout_s": 1.0})
    body = np.tile(queries, (25, 1))
    head = (
        f"POST /v1/search?k=2000&nprobe=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        f"Accept: application/octet-stream\r\nContent-Length: {body.nbytes}\r\n\r\n"
    )
    with live(service) as port, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head.encode() + body.tobytes())
        while service.memory.taken_bytes < 10 * MIB:
            pass
        while service.memory.taken_bytes:
            pass
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                received += len(part)
        assert received < 12 * len(body) * 2000
