"""Queries given to the refresh over HTTP: who may, what is taken, what is kept, and what is told where none are."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import httpx
import numpy as np
import pytest

from hybridindex.client import AsyncClient, Client
from hybridindex.config import RouterConfig
from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.app import create_app
from tests.clustered import clustered
from tests.service.conftest import ask

PATH = "/v1/queries/recent"
CONFIG = RefreshConfig(reservoir_queries=512, min_queries=64, tick_s=3600)


@pytest.fixture
def make_following(index_path):
    made = []

    def factory(config=CONFIG, **limits):
        def make(index, router, store):
            return Refresher(index, router, store, config)

        settings = ServiceConfig(router=RouterConfig(devices=("cpu",)), limits=Limits(**limits))
        made.append(Service.open(index_path, settings, make_refresher=make))
        return made[-1]

    yield factory
    for service in made:
        service.close()


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_uploaded_queries_are_what_a_plan_is_made_from(make_following):
    service = make_following()
    queries = clustered(100, seed=8)
    kinds = [
        {"content": queries[:40].tobytes(), "headers": {"content-type": "application/octet-stream"}},
        {"content": npy(queries[40:80]), "headers": {"content-type": "application/x-npy"}},
        {"json": {"queries": queries[80:].tolist()}},
    ]
    with pytest.raises(ProfileError):
        service.refresher.propose()
    kept = 0
    for request in kinds:
        answer = ask(service, "POST", PATH, **request)
        assert answer.status_code == 200, answer.text
        kept += answer.json()["offered"]
        assert answer.json()["kept"] == kept
    sample = service.refresher._reservoir.sample(service.refresher._clock())
    np.testing.assert_array_equal(sample, queries)
    assert service.refresher.propose().n_queries == 100
    # They were served by nobody: no window knows of them.
    assert service.refresher.status().requests == 0


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        ({"content": b"123", "headers": {"content-type": "application/octet-stream"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "Content-Type"),
        ({"json": {"queries": [[1.0, 2.0]]}}, 400, "queries"),
        ({"json": {"queries": [[0.0] * 24], "nprobe": 3}}, 400, "nprobe"),
        ({"json": {"queries": [[0.0] * 24], "budget_bytes": 3}}, 400, "budget_bytes"),
        ({"content": npy(np.full((2, 24), np.nan, np.float32)), "headers": {"content-type": "application/x-npy"}},
         400, "queries"),
        ({"content": npy(np.zeros((21, 24), np.float32)), "headers": {"content-type": "application/x-npy"}},
         400, "queries"),
        ({"content": bytes(8 << 10), "headers": {"content-type": "application/octet-stream"}}, 413, "body"),
    ],
)  # fmt: skip
def test_limits_are_those_of_searches(make_following, request_, status, field):
    service = make_following(max_queries=20, max_body_bytes=4096)
    answer = ask(service, "POST", PATH, **request_)
    assert answer.status_code == status, answer.text
    assert field is None or answer.json()["field"] == field
    assert service.refresher.status().queries_kept == 0


def test_where_queries_are_not_kept_the_reason_is_told(make_following, make_service, index_path):
    off = make_following(RefreshConfig(reservoir_queries=0))
    body = {"json": {"queries": [[0.0] * 24]}}
    answer = ask(off, "POST", PATH, **body)
    assert answer.status_code == 409
    assert "reservoir_queries is 0" in answer.json()["detail"]
    assert answer.json()["type"].endswith(":not-kept")
    without = ask(make_service(), "POST", PATH, **body)
    assert without.status_code == 409
    assert "--refresh" in without.json()["detail"]


def test_the_example_of_the_openapi_document_works(make_following):
    service = make_following()
    described = ask(service, "GET", "/v1/openapi.json").json()["paths"][PATH]["post"]
    example = described["requestBody"]["content"]["application/json"]["example"]
    expected = described["responses"]["200"]["content"]["application/json"]["example"]
    assert ask(service, "POST", PATH, json=example).json() == expected


def test_it_takes_an_admin_and_is_audited_and_no_vector_is_logged(make_following, tmp_path, caplog):
    service = make_following()
    file = KeyFile(tmp_path / "keys.json")
    keys = {role: file.add(role, role) for role in ("search", "admin")}
    options = {"app_options": {"keyring": Keyring(file.path)}, "json": {"queries": [[0.123456] * 24]}}
    caplog.set_level(logging.DEBUG)
    for role, status in ((None, 401), ("search", 403), ("admin", 200)):
        headers = {} if role is None else {"authorization": f"Bearer {keys[role]}"}
        assert ask(service, "POST", PATH, headers=headers, **options).status_code == status
    audit = [(r.action, r.client, r.outcome) for r in caplog.records if r.name == "hybridindex.audit"]
    assert audit == [(PATH, "unknown", 401), (PATH, "search", 403), (PATH, "admin", 200)]
    assert "0.123456" not in caplog.text
    assert "0.123456" not in json.dumps([repr(e) for e in service.store.list_events()])


class Loopback(httpx.BaseTransport):
    """The application under a blocking client."""

    def __init__(self, service):
        self._service = service

    def handle_request(self, request):
        answer = ask(
            self._service, request.method, request.url.raw_path.decode(), content=request.read(),
            headers=dict(request.headers),
        )  # fmt: skip
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def test_both_clients_upload(make_following, index_path):
    service = make_following()
    queries = clustered(30, seed=9)
    with Client("http://daemon", transport=Loopback(service)) as client:
        assert client.upload_queries(queries) == {"offered": 30, "kept": 30}
        assert client.upload_queries(queries[0]) == {"offered": 1, "kept": 31}
        with pytest.raises(InvalidInputError):
            client.upload_queries(queries[:, :3].copy())

    async def upload():
        transport = httpx.ASGITransport(create_app(service))
        async with AsyncClient("http://daemon", transport=transport) as client:
            return await client.upload_queries(queries)

    assert asyncio.run(upload()) == {"offered": 30, "kept": 61}


def test_clients_say_why_none_is_kept(make_service, tmp_path):
    service = make_service()
    with Client("http://daemon", transport=Loopback(service)) as client, pytest.raises(ProfileError, match="--refresh"):
        client.upload_queries(clustered(1, seed=1))
