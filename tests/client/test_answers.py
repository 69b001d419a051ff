"""What answers as no daemon does is an error of the library's tree: redirects, pages of others, fields that are not
there."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from hybridindex import errors
from hybridindex.client import AsyncClient, Client
from hybridindex.client.messages import error_of

ROW = np.zeros((1, 4), np.float32)
PAGE = b"<html>welcome</html>"


def answering(status, content=b"", **headers):
    return httpx.MockTransport(lambda _request: httpx.Response(status, content=content, headers=headers))


def client_of(status, content=b"", **headers):
    return Client("http://daemon", transport=answering(status, content, **headers))


def session_calls(client):
    opened = httpx.Response(201, json={"session": "s", "ttl_s": 1})
    later = client._transport
    client._transport = httpx.MockTransport(lambda _request: opened)
    session = client.session()
    client._transport = later
    return session


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
@pytest.mark.parametrize("ask", [lambda c: c.drain(), lambda c: c.status(), lambda c: c.search(ROW)])
def test_redirects_are_errors_that_say_where_they_lead(status, ask):
    """``drain`` used to say "draining" where a proxy had answered 308, and nothing was drained."""
    client = client_of(status, location="https://user:s3cret@other:8443/v1/drain?token=s3cret")
    with pytest.raises(
        errors.ServiceError, match=f"answered {status}, which leads to https://other:8443/v1/drain; "
    ) as e:
        ask(client)
    assert "s3cret" not in str(e.value)
    assert "user" not in str(e.value)


@pytest.mark.parametrize(
    "location", [None, "", "https://u:s3cret@[::1", "http:u:s3cret@h/", "u:s3cret@h", "ftp://u:s3cret@h"]
)
def test_redirects_that_lead_nowhere_are_errors(location):
    headers = {} if location is None else {"location": location}
    with pytest.raises(errors.ServiceError, match="answered 308") as caught:
        client_of(308, **headers).drain()
    assert "s3cret" not in str(caught.value)
    assert type(error_of(304, {}, b"")) is errors.ServiceError


def test_a_redirect_to_a_path_is_said():
    with pytest.raises(errors.ServiceError, match="leads to /login; give that address"):
        client_of(302, location="/login").drain()


@pytest.mark.parametrize("status", [200, 201, 204, 206])
def test_draining_is_believed_of_a_daemon_alone(status):
    with pytest.raises(errors.ServiceError, match=f"answered {status} to POST /v1/drain; a daemon answers 202"):
        client_of(status, b"" if status == 204 else PAGE).drain()
    assert client_of(202, b'{"draining": true}').drain() is None

    async def run():
        async with AsyncClient("http://daemon", transport=answering(status, b"")) as client:
            await client.drain()

    with pytest.raises(errors.ServiceError, match="a daemon answers 202"):
        asyncio.run(run())


def test_lookahead_and_the_end_of_a_session_are_believed_of_a_daemon_alone():
    session = session_calls(client_of(200, PAGE))
    with pytest.raises(errors.ServiceError, match="a daemon answers 202"):
        session.lookahead(ROW)
    with pytest.raises(errors.ServiceError, match="a daemon answers 204"):
        session.close()
    session_calls(client_of(202)).lookahead(ROW)
    session_calls(client_of(204)).close()


CALLS = {
    "session": (lambda c: c.session(), "session"),
    "add": (lambda c: c.add(ROW), "ids"),
    "upsert": (lambda c: c.upsert(ROW, [1]), "replaced"),
    "delete": (lambda c: c.delete([1]), "deleted"),
    "add_documents": (lambda c: c.add_documents([{"source": "a", "text": "b"}]), "sources"),
    "delete_documents": (lambda c: c.delete_documents(["a"]), "sources.removed"),
}


@pytest.mark.parametrize("content", [b"{}", b'{"ok": true}'])
@pytest.mark.parametrize("call", CALLS)
def test_answers_without_their_fields_say_what_they_lack(call, content):
    ask, field = CALLS[call]
    with pytest.raises(errors.ServiceError, match=f"the daemon's answer lacks {field}"):
        ask(client_of(200, content))


@pytest.mark.parametrize(
    ("call", "content"),
    [
        ("session", b'{"session": null}'),
        ("add", b'{"ids": null}'),
        ("add", b'{"ids": ["a"]}'),
        ("add", b'{"ids": 5}'),
        ("add", b'{"ids": [1e400]}'),
        ("add", b'{"ids": [99999999999999999999]}'),
        ("upsert", b'{"replaced": "many"}'),
        ("upsert", b'{"replaced": null}'),
        ("delete", b'{"deleted": []}'),
        ("delete", b'{"deleted": 1e400}'),
        ("add_documents", b'{"sources": 3}'),
        ("delete_documents", b'{"sources": 3}'),
        ("delete_documents", b'{"sources": []}'),
        ("delete_documents", b'{"sources": {"removed": {}}}'),
    ],
)
def test_answers_whose_fields_are_something_else_are_errors(call, content):
    with pytest.raises(errors.ServiceError, match="the daemon's answer") as caught:
        CALLS[call][0](client_of(200, content))
    assert CALLS[call][1].split(".")[0] in str(caught.value)


@pytest.mark.parametrize("content", [b"[]", b"[[1, 2]]", b"3", b"null", b"\xff", b"[" * 100_000])
def test_answers_that_are_no_objects_are_errors(content):
    with pytest.raises(errors.ServiceError, match="the daemon's answer is no"):
        client_of(200, content).status()
    with pytest.raises(errors.ServiceError, match="answered 500"):
        client_of(500, content).status()


def test_ids_are_those_of_the_daemon_or_those_given():
    assert client_of(200, b'{"ids": [4]}').add(ROW).tolist() == [4]
    assert client_of(200, b'{"ids": null}').add(ROW, [7]).tolist() == [7]
    with pytest.raises(errors.InvalidInputError):
        client_of(200, b'{"ids": null}').add(ROW, ["a"])


def test_answers_that_cannot_be_unpacked_are_errors():
    """The answer's compression is read with it, outside httpx's transport."""
    content = httpx.ByteStream(b"no gzip")
    answer = httpx.Response(200, stream=content, headers={"content-encoding": "gzip"})
    with pytest.raises(errors.ServiceError):
        Client("http://daemon", transport=httpx.MockTransport(lambda _request: answer)).status()
