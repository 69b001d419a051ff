"""Hostile bytes over real sockets: bodies that lie, requests that are none, connections that stop half way.

Nothing of it may be answered with 500 or end the daemon, and when it is over nothing is left: files, sessions, queued
and admitted queries, and memory are where they were. What the OpenAPI document can describe is in
``test_openapi_contract.py``.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridindex.answer_codec import ANSWER_TYPE, decode_answer
from hybridindex.config import RouterConfig
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from tests.clustered import DIM, clustered
from tests.examples import examples
from tests.service.conftest import HERE, assert_same
from tests.service.live import live

RAW, NPY, JSON = "application/octet-stream", "application/x-npy", "application/json"
QUERIES = clustered(4, seed=3)
_SETTINGS = examples(60, suppress_health_check=list(HealthCheck))
#: Growth that a test of a few thousand requests may leave: allocators keep some.
MOST_GROWTH_BYTES = 24 << 20


@pytest.fixture(scope="module")
def served(planned_index, tmp_path_factory):
    """(port, service); patience of one second, bodies of 64 KiB at most."""
    folder = tmp_path_factory.mktemp("fuzzed")
    limits = Limits(max_body_bytes=1 << 16, client_timeout_s=1.0, max_sessions=8)
    service = Service.open(
        shutil.copytree(planned_index, folder / "idx"),
        ServiceConfig(router=RouterConfig(devices=("cpu",)), limits=limits),
        planning=HERE,
    )
    try:
        with live(service) as port:
            yield port, service
        service.router.check_invariants()
    finally:
        service.close()


def _held(service) -> tuple[int, int, int, int]:
    return (
        len(os.listdir("/proc/self/fd")),
        len(service.sessions),
        service.admission.n_waiting,
        service.admission.n_in_flight,
    )


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    """Every test ends with a daemon that answers rightly and holds what it held before."""
    port, service = served
    expected = service.router.search(QUERIES, 3, 4)
    assert_same(
        decode_answer(_body(_talk(port, _search(QUERIES.tobytes(), target="/v1/search?k=3&nprobe=4")))), expected
    )
    before, memory = _held(service), _rss_bytes()
    yield
    assert_same(
        decode_answer(_body(_talk(port, _search(QUERIES.tobytes(), target="/v1/search?k=3&nprobe=4")))), expected
    )
    # The daemon closes its end of a connection a moment after ours.
    deadline = service.clock() + 30
    while _held(service) != before and service.clock() < deadline:
        pass
    assert _held(service) == before
    service.admission.check_invariants()
    assert _rss_bytes() - memory < MOST_GROWTH_BYTES


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _search(body: bytes, kind: str = RAW, target: str = "/v1/search", more: str = "") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nAccept: {ANSWER_TYPE}\r\n{more}"
    if "connection" not in more.lower():
        head += "Connection: close\r\n"
    if "content-length" not in more.lower() and "transfer-encoding" not in more.lower():
        head += f"Content-Length: {len(body)}\r\n"
    return head.encode("latin-1") + b"\r\n" + body


def _talk(port: int, *parts: bytes, shut: bool = False) -> bytes:
    """Sends the parts and returns everything that comes until the daemon closes.

    ``shut``: half-closes after the last byte, which the daemon takes for a client that is gone.
    """
    found = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(60)
        try:
            for part in parts:
                connection.sendall(part)
            if shut:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # it may close on garbage without hearing it out
    return found


def _statuses(answer: bytes) -> list[int]:
    """Of every answer in a stream of them."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), head
        found.append(int(head[9:12]))
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        assert found[-1] < 500 or found[-1] in (503, 504), rest
        length = int(fields.get(b"content-length", len(rest)))
        answer = rest[length:]
    return found


def _body(answer: bytes) -> bytes:
    assert _statuses(answer) == [200], answer
    return answer.partition(b"\r\n\r\n")[2]


# Bodies


