"""Refusals from headers alone: when, with what, and that connections outlive them. The queue is in test_admission."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket

import pytest

from hybridindex.answer_codec import ANSWER_TYPE, decode_answer
from hybridindex.partitioner.fair_shares import ShareRule
from hybridindex.service import daemon as run
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.http.app import create_app
from hybridindex.service.http.load_shedding import LoadShedder, deadline_ms
from hybridindex.service.http.middleware import RequestMiddleware
from hybridindex.service.http.protocol import TimedH11Protocol
from tests.clustered import DIM
from tests.service.conftest import assert_same, held_engine, talk
from tests.service.live import live

RAW = {"content-type": "application/octet-stream", "accept": ANSWER_TYPE}
#: One query is searched, four may wait, two of them of one client.
LIMITS = {"in_flight_queries": 1, "queue_queries": 4, "client_share": 0.5, "max_queries": 8}


def length_of(n: int) -> dict[bytes, bytes]:
    return {b"content-type": b"application/octet-stream", b"content-length": str(n * DIM * 4).encode()}


async def until(condition) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0)


class Full:
    """A daemon whose queue holds one query in flight and two that wait, of the client 127.0.0.1."""

    def __init__(self, service, queries):
        self.service, self.queries = service, queries

    async def __call__(self, http, then):
        body = self.queries[0].tobytes()
        asked = [asyncio.create_task(http.post("/v1/search", content=body, headers=RAW)) for _ in range(3)]
        await until(lambda: self.service.admission.n_waiting == 2)
        try:
            return await then(http)
        finally:
            self.opened.set()
            for task in asked:
                assert (await task).status_code == 200

    def run(self, then):
        with held_engine(self.service.router, self.queries) as self.opened:
            return talk(self.service, lambda http: self(http, then))


@pytest.fixture
def full(make_service, queries):
    return Full(make_service(limits=LIMITS), queries)


def test_a_full_share_is_refused_before_the_body_is_asked_for(full):
    asked_for_body = False

    async def body():
        nonlocal asked_for_body
        asked_for_body = True
        yield b"\0" * DIM * 4

    async def refuse(http):
        headers = {**RAW, "x-request-id": "mine-1", "content-length": str(DIM * 4)}
        return await http.post("/v1/search", content=body(), headers=headers)

    answer = full.run(refuse)
    assert answer.status_code == 429
    assert not asked_for_body
    problem = answer.json()
    assert problem["type"] == "urn:hybridindex:problem:too-many-requests"
    assert problem["request_id"] == answer.headers["x-request-id"] == "mine-1"
    assert int(answer.headers["retry-after"]) == math.ceil(problem["retry_after_s"])
    assert int(answer.headers["retry-after-ms"]) == 1000 * problem["retry_after_s"]
    assert answer.headers["content-type"] == "application/problem+json"
    assert "2 queries" in problem["detail"]
    assert full.service.admission.refused["client"] == 1


def test_refusals_are_counted_each_and_logged_together(full, caplog):
    async def refuse(http):
        for _ in range(5):
            assert (await http.post("/v1/search", content=full.queries[0].tobytes(), headers=RAW)).status_code == 429
        return (await http.get("/metrics")).text

    with caplog.at_level(logging.INFO, "hybridindex.access"):
        text = full.run(refuse)
    assert [r for r in caplog.records if getattr(r, "status", 0) == 429] == []
    assert 'hybridindex_responses_total{route="/v1/search",status="429"} 5.0' in text
    assert 'hybridindex_refused_total{reason="client"} 5.0' in text
    assert 'hybridindex_request_seconds_count{route="/v1/search"} 5.0' in text


def test_one_line_tells_how_many(full, caplog):
    shedder = LoadShedder(full.service)
    full.service.admission.drain()

    async def refuse():
        for _ in range(3):
            assert shedder.refusal("a", {}, b"").status == 503
        shedder.flush()
        shedder.flush()

    with caplog.at_level(logging.INFO, "hybridindex.access"):
        asyncio.run(refuse())
    assert [r.count for r in caplog.records if hasattr(r, "count")] == [3]


def test_what_the_headers_say_of_the_number_of_queries(full):
    async def look(_http):
        shedder = LoadShedder(full.service)
        other = [shedder.refusal("other", length_of(n), b"") for n in (1, 2, 3, 8, 9)]
        # Two of four places are taken, and one client may have two.
        assert [None if r is None else r.status for r in other] == [None, None, 503, 503, None]
        # Without a number, one at least.
        assert shedder.refusal("other", {}, b"") is None
        for length in (b"x", b"-1", b"9" * 19, b"", str(1 << 40).encode()):
            assert shedder.refusal("127.0.0.1", {**length_of(1), b"content-length": length}, b"") is None
        assert shedder.refusal("127.0.0.1", {}, b"").status == 429
        # Who waits for 100 may be told to go on or not by the route alone.
        assert shedder.refusal("127.0.0.1", {b"expect": b"100-continue"}, b"") is None

    full.run(look)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"", None),
        (b"deadline_ms=40", 40.0),
        (b"k=3&deadline_ms=0.5&n=1", 0.5),
        (b"deadline_ms=nan", None),
        (b"deadline_ms=-4", None),
        (b"deadline_ms=%34", None),
        (b"xdeadline_ms=4", None),
        (b"deadline_ms=4e1", None),
    ],
)
def test_deadlines_that_are_named_plainly_are_read(query, expected):
    assert deadline_ms(query) == expected


def test_who_cannot_start_in_time_is_refused_from_the_headers(full):
    async def look(_http):
        shedder, admission = LoadShedder(full.service), full.service.admission
        admission._pace._seconds, admission._pace._queries = 10.0, 1.0
        # Two of its own wait and one is in flight: 30 s at least; nobody else waits, so another is next.
        admission._rule = ShareRule(4)
        assert shedder.refusal("127.0.0.1", {}, b"deadline_ms=29000").status == 503
        assert shedder.refusal("127.0.0.1", {}, b"deadline_ms=31000") is None
        assert shedder.refusal("127.0.0.1", {}, b"") is None
        assert shedder.refusal("other", {}, b"deadline_ms=9000").status == 503
        assert shedder.refusal("other", {}, b"deadline_ms=11000") is None
        assert admission.refused["deadline"] == 2

    full.run(look)


def test_the_document_is_the_one_that_the_queue_would_give(full, queries):
    async def both(http):
        early = await http.post("/v1/search", content=queries[0].tobytes(), headers=RAW)
        text = json.dumps({"queries": queries[:2].tolist()})
        # Whoever says "expect" is let past.
        late = await http.post(
            "/v1/search", content=text, headers={"content-type": "application/json", "expect": "100-continue"}
        )
        return early, late

    early, late = full.run(both)
    assert early.status_code == late.status_code == 429
    assert set(early.json()) == set(late.json())
    assert set(early.headers) == set(late.headers)


def test_a_wrong_key_learns_nothing_of_the_queue(make_service, tmp_path):
    service = make_service(limits=LIMITS)
    file = KeyFile(tmp_path / "keys.json")
    key = file.add("web", "search")
    service.admission.drain()

    async def ask_both(http):
        right = await http.post("/v1/search", content=b"x", headers={"authorization": f"Bearer {key}"})
        wrong = await http.post("/v1/search", content=b"x", headers={"authorization": "Bearer hix_wrong"})
        return right.status_code, wrong.status_code

    assert talk(service, ask_both, keyring=Keyring(file.path)) == (503, 401)


class Wire:
    """One connection to a daemon whose queue is full as long as :attr:`full` says so."""

    def __init__(self, service, port):
        self.admission = service.admission
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.connection.settimeout(60)
        # What is sent second must not wait for the first to be acknowledged.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unread = b""

    def full(self, is_full):
        # As many as may wait; nobody else is there who could take them away.
        self.admission._n_in_flight, self.admission._n_waiting = (1, 4) if is_full else (0, 0)

    def send(self, data):
        self.connection.sendall(data)

    def read(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        while b"\r\n\r\n" not in self.unread:
            self._more()
        top, _, self.unread = self.unread.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in top.decode().split("\r\n")[1:])
        length = int(headers["content-length"])
        while len(self.unread) < length:
            self._more()
        body, self.unread = self.unread[:length], self.unread[length:]
        return int(top[9:12]), headers, body

    def _more(self):
        part = self.connection.recv(1 << 16)
        assert part, "closed"
        self.unread += part

    def ended(self) -> bool:
        """Waits for the daemon to close, with nothing left to read."""
        return not self.unread and not self.connection.recv(1)


@contextlib.contextmanager
def wire(service, keyring=None):
    with live(service, keyring) as port:
        made = Wire(service, port)
        try:
            yield made
        finally:
            made.full(False)
            made.connection.close()


def head_of(body: bytes, *lines: str, target="/v1/search?k=3", version="1.1") -> bytes:
    return (
        f"POST {target} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
        + f"accept: {ANSWER_TYPE}\r\ncontent-length: {len(body)}\r\n"
        + "".join(f"{line}\r\n" for line in lines)
        + "\r\n"
    ).encode()


@pytest.mark.parametrize("apart", [False, True])
def test_a_connection_outlives_its_refusals(make_service, queries, apart):
    """Whether the body comes with the head or after the refusal."""
    service = make_service(limits=LIMITS)
    expected = service.router.search(queries[:1], 3)
    body = queries[:1].tobytes()
    with wire(service) as daemon:
        daemon.full(True)
        for _ in range(3):
            daemon.send(head_of(body) if apart else head_of(body) + body)
            status, headers, _ = daemon.read()
            assert (status, "connection" in headers) == (503, False)
            if apart:
                daemon.send(body)
        daemon.full(False)
        daemon.send(head_of(body) + body)
        status, _, answer = daemon.read()
    assert status == 200
    assert_same(decode_answer(answer), expected)
    assert service.admission.refused["queue"] == 3


def test_refusals_need_no_task_where_httptools_reads(make_service, queries, monkeypatch):
    """And are then the same, but for their ids, as those that have one."""
    pytest.importorskip("httptools")
    body = queries[:1].tobytes()
    found = []
    for protocol in (run.choose_protocol, lambda turn_away: TimedH11Protocol):
        monkeypatch.setattr(run, "choose_protocol", protocol)
        service = make_service(limits=LIMITS)
        tasks = []

        def watched(self, *args, call=RequestMiddleware.__call__, tasks=tasks):
            tasks.append(1)
            return call(self, *args)

        monkeypatch.setattr(RequestMiddleware, "__call__", watched)
        with wire(service) as daemon:
            tasks.clear()
            daemon.full(True)
            daemon.send(head_of(body, "X-Request-Id: mine") + body)
            status, headers, text = daemon.read()
            found.append((len(tasks), status, set(headers), headers["x-request-id"], json.loads(text)))
    (none, *early), (one, *late) = found
    assert (none, one) == (0, 1)
    assert early == late
    assert "date" in early[1]


def test_refused_and_admitted_requests_in_one_segment_are_answered_in_order(make_service, queries):
    service = make_service(limits=LIMITS)
    body = queries[:1].tobytes()
    both = head_of(body, "X-Request-Id: one") + body + head_of(body, "X-Request-Id: two") + body
    with wire(service) as daemon:
        daemon.full(True)
        daemon.send(both)
        assert [daemon.read()[1]["x-request-id"] for _ in range(2)] == ["one", "two"]
        daemon.full(False)
        with held_engine(service.router, queries):
            daemon.send(head_of(body, "X-Request-Id: one") + body)
            while not service.admission.n_in_flight:
                pass
            daemon.full(True)
            # Neither is refused before the one that was first is answered.
            daemon.send(head_of(body, "X-Request-Id: two") + body)
            with socket.create_connection(daemon.connection.getpeername()) as other:
                other.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert other.recv(100)
            service.admission._n_waiting = 0
        assert [daemon.read()[1]["x-request-id"] for _ in range(2)] == ["one", "two"]


def test_traced_requests_come_in_so_that_they_have_a_span(make_service):
    service = make_service(limits=LIMITS)
    middleware = create_app(service)._middleware
    service.admission._n_in_flight, service.admission._n_waiting = 1, 4
    scope = {"type": "http", "method": "POST", "server": ("::1", 1), "client": ("a", 1), "headers": []}

    async def ask():
        return middleware.turn_away(dict(scope), b"/v1/search", b"")

    assert asyncio.run(ask()) is not None
    service.traces = object()
    assert asyncio.run(ask()) is None
    service.traces = None
    service.admission._n_in_flight = service.admission._n_waiting = 0


def test_no_more_are_let_past_than_find_room(make_service, queries):
    """Those that come in one poll of the sockets: the tasks of the first have not begun when the next are read."""
    pytest.importorskip("httptools")
    service = make_service(limits=LIMITS)
    middleware = create_app(service)._middleware
    service.admission._n_in_flight, service.admission._n_waiting = 1, 2
    lines = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % (DIM * 4))]

    def ask(client):
        scope = {"type": "http", "method": "POST", "server": ("::1", 1), "client": (client, 1), "headers": lines}
        return scope, middleware.turn_away(scope, b"/v1/search?k=3", b"")

    async def talk():
        one, two, three = ask("a"), ask("b"), ask("c")
        assert (one[1], two[1]) == (None, None)
        assert three[1].startswith(b"HTTP/1.1 503 ")
        # One has begun: whether it waits now is for the queue to say.
        with contextlib.suppress(KeyError):
            await middleware(one[0], None, None)
        return ask("d")[1]

    assert asyncio.run(talk()) is None
    service.admission._n_in_flight = service.admission._n_waiting = 0


@pytest.mark.parametrize(
    ("lines", "options", "status"),
    [
        (("Connection: close",), {}, 503),
        ((), {"version": "1.0"}, 503),
        (("Origin: http://elsewhere",), {}, 403),
        (("Authorization: Bearer hix_wrong",), {}, 401),
        ((), {"target": "/v1/search/other"}, 404),
        ((), {"target": "//v1/search"}, 404),
    ],
)
def test_a_full_queue_does_not_hide_other_errors(make_service, queries, tmp_path, lines, options, status):
    service = make_service(limits=LIMITS)
    file = KeyFile(tmp_path / "keys.json")
    key = f"Authorization: Bearer {file.add('web', 'search')}"
    body = queries[:1].tobytes()
    with wire(service, Keyring(file.path)) as daemon:
        daemon.full(True)
        with_key = lines if any("hix_wrong" in line for line in lines) else (key, *lines)
        daemon.send(head_of(body, *with_key, **options) + body)
        found, headers, _ = daemon.read()
        assert found == status
        if options.get("version") == "1.0" or "Connection: close" in lines:
            assert headers["connection"] == "close"
            assert daemon.ended()


def test_a_body_over_the_limit_is_told_so_even_where_the_queue_is_full(make_service):
    service = make_service(limits={**LIMITS, "max_body_bytes": 1024})
    body = bytes(2000)
    with wire(service) as daemon:
        daemon.full(True)
        daemon.send(head_of(body) + body)
        assert daemon.read()[0] == 413
