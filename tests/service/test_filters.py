"""Searches with ids that may or may not be answered, over HTTP: both clients, and what is refused."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import AsyncClient, Client
from hybridindex.errors import InvalidInputError
from hybridindex.service.http import requests, searching
from hybridindex.service.searches import Observation
from tests.service.conftest import ask, assert_same
from tests.service.live import live

SOME = np.arange(0, 2000, 7)


def test_both_clients_find_what_the_router_finds(make_service, queries):
    service = make_service()

    async def asynchronous(port):
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            async with await client.session() as session:
                await session.lookahead(queries)
                found = await session.search(queries, 5, 4, allow_ids=SOME)
            return await client.search(queries, 5, 4, deny_ids=SOME), found

    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        allowed = service.router.search(queries, 5, 4, allow_ids=SOME)
        denied = service.router.search(queries, 5, 4, deny_ids=SOME)
        assert np.isin(allowed.ids, SOME).all()
        assert not np.isin(denied.ids, SOME).any()
        assert_same(client.search(queries, 5, 4, allow_ids=SOME), allowed)
        assert_same(client.search(queries, 5, 4, deny_ids=SOME.tolist()), denied)
        assert_same(
            client.search(queries[0], 5, 4, allow_ids=SOME, deny_ids=SOME),
            service.router.search(queries[0], 5, 4, allow_ids=SOME, deny_ids=SOME),
        )
        with client.session() as session:
            assert_same(session.search(queries, 5, 4, allow_ids=SOME), allowed)
        by_async, in_session = asyncio.run(asynchronous(port))
        assert_same(by_async, denied)
        assert_same(in_session, allowed)
        for wrong, message in (([0.5], "allow_ids is a list of dtype float64"), (7, "allow_ids is a int")):
            with pytest.raises(InvalidInputError, match=message):
                client.search(queries, allow_ids=wrong)
        with pytest.raises(InvalidInputError, match="NaN"):
            client.search(np.full_like(queries, np.nan), allow_ids=[1])
        status = client.status()["router"]
        assert status["filtered_requests"] > 5
        assert status["filtered_rows"] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allow_ids": 5}, "allow_ids"),
        ({"allow_ids": ["5"]}, "allow_ids"),
        ({"allow_ids": [1.5]}, "allow_ids"),
        ({"deny_ids": [True]}, "deny_ids"),
        ({"deny_ids": [1 << 63]}, "deny_ids"),
        ({"deny_ids": [[1]]}, "deny_ids"),
        ({"deny_ids": None}, "deny_ids is null"),
    ],
)
def test_what_is_no_list_of_ids_is_told_what_would_be_right(service, queries, given, said):
    answer = ask(service, "POST", "/v1/search", json={"queries": queries[0].tolist(), **given})
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert "null" in said or "expected a list of at most 1000000 integers" in answer.json()["detail"]


def test_the_number_of_ids_has_a_limit(make_service, queries, monkeypatch):
    monkeypatch.setattr(requests, "MAX_FILTER_IDS", 3)
    monkeypatch.setattr(searching, "_requests", requests.Requests)  # those of before have another limit
    service = make_service()
    body = {"queries": queries[0].tolist(), "k": 2}
    assert ask(service, "POST", "/v1/search", json={**body, "allow_ids": [1, 2.0, 3]}).status_code == 200
    answer = ask(service, "POST", "/v1/search", json={**body, "allow_ids": [1, 2, 3, 4]})
    assert answer.status_code == 400
    assert "expected a list of at most 3 integers" in answer.json()["detail"]


def test_conditions_are_searched_for(index_path, make_service, queries):
    with hx.open(index_path) as index:
        index.set_attributes({"year": np.arange(index.count) % 40, "lang": ["en", "de"] * (index.count // 2)})
    service = make_service()
    where = "lang = 'en' AND year < 20"
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        right = service.router.search(queries, 5, 4, where=where)
        assert (right.ids % 2 == 0).all()
        assert (right.ids % 40 < 20).all()
        assert_same(client.search(queries, 5, 4, where=where), right)
        assert_same(client.search(queries, 5, 4, where=" OR ".join([where] * 100)), right)
        assert_same(client.search(queries, 5, 4, where=where, deny_ids=[]), right)
        assert client.status()["index"]["attributes"] == {"year": "int", "lang": "string"}
        with client.session() as session:
            assert_same(session.search(queries, 5, 4, where=where), right)
        for wrong, message in (
            ("year = ", "does not parse"),
            ("owner = 1", "names 'owner', which is not an attribute; expected one of lang, year"),
            ("year IN (SELECT 1)", "expected"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                client.search(queries, 5, 4, where=wrong)
    body = {"queries": queries[0].tolist()}
    for wrong in (5, ["year = 1"], "x" * 70_000):
        answer = ask(service, "POST", "/v1/search", json={**body, "where": wrong})
        assert answer.status_code == 400
        assert "expected a text of at most 65536 characters" in answer.json()["detail"]


def test_conditions_of_an_index_without_attributes_are_refused(service, queries):
    answer = ask(service, "POST", "/v1/search", json={"queries": queries[0].tolist(), "where": "year = 1"})
    assert answer.status_code == 400
    assert "the index has no attributes" in answer.json()["detail"]


def test_a_query_string_holds_no_ids(service, queries):
    headers = {"content-type": "application/octet-stream"}
    answer = ask(
        service,
        "POST",
        "/v1/search",
        params={"n": 1, "d": queries.shape[1], "allow_ids": "1"},
        content=queries[0].tobytes(),
        headers=headers,
    )
    assert answer.status_code == 400
    assert "allow_ids stands in the query string; expected it in a JSON body" in answer.json()["detail"]
    document = ask(service, "GET", "/v1/openapi.json").json()
    asked = document["paths"]["/v1/search"]["post"]
    assert not {"allow_ids", "deny_ids", "where"} & {each["name"] for each in asked["parameters"]}
    assert "allow_ids" in json.dumps(asked["requestBody"])


def test_they_say_nothing_of_what_devices_should_hold(make_service, queries):
    observed = []

    class Refresher:
        def observe(self, *given):
            observed.append(given)

    service = make_service()
    serving = service.generations.enter()
    try:
        service._tell(_seen(service, queries), Refresher(), filtered=True)
        service._tell(_seen(service, queries), Refresher(), filtered=False)
    finally:
        service.generations.leave(serving)
    assert len(observed) == 1


def _seen(service, queries):
    result = service.router.search(queries, 5, 4)
    return Observation(queries=queries, queue_s=0.0, search_s=0.1, result=result, lowered=False)
