"""Addresses that are none, and passwords in them, are refused before anything is sent."""

from __future__ import annotations

import pytest

from hybridindex import errors
from hybridindex.client import AsyncClient, Client
from hybridindex.client.messages import Address


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:abc",
        "http://localhost:99999",
        "http://localhost:-1",
        "http://[::1",
        "http://[::1]x:80",
        "http://",
        "https:///path",
        "http://:80",
        "http://a b",
        "http://h\x00",
        "http://h\n",
        "http://" + "h" * 70_000,
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_malformed_address_is_refused_when_it_is_given(kind, url):
    with pytest.raises(errors.InvalidInputError, match=r"^url is") as caught:
        kind(url)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("more", ["?", "?key=s3cret", "#s3cret", "/path?key=s3cret#s3cret"])
def test_an_address_that_goes_on_is_refused_and_the_rest_is_not_shown(more):
    """Paths would be put behind it, and whatever answers there be taken for the daemon."""
    with pytest.raises(errors.InvalidInputError, match=r"^url is 'http://h:80.*goes on with a query") as caught:
        Client(f"http://h:80{more}")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@host",
        "https://s3cret@host:8443/path",
        "http://:s3cret@host",
        "http://user:s3cret@host:abc",
        "http://user:s3cret@[::1",
        "http://user:s3cret@",
        "http://user:p/s3cret@host",
        "http:/user:s3cret@host",
        "ftp://user:s3cret@host",
        "user:s3cret@host",
    ],
)
def test_a_password_in_an_address_is_refused_and_never_shown(url):
    with pytest.raises(errors.InvalidInputError, match=r"--key or HYBRIDINDEX_KEY") as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "url", ["http://localhost", "http://127.0.0.1:8080/", "https://[::1]:8443", "http://h/below/it", "http://h/a@b"]
)
def test_addresses_are_taken(url):
    assert Address.parse(url) == Address(url=url.rstrip("/"))
    assert Address.parse("unix:/run/a@b") == Address(url="http://daemon", uds="/run/a@b")
    Client(url).close()
