"""Who may do what: keys, roles, owners of sessions, the audit."""

from __future__ import annotations

import logging

import pytest

from hybridindex.service.auth import KeyFile, Keyring
from tests.service.conftest import talk
from tests.service.http.test_app import is_problem


@pytest.fixture
def keys(tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    return {"search": file.add("web", "search"), "admin": file.add("ops", "admin")}, Keyring(file.path)


@pytest.mark.parametrize(
    ("method", "path", "none", "search", "admin"),
    [
        ("GET", "/livez", 200, 200, 200),
        ("GET", "/readyz", 200, 200, 200),
        ("GET", "/healthz", 401, 200, 200),
        ("GET", "/metrics", 401, 200, 200),
        ("GET", "/v1/status", 401, 200, 200),
        ("GET", "/v1/indexes", 401, 200, 200),
        ("GET", "/v1/plan", 401, 200, 200),
        ("GET", "/v1/plans", 401, 200, 200),
        ("GET", "/v1/plan/tradeoff", 401, 200, 200),
        ("GET", "/v1/series", 401, 200, 200),
        ("GET", "/v1/events", 401, 200, 200),
        ("GET", "/", 200, 200, 200),
        ("GET", "/page.js", 200, 200, 200),
        ("GET", "/v1/plans/1", 401, 200, 200),
        ("GET", "/v1/plans/99", 401, 404, 404),
        ("GET", "/v1/plans/none", 401, 400, 400),
        ("GET", "/v1/openapi.json", 401, 200, 200),
        ("POST", "/v1/search", 401, 400, 400),
        ("POST", "/v1/sessions", 401, 201, 201),
        ("GET", "/nowhere", 401, 404, 404),
        ("POST", "/v1/repartition", 401, 403, 200),
        ("POST", "/v1/plans/1/apply", 401, 403, 200),
        ("POST", "/v1/queries/recent", 401, 403, 409),
        ("POST", "/v1/vectors", 401, 403, 400),
        ("POST", "/v1/vectors/delete", 401, 403, 400),
        ("POST", "/v1/documents", 401, 403, 400),
        ("POST", "/v1/documents/delete", 401, 403, 400),
        ("POST", "/v1/compact", 401, 403, 202),
        ("POST", "/v1/drain", 401, 403, 202),
    ],
)
def test_who_may_do_what(service, keys, method, path, none, search, admin):
    known, ring = keys

    async def conversation(http):
        statuses = []
        body = (
            {"content": b"{}", "headers": {"content-type": "application/json"}} if method == "POST" else {"headers": {}}
        )
        for key in (None, "wrong", known["search"], known["admin"]):
            headers = {**body["headers"], **({} if key is None else {"authorization": f"Bearer {key}"})}
            answer = await http.request(method, path, **{**body, "headers": headers})
            if answer.status_code >= 400:
                is_problem(answer, answer.status_code)
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"].startswith("Bearer")
            statuses.append(answer.status_code)
        return statuses

    assert talk(service, conversation, keyring=ring) == [none, none, search, admin]


def test_no_path_with_a_control_character_is_another_ones(service, keys):
    """Routers of requests take a line feed at the end for nothing, and roles are of whole paths."""
    known, ring = keys
    paths = ["/v1/vectors", "/v1/vectors/delete", "/v1/documents", "/v1/documents/delete", "/v1/compact", "/v1/reload"]
    paths += ["/v1/repartition", "/v1/plans/1/apply", "/v1/queries/recent", "/v1/indexes/a/vectors/delete", "/v1/drain"]

    async def conversation(http):
        for key in known.values():
            for path in paths:
                for end in ("%0A", "%0D", "%00", "%0A%0A", "%E2%80%A8"):
                    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                    answer = await http.post(path + end, content=b"{}", headers=headers)
                    is_problem(answer, 404)
        return (await http.get("/v1/status", headers=headers)).json()

    assert talk(service, conversation, keyring=ring)["draining"] is False


def test_a_session_is_its_keys(service, keys, queries):
    known, ring = keys

    async def conversation(http):
        own = {"authorization": f"Bearer {known['search']}"}
        other = {"authorization": f"Bearer {known['admin']}"}
        path = "/v1/sessions/" + (await http.post("/v1/sessions", headers=own)).json()["session"]
        is_problem(await http.get(path, headers=other), 404, "session")
        is_problem(await http.delete(path, headers=other), 404, "session")
        assert (await http.delete(path, headers=own)).status_code == 204

    talk(service, conversation, keyring=ring)


def test_admin_calls_are_audited_and_so_are_attempts(service, keys, caplog):
    known, ring = keys

    async def conversation(http):
        for name in ("search", "admin"):
            headers = {"authorization": f"Bearer {known[name]}"}
            await http.post("/v1/repartition", json={"coverage": 0.1}, headers=headers)
        await http.post("/v1/drain", headers={"authorization": "Bearer wrong"})
        await http.post("/v1/reload", headers={**headers, "origin": "http://evil.example"})
        await http.post("/v1/indexes/a%0Ab/reload")
        await http.post("/v1/search")  # anybody's
        # Deletions are audited, and who may not add; what comes is not.
        await http.post("/v1/vectors", json={"vectors": [0.0] * 24}, headers=headers)
        await http.post("/v1/vectors/delete", json={"ids": [1]}, headers=headers)
        await http.post("/v1/vectors", headers={"authorization": f"Bearer {known['search']}"})

    with caplog.at_level(logging.INFO, "hybridindex.audit"):
        talk(service, conversation, keyring=ring)
    lines = [(r.client, r.action, r.outcome) for r in caplog.records if r.name == "hybridindex.audit"]
    assert lines == [
        ("web", "/v1/repartition", 403),
        ("ops", "/v1/repartition", 200),
        ("unknown", "/v1/drain", 401),
        ("unknown", "/v1/reload", 403),
        ("unknown", "/v1/indexes/a%0Ab/reload", 401),
        ("ops", "/v1/vectors/delete", 200),
        ("web", "/v1/vectors", 403),
    ]
    assert not any(key in caplog.text for key in known.values())