def npy(header: str, data: bytes, *, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """A .npy file with any header; ``length``: what it says the header's length is."""
    size = len(header) if length is None else length
    packed = struct.pack("<H", size % (1 << 16)) if version[0] == 1 else struct.pack("<I", size)
    return b"\x93NUMPY" + bytes(version) + packed + header.encode("latin-1") + data


def _header(descr: str, order: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


_DESCRS = (
    "'<f4'",
    "'>f4'",
    "'<f8'",
    "'|O'",
    "'|V4'",
    "'<U4'",
    "'<c8'",
    "'<f2'",
    "'f4,f4'",
    "[('a', '<f4')]",
    "7",
    "None",
)
_SHAPES = (
    f"(4, {DIM})", f"({4 * DIM},)", "()", "(0,)", f"(0, {DIM})", f"(4, {DIM}, 1)", f"(-4, -{DIM})",
    "(99999999999999, 24)",
    "(18446744073709551615, 2)", f"(True, {DIM})", f"(4.0, {DIM})", f"(4, {DIM}" + "L)", "'x'", "(10**9, 10**9)",
    "(" * 3000 + ")" * 3000, "__import__('os').abort()",
)  # fmt: skip


@_SETTINGS
@given(
    st.sampled_from(_DESCRS),
    st.sampled_from(("False", "True", "1", "'x'")),
    st.sampled_from(_SHAPES),
    st.sampled_from(((1, 0), (2, 0), (3, 0), (0, 0), (255, 255))),
    st.sampled_from((None, 0, 1, 1 << 15, (1 << 32) - 1)),
    st.integers(0, QUERIES.nbytes),
)
def test_npy_headers_that_lie(served, descr, order, shape, version, length, cut):
    body = npy(_header(descr, order, shape), QUERIES.tobytes()[:cut], version=version, length=length)
    (status,) = _statuses(_talk(served[0], _search(body, NPY)))
    plain = (descr, order, shape, cut) == ("'<f4'", "False", f"(4, {DIM})", QUERIES.nbytes)
    assert status == 400 or (status == 200 and descr in ("'<f4'", "'>f4'") and cut == QUERIES.nbytes)
    assert status == 200 or not plain or version not in ((1, 0), (2, 0)) or length is not None


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("descr", ["'<f4'", "'>f4'"])
def test_npy_headers_that_do_not_lie_are_answered(served, version, descr):
    port, service = served
    data = QUERIES.astype(descr.strip("'")).tobytes()
    answer = _talk(port, _search(npy(_header(descr, "False", f"(4, {DIM})"), data, version=version), NPY))
    assert np.array_equal(decode_answer(_body(answer)).ids, service.router.search(QUERIES, 10).ids)


@_SETTINGS
@given(st.binary(max_size=600), st.sampled_from((RAW, NPY, JSON, "", "a/b;" * 20, "*/*")))
def test_bodies_of_any_bytes(served, body, kind):
    (status,) = _statuses(_talk(served[0], _search(body, kind)))
    assert status in (200, 400, 415)
    assert status != 200 or (kind == RAW and len(body) % (4 * DIM) == 0)


_ODD = st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0, 1.0])


@_SETTINGS
@given(st.lists(_ODD, min_size=DIM, max_size=DIM), st.sampled_from((RAW, NPY)))
def test_numbers_that_are_none_are_refused(served, values, kind):
    row = np.array([values], dtype=np.float32)
    body = row.tobytes() if kind == RAW else npy(_header("'<f4'", "False", f"(1, {DIM})"), row.tobytes())
    (status,) = _statuses(_talk(served[0], _search(body, kind)))
    # No vector longer than 1.58e18 is searched.
    assert status == (200 if np.isfinite(row).all() and np.abs(row).max() < 1e38 else 400)


_VALUES = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "",
            " 1",
            "1 ",
            "+1",
            "1_0",
            "0x1",
            "1e3",
            "%31",
            "%00",
            "%F0",
            "1" * 5000,
            "null",
            "\u0661",
            "5" + " " * 30 + "x",
        ]
    ),
)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


@_SETTINGS
@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "d", "k", "nprobe", "min_nprobe", "deadline_ms", "z"]), _VALUES), max_size=5
    )
)
def test_options_of_any_kind(served, options):
    target = "/v1/search?" + "&".join(f"{name}={value}" for name, value in options)
    request = _search(QUERIES.tobytes(), target=target.replace(" ", "%20").replace("\u0661", "%D9%A1"))
    (status,) = _statuses(_talk(served[0], request))
    names = [name for name, _ in options]
    bad = len(set(names)) < len(names) or "z" in names
    bad |= any(not _is_plain(value.replace("%31", "1")) for name, value in options if name != "deadline_ms")
    # 408 to 431: uvicorn's own for a line that is too long.
    assert status in ((400,) if bad else (200, 400, 504))


# Connections


