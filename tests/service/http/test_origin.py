"""Which requests pass that a page of another site could make a browser send."""

from __future__ import annotations

import pytest

from hybridindex.service.http.origin import OriginPolicy
from hybridindex.service.http.problems import ProblemError

TCP, UNIX = ("127.0.0.1", 8080), ("/run/daemon.sock", None)


def status_of(headers, *, method="POST", server=TCP, host="127.0.0.1", keyed=False):
    """200, or the status of the problem."""
    scope = {"method": method, "server": server}
    try:
        OriginPolicy(host=host, keyed=keyed).check(scope, {k.encode(): v.encode() for k, v in headers.items()})
    except ProblemError as error:
        return error.problem.status
    return 200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("localhost.:8080", 200),
        ("127.0.0.1", 200),
        ("127.9.9.9:1", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("evil.example", 421),
        ("evil.example:8080", 421),
        ("127.0.0.1.evil.example:8080", 421),
        ("localhost.evil.example", 421),
        ("192.168.1.4:8080", 421),
        ("[2001:db8::1]:8080", 421),
        ("[::1", 200),
        ("localhost@evil.example", 421),
        (":8080", 421),
    ],
)
def test_without_keys_the_host_names_this_machine(method, host, status):
    assert status_of({"host": host}, method=method) == status


def test_a_bound_address_and_any_host_with_keys_will_do():
    assert status_of({"host": "daemon.lan:8080"}, host="Daemon.lan") == 200
    assert status_of({"host": "daemon.lan:8080"}) == 421
    assert status_of({"host": "daemon.lan:8080"}, keyed=True) == 200


def test_unix_sockets_and_programs_without_a_host_are_no_browsers():
    assert status_of({"host": "daemon"}, server=UNIX) == 200
    assert status_of({}) == 200
    # Who names an origin is one, and no address is asked that could be the same.
    assert status_of({"origin": "null"}, method="POST") == 403
    # Where the server is not known, it may be TCP.
    assert status_of({"host": "daemon"}, server=None) == 421


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        # Another port of localhost is the same site, and another's page.
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost:8080"}, 403),
        ({"sec-fetch-site": "SAME-ORIGIN"}, 403),
        ({"origin": "http://localhost:8080"}, 200),
        ({"origin": "https://LOCALHOST:8080"}, 200),
        ({"origin": "http://localhost:8081"}, 403),
        ({"origin": "http://localhost"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
    ],
)
def test_a_change_comes_from_our_own_page_or_from_none(headers, status, keyed):
    asked = {"host": "localhost:8080", **headers}
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert status_of(asked, method=method, keyed=keyed) == status
    for method in ("GET", "HEAD"):
        # Without keys vLLM's CORS would let any page read the answer; a person who follows a link reads it alone.
        assert status_of(asked, method=method, keyed=keyed) == (200 if keyed else status)
        assert status_of({**asked, "sec-fetch-mode": "navigate"}, method=method, keyed=keyed) == 200