def test_odd_headers(served):
    port, _ = served
    body = QUERIES.tobytes()
    for more, expected in (
        (f"Content-Length: {len(body)}\r\nContent-Length: {len(body)}\r\n", {200, 400}),
        (f"Content-Length: {len(body)}\r\nContent-Length: 1\r\n", {400}),
        ("Content-Length: -1\r\n", {400}),
        ("Content-Length: 1e3\r\n", {400}),
        (f"Content-Length: {'9' * 19}\r\n", {413}),
        (f"Content-Length: {'9' * 4000}\r\n", {400, 413}),
        ("Transfer-Encoding: gzip, chunked\r\n", {400, 501}),
        ("Content-Type: text/xml\r\n", {200, 415}),
        ("X-Request-Id: a\r\nX-Request-Id: b\r\n", {200}),
        ("Authorization: Bearer \xff\xfe\r\nAuthorization: \r\n", {200}),
        ("X-Long: " + "a" * 400_000 + "\r\n", {400, 431}),
        ("Accept: " + "," * 5000 + "\r\n", {200}),
    ):
        answer = _talk(port, _search(body, more=more))
        assert answer.startswith(b"HTTP/1.1 "), (more[:60], answer)
        found = int(answer[9:12])
        assert found in expected, (more[:60], answer)


def test_chunked_bodies(served):
    port, service = served
    body, te = QUERIES.tobytes(), "Transfer-Encoding: chunked\r\n"
    one_by_one = b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body))) + b"0\r\n\r\n"
    answer = _talk(port, _search(one_by_one, more=te))
    assert np.array_equal(decode_answer(_body(answer)).ids, service.router.search(QUERIES, 10).ids)
    assert _statuses(_talk(port, _search(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n1\r\nx\r\n0\r\n\r\n", more=te))) == [
        413
    ]
    for bad in (b"zz\r\n", b"-1\r\nx\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nabcdefg\r\n0\r\n\r\n", b"1" * 70_000):
        assert not set(_statuses(_talk(port, _search(bad, more=te), shut=True))) - {400}


def test_expect_100_continue(served):
    port, service = served
    body = QUERIES.tobytes()
    head = _search(b"", more=f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(60)
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert np.array_equal(decode_answer(_body(answer)).ids, service.router.search(QUERIES, 10).ids)
    # What is too large is refused before it is asked for.
    head = _search(b"", more=f"Content-Length: {1 << 30}\r\nExpect: 100-continue\r\n")
    assert _statuses(_talk(port, head))[0] == 413


def test_bodies_that_come_too_slowly_are_given_up(served):
    """Slow loris: many connections whose bodies stop, all at once; the daemon answers others meanwhile."""
    port, _ = served
    stuck = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        for connection in stuck:
            connection.settimeout(60)
            connection.sendall(_search(b"x" * 10, more=f"Content-Length: {QUERIES.nbytes}\r\n"))
        assert _body(_talk(port, _search(QUERIES.tobytes())))
        assert {int(connection.recv(1 << 16)[9:12]) for connection in stuck} == {408}
    finally:
        for connection in stuck:
            connection.close()


def test_connections_that_end_half_way(served):
    port, _ = served
    whole = _search(QUERIES.tobytes())
    for cut in (1, 10, len(whole) - QUERIES.nbytes, len(whole) - 1):
        for linger in (True, False):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                if linger:  # closing sends a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(whole[:cut])
    # Nobody takes the answer.
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(whole)


def test_pipelined_requests_are_answered_in_order(served):
    port, service = served
    many = b"".join(
        _search(QUERIES[i : i + 1].tobytes(), target=f"/v1/search?k={i + 1}", more="Connection: keep-alive\r\n")
        for i in range(4)
    )
    # The last one ends the connection.
    answers = _talk(port, many, _search(b""))
    assert _statuses(answers) == [200, 200, 200, 200, 400]
    for i in range(4):
        head, _, rest = answers.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found, answers = decode_answer(rest[:length]), rest[length:]
        assert np.array_equal(found.ids, service.router.search(QUERIES[i : i + 1], i + 1).ids)


@_SETTINGS
@given(
    st.one_of(
        st.binary(min_size=1, max_size=300),
        st.builds(
            lambda method, path, version: f"{method} {path} {version}\r\nHost: localhost\r\n\r\n".encode("latin-1"),
            st.sampled_from(["GET", "POST", "PRI", "get", "", "\x00", "DELETE"]),
            st.sampled_from(
                ["/livez", "/", "*", "//v1/search", "/../v1/plan", "/%ff", "http://x/livez", "/v1/sessions/%00", "/a b"]
            ),
            st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "FTP/1.1", ""]),
        ),
        st.binary(max_size=100).map(lambda b: b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b + b"\r\n\r\n"),
    )
)
def test_garbage_instead_of_http(served, garbage):
    for status in _statuses(_talk(served[0], garbage, shut=True)):
        assert status in (200, 400, 401, 404, 405, 415, 431)
